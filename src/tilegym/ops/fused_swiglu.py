"""A SwiGLU MLP whose gate and up projections are one GEMM, on one copy of the weights.

``gate_proj.weight`` and ``up_proj.weight`` stay parameters of their own, with the names, values and gradients of a
Hugging Face MLP, but lie one behind the other in one storage, where they are also the rows of one [2I, H] matrix. What
moves them apart (assigning new parameters, say) is noticed: they are joined again, or multiplied one by one.
"""

from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.backend.selector import get_current_backend
from tilegym.backend.wrapped import is_wrapped
from tilegym.backend.wrapped import unreadable
from tilegym.backend.wrapped import untraceable
from tilegym.ops.autocast import is_autocast
from tilegym.ops.modules import SwiGLUMLP
from tilegym.ops.modules import is_hooked
from tilegym.ops.ops import linear
from tilegym.ops.ops import matmul
from tilegym.ops.ops import silu_and_mul


def _are_joined(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` starts where ``a`` ends, in the same storage."""
    return (
        b.data_ptr() == a.data_ptr() + a.nbytes
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.is_contiguous()
        and b.is_contiguous()
    )


def _joined(a: Tensor, b: Tensor) -> Tensor:
    """Both as one tensor: a view if they are joined, else a copy."""
    if not _are_joined(a, b):
        return torch.cat((a, b))
    return a.as_strided((2 * a.shape[0], *a.shape[1:]), a.stride())


@torch.no_grad()
def _join(a: nn.Parameter, b: nn.Parameter) -> None:
    """Moves both parameters into one storage; they stay the objects that they are."""
    whole = a.new_empty(2 * a.shape[0], *a.shape[1:])
    for parameter, half in zip((a, b), whole.chunk(2), strict=True):
        half.copy_(parameter)
        parameter.data = half


def _fake_forward(x, gate, up, gate_bias, up_bias):
    *rows, _ = x.shape
    return x.new_empty(*rows, 2 * gate.shape[0])


@compilable(fake=_fake_forward)
def gate_up_forward(x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> Tensor:
    """[..., 2I]: the gate's outputs, then those of up."""
    bias = None if gate_bias is None else _joined(gate_bias, up_bias)
    return linear(x, _joined(gate, up), bias)


def _fake_backward(dy, x, gate, up, dx, dweight, dbias):
    weights = (torch.empty_like(t) if dweight else t.new_empty(0) for t in (gate, up))
    biases = (t.new_empty(t.shape[0] if dbias else 0) for t in (gate, up))
    return torch.empty_like(x, memory_format=torch.contiguous_format) if dx else x.new_empty(0), *weights, *biases


@compilable(fake=_fake_backward)
def gate_up_backward(
    dy: Tensor, x: Tensor, gate: Tensor, up: Tensor, dx: bool, dweight: bool, dbias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, both weights and both biases, empty where not asked for."""
    rows, upstream = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    halves = upstream.chunk(2, dim=1)
    nothing = tuple(x.new_empty(0) for _ in range(5))
    return (
        matmul(upstream, _joined(gate, up)).view(x.shape) if dx else nothing[0],
        *((matmul(half, rows, trans_a=True) for half in halves) if dweight else nothing[1:3]),
        *((half.sum(0) for half in halves) if dbias else nothing[3:]),
    )


class _GateUp(Function):
    @staticmethod
    def forward(ctx, x, gate, up, gate_bias, up_bias):
        ctx.save_for_backward(x, gate, up)
        return gate_up_forward(x, gate, up, gate_bias, up_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        needed = ctx.needs_input_grad
        wanted = (needed[0], needed[1] or needed[2], needed[3] or needed[4])
        gradients = gate_up_backward(dy, *ctx.saved_tensors, *wanted)
        return tuple(g if need else None for g, need in zip(gradients, needed, strict=True))


def _is_plain(module: nn.Module) -> bool:
    """Whether calling ``module`` is nothing but a product with its weight: no adapter, no quantisation, no hooks."""
    own = "forward" in module.__dict__ or is_hooked(module)
    return type(module) is nn.Linear and not own and not is_wrapped(module.weight)


class FusedSwiGLUMLP(SwiGLUMLP):
    """:class:`~tilegym.ops.modules.SwiGLUMLP` with gate and up as one GEMM and the activation right behind it.

    Constructor, parameter names, ``state_dict`` and results are those of ``LlamaMLP``. Under autocast, or where a
    projection was replaced or hooked, its projections are called one by one; with the PyTorch backend in training, too,
    whose gradients can be differentiated again.

    Gate and up share a storage: to save them with safetensors call ``save_file(module.state_dict(), path)``, since
    ``save_model`` refuses tensors that are not all of their storage.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._join_weights()

    def _join_weights(self) -> None:
        """Joins gate and up, unless they are: at most once until the module is moved."""
        gate, up = self.gate_proj, self.up_proj
        self._was_joined = not gate.weight.is_meta
        for a, b in ((gate.weight, up.weight), (gate.bias, up.bias)):
            if a is None or a.is_meta or _are_joined(a, b):
                continue
            if a.dtype == b.dtype and a.device == b.device:
                _join(a, b)

    def _apply(self, *args: Any, **kwargs: Any) -> "FusedSwiGLUMLP":
        super()._apply(*args, **kwargs)
        self._was_joined = False
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._was_joined = False  # the projections' own, which follow, may be assigned

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._was_joined = False  # copies of the parameters have storages of their own

    def _ready(self, x: Tensor) -> bool:
        """Whether gate and up can be one GEMM."""
        gate, up = self.gate_proj, self.up_proj
        if not (_is_plain(gate) and _is_plain(up)) or is_autocast(x):
            return False
        if _has_any_global_hook():
            return False
        if torch.compiler.is_compiling():
            # The operator looks where the weights are whenever it runs.
            return untraceable(forward_ad._current_level) is None
        if unreadable((x, gate.weight, up.weight, gate.bias, up.bias)) is not None:
            return False
        if not self._was_joined:
            self._join_weights()
        return _are_joined(gate.weight, up.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self._ready(x):
            return super().forward(x)
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        arguments = (x, gate.weight, up.weight, gate.bias, up.bias)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments):
            if get_current_backend() == "pytorch":
                return super().forward(x)
            hidden = silu_and_mul(_GateUp.apply(*arguments))
        else:
            hidden = silu_and_mul(gate_up_forward(*arguments))
        return linear(hidden, down.weight, down.bias) if _is_plain(down) else down(hidden)


def get_fused_swiglu_module() -> type[nn.Module]:
    """The class of an MLP with gate_proj, up_proj and down_proj, built from a Hugging Face config, that computes gate
    and up as one GEMM without a second copy of their weights."""
    return FusedSwiGLUMLP
