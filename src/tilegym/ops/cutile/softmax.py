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
    return ct.gather(x, at(x, rows[:, None], cols[None, :]), padding_value=padding).astype(ct.float32)


def _store(y, rows, cols, out):
    ct.scatter(y, at(y, rows[:, None], cols[None, :]), out.astype(y.dtype))


def _exp(difference, dtype):
    """exp, to fp32's precision for fp32 inputs, else to well beyond that of their dtype."""
    if dtype == ct.float32:
        return ct.exp(difference)
    return ct.exp2(difference * 1.4426950408889634, flush_to_zero=True)


@ct.kernel
def softmax_kernel(x, y, TILE_M: Int, TILE_N: Int):
    """Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    row = _load(x, rows, cols, -math.inf)
    power = _exp(row - ct.max(row, axis=1, keepdims=True), x.dtype)
    out = power * (1.0 / ct.sum(power, axis=1, keepdims=True))
    _store(y, rows, cols, out)


@ct.kernel
def softmax_wide_kernel(x, y, TILE_N: Int):
    """Each block takes one row, in tiles of TILE_N columns."""
    rows = span(ct.bid(0), 1)
    tiles = ct.cdiv(x.shape[x.ndim - 1], TILE_N)
    top = ct.full((1, 1), -math.inf, ct.float32)
    sums = ct.zeros((1, TILE_N), ct.float32)
    for tile in range(tiles):
        part = _load(x, rows, span(tile, TILE_N), -math.inf)
        new_top = ct.maximum(top, ct.max(part, axis=1, keepdims=True))
        # While all seen so far is -inf, differences to it would be NaN.
        base = ct.where(new_top == -math.inf, 0.0, new_top)
        sums = sums * _exp(top - base, x.dtype) + _exp(part - base, x.dtype)
        top = new_top
    scale = 1.0 / ct.sum(sums, axis=1, keepdims=True)
    for i in range(tiles):
        cols = span(tiles - 1 - i, TILE_N)  # what was read last is in the cache still
        out = _exp(_load(x, rows, cols, -math.inf) - top, x.dtype) * scale
        _store(y, rows, cols, out)


@ct.kernel
def softmax_backward_kernel(dy, y, dx, TILE_M: Int, TILE_N: Int):
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    out, up = _load(y, rows, cols, 0), _load(dy, rows, cols, 0)
    product = out * up
    grad = product - out * ct.sum(product, axis=1, keepdims=True)
    _store(dx, rows, cols, grad)


@ct.kernel
def softmax_backward_wide_kernel(dy, y, dx, TILE_N: Int):
    rows = span(ct.bid(0), 1)
    tiles = ct.cdiv(y.shape[y.ndim - 1], TILE_N)
    sums = ct.zeros((1, TILE_N), ct.float32)
    for tile in range(tiles):
        cols = span(tile, TILE_N)
        sums = sums + _load(y, rows, cols, 0) * _load(dy, rows, cols, 0)
    total = ct.sum(sums, axis=1, keepdims=True)
    for i in range(tiles):
        cols = span(tiles - 1 - i, TILE_N)
        grad = _load(y, rows, cols, 0) * (_load(dy, rows, cols, 0) - total)
        _store(dx, rows, cols, grad)


# A longer row does not fit into the registers of one block.
MAX_CACHED = 16384


@functools.lru_cache(maxsize=1024)
def plan(m: int, n: int, device: int, backward: bool) -> tuple[ct.kernel, tuple[int], tuple[int, ...]]:
    """(kernel, grid, tile constants) for rows [m, n] on CUDA device ``device`` (-1: CPU).

    The fastest on an H200 for 8192x4096, 131072x256, 1024x32768 and 1024x128256 in bf16.
    """
    m = m if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    if tile_n > MAX_CACHED:
        if backward:
            kernel, tile, warps, occupancy = (
                softmax_backward_wide_kernel,
                *((4096, 8, 1) if n < 65536 else (2048, 8, 2)),
            )
        else:
            kernel, tile, warps, occupancy = softmax_wide_kernel, *((8192, 8, 1) if n < 65536 else (4096, 4, 2))
        return hinted(kernel, num_worker_warps=warps, occupancy=occupancy), (m,), (tile,)
    # Short rows share a block, as long as there are blocks for every multiprocessor.
    tile_m = max(1, min(4096 // tile_n, next_power_of_2(m // (4 * sm_count(device)))))
    elements = tile_m * tile_n
    if backward:
        kernel, warps, occupancy = softmax_backward_kernel, 8, max(1, min(4, 16384 // elements))
    else:
        kernel, warps, occupancy = softmax_kernel, 8 if tile_n >= 4096 else 4, min(8, 32768 // elements)
    return hinted(kernel, num_worker_warps=warps, occupancy=occupancy), (ct.cdiv(m, tile_m),), (tile_m, tile_n)


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
    kernel, grid, tiles = plan(*size_of(rows), x.get_device(), False)
    launch(x, grid, kernel, (rows, out, *tiles))
    return y


@compilable(fake=lambda dy, y, dim: _fake(y, dim))
def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    rows = _rows_along(y, dim)
    out, dx = _like(rows, y, dim)
    kernel, grid, tiles = plan(*size_of(rows), y.get_device(), True)
    launch(y, grid, kernel, (_rows_along(dy, dim), rows, out, *tiles))
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
