"""``granite_residual``, with PyTorch's rounding at every step. Without it:

y = residual + hidden_states * 0.22
"""

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import indices
from tilegym.ops.cutile.pointwise import plan
from tilegym.ops.cutile.pointwise import small_or_flat
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import size_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rounded(value, dtype):
    """In a kernel: ``value`` as PyTorch keeps it between two steps, in fp32."""
    return value.astype(dtype).astype(ct.float32)


@ct.kernel
def granite_residual_kernel(hidden_states, residual, y, TILE_M: Int, TILE_N: Int):
    """One block a tile of elements, neighbours along a row."""
    place = indices(y, TILE_M, TILE_N)
    residual_tile = ct.gather(residual, place).astype(ct.float32)
    hidden_states_tile = ct.gather(hidden_states, place).astype(ct.float32)
    ct.scatter(y, place, (residual_tile + rounded(hidden_states_tile * 0.22, hidden_states.dtype)).astype(y.dtype))


def _granite_residual_outputs(hidden_states, residual):
    return contiguous_like(hidden_states)


@compilable(fake=_granite_residual_outputs)
def granite_residual_forward(hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    y = _granite_residual_outputs(hidden_states, residual)
    arrays = small_or_flat(hidden_states, residual, y)
    grid, tile_m, tile_n = plan(*size_of(arrays[0]), hidden_states.get_device())
    launch(hidden_states, grid, granite_residual_kernel, (*arrays, tile_m, tile_n))
    return y


@ct.kernel
def granite_residual_backward_kernel(dy, d_hidden_states, TILE_M: Int, TILE_N: Int):
    """One block a tile of elements, neighbours along a row."""
    place = indices(d_hidden_states, TILE_M, TILE_N)
    dy_tile = ct.gather(dy, place).astype(ct.float32)
    ct.scatter(d_hidden_states, place, (dy_tile * 0.22).astype(d_hidden_states.dtype))


def _granite_residual_gradients(dy):
    return contiguous_like(dy)


@compilable(fake=_granite_residual_gradients)
def granite_residual_backward(dy: torch.Tensor) -> torch.Tensor:
    d_hidden_states = _granite_residual_gradients(dy)
    arrays = small_or_flat(dy, d_hidden_states)
    grid, tile_m, tile_n = plan(*size_of(arrays[0]), dy.get_device())
    launch(dy, grid, granite_residual_backward_kernel, (*arrays, tile_m, tile_n))
    return d_hidden_states


class GraniteResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, residual):
        return granite_residual_forward(hidden_states, residual)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise UnsupportedError("there is no second derivative")
        d_hidden_states = granite_residual_backward(dy)
        return d_hidden_states, dy


def granite_residual(hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Computes ``y`` as at the top of this file.

    Args:
        hidden_states: [..., N], in one of DTYPES.
        residual: [..., N], in one of DTYPES.

    Raises:
        UnsupportedError: the kernels do not serve these arguments.
    """
    if hidden_states.dtype not in DTYPES or residual.dtype != hidden_states.dtype:
        raise UnsupportedError("a dtype is none that the kernels are for")
    if residual.shape != hidden_states.shape:
        raise UnsupportedError("the shapes are not those of the region")
    if torch.is_grad_enabled() and (hidden_states.requires_grad or residual.requires_grad):
        return GraniteResidual.apply(hidden_states, residual)
    return granite_residual_forward(hidden_states, residual)
