"""RMS normalisation: ``xhat = x * rstd``, ``rstd = rsqrt(mean(x^2) + eps)``, ``y = xhat * (offset + weight) + bias``.

Backward, with ``g = dy * (offset + weight)``: ``dx = rstd * (g - xhat * mean(g * xhat))``, ``dweight = sum(dy * xhat)``
and ``dbias = sum(dy)`` over the rows. Each block sums over rows of its own, then the blocks' sums are added in a fixed
order: the gradients are the same in every run.

Constants of the kernels: WEIGHT, BIAS and RSTD say whether that array is given (else any array stands in its place,
untouched); ROUND, whether xhat is rounded to the dtype of y before it is scaled.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import row_count
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import small_or_rows
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.rms_norm import check_rms_norm


def _load(x, rows, cols):
    return ct.gather(x, at(x, rows[:, None], cols[None, :]))


def _load_vector(vector, cols, GIVEN: Bool):
    return ct.gather(vector, cols)[None, :] if GIVEN else None


def _scale(weight, OFFSET: Float):
    scale = 1.0 if weight is None else weight.astype(ct.float32)
    return scale if OFFSET == 0.0 else scale + OFFSET


def _store(y, rows, cols, xhat, weight, bias, OFFSET: Float, ROUND: Bool):
    if ROUND:
        xhat = xhat.astype(y.dtype).astype(ct.float32)
    out = xhat * _scale(weight, OFFSET)
    if bias is not None:
        out = out + bias.astype(ct.float32)
    ct.scatter(y, at(y, rows[:, None], cols[None, :]), out.astype(y.dtype))


def _rstd(squares, eps, N: Int):
    return ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / N + eps)


@ct.kernel
def rms_norm_cached_kernel(
    x, weight, bias, y, rstd, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, BIAS: Bool,
    ROUND: Bool, RSTD: Bool,
):  # fmt: skip
    """multi_wave_cached: a block reads TILE_M whole rows and keeps them in registers."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    row = _load(x, rows, cols)
    w = _load_vector(weight, cols, WEIGHT)  # before the row is waited for
    b = _load_vector(bias, cols, BIAS)
    row = row.astype(ct.float32)
    r = _rstd(row * row, eps, N)
    _store(y, rows, cols, row * r, w, b, OFFSET, ROUND)
    if RSTD:
        ct.scatter(rstd, rows[:, None], r)


@ct.kernel
def rms_norm_persistent_kernel(
    x, weight, bias, y, rstd, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, BIAS: Bool,
    ROUND: Bool, RSTD: Bool,
):  # fmt: skip
    """static_persistent: as cached, but a fixed number of blocks strides over all rows and reads the weight once."""
    cols = span(0, TILE_N)
    w = _load_vector(weight, cols, WEIGHT)
    b = _load_vector(bias, cols, BIAS)
    for tile in range(ct.bid(0), ct.cdiv(row_count(x), TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        row = _load(x, rows, cols).astype(ct.float32)
        r = _rstd(row * row, eps, N)
        _store(y, rows, cols, row * r, w, b, OFFSET, ROUND)
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
    for tile in range(ct.cdiv(N, TILE_N)):
        part = _load(x, rows, span(tile, TILE_N)).astype(ct.float32)
        squares = squares + part * part
    r = _rstd(squares, eps, N)
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        w, b = _load_vector(weight, cols, WEIGHT), _load_vector(bias, cols, BIAS)
        _store(y, rows, cols, _load(x, rows, cols).astype(ct.float32) * r, w, b, OFFSET, ROUND)
    if RSTD:
        ct.scatter(rstd, rows[:, None], r)


@ct.kernel
def rms_norm_backward_kernel(
    dy, x, weight, rstd, dx, dweight, dbias, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool,
    DWEIGHT: Bool, DBIAS: Bool,
):  # fmt: skip
    """Whole rows in registers, blocks striding over them; row ``bid`` of dweight and dbias is that block's sum."""
    cols = span(0, TILE_N)
    scale = _scale(_load_vector(weight, cols, WEIGHT), OFFSET)
    dw = ct.zeros((TILE_M, TILE_N), ct.float32)
    db = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.bid(0), ct.cdiv(x.shape[0], TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        up = _load(dy, rows, cols).astype(ct.float32)
        r = ct.gather(rstd, rows)[:, None]
        xhat = _load(x, rows, cols).astype(ct.float32) * r
        g = up * scale
        mean = ct.sum(g * xhat, axis=1, keepdims=True) / N
        ct.scatter(dx, (rows[:, None], cols[None, :]), (r * (g - xhat * mean)).astype(dx.dtype))
        if DWEIGHT:
            dw = dw + up * xhat
        if DBIAS:
            db = db + up
    if DWEIGHT:
        ct.scatter(dweight, (ct.bid(0), cols), ct.sum(dw, axis=0))
    if DBIAS:
        ct.scatter(dbias, (ct.bid(0), cols), ct.sum(db, axis=0))


@ct.kernel
def rms_norm_backward_reload_kernel(dy, x, weight, rstd, dx, OFFSET: Float, N: Int, TILE_N: Int, WEIGHT: Bool):
    """dx of rows of any length: each block reads its row twice."""
    rows = span(ct.bid(0), 1)
    r = ct.gather(rstd, rows)[:, None]
    products = ct.zeros((1, TILE_N), ct.float32)
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        g = _load(dy, rows, cols).astype(ct.float32) * _scale(_load_vector(weight, cols, WEIGHT), OFFSET)
        products = products + g * _load(x, rows, cols).astype(ct.float32) * r
    mean = ct.sum(products, axis=1, keepdims=True) / N
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        g = _load(dy, rows, cols).astype(ct.float32) * _scale(_load_vector(weight, cols, WEIGHT), OFFSET)
        xhat = _load(x, rows, cols).astype(ct.float32) * r
        ct.scatter(dx, (rows[:, None], cols[None, :]), (r * (g - xhat * mean)).astype(dx.dtype))


@ct.kernel
def rms_norm_backward_columns_kernel(
    dy, x, rstd, dweight, dbias, TILE_M: Int, TILE_N: Int, DWEIGHT: Bool, DBIAS: Bool
):  # fmt: skip
    """dweight and dbias of rows of any length: blocks stride over the rows of one tile of columns each."""
    cols = span(ct.bid(1), TILE_N)
    dw = ct.zeros((TILE_M, TILE_N), ct.float32)
    db = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.bid(0), ct.cdiv(x.shape[0], TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        up = _load(dy, rows, cols).astype(ct.float32)
        if DWEIGHT:
            dw = dw + up * _load(x, rows, cols).astype(ct.float32) * ct.gather(rstd, rows)[:, None]
        if DBIAS:
            db = db + up
    if DWEIGHT:
        ct.scatter(dweight, (ct.bid(0), cols), ct.sum(dw, axis=0))
    if DBIAS:
        ct.scatter(dbias, (ct.bid(0), cols), ct.sum(db, axis=0))


# A row of up to this many elements is held in the registers of one block; the backward pass holds four times as much.
MAX_CACHED = 16384
MAX_CACHED_BACKWARD = 8192


@functools.lru_cache(maxsize=1024)
def forward_plan(mode: str | None, rows: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int]:
    """(kernel, grid, TILE_M, TILE_N) for an input of [rows, n] on CUDA device ``device`` (-1: CPU).

    Warps and occupancy are those that were the fastest on an H200 for 8192x4096, 262144x128, 4096x8192, 4096x14336
    and 1024x65536 in bf16: about as much as its registers hold.
    """
    rows = rows if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    if tile_n > MAX_CACHED or mode == "multi_wave_reload":
        kernel = hinted(rms_norm_reload_kernel, num_worker_warps=4, occupancy=8)
        return kernel, (rows,), 1, min(tile_n, 4096)
    # Short rows share a block, as long as there are blocks for every multiprocessor.
    tile_m = max(1, min(4096 // tile_n, next_power_of_2(rows // (4 * sm_count(device)))))
    tiles, elements = ct.cdiv(rows, tile_m), tile_m * tile_n
    if mode == "static_persistent":
        occupancy = 3 if elements <= 4096 else 1
        kernel = hinted(rms_norm_persistent_kernel, num_worker_warps=8, occupancy=occupancy)
        return kernel, (min(tiles, occupancy * sm_count(device)),), tile_m, tile_n
    warps, occupancy = (8 if elements >= 8192 else 4), min(8, 32768 // elements)
    return hinted(rms_norm_cached_kernel, num_worker_warps=warps, occupancy=occupancy), (tiles,), tile_m, tile_n


@functools.lru_cache(maxsize=1024)
def backward_plan(rows: int, n: int, device: int) -> tuple[ct.kernel, int, int, int]:
    """(kernel, blocks, TILE_M, TILE_N) of the backward pass in registers, for rows of up to MAX_CACHED_BACKWARD.

    The fastest on an H200 for 8192x4096, 262144x128 and 4096x8192 in bf16.
    """
    rows = rows if n else 0
    tile_n = next_power_of_2(n)
    warps, occupancy = (8, 2 if tile_n > 4096 else 3) if tile_n > 2048 else (4, 8)
    tile_m = max(1, min(2048 // tile_n, next_power_of_2(rows // (occupancy * sm_count(device)))))
    kernel = hinted(rms_norm_backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, min(ct.cdiv(rows, tile_m), occupancy * sm_count(device)), tile_m, tile_n


def _launch_forward(x, weight, bias, eps, mode, offset, rounded, with_rstd):
    rows = small_or_rows(x)
    m, n = size_of(rows)
    y = torch.empty_like(rows)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device) if with_rstd else y
    kernel, grid, tile_m, tile_n = forward_plan(mode, m, n, x.get_device())
    w = rows if weight is None else weight
    b = rows if bias is None else bias
    flags = (weight is not None, bias is not None, rounded, with_rstd)
    launch(x, grid, kernel, (rows, w, b, y, rstd, eps, offset, n, tile_m, tile_n, *flags))
    return (y if rows is x else y.view(x.shape)), rstd


def _like_rows(x, *_):
    return torch.empty_like(rows_of(x)).view(x.shape)


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


def _fake_backward(dy, x, weight, rstd, offset, dweight, dbias):
    sums = x.new_empty(x.shape[-1], dtype=torch.float32)
    nothing = x.new_empty(0, dtype=torch.float32)
    return _like_rows(x), sums if dweight else nothing, torch.empty_like(sums) if dbias else torch.empty_like(nothing)


@compilable(fake=_fake_backward)
def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    dweight: bool,
    dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, and in fp32 the gradients of weight and bias, empty where not asked for."""
    dy, rows = rows_of(dy), rows_of(x)
    m, n = rows.shape
    dx = torch.empty_like(rows)
    device = x.get_device()
    w = rows if weight is None else weight
    if n <= MAX_CACHED_BACKWARD:
        kernel, blocks, tile_m, tile_n = backward_plan(m, n, device)
    else:
        kernel, tile_m, tile_n = None, 8, 256
        blocks = min(ct.cdiv(m, tile_m), sm_count(device)) if dweight or dbias else 0
    # A row of sums for each block.
    dw = rstd.new_empty(blocks, n) if dweight else rstd
    db = rstd.new_empty(blocks, n) if dbias else rstd
    if kernel is not None:
        constants = (n, tile_m, tile_n, weight is not None, dweight, dbias)
        launch(x, (blocks,), kernel, (dy, rows, w, rstd, dx, dw, db, offset, *constants))
    else:
        constants = (n, 1024, weight is not None)
        launch(x, (m,), rms_norm_backward_reload_kernel, (dy, rows, w, rstd, dx, offset, *constants))
        grid, constants = (blocks, ct.cdiv(n, tile_n)), (tile_m, tile_n, dweight, dbias)
        launch(x, grid, rms_norm_backward_columns_kernel, (dy, rows, rstd, dw, db, *constants))
    return (
        dx.view(x.shape),
        dw.sum(0) if dweight else rstd.new_empty(0),
        db.sum(0) if dbias else rstd.new_empty(0),
    )


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, mode, offset, rounded):
        y, rstd = rms_norm_forward_rstd(x, weight, bias, eps, mode, offset, rounded)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        _, dweight, dbias, *_ = ctx.needs_input_grad
        dx, dw, db = rms_norm_backward(dy, x, weight, rstd, ctx.offset, dweight, dbias)
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
        raise UnsupportedError("input is not fp32, fp16 or bf16")
    rounded = casting == "llama"
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return RMSNorm.apply(input, weight, bias, eps, mode, offset, rounded)
    return rms_norm_forward(input, weight, bias, eps, mode, offset, rounded)
