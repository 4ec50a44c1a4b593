"""``silu(x[..., :H]) * x[..., H:]``; backward is swiglu's kernel over the two halves of each row."""

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
from tilegym.ops.cutile.pointwise import tile_of
from tilegym.ops.cutile.swiglu import gated
from tilegym.ops.cutile.swiglu import launch_swiglu_backward
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import is_small
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.silu_and_mul import check_silu_and_mul


@ct.kernel
def silu_and_mul_kernel(x, y, HALF: Int, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, OVERLAP: Bool):
    """x: [M, 2 HALF] or [B, S, 2 HALF], y: the same with HALF columns; one block a tile, neighbours along a row."""
    let_next_begin(OVERLAP)
    at = tile_of(y, TILE_M, TILE_N, GRID)
    # Columns of a tile beyond the half would be those of the other one.
    own = None if HALF % TILE_N == 0 else at[-1] < HALF
    gate = ct.gather(x, at, mask=own, check_bounds=CHECK)
    up = ct.gather(x, (*at[:-1], at[-1] + HALF), mask=own, check_bounds=CHECK)
    ct.scatter(y, at, gated(gate, up), check_bounds=CHECK)


def launch_silu_and_mul(x: torch.Tensor, y: torch.Tensor) -> None:
    """Writes into y [..., H], which is contiguous."""
    rows = x
    if not is_small(x):
        rows, y = rows_of(x), rows_of(y)
    shape = y.shape
    kernel, grid, tiles = layout(silu_and_mul_kernel, shape, y.get_device())
    launch(y, grid, kernel, (rows, y, shape[-1], *tiles, overlaps(y.get_device())))


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of [M, 2H], as views [M, H]."""
    return rows.chunk(2, dim=1) if rows.shape[1] else (rows, rows)


def _output(x: torch.Tensor) -> torch.Tensor:
    *rows, n = x.shape
    return x.new_empty(*rows, n // 2)


@compilable(fake=_output)
def silu_and_mul_forward(x: torch.Tensor) -> torch.Tensor:
    y = _output(x)
    launch_silu_and_mul(x, y)
    return y


@compilable(fake=lambda dy, x: torch.empty_like(x, memory_format=torch.contiguous_format))
def silu_and_mul_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_swiglu_backward(rows_of(dy), *_halves(rows_of(x)), *_halves(rows_of(dx)))
    return dx


@compilable(fake=lambda dy, x: None, mutates=("x",))
def silu_and_mul_backward_in_place(dy: torch.Tensor, x: torch.Tensor) -> None:
    """Writes the gradient over x, which is 2-D or contiguous."""
    launch_swiglu_backward(rows_of(dy), *_halves(rows_of(x)))


class SiluAndMul(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.in_place = in_place.wanted(in_place.UNSEEN)
        return silu_and_mul_forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,), overwrites = in_place.unpack(ctx)
        if overwrites:
            silu_and_mul_backward_in_place(dy, x)
            return in_place.overwritten(x)
        return silu_and_mul_backward(dy, x)


@register_impl("silu_and_mul", "cutile")
def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    check_silu_and_mul(input, out)
    if input.dtype not in FLOATS:
        check_floating("silu_and_mul", input=input)
        raise UnsupportedError("input is not fp32, fp16 or bf16")
    if out is not None:
        with torch.no_grad():
            if torch.compiler.is_compiling() or not out.is_contiguous():
                return out.copy_(silu_and_mul_forward(input))
            launch_silu_and_mul(input, out)
            return out
    if torch.is_grad_enabled() and input.requires_grad:
        return SiluAndMul.apply(input)
    return silu_and_mul_forward(input)
