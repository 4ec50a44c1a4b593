"""``total = x + residual``, rounded to the dtype, and its RMS normalisation, in one pass over memory.

Backward, from the gradients of both outputs: x and residual have the same one, that of ``total`` itself plus what
comes through the normalisation (``rms_norm.py`` has the formulas). Constants of the kernels are as there.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.rms_norm import MAX_CACHED
from tilegym.ops.cutile.rms_norm import MAX_CACHED_BACKWARD
from tilegym.ops.cutile.rms_norm import _load
from tilegym.ops.cutile.rms_norm import _load_vector
from tilegym.ops.cutile.rms_norm import _rstd
from tilegym.ops.cutile.rms_norm import _scale
from tilegym.ops.cutile.rms_norm import _store
from tilegym.ops.cutile.rms_norm import rms_norm_backward_columns_kernel
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import small_or_rows
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.fused_add_rms_norm import check_fused_add_rms_norm


def _add(x, residual, rows, cols):
    """The sum as it is stored, in x's dtype."""
    a, b = _load(x, rows, cols), _load(residual, rows, cols)
    return (a.astype(ct.float32) + b.astype(ct.float32)).astype(x.dtype)


@ct.kernel
def add_rms_norm_kernel(
    x, residual, weight, y, total, rstd, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool,
    ROUND: Bool, RSTD: Bool,
):  # fmt: skip
    """A block reads TILE_M whole rows and keeps their sums in registers."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    row = _add(x, residual, rows, cols)
    w = _load_vector(weight, cols, WEIGHT)
    ct.scatter(total, at(total, rows[:, None], cols[None, :]), row)
    row = row.astype(ct.float32)
    r = _rstd(row * row, eps, N)
    _store(y, rows, cols, row * r, w, None, OFFSET, ROUND)
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
    for tile in range(ct.cdiv(N, TILE_N)):
        part = _add(x, residual, rows, span(tile, TILE_N)).astype(ct.float32)
        squares = squares + part * part
    r = _rstd(squares, eps, N)
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        part = _add(x, residual, rows, cols)
        w = _load_vector(weight, cols, WEIGHT)
        ct.scatter(total, at(total, rows[:, None], cols[None, :]), part)
        _store(y, rows, cols, part.astype(ct.float32) * r, w, None, OFFSET, ROUND)
    if RSTD:
        ct.scatter(rstd, rows[:, None], r)


@ct.kernel
def add_rms_norm_backward_kernel(
    dy, dtotal, total, weight, rstd, dx, dweight, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool,
    DWEIGHT: Bool,
):  # fmt: skip
    """Whole rows in registers, blocks striding over them; row ``bid`` of dweight is that block's sum."""
    cols = span(0, TILE_N)
    scale = _scale(_load_vector(weight, cols, WEIGHT), OFFSET)
    dw = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.bid(0), ct.cdiv(total.shape[0], TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        up = _load(dy, rows, cols).astype(ct.float32)
        through = _load(dtotal, rows, cols).astype(ct.float32)
        r = ct.gather(rstd, rows)[:, None]
        xhat = _load(total, rows, cols).astype(ct.float32) * r
        g = up * scale
        mean = ct.sum(g * xhat, axis=1, keepdims=True) / N
        ct.scatter(dx, (rows[:, None], cols[None, :]), (r * (g - xhat * mean) + through).astype(dx.dtype))
        if DWEIGHT:
            dw = dw + up * xhat
    if DWEIGHT:
        ct.scatter(dweight, (ct.bid(0), cols), ct.sum(dw, axis=0))


@ct.kernel
def add_rms_norm_backward_reload_kernel(
    dy, dtotal, total, weight, rstd, dx, OFFSET: Float, N: Int, TILE_N: Int, WEIGHT: Bool
):  # fmt: skip
    """dx of rows of any length: each block reads its row twice."""
    rows = span(ct.bid(0), 1)
    r = ct.gather(rstd, rows)[:, None]
    products = ct.zeros((1, TILE_N), ct.float32)
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        g = _load(dy, rows, cols).astype(ct.float32) * _scale(_load_vector(weight, cols, WEIGHT), OFFSET)
        products = products + g * _load(total, rows, cols).astype(ct.float32) * r
    mean = ct.sum(products, axis=1, keepdims=True) / N
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        g = _load(dy, rows, cols).astype(ct.float32) * _scale(_load_vector(weight, cols, WEIGHT), OFFSET)
        through = _load(dtotal, rows, cols).astype(ct.float32)
        xhat = _load(total, rows, cols).astype(ct.float32) * r
        ct.scatter(dx, (rows[:, None], cols[None, :]), (r * (g - xhat * mean) + through).astype(dx.dtype))


@functools.lru_cache(maxsize=1024)
def forward_plan(rows: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int]:
    """(kernel, grid, TILE_M, TILE_N) for [rows, n] on CUDA device ``device`` (-1: CPU).

    As rms_norm's, whose tiles were measured on an H200, with half the blocks for the second input held in flight.
    """
    rows = rows if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    if tile_n > MAX_CACHED:
        return hinted(add_rms_norm_reload_kernel, num_worker_warps=4, occupancy=4), (rows,), 1, 4096
    # Short rows share a block, as long as there are blocks for every multiprocessor.
    tile_m = max(1, min(4096 // tile_n, next_power_of_2(rows // (4 * sm_count(device)))))
    elements = tile_m * tile_n
    warps, occupancy = (8 if elements >= 8192 else 4), max(1, min(8, 16384 // elements))
    kernel = hinted(add_rms_norm_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (ct.cdiv(rows, tile_m),), tile_m, tile_n


@functools.lru_cache(maxsize=1024)
def backward_plan(rows: int, n: int, device: int) -> tuple[ct.kernel, int, int, int]:
    """(kernel, blocks, TILE_M, TILE_N) of the backward pass in registers, for rows of up to MAX_CACHED_BACKWARD."""
    rows = rows if n else 0
    tile_n = next_power_of_2(n)
    warps, occupancy = (8, 2) if tile_n > 2048 else (4, 4)
    tile_m = max(1, min(2048 // tile_n, next_power_of_2(rows // (occupancy * sm_count(device)))))
    kernel = hinted(add_rms_norm_backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, min(ct.cdiv(rows, tile_m), occupancy * sm_count(device)), tile_m, tile_n


def _like(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch_forward(x, residual, weight, eps, offset, rounded, with_rstd):
    rows, residual = small_or_rows(x), small_or_rows(residual)
    m, n = size_of(rows)
    y, total = _like(x), _like(x)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device) if with_rstd else y
    kernel, grid, tile_m, tile_n = forward_plan(m, n, x.get_device())
    w = rows if weight is None else weight
    constants = (offset, n, tile_m, tile_n, weight is not None, rounded, with_rstd)
    launch(x, grid, kernel, (rows, residual, w, small_or_rows(y), small_or_rows(total), rstd, eps, *constants))
    return y, total, rstd


@compilable(fake=lambda x, *_: (_like(x), _like(x)))
def add_rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch_forward(x, residual, weight, eps, offset, rounded, False)[:2]


@compilable(fake=lambda x, *_: (_like(x), _like(x), x.new_empty(rows_of(x).shape[0], dtype=torch.float32)))
def add_rms_norm_forward_rstd(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward pass of a training step: y, total and rstd [M]."""
    return _launch_forward(x, residual, weight, eps, offset, rounded, True)


def _fake_backward(dy, dtotal, total, weight, rstd, offset, dweight):
    return _like(total), total.new_empty(total.shape[-1] if dweight else 0, dtype=torch.float32)


@compilable(fake=_fake_backward)
def add_rms_norm_backward(
    dy: torch.Tensor,
    dtotal: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x and residual, and in fp32 that of weight, empty if not asked for."""
    dx, rows = _like(total), rows_of(total)
    dy, dtotal = rows_of(dy), rows_of(dtotal)
    m, n = rows.shape
    device = total.get_device()
    w = rows if weight is None else weight
    if n <= MAX_CACHED_BACKWARD:
        kernel, blocks, tile_m, tile_n = backward_plan(m, n, device)
        dw = rstd.new_empty(blocks, n) if dweight else rstd
        constants = (offset, n, tile_m, tile_n, weight is not None, dweight)
        launch(total, (blocks,), kernel, (dy, dtotal, rows, w, rstd, dx.view(m, n), dw, *constants))
    else:
        constants = (offset, n, 1024, weight is not None)
        arrays = (dy, dtotal, rows, w, rstd, dx.view(m, n))
        launch(total, (m,), add_rms_norm_backward_reload_kernel, (*arrays, *constants))
        tile_m, tile_n = 8, 256
        blocks = min(ct.cdiv(m, tile_m), sm_count(device)) if dweight else 0
        dw = rstd.new_empty(blocks, n) if dweight else rstd
        grid, constants = (blocks, ct.cdiv(n, tile_n)), (tile_m, tile_n, dweight, False)
        launch(total, grid, rms_norm_backward_columns_kernel, (dy, rows, rstd, dw, rstd, *constants))
    return dx, dw.sum(0) if dweight else rstd.new_empty(0)


class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, rounded):
        y, total, rstd = add_rms_norm_forward_rstd(x, residual, weight, eps, offset, rounded)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = offset
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dtotal):
        total, weight, rstd = ctx.saved_tensors
        dweight = ctx.needs_input_grad[2]
        dx, dw = add_rms_norm_backward(dy, dtotal, total, weight, rstd, ctx.offset, dweight)
        return dx, dx, dw.to(weight.dtype) if dweight else None, None, None, None


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
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    rounded = casting == "llama"
    if torch.is_grad_enabled() and (
        x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
    ):
        return AddRMSNorm.apply(x, residual, weight, eps, offset, rounded)
    return add_rms_norm_forward(x, residual, weight, eps, offset, rounded)
