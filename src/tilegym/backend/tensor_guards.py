"""Whether tensors are like others, in one call of PyTorch's own.

That is torch.compile's, and no public interface: it is used with versions of PyTorch that it was tried with, if it
tells tensors apart there as it should.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence

import torch
from torch.utils import _python_dispatch

TRIED = ((2, 9), (2, 15))  # the first version and the last one


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function of as many tensors: whether they are as these, in class, device, dtype, sizes, strides, in whether
    they require gradients, and in all else that PyTorch dispatches by, and no two of them the same one. None where
    PyTorch has no such thing."""
    return _guard(tensors) if _works() else None


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


@functools.cache
def _works() -> bool:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if not TRIED[0] <= version <= TRIED[1]:
        return False
    try:
        # Modes that watch or fake the call of an op are not shown this.
        with torch._C.DisableTorchFunction(), _python_dispatch._disable_current_modes():
            a, b = (torch.empty(2, 3, device="cpu") for _ in range(2))
            others = (b.t(), b.t().contiguous(), b[:1], b.half(), b.as_strided((2, 3), (1, 2)), torch.nn.Parameter(b))
            check = _guard((a, b))
            return check(b, a) is True and not any(check(a, other) for other in (*others, None, a))
    except Exception:
        return False
