"""``linear`` in cuTile: a GEMM for many rows; for few, kernels that read the weight as fast as memory delivers it.

Decoding multiplies one or a few rows by each weight: every weight is used once or a few times, so that reading it is
all the work there is.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.ops import ops
from tilegym.ops.cutile.early_weights import NOTHING
from tilegym.ops.cutile.early_weights import begin_early
from tilegym.ops.cutile.early_weights import columns_of
from tilegym.ops.cutile.early_weights import early_columns
from tilegym.ops.cutile.early_weights import row_at_once
from tilegym.ops.cutile.early_weights import rows_at_once
from tilegym.ops.cutile.early_weights import rows_fit
from tilegym.ops.cutile.early_weights import waits_in_graph
from tilegym.ops.cutile.few_rows import MAX_ROWS
from tilegym.ops.cutile.few_rows import launch_few_rows
from tilegym.ops.cutile.few_rows import onto
from tilegym.ops.cutile.matmul import check_supported
from tilegym.ops.cutile.matmul import differentiable as differentiable_matmul
from tilegym.ops.cutile.matmul import gemm
from tilegym.ops.cutile.matmul import load_bias
from tilegym.ops.cutile.split_gemm import launch_split
from tilegym.ops.cutile.split_gemm import splits_of
from tilegym.ops.cutile.tiling import LINE
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import aligned
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.wide_gemm import fits_better
from tilegym.ops.cutile.wide_gemm import launch_wide
from tilegym.ops.pytorch.linear import check_operands
from tilegym.ops.pytorch.linear import in_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of held_gemv_kernel: rows, columns and columns held, blocks a multiprocessor, and from and up to how many columns.
HELD = (
    (8, 256, 1536, 4, 0, 2**31), (4, 512, 1024, 6, 0, 5120), (4, 512, 3072, 4, 0, 8192), (4, 512, 2048, 4, 0, 2**31),
    (4, 512, 2048, 5, 8193, 2**31),
)  # fmt: skip


def weight_tile(x, i, k, TILE_N: Int, TILE_K: Int):
    return ct.load(x, (i, k), (TILE_N, TILE_K), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)


def row_tile(x, k, TILE_K: Int):
    """Tile k of a single row ``x``, [1, K] or [1, 1, K], as [1, TILE_K] in fp32."""
    if x.ndim == 2:
        return weight_tile(x, 0, k, 1, TILE_K)
    tile = ct.load(x, (0, 0, k), (1, 1, TILE_K), padding_mode=ct.PaddingMode.ZERO)
    return tile.reshape((1, TILE_K)).astype(ct.float32)


def total(acc, bias, n, BIAS: Bool, TILE_N: Int):
    """The sums of ``acc`` [TILE_N, TILE_K], and a tile of the bias added, [1, TILE_N] in fp32."""
    y = ct.sum(acc, axis=1).reshape((1, TILE_N))
    return y + load_bias(bias, n, TILE_N) if BIAS else y


@ct.kernel
def gemv_kernel(
    x, weight, bias, residual, out, nothing, BIAS: Bool, ADD: Bool, SCALE: Float, K: Int, TILE_N: Int, TILE_K: Int,
    EARLY: Int, COLS: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [1, K], weight [N, K], bias [N] if BIAS (else 0), residual [1, N] if ADD, out [1, N]; x and out may have another
    # dimension of 1. One row leaves most of a tensor core idle: the products are added up instead.
    n = ct.bid(0)
    begin_early((weight,), n, out, nothing, TILE_N, EARLY, COLS, OVERLAP)
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        acc = acc + weight_tile(weight, n, k, TILE_N, TILE_K) * row_tile(x, k, TILE_K)
    rest = weight_tile(residual, 0, n, 1, TILE_N) if ADD else None
    y = onto(total(acc, bias, n, BIAS, TILE_N), rest, SCALE, out.dtype)
    if out.ndim == 2:
        ct.store(out, (0, n), y)
    else:
        ct.store(out, (0, 0, n), y.reshape((1, 1, TILE_N)))


@ct.kernel
def held_gemv_kernel(
    x, weight, bias, residual, out, BIAS: Bool, ADD: Bool, SCALE: Float, K: Int, TILE_N: Int, TILE_K: Int, HOLD: Int,
    OVERLAP: Bool,
):  # fmt: skip
    """gemv_kernel, for arrays of two dimensions, with the first HOLD columns of a block's rows loaded ahead of the wait
    and kept in registers, which takes no second load; the others by tensor map, as ever."""
    let_next_begin(OVERLAP)
    n = ct.bid(0)
    tiles = rows_at_once(weight, n, HOLD, TILE_N, TILE_K)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in ct.static_iter(range(HOLD // TILE_K)):
        acc = acc + tiles[k].astype(ct.float32) * row_tile(x, k, TILE_K)
    for k in range(ct.static_eval(HOLD // TILE_K), ct.cdiv(K, TILE_K)):
        acc = acc + weight_tile(weight, n, k, TILE_N, TILE_K) * row_tile(x, k, TILE_K)
    rest = weight_tile(residual, 0, n, 1, TILE_N) if ADD else None
    y = onto(total(acc, bias, n, BIAS, TILE_N), rest, SCALE, out.dtype)
    ct.store(out, (0, n), y)


@ct.kernel
def at_once_gemv_kernel(
    x, weight, bias, residual, out, nothing, BIAS: Bool, ADD: Bool, SCALE: Float, K: Int, TILE_N: Int, TILE_K: Int,
    EARLY: Int, COLS: Int, OVERLAP: Bool,
):  # fmt: skip
    """gemv_kernel, for arrays of two dimensions, with all loads of a block on their way at once.

    They come behind the wait: ahead of it they delay those of the attention in front of this launch, which reads early
    in turn do not. Stored by ``ct.scatter``, two of four rows are loaded and summed up behind the other two; by
    ``ct.store`` all at once, which takes a layer of Llama-3.1-8B 1.5 us more on an H200.
    """
    n = ct.bid(0)
    begin_early((weight,), n, out, nothing, TILE_N, EARLY, COLS, OVERLAP, True)
    tiles = rows_at_once(weight, n, K, TILE_N, TILE_K)
    at = n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    rest = ct.gather(residual, (0, at)).astype(ct.float32) if ADD else None
    row = row_at_once(x, K, TILE_K)
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in ct.static_iter(range(K // TILE_K)):
        acc = acc + tiles[k].astype(ct.float32) * row[k].astype(ct.float32)
    y = ct.sum(acc, axis=1)
    if BIAS:
        y = y + ct.gather(bias, at).astype(ct.float32)
    ct.scatter(out, (0, at), onto(y, rest, SCALE, out.dtype))


@functools.lru_cache(maxsize=1024)
def gemv_plan(k: int, bits: int, device_index: int) -> tuple[ct.kernel, int, int, int, int, bool]:
    """(kernel, TILE_N, TILE_K, EARLY, COLS, OVERLAP) for a row of k elements of so many bits; COLS: in a graph.

    The fastest on an H200, launch behind launch in a graph, in bf16: 6144x4096 in 13.3 us (3791 GB/s), 4096x4096 in
    9.5 us (3552), 4096x14336 in 28.2 us (4162). In fp32, cache cold, 4096x4096 takes 21.1 us (25.5 with as many bytes
    in a tile), 14336x4096 64.7 (68.5), 1024x3584 10.8 (11.7).
    """
    if device_index < 0:
        return gemv_kernel, 8, 64, 2, 256, False
    tile_n, tile_k, occupancy, cols = (
        (4, 8192 // bits, 6, 2048) if k <= 8192 and bits < 32 else (8, 4096 // bits, 4, 1024)
    )
    kernel, tile_k = hinted(gemv_kernel, occupancy=occupancy), min(tile_k, next_power_of_2(k))
    return kernel, tile_n, tile_k, occupancy * sm_count(device_index), cols, overlaps(device_index)


@functools.lru_cache(maxsize=1024)
def held_plan(n: int, k: int, device_index: int) -> tuple[ct.kernel, int, int, int, bool] | None:
    """(kernel, TILE_N, TILE_K, HOLD, OVERLAP) for a weight [n, k] of 16 bits, behind a launch that this overlaps; None
    where rows do not fit its tiles.

    On an H200 a layer takes so, in a graph, instead of with gemv_kernel: of Llama-3.1-8B, whose weight is 4096x14336,
    109.2 us (110.5; with 1024 columns held 110.1), of Qwen3-8B 98.2 (99.5), of Qwen2.5-7B 121.3 (123.1), of
    Llama-3.2-1B, 2048x8192, 38.9 (41.0; with 2048 columns held 39.4), of Qwen3-0.6B 19.4 (21.2). Between tiles decides
    which keeps the multiprocessors busy, to the last wave of blocks. In the order of HELD: of Qwen2.5-3B, 2048x11008,
    51.4, 52.7 and 47.2 us; of Llama-3.2-3B, 3072x8192, 69.1 and 73.6 for the first and the last; of attention's last
    weight, 4096 columns of 2560 63.3, 63.1, 64.8, of 2880 48.7, 46.8, 48.0, 5120x5120 192.2, 183.6, 191.2, 8192x8192
    413, 421, 422. By five blocks a multiprocessor a layer of Gemma-3-4B, 2560x10240, takes 62.0 instead of 62.8.
    """
    if device_index < 0:
        return None if n % 8 or k < 128 else (held_gemv_kernel, 8, 64, 128, False)
    best, chosen = 0.0, None
    for tile_n, tile_k, hold, occupancy, least, most in HELD:
        hold = min(hold, k // tile_k * tile_k)
        if n % tile_n or hold == 0 or not least <= k <= most:
            continue
        waves = n / tile_n / (occupancy * sm_count(device_index))
        if tile_n == 4 and k > 8192 and waves > 1:
            continue  # slower for 3584x18944, and not measured for others
        if waves / math.ceil(waves) > best + 0.02:
            best = waves / math.ceil(waves)
            chosen = hinted(held_gemv_kernel, occupancy=occupancy), tile_n, tile_k, hold, overlaps(device_index)
    return chosen


@functools.lru_cache(maxsize=32)
def at_once_plan(device_index: int) -> tuple[ct.kernel, int, int, int, bool]:
    """(kernel, TILE_N, TILE_K, EARLY, OVERLAP) for a weight of which ``rows_fit``, behind a launch that this overlaps.

    Where rows are no longer than there are many. On an H200 a layer of Llama-3.1-8B takes 112.0 us in a graph with its
    4096x4096 so and 114.3 by gemv_kernel with weights read early; with the loads of this kernel ahead of the wait 1.8
    us more, with all columns read early in turn 1.3 us less. One with the sizes of Llama-3.2-1B takes 43.2 instead of
    44.6, and 0.9 us less early; of Qwen3-0.6B, 1024x2048, 24.0 and 23.8.
    """
    if device_index < 0:
        return at_once_gemv_kernel, 4, 64, 2, False
    return hinted(at_once_gemv_kernel, occupancy=4), 4, 1024, 4 * sm_count(device_index), overlaps(device_index)


def launch_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    early: bool = False,
    scale: float = 1.0,
) -> None:
    """Writes ``residual + scale * (x @ weight.T + bias)`` to out; x [1, K], weight [N, K], the others [N], [1, N],
    [1, N].

    x and out may be [1, 1, K] and [1, 1, N]. ``early``: they are not, and this launch may mostly overlap that in front.
    """
    n, k = weight.shape
    has_bias, adds = bias is not None, residual is not None
    arrays = (x, weight, bias if has_bias else 0, residual if adds else 0, out)
    if early and k <= n and rows_fit(weight):
        kernel, tile_n, tile_k, early_blocks, overlap = at_once_plan(x.get_device())
        cols = columns_of(k, tile_n, k) if overlap or not weight.is_cuda else 0
        flags = (has_bias, adds, scale, k, tile_n, tile_k, early_blocks, cols, overlap)
        launch(x, (n // tile_n,), kernel, (*arrays, NOTHING, *flags), overlap)
        return
    held = held_plan(n, k, x.get_device()) if early and waits_in_graph(weight) else None
    if held is not None:
        kernel, tile_n, tile_k, hold, overlap = held
        flags = (has_bias, adds, scale, k, tile_n, tile_k, hold, overlap)
        launch(x, (n // tile_n,), kernel, (*arrays, *flags), overlap)
        return
    kernel, tile_n, tile_k, early_blocks, cols, overlap = gemv_plan(k, x.dtype.itemsize * 8, x.get_device())
    cols = early_columns(weight, tile_n, cols) if early else 0
    flags = (has_bias, adds, scale, k, tile_n, tile_k, early_blocks, cols, overlap)
    launch(x, (-(-n // tile_n),), kernel, (*arrays, NOTHING, *flags), overlap)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _fake(x, weight, bias, settled=False):
    *rows, _ = x.shape
    return x.new_empty(*rows, weight.shape[0])


@compilable(_fake)
def linear_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settled: bool = False
) -> torch.Tensor:
    n, k = weight.shape
    out = _fake(x, weight, bias)
    if x.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    # One token of each sequence, as in decoding, comes in three dimensions, and a view takes the host a while.
    of_tokens = x.dim() == 3 and x.shape[1] == 1 and x.shape[0] <= MAX_ROWS
    rows = x if x.dim() == 2 or of_tokens else x.reshape(-1, k)
    m = rows.shape[0]
    y = out if rows is x else out.view(m, n)
    if m > MAX_ROWS:
        if fits_better(m, n, x.dtype, x.get_device()) and rows.stride(1) == weight.stride(1) == 1:
            launch_wide(aligned(rows), aligned(weight), bias if bias is None else bias.contiguous(), y)
            return out
        splits = splits_of(m, n, k, x.dtype, x.get_device())
        if splits and rows.stride(1) == weight.stride(1) == 1:
            launch_split(aligned(rows), aligned(weight), bias, y, splits)
            return out
        gemm(rows, weight, bias, y, False, True)
        return out
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if weight.stride(1) != 1:
        weight, settled = weight.contiguous(), False
    if k * weight.element_size() % LINE:
        rows, weight, settled = aligned(rows), aligned(weight), False
    if m == 1:
        if settled:  # its kernels take two dimensions
            rows, y = rows.view(1, k), y.view(1, n)
        launch_gemv(rows, weight, bias, None, y, settled)
        return out
    launch_few_rows(rows, weight, bias, None, y)
    return out


class Linear(Function):
    """dX = dY W, dW = dY^T X, and the bias gets the sum of dY's rows."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return linear_forward(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        rows = _rows(dy)
        if ctx.needs_input_grad[0]:
            dx = differentiable_matmul(rows, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = differentiable_matmul(rows, _rows(x), True, False)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0)
        return dx, dw, db


def _fake_wide(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32)


@compilable(_fake_wide)
def wide_row_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] with one row, contiguous like weight; [..., N] in fp32, as it is summed."""
    out = _fake_wide(x, weight, bias)
    launch_gemv(x.view(1, x.shape[-1]), weight, bias, None, out.view(1, weight.shape[0]))
    return out


@register_impl("linear", "cutile")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    settled: bool = False,
) -> torch.Tensor:
    check_operands(x, weight, bias, out_dtype)
    check_supported(x, DTYPES)
    gradients = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if out_dtype is not None and out_dtype is not x.dtype:
        if x.numel() == x.shape[-1] > 0 and x.is_contiguous() and weight.is_contiguous() and not gradients:
            return wide_row_forward(x, weight, bias)
        return ops.linear(*in_dtype(out_dtype, x, weight, bias), backend="cutile")
    if gradients:
        return Linear.apply(x, weight, bias)
    return linear_forward(x, weight, bias, settled)
