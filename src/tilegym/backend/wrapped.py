"""Tensors that no kernel can read as they are, or not all of them: those are PyTorch's.

DTensors, of which each process has a part, and the like are of subclasses that say themselves what an operation on them
does. Those of :mod:`torch.func`'s transforms, those with a tangent (forward-mode differentiation) and those whose sign
is still to be turned are of PyTorch's own class.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from tilegym.backend.selector import constant_while_compiling
from tilegym.errors import UnsupportedError

_SHAPES = "torch._subclasses.fake_tensor"
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.Size})
_WRAPPED = UnsupportedError("a tensor stands for others, as a DTensor does for the parts of several processes")
_TRANSFORMED = UnsupportedError("torch.func's transforms (vmap, grad, jvp and others) are of PyTorch's operations only")
_TANGENT = UnsupportedError("a tensor has a tangent, and no kernel computes one (forward-mode differentiation)")
_NEGATIVE = UnsupportedError("a tensor's sign is still to be turned: resolve_neg() does it")


def is_wrapped(value: Any) -> bool:
    """Whether ``value`` is a tensor that stands for others."""
    if type(value) in PLAIN_TENSORS or not isinstance(value, torch.Tensor):
        return False
    kind = type(value)
    # Those of a mode that follows shapes stand for none.
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and kind.__module__ != _SHAPES


def is_spread(value: Any) -> bool:
    """Whether ``value`` is a tensor of which each of several processes has a part."""
    return is_wrapped(value) and hasattr(value, "device_mesh")  # a DTensor


def is_quantised(value: Any) -> bool:
    """Whether ``value`` is a tensor that stands for others that are here, as torchao's and quanto's weights do."""
    return is_wrapped(value) and not is_spread(value)


def addresses_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where the memory of a tensor begins, or that of those that it stands for."""
    if not is_wrapped(tensor):
        return (tensor.data_ptr(),)
    if not hasattr(tensor, "__tensor_flatten__"):
        return (id(tensor),)
    names, _ = tensor.__tensor_flatten__()
    return tuple(address for name in names for address in addresses_of(getattr(tensor, name)))


@constant_while_compiling
def untraceable(level: int) -> UnsupportedError | None:
    """Why no call of a kernel can be compiled now, if so; ``level``: forward_ad's, on which traced code is guarded."""
    if torch._C._are_functorch_transforms_active():
        return _TRANSFORMED
    return _TANGENT if level >= 0 else None


def unreadable(values: Iterable[Any]) -> UnsupportedError | None:
    """Why kernels cannot take these arguments of a call, if so."""
    if torch._C._are_functorch_transforms_active():
        return _TRANSFORMED
    return _among(values, forward_ad._current_level >= 0)


def _among(values: Iterable[Any], tangents: bool) -> UnsupportedError | None:
    for value in values:
        if type(value) in _NO_TENSORS:
            continue
        if isinstance(value, torch.Tensor):
            if is_wrapped(value):
                return _WRAPPED
            if value.is_neg():
                return _NEGATIVE
            if torch._C._functorch.is_legacy_batchedtensor(value):  # of several backward passes at a time
                return _TRANSFORMED
            if tangents and forward_ad.unpack_dual(value).tangent is not None:
                return _TANGENT
        elif isinstance(value, list | tuple):
            found = _among(value, tangents)
            if found is not None:
                return found
    return None
