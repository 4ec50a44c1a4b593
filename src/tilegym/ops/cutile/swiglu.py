"""``y = silu(a) * b`` with silu(a) = a * sigmoid(a), rounded to the dtype before the product.

Backward: ``da = dy * b * s * (1 + a * (1 - s))`` with s = sigmoid(a), ``db = dy * silu(a)``.
"""

import cuda.tile as ct
import torch

from tilegym.backend import in_place
from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import layout
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.pointwise import small_or_flat
from tilegym.ops.cutile.pointwise import tile_of
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.swiglu import check_swiglu


@ct.kernel
def swiglu_kernel(a, b, y, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, OVERLAP: Bool):
    """a, b, y: [M, N] or [B, S, N]; one block a tile, neighbours along a row."""
    let_next_begin(OVERLAP)
    at = tile_of(y, TILE_M, TILE_N, GRID)
    gate, up = ct.gather(a, at, check_bounds=CHECK), ct.gather(b, at, check_bounds=CHECK)
    ct.scatter(y, at, gated(gate, up), check_bounds=CHECK)


def gated(gate, up):
    """In a kernel: silu(gate) * up, in their dtype."""
    silu = over_one_plus_exp(gate.astype(ct.float32), gate, gate.dtype).astype(gate.dtype)
    return (silu.astype(ct.float32) * up.astype(ct.float32)).astype(gate.dtype)


@ct.kernel
def swiglu_backward_kernel(
    dy, a, b, da, db, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, INPLACE: Bool, OVERLAP: Bool
):
    """INPLACE: da is written over a, db over b, and da and db stand for nothing."""
    begin(OVERLAP)
    at = tile_of(dy, TILE_M, TILE_N, GRID, LAST_FIRST=True)
    gate, up = ct.gather(a, at, check_bounds=CHECK), ct.gather(b, at, check_bounds=CHECK)
    g = ct.gather(dy, at, check_bounds=CHECK)
    sigmoid = over_one_plus_exp(1.0, gate, gate.dtype)
    gate, up, g = gate.astype(ct.float32), up.astype(ct.float32), g.astype(ct.float32)
    silu = gate * sigmoid
    ct.scatter(b if INPLACE else db, at, (g * silu).astype(b.dtype), check_bounds=CHECK)
    da_of = g * up * (sigmoid + silu * (1.0 - sigmoid))
    ct.scatter(a if INPLACE else da, at, da_of.astype(a.dtype), check_bounds=CHECK)


def launch_swiglu_backward(
    dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, da: torch.Tensor | None = None, db: torch.Tensor | None = None
) -> None:
    """Writes the gradients of swiglu(a, b) into da and db, or over a and b; all are [M, N] or [B, S, N]."""
    kernel, grid, tiles = layout(swiglu_backward_kernel, dy.shape, dy.get_device())
    outputs = (0, 0, *tiles, True) if da is None else (da, db, *tiles, False)
    overlap = overlaps(dy.get_device())
    launch(dy, grid, kernel, (dy, a, b, *outputs, overlap), overlap=overlap)


@compilable(fake=lambda a, b: torch.empty_like(a, memory_format=torch.contiguous_format))
def swiglu_forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(a, memory_format=torch.contiguous_format)
    rows_a, rows_b, rows = small_or_flat(a, b, y)
    kernel, grid, tiles = layout(swiglu_kernel, rows.shape, y.get_device())
    launch(y, grid, kernel, (rows_a, rows_b, rows, *tiles, overlaps(y.get_device())))
    return y


def _fake_backward(dy, a, b):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (a, b))


@compilable(fake=_fake_backward)
def swiglu_backward(dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    da, db = _fake_backward(dy, a, b)
    launch_swiglu_backward(*small_or_flat(dy, a, b, da, db))
    return da, db


@compilable(fake=lambda dy, a, b: None, mutates=("a", "b"))
def swiglu_backward_in_place(dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Writes the gradients over a and b, which are 2-D or contiguous."""
    launch_swiglu_backward(*small_or_flat(dy, a, b))


class SwiGLU(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        ctx.in_place = in_place.wanted(in_place.UNSEEN)
        return swiglu_forward(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved, overwrites = in_place.unpack(ctx)
        if overwrites:
            swiglu_backward_in_place(dy, *saved)
            return in_place.overwritten(*saved)
        return swiglu_backward(dy, *saved)


@register_impl("swiglu", "cutile")
def swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    check_swiglu(a, b)
    if a.dtype not in FLOATS:
        check_floating("swiglu", a=a)
        raise UnsupportedError("a and b are not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return SwiGLU.apply(a, b)
    return swiglu_forward(a, b)
