"""``total = x + residual``, rounded to the dtype, and its RMS normalisation, in one pass over memory.

Backward, from the gradients of both outputs: x and residual have the same one, that of ``total`` itself plus what
comes through the normalisation. ``row_norms_backward.py`` has that pass, ``row_norms.py`` says what the
constants of the kernels are; RSTD: whether rstd is given.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import in_place
from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import of_caller
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.row_norms import MAX_CACHED
from tilegym.ops.cutile.row_norms import at_once
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import forward_warps
from tilegym.ops.cutile.row_norms import grid_of
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import load_vector
from tilegym.ops.cutile.row_norms import outside
from tilegym.ops.cutile.row_norms import row_sum
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import scaled
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.row_norms import store_piece
from tilegym.ops.cutile.row_norms import sums_dtype
from tilegym.ops.cutile.row_norms import whole_rows
from tilegym.ops.cutile.row_norms_backward import norm_gradients
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import SMALL
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import small_or_rows
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.fused_add_rms_norm import check_fused_add_rms_norm


def _add(x, residual, rows, cols, CHECK: Bool = True):
    """The sum as it is stored, in x's dtype."""
    a, b = load(x, rows, cols, CHECK), load(residual, rows, cols, CHECK)
    return (a.astype(ct.float32) + b.astype(ct.float32)).astype(x.dtype)


@ct.kernel
def add_rms_norm_kernel(
    x, residual, weight, y, total, rstd, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, PIECES: Int,
    AT_ONCE: Bool, AXIS: Int, WARPS: Int, WEIGHT: Bool, ROUND: Bool, RSTD: Bool,
):  # fmt: skip
    """A block reads TILE_M whole rows, as PIECES tiles, and keeps their sums in registers."""
    check = outside(N, TILE_M, TILE_N * PIECES)
    rows = span(ct.bid(AXIS), TILE_M)
    squares = ct.zeros((TILE_M, TILE_N), ct.float32)
    sums, pieces, ws = (), (), ()
    for piece in ct.static_iter(range(PIECES)):
        cols = span(piece, TILE_N)
        stored, w = _add(x, residual, rows, cols, check), load_vector(weight, cols, WEIGHT, check)
        row = stored.astype(ct.float32)
        squares = squares + row * row
        sums, pieces, ws = (*sums, stored), (*pieces, row), (*ws, w)
    for piece in ct.static_iter(range(PIECES)):
        store_piece(total, rows, piece, sums[piece], TILE_N, PIECES, AXIS, check)
    r = rstd_of(row_sum(squares, x.dtype, WARPS, AT_ONCE, *ws), eps, N)
    for piece in ct.static_iter(range(PIECES)):
        out = scaled(pieces[piece] * r, ws[piece], None, y.dtype, OFFSET, ROUND)
        store_piece(y, rows, piece, out, TILE_N, PIECES, AXIS, check)
    if RSTD:
        ct.scatter(rstd, rows[:, None], r)


@ct.kernel
def add_rms_norm_reload_kernel(
    x, residual, weight, y, total, rstd, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool,
    ROUND: Bool, RSTD: Bool,
):  # fmt: skip
    """A block reads its rows twice, a tile of columns at a time; for rows of any length."""
    rows = span(ct.bid(0), TILE_M)
    squares = ct.zeros((TILE_M, TILE_N), ct.float32)
    tiles = ct.cdiv(N, TILE_N)
    for tile in range(tiles):
        part = _add(x, residual, rows, span(tile, TILE_N)).astype(ct.float32)
        squares = squares + part * part
    r = rstd_of(squares, eps, N)
    for i in range(tiles):
        cols = span(tiles - 1 - i, TILE_N)  # what was read last is in the cache still
        part = _add(x, residual, rows, cols)
        w = load_vector(weight, cols, WEIGHT)
        store(total, rows, cols, part)
        store(y, rows, cols, scaled(part.astype(ct.float32) * r, w, None, y.dtype, OFFSET, ROUND))
    if RSTD:
        ct.scatter(rstd, rows[:, None], r)


@functools.lru_cache(maxsize=1024)
def forward_plan(rows: int, n: int, device: int) -> tuple[ct.kernel, tuple[int, ...], tuple]:
    """(kernel, grid, tiles) for [rows, n] on CUDA device ``device`` (-1: CPU).

    The tiles are TILE_M and TILE_N, and where rows are held PIECES, AT_ONCE, AXIS and WARPS.

    As rms_norm's, whose tiles were measured on an H200, with half the blocks for the second input held in flight, and
    8 warps from 4096 columns on: 8192x4096 in 69.5 us instead of 72.9. Where all blocks run at once, with as many
    registers as it takes: the compiler saves them by storing a part of the sum before it reads the next.
    """
    rows = rows if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    if tile_n > MAX_CACHED:
        return hinted(add_rms_norm_reload_kernel, num_worker_warps=4, occupancy=4), (rows,), (1, 4096)
    tile_m, tile_n = whole_rows(rows, n, device)
    if 1024 < n <= 3072 and rows * n > SMALL:
        # In one tile, of which a part is idle, or two rows in one, 8192x2560 takes an H200 52.0 us instead of 43.7,
        # x1536 29.3 instead of 28.6, 32768x2048 131.3 instead of 129.3. In six pieces 8192x2880 takes 51.5, in three
        # 49.7.
        few, wide = at_once(rows, n, device), n > 2560
        kernel = hinted(add_rms_norm_kernel, num_worker_warps=4, occupancy=few or (6 if wide else 4))
        grid, axis = grid_of(rows)
        tile = (1024, 3, few > 0) if wide else (512, ct.cdiv(n, 512), True)
        return kernel, grid, (1, *tile, axis, 4)
    if 4096 < n <= 6144 and rows * n > SMALL:
        # 8192x5120 in one tile takes an H200 95.4 us instead of 86.0 (a copy 83.6).
        kernel = hinted(add_rms_norm_kernel, num_worker_warps=8, occupancy=3)
        grid, axis = grid_of(rows)
        return kernel, grid, (1, 1024, ct.cdiv(n, 1024), False, axis, 8)
    if n in (7168, 8192) and (2 if n == 8192 else 3) * sm_count(device) < rows <= 4 * sm_count(device):
        # All blocks at once: 512x8192 takes an H200 10.9 us instead of 12.2, where half as many have a tile each;
        # 512x7168 10.1 instead of 10.6, but 272x7168 9.6 instead of 9.3.
        kernel = hinted(add_rms_norm_kernel, num_worker_warps=8, occupancy=4)
        grid, axis = grid_of(rows)
        tile_n = min(2048, n & -n)  # which divides n
        return kernel, grid, (1, tile_n, n // tile_n, False, axis, 8)
    elements = tile_m * tile_n
    tiles = ct.cdiv(rows, tile_m)
    warps, occupancy = forward_warps(tiles, elements, device), max(1, min(8, 16384 // elements))
    early = at_once(rows, elements, device)
    warps = 8 if tile_n >= 4096 else warps
    kernel = hinted(add_rms_norm_kernel, num_worker_warps=warps, occupancy=early or occupancy)
    grid, axis = grid_of(tiles)
    return kernel, grid, (tile_m, tile_n, 1, early > 0, axis, warps if tile_m == 1 else 0)


def _launch_forward(x, residual, weight, eps, offset, rounded, with_rstd):
    rows, residual = small_or_rows(x), small_or_rows(residual)
    m, n = size_of(rows)
    y, total = contiguous_like(x), contiguous_like(x)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device) if with_rstd else 0
    kernel, grid, tiles = forward_plan(m, n, x.get_device())
    w = 0 if weight is None else weight
    constants = (offset, n, *tiles, weight is not None, rounded, with_rstd)
    launch(x, grid, kernel, (rows, residual, w, small_or_rows(y), small_or_rows(total), rstd, eps, *constants))
    return y, total, rstd


@compilable(fake=lambda x, *_: (contiguous_like(x), contiguous_like(x)))
def add_rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch_forward(x, residual, weight, eps, offset, rounded, False)[:2]


@compilable(
    fake=lambda x, *_: (contiguous_like(x), contiguous_like(x), x.new_empty(rows_of(x).shape[0], dtype=torch.float32))
)
def add_rms_norm_forward_rstd(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass of a training step: y, total and rstd [M]."""
    return _launch_forward(x, residual, weight, eps, offset, rounded, True)


class AddRMSNorm(Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, rounded):
        y, total, rstd = add_rms_norm_forward_rstd(x, residual, weight, eps, offset, rounded)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        ctx.in_place = in_place.wanted()
        ctx.set_materialize_grads(False)  # behind a model's last norm nothing uses total: no zeros for its gradient
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        dweight = ctx.needs_input_grad[2]
        if dy is None:
            return dtotal, dtotal, torch.zeros_like(weight) if dweight else None, None, None, None
        dtype = sums_dtype(weight, None)
        args = dy, total, dtotal, weight, None, rstd, ctx.offset, 1, dweight, False, dtype
        dx, dw, _ = norm_gradients(ctx.in_place, *args)
        return dx, dx, dw if dweight else None, None, None, None


@register_impl("fused_add_rms_norm", "cutile")
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    check_fused_add_rms_norm(x, residual, weight, casting)
    if x.dtype not in FLOATS:
        check_floating("fused_add_rms_norm", x=x)
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    rounded = casting == "llama"
    if torch.is_grad_enabled() and (
        x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
    ):
        return AddRMSNorm.apply(x, residual, weight, of_caller(eps), of_caller(offset), rounded)
    return add_rms_norm_forward(x, residual, weight, eps, offset, rounded)
