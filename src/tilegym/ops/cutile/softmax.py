"""``y = exp(x - max) / sum(exp(x - max))`` over rows; backward: ``dx = y * (dy - sum(y * dy))``.

A row that fits is held in the registers of one block; ``softmax_long.py`` has the others.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import block
from tilegym.ops.cutile.row_groups import group_size
from tilegym.ops.cutile.softmax_joint import MAX_ROWS
from tilegym.ops.cutile.softmax_joint import exp_of
from tilegym.ops.cutile.softmax_joint import joint_plan
from tilegym.ops.cutile.softmax_long import MAX_COLUMNS
from tilegym.ops.cutile.softmax_long import again
from tilegym.ops.cutile.softmax_long import launch_long_rows
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


@ct.kernel
def softmax_kernel(x, y, TILE_M: Int, TILE_N: Int, TWICE: Bool):
    """Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    row = _load(x, rows, cols, -math.inf)
    # In the dtype of x: were values converted as they arrive, registers would be reused while others are on their way.
    top = ct.max(row, axis=1, keepdims=True).astype(ct.float32)
    total = ct.sum(exp_of(row.astype(ct.float32) - top, x.dtype), axis=1, keepdims=True)
    _store(y, rows, cols, exp_of(again(row, TWICE) - top, x.dtype) * (1.0 / total))


@ct.kernel
def softmax_backward_kernel(dy, y, dx, TILE_M: Int, TILE_N: Int, TWICE: Bool):
    """Each block takes TILE_M whole rows, the last first: the cache may hold these still. On an H200 in bf16 both
    passes of 8192x4096 take 85.3 us instead of 88.4, of 8192x8192 161.9 instead of 165.8."""
    rows, cols = span(block(0, True), TILE_M), span(0, TILE_N)
    out, up = _load(y, rows, cols, 0), _load(dy, rows, cols, 0)
    total = ct.sum(out.astype(ct.float32) * up.astype(ct.float32), axis=1, keepdims=True)
    _store(dx, rows, cols, again(out, TWICE) * (again(up, TWICE) - total))


# Longer rows do not fit into the registers of one block, or are slower there: forward, backward, by bytes a value.
MAX_HELD = ({2: 32768, 4: 16384}, {2: 16384, 4: 16384})
# Rows that are long enough to be read as groups (``row_groups.py``), where a block that holds one would read numbers.
MAX_SCATTERED = 8192
# How many blocks a multiprocessor has for 16-bit rows, by their columns, if their values are converted TWICE: forward,
# backward. The fastest for 8192 rows on an H200, where shorter ones are as fast without.
TWICE = ({16384: 3, 32768: 2}, {8192: 3, 16384: 2})


@functools.lru_cache(maxsize=1024)
def plan(m: int, n: int, device: int, backward: bool, size: int) -> tuple[ct.kernel, tuple[int], tuple[int, ...]]:
    """(kernel, grid, tile constants) for rows [m, n] that a block holds, on CUDA device ``device`` (-1: CPU)."""
    m = m if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    # Short rows share a block, as long as there are blocks for every multiprocessor.
    shared = 4096 if backward or tile_n < 1024 else 2048
    tile_m = max(1, min(shared // tile_n, next_power_of_2(m // (4 * sm_count(device)))))
    elements = tile_m * tile_n
    occupancy = TWICE[backward].get(tile_n) if size == 2 else None
    twice = occupancy is not None
    if backward:
        kernel, warps = softmax_backward_kernel, 8
        occupancy = occupancy or max(1, min(4, 16384 // elements))
    else:
        kernel, warps = softmax_kernel, 8 if tile_n > 4096 else 4
        occupancy = occupancy or min(8, 32768 // elements)
    grid = (ct.cdiv(m, tile_m),)
    return hinted(kernel, num_worker_warps=warps, occupancy=occupancy), grid, (tile_m, tile_n, twice)


def _launch(like, arrays, rows, backward):
    """Launches what computes the last of ``arrays`` from the others, all shaped as ``rows``."""
    (m, n), device, size = size_of(rows), like.get_device(), rows.element_size()
    joint = joint_plan(m, n, device, backward, size)
    if joint is not None:
        kernel, tiles = joint
        launch(like, (1, m), kernel, (*arrays, *tiles))
        return
    most = MAX_HELD[backward][size]
    if 2 * m < sm_count(device):  # half of the multiprocessors or fewer would hold rows alone
        most = 16384
    elif n > MAX_SCATTERED and group_size(n, *arrays):
        most = MAX_SCATTERED
    if next_power_of_2(n) <= most:
        kernel, grid, tiles = plan(m, n, device, backward, size)
        launch(like, grid, kernel, (*arrays, *tiles))
        return
    if m > MAX_ROWS:
        for some in zip(*(array.split(MAX_ROWS) for array in arrays), strict=True):
            _launch(like, some, some[-1], backward)
        return
    launch_long_rows(like, arrays, m, n, backward)


def _rows_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` as [M, N], or as it is if it is a small [B, S, N], with dimension ``dim`` as N."""
    return small_or_rows(x) if dim == -1 else rows_of(x.movedim(dim, -1))


def _like(rows: torch.Tensor, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the result of ``rows`` is written to, and the same memory, empty, in the shape of ``x``."""
    if dim == -1:  # no view: what is one could not be written over in training
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        return (y if rows is x else y.view(rows.shape)), y
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
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


class Softmax(Function):
    @staticmethod
    def forward(ctx, x, dim):
        y = softmax_forward(x, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return softmax_backward(dy, *ctx.saved_tensors, ctx.dim), None


@register_impl("softmax", "cutile")
def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    if x.dtype not in FLOATS:
        check_floating("softmax", x=x)
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    if x.dim() == 0:
        raise UnsupportedError("x has no dimensions")
    if x.size(dim) > MAX_COLUMNS:
        raise UnsupportedError(f"rows have more than {MAX_COLUMNS} columns")
    if torch.is_grad_enabled() and x.requires_grad:
        return Softmax.apply(x, dim)
    return softmax_forward(x, dim)
