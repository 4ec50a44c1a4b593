"""Layer normalisation: ``xhat = (x - mean) * rstd``, ``rstd = rsqrt(mean((x - mean)^2) + eps)``, ``y = xhat * w + b``.

Backward, with ``g = dy * w``: ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))``, ``dw = sum(dy * xhat)`` and
``db = sum(dy)`` over the rows. Each block sums over rows of its own, then the blocks' sums are added in a fixed order:
the gradients are the same in every run.

The variance is summed from differences to the mean, never as mean(x^2) - mean(x)^2, which cancels where the mean is
large. Constants of the kernels: WEIGHT, BIAS and SAVE say whether those arrays are given (else any array stands in
their place, untouched).
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
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.layer_norm import check_layer_norm


def _load(x, rows, cols):
    return ct.gather(x, (rows[:, None], cols[None, :])).astype(ct.float32)


def _load_vector(vector, cols, GIVEN: Bool):
    return ct.gather(vector, cols)[None, :].astype(ct.float32) if GIVEN else None


def _centered(row, mean, cols, N: Int):
    """row - mean, and 0 beyond the row's end, so that it adds nothing to sums."""
    return ct.where(cols[None, :] < N, row - mean, 0.0)


def _store(y, rows, cols, xhat, weight, bias):
    out = xhat if weight is None else xhat * weight
    out = out if bias is None else out + bias
    ct.scatter(y, (rows[:, None], cols[None, :]), out.astype(y.dtype))


def _gradient(up, weight):
    return up if weight is None else up * weight


@ct.kernel
def layer_norm_kernel(
    x, weight, bias, y, means, rstds, eps, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, BIAS: Bool, SAVE: Bool
):
    """A block reads TILE_M whole rows and keeps them in registers."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    row = _load(x, rows, cols)
    w, b = _load_vector(weight, cols, WEIGHT), _load_vector(bias, cols, BIAS)
    mean = ct.sum(row, axis=1, keepdims=True) / N
    centered = _centered(row, mean, cols, N)
    rstd = ct.rsqrt(ct.sum(centered * centered, axis=1, keepdims=True) / N + eps)
    _store(y, rows, cols, centered * rstd, w, b)
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
    for tile in range(ct.cdiv(N, TILE_N)):
        sums = sums + _load(x, rows, span(tile, TILE_N))
    mean = ct.sum(sums, axis=1, keepdims=True) / N
    squares = ct.zeros((TILE_M, TILE_N), ct.float32)
    rests = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        centered = _centered(_load(x, rows, cols), mean, cols, N)
        squares = squares + centered * centered
        rests = rests + centered
    # What rounding left of the mean: a long sum of large values is off by more than one such value's rounding.
    rest = ct.sum(rests, axis=1, keepdims=True) / N
    rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / N - rest * rest + eps)
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        w, b = _load_vector(weight, cols, WEIGHT), _load_vector(bias, cols, BIAS)
        _store(y, rows, cols, (_load(x, rows, cols) - mean - rest) * rstd, w, b)
    mean = mean + rest
    if SAVE:
        ct.scatter(means, rows[:, None], mean)
        ct.scatter(rstds, rows[:, None], rstd)


@ct.kernel
def layer_norm_backward_kernel(
    dy, x, weight, means, rstds, dx, dweight, dbias, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, DWEIGHT: Bool,
    DBIAS: Bool,
):  # fmt: skip
    """Whole rows in registers, blocks striding over them; row ``bid`` of dweight and dbias is that block's sum."""
    cols = span(0, TILE_N)
    w = _load_vector(weight, cols, WEIGHT)
    dw = ct.zeros((TILE_M, TILE_N), ct.float32)
    db = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.bid(0), ct.cdiv(x.shape[0], TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        up = _load(dy, rows, cols)
        rstd = ct.gather(rstds, rows)[:, None]
        xhat = _centered(_load(x, rows, cols), ct.gather(means, rows)[:, None], cols, N) * rstd
        g = _gradient(up, w)
        mean_g = ct.sum(g, axis=1, keepdims=True) / N
        mean_product = ct.sum(g * xhat, axis=1, keepdims=True) / N
        ct.scatter(dx, (rows[:, None], cols[None, :]), (rstd * (g - mean_g - xhat * mean_product)).astype(dx.dtype))
        if DWEIGHT:
            dw = dw + up * xhat
        if DBIAS:
            db = db + up
    if DWEIGHT:
        ct.scatter(dweight, (ct.bid(0), cols), ct.sum(dw, axis=0))
    if DBIAS:
        ct.scatter(dbias, (ct.bid(0), cols), ct.sum(db, axis=0))


@ct.kernel
def layer_norm_backward_reload_kernel(dy, x, weight, means, rstds, dx, N: Int, TILE_N: Int, WEIGHT: Bool):
    """dx of rows of any length: each block reads its row twice."""
    rows = span(ct.bid(0), 1)
    mean, rstd = ct.gather(means, rows)[:, None], ct.gather(rstds, rows)[:, None]
    sums = ct.zeros((1, TILE_N), ct.float32)
    products = ct.zeros((1, TILE_N), ct.float32)
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        g = _gradient(_load(dy, rows, cols), _load_vector(weight, cols, WEIGHT))  # 0 beyond the row's end
        sums = sums + g
        products = products + g * ((_load(x, rows, cols) - mean) * rstd)
    mean_g = ct.sum(sums, axis=1, keepdims=True) / N
    mean_product = ct.sum(products, axis=1, keepdims=True) / N
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        g = _gradient(_load(dy, rows, cols), _load_vector(weight, cols, WEIGHT))
        xhat = (_load(x, rows, cols) - mean) * rstd
        ct.scatter(dx, (rows[:, None], cols[None, :]), (rstd * (g - mean_g - xhat * mean_product)).astype(dx.dtype))


@ct.kernel
def layer_norm_backward_columns_kernel(
    dy, x, means, rstds, dweight, dbias, TILE_M: Int, TILE_N: Int, DWEIGHT: Bool, DBIAS: Bool
):
    """dweight and dbias of rows of any length: blocks stride over the rows of one tile of columns each."""
    cols = span(ct.bid(1), TILE_N)
    dw = ct.zeros((TILE_M, TILE_N), ct.float32)
    db = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.bid(0), ct.cdiv(x.shape[0], TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        up = _load(dy, rows, cols)
        if DWEIGHT:
            mean, rstd = ct.gather(means, rows)[:, None], ct.gather(rstds, rows)[:, None]
            dw = dw + up * ((_load(x, rows, cols) - mean) * rstd)
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
def forward_plan(rows: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int]:
    """(kernel, grid, TILE_M, TILE_N) for [rows, n] on CUDA device ``device`` (-1: CPU).

    The kernels hold what rms_norm's hold: tiles, warps and occupancy are those measured for it on an H200.
    """
    rows = rows if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    if tile_n > MAX_CACHED:
        return hinted(layer_norm_reload_kernel, num_worker_warps=4, occupancy=8), (rows,), 1, 4096
    # Short rows share a block, as long as there are blocks for every multiprocessor.
    tile_m = max(1, min(4096 // tile_n, next_power_of_2(rows // (4 * sm_count(device)))))
    elements = tile_m * tile_n
    warps, occupancy = (8 if elements >= 8192 else 4), min(8, 32768 // elements)
    kernel = hinted(layer_norm_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (ct.cdiv(rows, tile_m),), tile_m, tile_n


@functools.lru_cache(maxsize=1024)
def backward_plan(rows: int, n: int, device: int) -> tuple[ct.kernel, int, int, int]:
    """(kernel, blocks, TILE_M, TILE_N) of the backward pass in registers, for rows of up to MAX_CACHED_BACKWARD."""
    rows = rows if n else 0
    tile_n = next_power_of_2(n)
    warps, occupancy = (8, 2) if tile_n > 2048 else (4, 4)
    tile_m = max(1, min(2048 // tile_n, next_power_of_2(rows // (occupancy * sm_count(device)))))
    kernel = hinted(layer_norm_backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, min(ct.cdiv(rows, tile_m), occupancy * sm_count(device)), tile_m, tile_n


def _rows(x: torch.Tensor, dims: int) -> torch.Tensor:
    """``x`` as [M, N], N over its last ``dims`` dimensions."""
    if dims == 1:
        return rows_of(x)
    n = x.shape[-dims:].numel()
    rows = x.reshape(x.shape[:-dims].numel(), n)
    return rows if rows.stride(0) <= INT32_MAX else rows.contiguous()


def _like(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch_forward(x, weight, bias, eps, dims, save):
    rows, y = _rows(x, dims), _like(x)
    m, n = rows.shape
    mean, rstd = (torch.empty(m, dtype=torch.float32, device=x.device) if save else y for _ in range(2))
    kernel, grid, tile_m, tile_n = forward_plan(m, n, x.get_device())
    w = rows if weight is None else weight.reshape(-1)
    b = rows if bias is None else bias.reshape(-1)
    constants = (n, tile_m, tile_n, weight is not None, bias is not None, save)
    launch(x, grid, kernel, (rows, w, b, y.view(m, n), mean, rstd, eps, *constants))
    return y, mean, rstd


@compilable(fake=_like)
def layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, dims: int
) -> torch.Tensor:
    return _launch_forward(x, weight, bias, eps, dims, False)[0]


def _fake_forward_save(x, weight, bias, eps, dims):
    # math.prod: torch.Size.numel() would make traced code depend on the sizes.
    statistics = x.new_empty(math.prod(x.shape[:-dims]), dtype=torch.float32)
    return _like(x), statistics, torch.empty_like(statistics)


@compilable(fake=_fake_forward_save)
def layer_norm_forward_save(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, dims: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass of a training step: y, and each row's mean and rstd."""
    return _launch_forward(x, weight, bias, eps, dims, True)


def _fake_backward(dy, x, weight, mean, rstd, dims, dweight, dbias):
    n = math.prod(x.shape[-dims:])
    return _like(x), mean.new_empty(n if dweight else 0), mean.new_empty(n if dbias else 0)


@compilable(fake=_fake_backward)
def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dims: int,
    dweight: bool,
    dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, and in fp32 [N] the gradients of weight and bias, empty where not asked for."""
    dx, dy, rows = _like(x), _rows(dy, dims), _rows(x, dims)
    m, n = rows.shape
    device, out = x.get_device(), dx.view(m, n)
    w = rows if weight is None else weight.reshape(-1)
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
        launch(x, (blocks,), kernel, (dy, rows, w, mean, rstd, out, dw, db, *constants))
    else:
        constants = (n, 1024, weight is not None)
        launch(x, (m,), layer_norm_backward_reload_kernel, (dy, rows, w, mean, rstd, out, *constants))
        grid, constants = (blocks, ct.cdiv(n, tile_n)), (tile_m, tile_n, dweight, dbias)
        launch(x, grid, layer_norm_backward_columns_kernel, (dy, rows, mean, rstd, dw, db, *constants))
    return (
        dx,
        dw.sum(0) if dweight else rstd.new_empty(0),
        db.sum(0) if dbias else rstd.new_empty(0),
    )


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, dims):
        y, mean, rstd = layer_norm_forward_save(x, weight, bias, eps, dims)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.dims = dims
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        _, dweight, dbias, *_ = ctx.needs_input_grad
        dx, dw, db = layer_norm_backward(dy, x, weight, mean, rstd, ctx.dims, dweight, dbias)
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
        raise UnsupportedError("input is not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return LayerNorm.apply(input, weight, bias, eps, len(shape))
    return layer_norm_forward(input, weight, bias, eps, len(shape))
