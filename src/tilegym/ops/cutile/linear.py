"""``linear`` in cuTile: a GEMM for many rows; for few, kernels that read the weight as fast as memory delivers it.

Decoding multiplies one or a few rows by each weight: every weight is used once or a few times, so that reading it is
all the work there is.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.matmul import check_supported
from tilegym.ops.cutile.matmul import differentiable as differentiable_matmul
from tilegym.ops.cutile.matmul import gemm
from tilegym.ops.cutile.matmul import load_bias
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.linear import check_operands

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_GEMV_ROWS = 16  # what the smallest tile of ct.mma holds


@ct.kernel(occupancy=4)
def gemv_kernel(x, weight, bias, out, TILE_N: Int, TILE_K: Int, BIAS: Bool):
    # x [1, K], weight [N, K], bias [N] if BIAS (else 0), out [1, N]. One row leaves most of a tensor core idle: the
    # products are added up instead.
    n = ct.bid(0)
    zero = ct.PaddingMode.ZERO
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        w_tile = ct.load(weight, (n, k), (TILE_N, TILE_K), padding_mode=zero)
        x_tile = ct.load(x, (0, k), (1, TILE_K), padding_mode=zero)
        acc = acc + w_tile.astype(ct.float32) * x_tile.astype(ct.float32)
    y = ct.sum(acc, axis=1).reshape((1, TILE_N))
    if BIAS:
        y = y + load_bias(bias, n, TILE_N)
    ct.store(out, (0, n), y.astype(out.dtype))


@ct.kernel(occupancy=2)
def few_rows_kernel(x, weight, bias, out, TILE_M: Int, TILE_N: Int, TILE_K: Int, BIAS: Bool, TF32: Bool):
    # x [M, K] with M <= TILE_M, weight [N, K], bias [N] if BIAS, out [M, N]. The weight is the left operand, whose
    # tiles may be tall, and the rows of x, padded with zeros, are the few columns of the right one.
    n = ct.bid(0)
    zero = ct.PaddingMode.ZERO
    acc = ct.zeros((TILE_N, TILE_M), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        w_tile = ct.load(weight, (n, k), (TILE_N, TILE_K), padding_mode=zero)
        x_tile = ct.load(x, (k, 0), (TILE_K, TILE_M), order=(1, 0), padding_mode=zero)
        if TF32:
            acc = ct.mma(w_tile.astype(ct.tfloat32), x_tile.astype(ct.tfloat32), acc)
        else:
            acc = ct.mma(w_tile, x_tile, acc)
    if BIAS:
        acc = acc + load_bias(bias, n, TILE_N).reshape((TILE_N, 1))
    ct.store(out, (n, 0), acc.astype(out.dtype), order=(1, 0))


@functools.lru_cache(maxsize=1024)
def choose_tile(m: int, n: int, k: int, bits: int, device_index: int) -> tuple[bool, int, int]:
    """Whether ``gemv_kernel`` is the one to take, and the tile of the weight, as measured on an H200 with bf16.

    In GB/s, cuBLAS in brackets: 14336x4096 2992 (2861), 6144x4096 2366 (2222), 4096x4096 1884 (1877), 128256x4096 4269
    (4083), for up to 16 rows alike. A long K with few blocks suits gemv_kernel better: 4096x14336 2923 (2850), where
    few_rows_kernel reaches 2818. Larger tiles spill, smaller ones have too little memory traffic under way.
    """
    if device_index < 0:
        return m == 1, 32, 64
    many_blocks = n > 64 * sm_count(device_index)
    if m == 1 and k >= 8192 and not many_blocks:
        return True, 4, 8192 // bits
    return False, 64, min((4096 if many_blocks else 2048) // bits, max(32, next_power_of_2(k)))


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _fake(x, weight, bias):
    *rows, _ = x.shape
    return x.new_empty(*rows, weight.shape[0])


@compilable(_fake)
def linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    n, k = weight.shape
    out = _fake(x, weight, bias)
    if x.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    m = rows.shape[0]
    y = out if rows is x else out.view(m, n)
    if m > MAX_GEMV_ROWS:
        gemm(rows, weight, bias, y, False, True)
        return out
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    has_bias = bias is not None
    is_gemv, tile_n, tile_k = choose_tile(m, n, k, x.dtype.itemsize * 8, x.get_device())
    arrays = (rows, weight, bias if has_bias else 0, y)
    if is_gemv:
        launch(out, (-(-n // tile_n),), gemv_kernel, (*arrays, tile_n, tile_k, has_bias))
    else:
        args = (*arrays, MAX_GEMV_ROWS, tile_n, tile_k, has_bias, uses_tf32(x.dtype))
        launch(out, (-(-n // tile_n),), few_rows_kernel, args)
    return out


class Linear(torch.autograd.Function):
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


@register_impl("linear", "cutile")
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    check_operands(x, weight, bias)
    check_supported(x, DTYPES)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return Linear.apply(x, weight, bias)
    return linear_forward(x, weight, bias)
