"""RMS normalisation: ``xhat = x * rstd``, ``rstd = rsqrt(mean(x^2) + eps)``, ``y = xhat * (offset + weight) + bias``.

``row_norms_backward.py`` has the backward pass, ``row_norms.py`` says what the constants of the kernels are; RSTD:
whether rstd is given.
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
from tilegym.ops.cutile.row_norms import in_pieces
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import load_vector
from tilegym.ops.cutile.row_norms import piece_plan
from tilegym.ops.cutile.row_norms import row_sum
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import scaled
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.row_norms import store_piece
from tilegym.ops.cutile.row_norms import sums_dtype
from tilegym.ops.cutile.row_norms import whole_rows
from tilegym.ops.cutile.row_norms_backward import norm_gradients
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin_alone
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import row_count
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import small_or_rows
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.rms_norm import check_rms_norm


@ct.kernel
def rms_norm_cached_kernel(
    x, weight, bias, y, rstd, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, PIECES: Int, AT_ONCE: Bool,
    AXIS: Int, WARPS: Int, OVERLAP: Bool, WEIGHT: Bool, BIAS: Bool, ROUND: Bool, RSTD: Bool,
):  # fmt: skip
    """multi_wave_cached: a block reads TILE_M whole rows, as PIECES tiles, and keeps them in registers."""
    begin_alone(OVERLAP)
    rows = span(ct.bid(AXIS), TILE_M)
    pieces, ws, bs, squares = (), (), (), 0.0
    for piece in ct.static_iter(range(PIECES)):
        cols, check = span(piece, TILE_N), TILE_M > 1 or (piece + 1) * TILE_N > N
        row = load(x, rows, cols, check).astype(ct.float32)
        w, b = load_vector(weight, cols, WEIGHT, check), load_vector(bias, cols, BIAS, check)
        pieces, ws, bs, squares = (*pieces, row), (*ws, w), (*bs, b), squares + row * row if piece else row * row
    r = rstd_of(row_sum(squares, x.dtype, WARPS, AT_ONCE, *ws, *bs), eps, N)
    for piece in ct.static_iter(range(PIECES)):
        out, check = scaled(pieces[piece] * r, ws[piece], bs[piece], y.dtype, OFFSET, ROUND), (piece + 1) * TILE_N > N
        store_piece(y, rows, piece, out, TILE_N, PIECES, AXIS, TILE_M > 1 or check)
    if RSTD:
        ct.scatter(rstd, rows[:, None], r)


@ct.kernel
def rms_norm_persistent_kernel(
    x, weight, bias, y, rstd, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, BIAS: Bool,
    ROUND: Bool, RSTD: Bool,
):  # fmt: skip
    """static_persistent: as cached, but a fixed number of blocks strides over all rows and reads the weight once."""
    cols = span(0, TILE_N)
    w = load_vector(weight, cols, WEIGHT)
    b = load_vector(bias, cols, BIAS)
    for tile in range(ct.bid(0), ct.cdiv(row_count(x), TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        row = load(x, rows, cols).astype(ct.float32)
        r = rstd_of(row * row, eps, N)
        store(y, rows, cols, scaled(row * r, w, b, y.dtype, OFFSET, ROUND))
        if RSTD:
            ct.scatter(rstd, rows[:, None], r)


@ct.kernel
def rms_norm_reload_kernel(
    x, weight, bias, y, rstd, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, BIAS: Bool,
    ROUND: Bool, RSTD: Bool,
):  # fmt: skip
    """multi_wave_reload: a block reads its rows twice, a tile of columns at a time; for rows of any length."""
    rows = span(ct.bid(0), TILE_M)
    squares = ct.zeros((TILE_M, TILE_N), ct.float32)
    tiles = ct.cdiv(N, TILE_N)
    for tile in range(tiles):
        part = load(x, rows, span(tile, TILE_N)).astype(ct.float32)
        squares = squares + part * part
    r = rstd_of(squares, eps, N)
    for i in range(tiles):
        cols = span(tiles - 1 - i, TILE_N)  # what was read last is in the cache still
        w, b = load_vector(weight, cols, WEIGHT), load_vector(bias, cols, BIAS)
        row = load(x, rows, cols).astype(ct.float32)
        store(y, rows, cols, scaled(row * r, w, b, y.dtype, OFFSET, ROUND))
    if RSTD:
        ct.scatter(rstd, rows[:, None], r)


OVERLAPPED = 64  # rows up to which a launch overlaps the one in front, as in decoding


@functools.lru_cache(maxsize=1024)
def forward_plan(
    mode: str | None, rows: int, n: int, device: int, slim: bool
) -> tuple[ct.kernel, tuple[int, ...], tuple]:
    """(kernel, grid, tiles) for an input of [rows, n] on CUDA device ``device`` (-1: CPU).

    ``slim``: input and weight have 16 bits, and there is no bias.

    The tiles are TILE_M and TILE_N, and where rows are held PIECES, AT_ONCE, AXIS, WARPS and OVERLAP.

    Warps and occupancy are those that were the fastest on an H200 for 8192x4096, 262144x128, 4096x8192, 4096x14336
    and 1024x65536 in bf16: about as much as its registers hold.
    """
    rows = rows if n else 0  # without columns there is nothing to launch
    overlap = rows <= OVERLAPPED and overlaps(device)
    tile_n = next_power_of_2(n)
    if tile_n > MAX_CACHED or mode == "multi_wave_reload":
        # 1024x65536 with 8 warps: 94 us. 4 warps and half the columns: 106, but shorter rows need no more.
        hints = {"num_worker_warps": 8, "occupancy": 1} if tile_n > 4096 else {"num_worker_warps": 4, "occupancy": 8}
        return hinted(rms_norm_reload_kernel, **hints), (rows,), (1, min(tile_n, 8192))
    if in_pieces(rows, n) and mode != "static_persistent":
        tile_n, warps, occupancy = piece_plan(n)
        kernel = hinted(rms_norm_cached_kernel, num_worker_warps=warps, occupancy=occupancy)
        grid, axis = grid_of(rows)
        return kernel, grid, (1, tile_n, ct.cdiv(n, tile_n), False, axis, warps, overlap)
    tile_m, tile_n = whole_rows(rows, n, device)
    tiles, elements = ct.cdiv(rows, tile_m), tile_m * tile_n
    if mode == "static_persistent":
        occupancy = 3 if elements <= 4096 else 1
        kernel = hinted(rms_norm_persistent_kernel, num_worker_warps=8, occupancy=occupancy)
        return kernel, (min(tiles, occupancy * sm_count(device)),), (tile_m, tile_n)
    early = at_once(rows, elements, device)
    warps, occupancy = forward_warps(tiles, elements, device), early or min(8, 32768 // elements)
    if slim and not early and n == elements in (4096, 8192):
        # The weight is read along with the row, not a piece of it behind each store, which more would spill: on an H200
        # 8192x4096 takes 37.8 us instead of 38.4, 32768x4096 133.7 instead of 135.1, 8192x8192 70.0 instead of 70.9.
        warps, occupancy, early = 8, 4, 4
    kernel = hinted(rms_norm_cached_kernel, num_worker_warps=warps, occupancy=occupancy)
    grid, axis = grid_of(tiles)
    return kernel, grid, (tile_m, tile_n, 1, early > 0, axis, warps if tile_m == 1 else 0, overlap)


def _launch_forward(x, weight, bias, eps, mode, offset, rounded, with_rstd):
    rows = small_or_rows(x)
    m, n = size_of(rows)
    y = _like_rows(x)  # no view: what is a view of memory that autograd does not know cannot be written over
    rstd = torch.empty(m, dtype=torch.float32, device=x.device) if with_rstd else 0
    slim = bias is None and x.element_size() == 2 and (weight is None or weight.element_size() == 2)
    kernel, grid, tiles = forward_plan(mode, m, n, x.get_device(), slim)
    w = 0 if weight is None else weight
    b = 0 if bias is None else bias
    flags = (weight is not None, bias is not None, rounded, with_rstd)
    out = y if rows is x else y.view(m, n)
    overlap = len(tiles) > 2 and tiles[-1]
    launch(x, grid, kernel, (rows, w, b, out, rstd, eps, offset, n, *tiles, *flags), overlap)
    return y, rstd


def _like_rows(x, *_):
    return torch.empty_like(x) if x.dim() == 2 else contiguous_like(x)


def _fake_forward_rstd(x, *_):
    return _like_rows(x), x.new_empty(rows_of(x).shape[0], dtype=torch.float32)


@compilable(fake=_like_rows)
def rms_norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    mode: str | None,
    offset: float,
    rounded: bool,
) -> torch.Tensor:
    return _launch_forward(x, weight, bias, eps, mode, offset, rounded, False)[0]


@compilable(fake=_fake_forward_rstd)
def rms_norm_forward_rstd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    mode: str | None,
    offset: float,
    rounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass of a training step: y and rstd [M]."""
    return _launch_forward(x, weight, bias, eps, mode, offset, rounded, True)


class RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, mode, offset, rounded):
        y, rstd = rms_norm_forward_rstd(x, weight, bias, eps, mode, offset, rounded)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        ctx.in_place = in_place.wanted()
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        _, dweight, dbias, *_ = ctx.needs_input_grad
        dtype = sums_dtype(weight, ctx.bias_dtype)
        args = dy, x, None, weight, None, rstd, ctx.offset, 1, dweight, dbias, dtype
        dx, dw, db = norm_gradients(ctx.in_place, *args)
        dw = dw.to(weight.dtype) if dweight else None
        db = db.to(ctx.bias_dtype) if dbias else None
        return dx, dw, db, None, None, None, None


@register_impl("rms_norm", "cutile")
def rms_norm(
    input: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None = None,
    mode: str | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    check_rms_norm(input, normalized_shape, weight, bias, mode, casting)
    if input.dtype not in FLOATS:
        check_floating("rms_norm", input=input)
        raise UnsupportedError("input is not fp32, fp16 or bf16")
    rounded = casting == "llama"
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return RMSNorm.apply(input, weight, bias, of_caller(eps), mode, of_caller(offset), rounded)
    return rms_norm_forward(input, weight, bias, eps, mode, offset, rounded)
