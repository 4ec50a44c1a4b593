"""``y = exp(x - max) / sum(exp(x - max))`` over rows; backward: ``dx = y * (dy - sum(y * dy))``.

A row that fits is held in the registers of one block. A longer one is read twice: first its maximum and sum are
computed together, tile by tile (Milakov and Gimelshein 2018, arXiv:1805.02867), then its values.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import small_or_rows
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating


def _load(x, rows, cols, padding):
    return ct.gather(x, at(x, rows[:, None], cols[None, :]), padding_value=padding)


def _store(y, rows, cols, out):
    ct.scatter(y, at(y, rows[:, None], cols[None, :]), out.astype(y.dtype))


def _exp(difference, dtype):
    """exp, to fp32's precision for fp32 inputs, else to well beyond that of their dtype."""
    if dtype == ct.float32:
        return ct.exp(difference)
    return ct.exp2(difference * 1.4426950408889634, flush_to_zero=True)


def _again(row, TWICE: Bool):
    """``row`` in fp32. TWICE: converted anew, in another way than by astype, of which the compiler would keep the first
    result: so what is held until then are 16 bits a value."""
    if TWICE and row.dtype == ct.bfloat16:
        return ct.bitcast(ct.bitcast(row, ct.uint16).astype(ct.uint32) << 16, ct.float32)
    return row.astype(ct.float32)


@ct.kernel
def softmax_kernel(x, y, TILE_M: Int, TILE_N: Int, TWICE: Bool):
    """Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    row = _load(x, rows, cols, -math.inf)
    # In the dtype of x: were values converted as they arrive, registers would be reused while others are on their way.
    top = ct.max(row, axis=1, keepdims=True).astype(ct.float32)
    total = ct.sum(_exp(row.astype(ct.float32) - top, x.dtype), axis=1, keepdims=True)
    _store(y, rows, cols, _exp(_again(row, TWICE) - top, x.dtype) * (1.0 / total))


@ct.kernel
def softmax_backward_kernel(dy, y, dx, TILE_M: Int, TILE_N: Int, TWICE: Bool):
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    out, up = _load(y, rows, cols, 0), _load(dy, rows, cols, 0)
    total = ct.sum(out.astype(ct.float32) * up.astype(ct.float32), axis=1, keepdims=True)
    _store(dx, rows, cols, _again(out, TWICE) * (_again(up, TWICE) - total))


@ct.kernel
def softmax_wide_kernel(x, y, TILE_N: Int):
    """Each block takes one row, in tiles of TILE_N columns."""
    rows = span(ct.bid(0), 1)
    tiles = ct.cdiv(x.shape[x.ndim - 1], TILE_N)
    top = ct.full((1, 1), -math.inf, ct.float32)
    sums = ct.zeros((1, TILE_N), ct.float32)
    for tile in range(tiles):
        part = _load(x, rows, span(tile, TILE_N), -math.inf).astype(ct.float32)
        new_top = ct.maximum(top, ct.max(part, axis=1, keepdims=True))
        # While all seen so far is -inf, differences to it would be NaN.
        base = ct.where(new_top == -math.inf, 0.0, new_top)
        sums = sums * _exp(top - base, x.dtype) + _exp(part - base, x.dtype)
        top = new_top
    scale = 1.0 / ct.sum(sums, axis=1, keepdims=True)
    for i in range(tiles):
        cols = span(tiles - 1 - i, TILE_N)  # what was read last is in the cache still
        out = _exp(_load(x, rows, cols, -math.inf).astype(ct.float32) - top, x.dtype) * scale
        _store(y, rows, cols, out)


@ct.kernel
def softmax_backward_wide_kernel(dy, y, dx, TILE_N: Int):
    rows = span(ct.bid(0), 1)
    tiles = ct.cdiv(y.shape[y.ndim - 1], TILE_N)
    sums = ct.zeros((1, TILE_N), ct.float32)
    for tile in range(tiles):
        cols = span(tile, TILE_N)
        out, up = _load(y, rows, cols, 0), _load(dy, rows, cols, 0)
        sums = sums + out.astype(ct.float32) * up.astype(ct.float32)
    total = ct.sum(sums, axis=1, keepdims=True)
    for i in range(tiles):
        cols = span(tiles - 1 - i, TILE_N)
        out, up = _load(y, rows, cols, 0), _load(dy, rows, cols, 0)
        _store(dx, rows, cols, out.astype(ct.float32) * (up.astype(ct.float32) - total))


# Longer rows do not fit into the registers of one block: bf16, other dtypes.
MAX_HELD = (32768, 16384)
# How many blocks a multiprocessor has for bf16 rows, by their columns, if their values are converted TWICE: forward,
# backward. The fastest for 8192 rows on an H200, where shorter ones are as fast without.
TWICE = ({16384: 3, 32768: 2}, {8192: 3, 16384: 2, 32768: 1})


@functools.lru_cache(maxsize=1024)
def plan(m: int, n: int, device: int, backward: bool, bf16: bool) -> tuple[ct.kernel, tuple[int], tuple[int, ...]]:
    """(kernel, grid, tile constants) for rows [m, n] that a block holds, on CUDA device ``device`` (-1: CPU)."""
    m = m if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    # Short rows share a block, as long as there are blocks for every multiprocessor.
    tile_m = max(1, min(4096 // tile_n, next_power_of_2(m // (4 * sm_count(device)))))
    elements = tile_m * tile_n
    occupancy = TWICE[backward].get(tile_n) if bf16 else None
    twice = occupancy is not None
    if backward:
        kernel, warps = softmax_backward_kernel, 8
        occupancy = occupancy or max(1, min(4, 16384 // elements))
    else:
        kernel, warps = softmax_kernel, 8 if tile_n > 4096 else 4
        occupancy = occupancy or min(8, 32768 // elements)
    grid = (ct.cdiv(m, tile_m),)
    return hinted(kernel, num_worker_warps=warps, occupancy=occupancy), grid, (tile_m, tile_n, twice)


def wide_plan(n: int, backward: bool) -> tuple[ct.kernel, int]:
    """(kernel, columns of a tile) for rows of n columns that no block holds."""
    if backward:
        kernel, tile, warps, occupancy = softmax_backward_wide_kernel, *((4096, 8, 1) if n < 65536 else (2048, 8, 2))
    else:
        kernel, tile, warps, occupancy = softmax_wide_kernel, *((8192, 8, 1) if n < 65536 else (4096, 4, 2))
    return hinted(kernel, num_worker_warps=warps, occupancy=occupancy), tile


def _launch(like, arrays, rows, backward):
    """Launches what computes the last of ``arrays`` from the others, all shaped as ``rows``."""
    (m, n), device = size_of(rows), like.get_device()
    bf16 = rows.dtype == torch.bfloat16
    if next_power_of_2(n) <= MAX_HELD[not bf16]:
        kernel, grid, tiles = plan(m, n, device, backward, bf16)
        launch(like, grid, kernel, (*arrays, *tiles))
        return
    kernel, tile = wide_plan(n, backward)
    launch(like, (m,), kernel, (*arrays, tile))


def _rows_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` as [M, N], or as it is if it is a small [B, S, N], with dimension ``dim`` as N."""
    return small_or_rows(x) if dim == -1 else rows_of(x.movedim(dim, -1))


def _like(rows: torch.Tensor, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An empty tensor for the result of ``rows``, and the view of it in the shape of ``x``."""
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if dim == -1:
        return out, (out if rows is x else out.view(x.shape))
    return out, out.view(x.movedim(dim, -1).shape).movedim(-1, dim)


def _fake(x, dim):
    # As _like lays it out, without a look at the size: traced code shall serve all.
    moved = x.movedim(dim, -1)
    return torch.empty_like(moved, memory_format=torch.contiguous_format).movedim(-1, dim)


@compilable(fake=_fake)
def softmax_forward(x: torch.Tensor, dim: int) -> torch.Tensor:
    rows = _rows_along(x, dim)
    out, y = _like(rows, x, dim)
    _launch(x, (rows, out), rows, False)
    return y


@compilable(fake=lambda dy, y, dim: _fake(y, dim))
def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    rows = _rows_along(y, dim)
    out, dx = _like(rows, y, dim)
    _launch(y, (_rows_along(dy, dim), rows, out), rows, True)
    return dx


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        y = softmax_forward(x, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return softmax_backward(dy, *ctx.saved_tensors, ctx.dim), None


@register_impl("softmax", "cutile")
def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    if x.dtype not in FLOATS:
        check_floating("softmax", x=x)
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    if x.dim() == 0:
        raise UnsupportedError("x has no dimensions")
    if torch.is_grad_enabled() and x.requires_grad:
        return Softmax.apply(x, dim)
    return softmax_forward(x, dim)
