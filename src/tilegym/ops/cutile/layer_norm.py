"""Layer normalisation: ``xhat = (x - mean) * rstd``, ``rstd = rsqrt(mean((x - mean)^2) + eps)``, ``y = xhat * w + b``.

The variance is summed from differences to the mean, never as mean(x^2) - mean(x)^2, which cancels where the mean is
large. ``row_norms_backward.py`` has the backward pass, ``row_norms.py`` says what the constants of the kernels are;
SAVE: whether means and rstds are given.
"""

import functools
import math

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
from tilegym.ops.cutile.row_norms import centered
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import forward_warps
from tilegym.ops.cutile.row_norms import grid_of
from tilegym.ops.cutile.row_norms import in_pieces
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import load_vector
from tilegym.ops.cutile.row_norms import piece_plan
from tilegym.ops.cutile.row_norms import row_sum
from tilegym.ops.cutile.row_norms import rows_over
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
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import small_or_rows
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.layer_norm import check_layer_norm


def _scaled(xhat, weight, bias):
    return scaled(xhat, weight, bias, xhat.dtype, 0.0, False)


def _over(total, N: Int):
    """total / N, correctly rounded but for the rarest: from a product and what it leaves. fp32's own division branches
    on sm_90, and the compiler spills the row around it; constants are rounded to fp32, which shows in large means, but
    for powers of two."""
    if N & (N - 1) == 0:
        mean = total * (1.0 / N)
    else:
        total = total.astype(ct.float64)
        first = total * (1.0 / N)
        mean = (first + (total - first * N) * (1.0 / N)).astype(ct.float32)
    return mean


@ct.kernel
def layer_norm_kernel(
    x, weight, bias, y, means, rstds, eps, N: Int, TILE_M: Int, TILE_N: Int, PIECES: Int, AT_ONCE: Bool, AXIS: Int,
    WARPS: Int, WEIGHT: Bool, BIAS: Bool, SAVE: Bool,
):  # fmt: skip
    """A block reads TILE_M whole rows, as PIECES tiles, and keeps them in registers."""
    rows = span(ct.bid(AXIS), TILE_M)
    pieces, ws, bs, sums = (), (), (), 0.0
    for piece in ct.static_iter(range(PIECES)):
        cols, check = span(piece, TILE_N), TILE_M > 1 or (piece + 1) * TILE_N > N
        row = load(x, rows, cols, check).astype(ct.float32)
        w, b = load_vector(weight, cols, WEIGHT, check), load_vector(bias, cols, BIAS, check)
        pieces, ws, bs, sums = (*pieces, row), (*ws, w), (*bs, b), sums + row if piece else row
    mean = _over(row_sum(sums, x.dtype, WARPS, AT_ONCE, *ws, *bs), N)
    rests, squares = (), 0.0
    for piece in ct.static_iter(range(PIECES)):
        rest = pieces[piece] - mean
        if (piece + 1) * TILE_N > N:
            rest = centered(pieces[piece], mean, span(piece, TILE_N), N)
        rests, squares = (*rests, rest), squares + rest * rest if piece else rest * rest
    rstd = rstd_of(row_sum(squares, x.dtype, WARPS, False), eps, N)
    for piece in ct.static_iter(range(PIECES)):
        check = TILE_M > 1 or (piece + 1) * TILE_N > N
        store_piece(y, rows, piece, _scaled(rests[piece] * rstd, ws[piece], bs[piece]), TILE_N, PIECES, AXIS, check)
    if SAVE:
        ct.scatter(means, rows[:, None], mean)
        ct.scatter(rstds, rows[:, None], rstd)


@ct.kernel
def layer_norm_reload_kernel(
    x, weight, bias, y, means, rstds, eps, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, BIAS: Bool, SAVE: Bool
):
    """A block reads its rows three times, a tile of columns at a time; for rows of any length."""
    rows = span(ct.bid(0), TILE_M)
    sums = ct.zeros((TILE_M, TILE_N), ct.float32)
    tiles = ct.cdiv(N, TILE_N)
    for tile in range(tiles):
        sums = sums + load(x, rows, span(tile, TILE_N)).astype(ct.float32)
    mean = _over(ct.sum(sums, axis=1, keepdims=True), N)
    squares = ct.zeros((TILE_M, TILE_N), ct.float32)
    rests = ct.zeros((TILE_M, TILE_N), ct.float32)
    for i in range(tiles):
        cols = span(tiles - 1 - i, TILE_N)  # what was read last is in the cache still
        part = centered(load(x, rows, cols).astype(ct.float32), mean, cols, N)
        squares = squares + part * part
        rests = rests + part
    # What rounding left of the mean: a long sum of large values is off by more than one such value's rounding.
    rest = _over(ct.sum(rests, axis=1, keepdims=True), N)
    rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / N) - rest * rest + eps)
    for tile in range(tiles):
        cols = span(tile, TILE_N)
        w, b = load_vector(weight, cols, WEIGHT), load_vector(bias, cols, BIAS)
        store(y, rows, cols, _scaled((load(x, rows, cols).astype(ct.float32) - mean - rest) * rstd, w, b))
    mean = mean + rest
    if SAVE:
        ct.scatter(means, rows[:, None], mean)
        ct.scatter(rstds, rows[:, None], rstd)


@functools.lru_cache(maxsize=1024)
def forward_plan(rows: int, n: int, device: int, wide: bool = False) -> tuple[ct.kernel, tuple[int, ...], tuple]:
    """(kernel, grid, tiles) for [rows, n] on CUDA device ``device`` (-1: CPU); ``wide``: some of it is fp32.

    The tiles are TILE_M and TILE_N, and where rows are held PIECES, AT_ONCE, AXIS and WARPS.

    The kernels hold what rms_norm's hold: tiles, warps and occupancy are those measured for it on an H200.
    """
    rows = rows if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    if tile_n > MAX_CACHED:
        return hinted(layer_norm_reload_kernel, num_worker_warps=4, occupancy=8), (rows,), (1, 4096)
    few = rows <= 4 * sm_count(device)
    held = few and 3072 < n <= 4096 and rows * n > SMALL
    long = few and 6144 < n <= 8192 and rows > sm_count(device) and not wide
    if in_pieces(rows, n) or held or long:
        # Instead of one tile, part of which is idle, or of two rows of 2048. On an H200 8192x1536 19.3 us instead of
        # 22.9, 8192x2048 24.5 instead of 25.8, 8192x2560 27.4 instead of 33.5, 8192x5120 52.7 instead of 64.1. Few rows
        # have registers for all loads at once: 512x4096 6.2 us, 6.3 in four pieces with 4 warps; 512x8192 8.6 instead
        # of 8.9.
        tile_n, warps, occupancy = (2048, 8, 4) if held else (1024, 4, 3) if long else piece_plan(n)
        if wide and not held:
            occupancy = occupancy * 3 // 4  # without spills
        kernel = hinted(layer_norm_kernel, num_worker_warps=warps, occupancy=occupancy)
        grid, axis = grid_of(rows)
        return kernel, grid, (1, tile_n, ct.cdiv(n, tile_n), few and 3072 < n <= 6144, axis, warps)
    tile_m, tile_n = whole_rows(rows, n, device)
    elements = tile_m * tile_n
    tiles = ct.cdiv(rows, tile_m)
    early = at_once(rows, elements, device)
    warps, occupancy = forward_warps(tiles, elements, device), early or min(8, 32768 // elements)
    kernel = hinted(layer_norm_kernel, num_worker_warps=warps, occupancy=occupancy)
    grid, axis = grid_of(tiles)
    return kernel, grid, (tile_m, tile_n, 1, early > 0, axis, warps if tile_m == 1 else 0)


def _flat(vector, dims):
    """weight or bias as [N]; 0 stands for none."""
    if vector is None:
        return 0
    return vector if dims == 1 else vector.reshape(-1)


def _launch_forward(x, weight, bias, eps, dims, save):
    rows = small_or_rows(x) if dims == 1 else rows_over(x, dims)
    m, n = size_of(rows)
    y = contiguous_like(x)  # no view of it: that could not be written over in training
    mean, rstd = (torch.empty(m, dtype=torch.float32, device=x.device) for _ in range(2)) if save else (0, 0)
    kernel, grid, tiles = forward_plan(
        m, n, x.get_device(), any(t is not None and t.dtype.itemsize == 4 for t in (x, weight, bias))
    )
    constants = (n, *tiles, weight is not None, bias is not None, save)
    out = y if rows is x else y.view(m, n)
    launch(x, grid, kernel, (rows, _flat(weight, dims), _flat(bias, dims), out, mean, rstd, eps, *constants))
    return y, mean, rstd


@compilable(fake=contiguous_like)
def layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, dims: int
) -> torch.Tensor:
    return _launch_forward(x, weight, bias, eps, dims, False)[0]


def _fake_forward_save(x, weight, bias, eps, dims):
    # math.prod: torch.Size.numel() would make traced code depend on the sizes.
    statistics = x.new_empty(math.prod(x.shape[:-dims]), dtype=torch.float32)
    return contiguous_like(x), statistics, torch.empty_like(statistics)


@compilable(fake=_fake_forward_save)
def layer_norm_forward_save(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, dims: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass of a training step: y, and each row's mean and rstd."""
    return _launch_forward(x, weight, bias, eps, dims, True)


class LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, dims):
        y, mean, rstd = layer_norm_forward_save(x, weight, bias, eps, dims)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.dims = dims
        ctx.in_place = in_place.wanted()
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        _, dweight, dbias, *_ = ctx.needs_input_grad
        dtype = sums_dtype(weight, ctx.bias_dtype)
        args = dy, x, None, weight, mean, rstd, 0.0, ctx.dims, dweight, dbias, dtype
        dx, dw, db = norm_gradients(ctx.in_place, *args)
        shape = x.shape[-ctx.dims :]
        dw = dw.to(weight.dtype).view(shape) if dweight else None
        db = db.to(ctx.bias_dtype).view(shape) if dbias else None
        return dx, dw, db, None, None


@register_impl("layer_norm", "cutile")
def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    shape = check_layer_norm(input, normalized_shape, weight, bias)
    if input.dtype not in FLOATS:
        check_floating("layer_norm", input=input)
        raise UnsupportedError("input is not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return LayerNorm.apply(input, weight, bias, of_caller(eps), len(shape))
    return layer_norm_forward(input, weight, bias, eps, len(shape))
