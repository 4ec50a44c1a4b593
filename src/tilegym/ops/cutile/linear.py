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
from tilegym.ops.cutile.matmul import GROUP_M
from tilegym.ops.cutile.matmul import check_supported
from tilegym.ops.cutile.matmul import choose_config
from tilegym.ops.cutile.matmul import differentiable as differentiable_matmul
from tilegym.ops.cutile.matmul import hinted
from tilegym.ops.cutile.matmul import matmul_forward
from tilegym.ops.cutile.matmul import multiply_tiles
from tilegym.ops.cutile.matmul import tile_of_block
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.matmul import with_unit_stride
from tilegym.ops.pytorch.linear import check_operands

Bool = ct.Constant[bool]
Int = ct.Constant[int]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_GEMV_ROWS = 16  # what the smallest tile of ct.mma holds


@ct.kernel(occupancy=4)
def gemv_kernel(x, weight, bias, out, TILE_N: Int, TILE_K: Int, BIAS: Bool):
    # x [1, K], weight [N, K], bias [N] if BIAS, out [1, N]. One row would leave tensor cores idle: multiply and add up.
    n = ct.bid(0)
    zero = ct.PaddingMode.ZERO
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        w_tile = ct.load(weight, (n, k), (TILE_N, TILE_K), padding_mode=zero)
        x_tile = ct.load(x, (0, k), (1, TILE_K), padding_mode=zero)
        acc = acc + w_tile.astype(ct.float32) * x_tile.astype(ct.float32)
    y = ct.sum(acc, axis=1).reshape((1, TILE_N))
    if BIAS:
        y = y + ct.load(bias, (n,), (TILE_N,), padding_mode=zero).astype(ct.float32).reshape((1, TILE_N))
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
        acc = acc + ct.load(bias, (n,), (TILE_N,), padding_mode=zero).astype(ct.float32).reshape((TILE_N, 1))
    ct.store(out, (n, 0), acc.astype(out.dtype), order=(1, 0))


@ct.kernel
def linear_kernel(
    x, weight, bias, out, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int, TRANS_X: Bool, TRANS_W: Bool, TF32: Bool
):
    # x [M, K], weight [N, K] (or their transposes), bias [N], out [M, N]: matmul_kernel with a bias added at the end.
    m, n = tile_of_block(ct.bid(0), ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N), GROUP)
    k_tiles = ct.cdiv(x.shape[0 if TRANS_X else 1], TILE_K)
    acc = multiply_tiles(x, weight, m, n, k_tiles, TILE_M, TILE_N, TILE_K, TRANS_X, TRANS_W, TF32, True)
    bias_tile = ct.load(bias, (n,), (TILE_N,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(out, (m, n), (acc + bias_tile.reshape((1, TILE_N))).astype(out.dtype))


@functools.lru_cache(maxsize=1024)
def _gemv_tile(k: int, bits: int, interpreted: bool) -> tuple[int, int]:
    # Measured on an H200 with bf16: 128256x4096 at 4.3 TB/s, 4096x4096 at 2.1; larger tiles spill, smaller ones have
    # too little memory traffic under way.
    if interpreted:
        return 4, 64
    return 4, min(16384 // bits, max(64, 1 << (k - 1).bit_length()))


def _few_rows_tile(bits: int, interpreted: bool) -> tuple[int, int]:
    # Measured on an H200 with bf16 and 16 columns: 14336x4096 at 3.0 TB/s, 6144x4096 at 2.3.
    if interpreted:
        return 32, 32
    return (128, 128) if bits == 16 else (64, 64)


def _fake(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@compilable(_fake)
def linear_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    n, k = weight.shape
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    m = rows.shape[0]
    if m > MAX_GEMV_ROWS and bias is None:
        return matmul_forward(rows, weight, False, True, None, None).view(*x.shape[:-1], n)
    out = _fake(x, weight, bias)
    if x.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    y = out.view(m, n)
    bits, device_index, tf32 = x.dtype.itemsize * 8, out.get_device(), uses_tf32(x.dtype)
    if m > MAX_GEMV_ROWS:
        rows, x_flipped = with_unit_stride(rows)
        weight, weight_flipped = with_unit_stride(weight)
        config = choose_config(m, n, bits, device_index)
        blocks = -(-m // config.tile_m) * -(-n // config.tile_n)
        tiles = (config.tile_m, config.tile_n, config.tile_k, GROUP_M)
        args = (rows, weight, bias, y, *tiles, x_flipped, not weight_flipped, tf32)
        launch(out, (blocks,), hinted(linear_kernel, config), args)
        return out
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    has_bias = bias is not None
    b = bias if has_bias else rows  # something to pass; not read
    if m == 1:
        tile_n, tile_k = _gemv_tile(k, bits, device_index < 0)
        launch(out, (-(-n // tile_n),), gemv_kernel, (rows, weight, b, y, tile_n, tile_k, has_bias))
    else:
        tile_n, tile_k = _few_rows_tile(bits, device_index < 0)
        args = (rows, weight, b, y, MAX_GEMV_ROWS, tile_n, tile_k, has_bias, tf32)
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
        rows = dy.reshape(-1, dy.shape[-1])
        if ctx.needs_input_grad[0]:
            dx = differentiable_matmul(rows, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = differentiable_matmul(rows, x.reshape(-1, x.shape[-1]), True, False)
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
