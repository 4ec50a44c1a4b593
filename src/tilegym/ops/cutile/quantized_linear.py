"""``quantized_linear`` in cuTile: a weight of 8 bits is read as it is, and widened in registers.

Decoding reads every weight once for each token, and half as many bytes take half the time, if the multiprocessors keep
up with widening them: 2 to 4 instructions a number, where an addition of products takes one.
"""

import functools
import math
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops import decode_ops
from tilegym.ops import ops
from tilegym.ops.cutile.early_weights import row_at_once
from tilegym.ops.cutile.early_weights import rows_at_once
from tilegym.ops.cutile.few_rows import MAX_ROWS
from tilegym.ops.cutile.few_rows import MERGED
from tilegym.ops.cutile.few_rows import merge_rows_kernel
from tilegym.ops.cutile.few_rows import onto
from tilegym.ops.cutile.matmul import check_supported
from tilegym.ops.cutile.matmul import load_bias
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import aligned
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.quantized_linear import BLOCK_K
from tilegym.ops.pytorch.quantized_linear import BLOCK_N
from tilegym.ops.pytorch.quantized_linear import MOST_ROWS
from tilegym.ops.pytorch.quantized_linear import WEIGHTS
from tilegym.ops.pytorch.quantized_linear import check_operands
from tilegym.ops.pytorch.quantized_linear import dequantized

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ONE, ROWS, BLOCKS = 0, 1, 2  # how many numbers of a weight have one scale: all; those of a row; those of a block
ZERO = ct.PaddingMode.ZERO


def widened(tile):
    """In a kernel: a tile of int8 or fp8 in fp32.

    An int8 is added to the bits of 1.5 * 2^23, whose last digit counts ones. The instruction that converts it comes 16
    times a clock from an H200's multiprocessor, these 64 times: 14336x4096 takes a row 17.7 us so and 23.0 by it.
    """
    if tile.dtype == ct.int8:
        tile = ct.bitcast(tile.astype(ct.int32) + 0x4B400000, ct.float32) - 12582912.0
    return tile.astype(ct.float32)


def scales_of_columns(scale, row, first, TILE_K: Int, BLOCK_K: Int):
    """In a kernel: the scales [1, TILE_K] of so many columns from ``first`` on, in a row of ``scale``."""
    at = (first + ct.arange(TILE_K, dtype=ct.int32)) // BLOCK_K
    return ct.gather(scale, (row, at)).astype(ct.float32).reshape((1, TILE_K))


def put_row(acc, scale, bias, residual, out, m, n, SCALES: Int, BIAS: Bool, ADD: Bool, TILE_N: Int):
    """In a kernel: stores the sums of ``acc`` [TILE_N, TILE_K], with their scales, the bias and the residual."""
    y = ct.sum(acc, axis=1).reshape((1, TILE_N))
    if SCALES == ROWS:
        y = y * load_bias(scale, n, TILE_N)
    elif SCALES == ONE:
        y = y * load_bias(scale, 0, 1)
    if BIAS:
        y = y + load_bias(bias, n, TILE_N)
    rest = None
    if ADD:
        rest = ct.load(residual, (m, n), (1, TILE_N), padding_mode=ZERO).astype(ct.float32)
    ct.store(out, (m, n), onto(y, rest, 1.0, out.dtype))


@ct.kernel
def quantized_gemv_kernel(
    x, weight, scale, bias, residual, out, SCALES: Int, BLOCK_N: Int, BLOCK_K: Int, BIAS: Bool, ADD: Bool, K: Int,
    TILE_N: Int, TILE_K: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [M, K], weight [N, K], scale [1], [N], or [blocks of rows, blocks of columns], bias [N] if BIAS (else 0),
    # residual [M, N] if ADD (else 0), out [M, N]. Of a row of x for each block of the second dimension; where SCALES is
    # BLOCKS, BLOCK_N is a multiple of TILE_N.
    begin(OVERLAP)
    n, m = ct.bid(0), ct.bid(1)
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        row = ct.load(x, (m, k), (1, TILE_K), padding_mode=ZERO).astype(ct.float32)
        if SCALES == BLOCKS:
            row = row * scales_of_columns(scale, n * TILE_N // BLOCK_N, k * TILE_K, TILE_K, BLOCK_K)
        acc = acc + widened(ct.load(weight, (n, k), (TILE_N, TILE_K), padding_mode=ZERO)) * row
    put_row(acc, scale, bias, residual, out, m, n, SCALES, BIAS, ADD, TILE_N)


@ct.kernel
def quantized_stream_kernel(
    x, weight, scale, bias, residual, out, SCALES: Int, BLOCK_N: Int, BLOCK_K: Int, BIAS: Bool, ADD: Bool, K: Int,
    TILE_N: Int, TILE_K: Int, OVERLAP: Bool,
):  # fmt: skip
    """quantized_gemv_kernel of one row, for N that is a multiple of TILE_N: as many blocks as run beside each other
    take all rows of the weight in turn, the next ones on their way while TILE_N are multiplied; the first come ahead of
    the wait for the launch in front."""
    let_next_begin(OVERLAP)
    first, blocks = ct.bid(0), ct.num_blocks(0)
    end = weight.shape[0] // TILE_N
    last = end - 1 - (end - 1 - first) % blocks
    ahead = rows_at_once(weight, first, K, TILE_N, TILE_K)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    xs = row_at_once(x, K, TILE_K)
    for n in range(first, end, blocks):
        tiles = ahead
        ahead = rows_at_once(weight, min(n + blocks, last), K, TILE_N, TILE_K)
        acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
        for k in ct.static_iter(range((K + TILE_K - 1) // TILE_K)):
            row = xs[k].astype(ct.float32)
            if SCALES == BLOCKS:
                row = row * scales_of_columns(scale, n * TILE_N // BLOCK_N, k * TILE_K, TILE_K, BLOCK_K)
            acc = acc + widened(tiles[k]) * row
        put_row(acc, scale, bias, residual, out, 0, n, SCALES, BIAS, ADD, TILE_N)


@ct.kernel
def quantized_rows_kernel(
    x, weight, scale, bias, residual, out, SCALES: Int, BLOCK_N: Int, BLOCK_K: Int, BIAS: Bool, ADD: Bool, K: Int,
    SPLITS: Int, TILE_M: Int, TILE_N: Int, TILE_K: Int, OVERLAP: Bool,
):  # fmt: skip
    # As quantized_gemv_kernel, for TILE_M rows at once on tensor cores: the weight, which fits into x's 16 bits, is the
    # left operand. Where SCALES is BLOCKS, BLOCK_N is a multiple of TILE_N, and BLOCK_K of TILE_K. With several SPLITS
    # of K M is at most TILE_M, and out [SPLITS, N, TILE_M] in fp32, for merge_rows_kernel, which does the rest.
    begin(OVERLAP)
    n, split, m = ct.bid(0), ct.bid(1), ct.bid(2)
    tiles = ct.cdiv(K, TILE_K)
    acc = ct.zeros((TILE_N, TILE_M), dtype=ct.float32)
    for k in range(tiles * split // SPLITS, tiles * (split + 1) // SPLITS):
        tile = ct.load(weight, (n, k), (TILE_N, TILE_K), padding_mode=ZERO).astype(x.dtype)
        xs = ct.load(x, (k, m), (TILE_K, TILE_M), order=(1, 0), padding_mode=ZERO)
        if SCALES == BLOCKS:
            part = ct.mma(tile, xs, ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
            acc = acc + part * ct.gather(scale, (n * TILE_N // BLOCK_N, k * TILE_K // BLOCK_K)).astype(ct.float32)
        else:
            acc = ct.mma(tile, xs, acc)
    if SCALES == ROWS:
        acc = acc * load_bias(scale, n, TILE_N).reshape((TILE_N, 1))
    elif SCALES == ONE:
        acc = acc * load_bias(scale, 0, 1)
    if SPLITS > 1:
        ct.store(out, (split, n, 0), acc.reshape((1, TILE_N, TILE_M)))
    else:
        if BIAS:
            acc = acc + load_bias(bias, n, TILE_N).reshape((TILE_N, 1))
        rest = None
        if ADD:
            rest = ct.load(residual, (n, m), (TILE_N, TILE_M), order=(1, 0), padding_mode=ZERO).astype(ct.float32)
        ct.store(out, (n, m), onto(acc, rest, 1.0, out.dtype), order=(1, 0))


class Plan(NamedTuple):
    """The kernel with its hints, its blocks, its tiles, and into how many parts columns are split; ``tile_m``: rows of
    x."""

    kernel: ct.kernel
    blocks: int
    tile_n: int
    tile_k: int
    splits: int = 1
    tile_m: int = 1


@functools.lru_cache(maxsize=1024)
def gemv_plan(n: int, k: int, fp8: bool, in_blocks: bool, one_row: bool, device: int) -> Plan:
    """For one row of x, or for a few of fp32.

    On an H200, launch behind launch in a graph, x in bf16, in us for int8, fp8 and fp8 in blocks of 128x128 (bf16 by
    ``linear``'s kernels: 11.5, 33.6, 32.9): 4096x4096 6.5, 6.3, 7.2; 14336x4096 18.8, 18.8, 21.9; 4096x14336 22.1,
    19.3, 23.1. 28672x8192 62.4, 59.1 and 71.2, which is 3767, 3973 and 3297 GB/s.
    """
    if device < 0:
        if one_row and k in (64, 128, 160) and n % 4 == 0:
            return Plan(quantized_stream_kernel, min(3, n // 4), 4, 64)
        return Plan(quantized_gemv_kernel, -(-n // 8), 8, 64)
    processors = sm_count(device)
    tile_n, tile_k, occupancy = _streamed(n, k, in_blocks)
    if one_row and tile_n and n % tile_n == 0:
        turns = n // tile_n
        blocks = -(-turns // -(-turns // (occupancy * processors)))  # fewer where that takes no more turns
        return Plan(hinted(quantized_stream_kernel, occupancy=occupancy), blocks, tile_n, tile_k)
    if in_blocks:  # between tiles decides which keeps the multiprocessors busy, to the last wave of blocks
        tiles = ((16, 512, 4), (8, 1024, 4), (4, 1024, 6), (8, 2048, 2))
        waves = [n / tile[0] / (tile[2] * processors) for tile in tiles]
        tile_n, tile_k, occupancy = max(zip(waves, tiles, strict=True), key=lambda w: w[0] / math.ceil(w[0]))[1]
    else:
        tile_n, tile_k, occupancy = (8, 2048, 2) if fp8 else (4, 2048, 4)
    return Plan(hinted(quantized_gemv_kernel, occupancy=occupancy), -(-n // tile_n), tile_n, min(tile_k, fitting(k)))


def _streamed(n: int, k: int, in_blocks: bool) -> tuple[int, int, int]:
    """(TILE_N, TILE_K, blocks of a multiprocessor) of quantized_stream_kernel; TILE_N 0: rows are too long for it."""
    if k > (5120 if in_blocks else 10240):
        return 0, 0, 0
    if k <= 3072:
        tile_k = min(512, fitting(k))
        return (4, min(1024, fitting(k)), 2) if n < 2048 and k % 1024 == 0 else (8, tile_k, 2)
    if k <= 4096:
        return 4, 2048, 3
    return (4, 1024, 2) if k <= 5120 else (2, 2048, 4 if k <= 8192 else 3)


def fitting(k: int) -> int:
    return max(64, next_power_of_2(k))


@functools.lru_cache(maxsize=1024)
def rows_plan(rows: int, n: int, k: int, block_n: int, device: int) -> Plan:
    """For several rows of 16 bits: columns are split where there are few rows of the weight.

    In us, as above, for 16, 64 and 512 rows, of int8 and of fp8 in blocks (bf16 by cuBLAS 33, 34, 87; PyTorch's
    operations that write the weight out in bf16 189, 191, 257 and 384, 386, 437): 14336x4096 27, 29, 144 and 33, 36,
    149; 4096x14336 25, 30, 120 and 31, 34, 124.
    """
    if device < 0:
        return Plan(quantized_rows_kernel, -(-n // 32), 32, 64, 2 if 128 <= k <= 192 and rows <= 16 else 1, 16)
    tile_m = min(128, max(8, next_power_of_2(rows)))
    tile_n = 128 if block_n and block_n % 128 == 0 and tile_m == 64 else 64
    blocks, splits = -(-n // tile_n), 1
    if rows <= tile_m:
        while 5 * blocks * splits < 7 * sm_count(device) and splits < 16 and k >= 4 * splits * BLOCK_K:
            splits *= 2
    wide = not block_n and k >= 512 * splits and tile_m in (8, 16, 64)
    return Plan(hinted(quantized_rows_kernel, occupancy=2), blocks, tile_n, 256 if wide else BLOCK_K, splits, tile_m)


def _fake(x, weight, scale, bias, residual, block_n, block_k):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@compilable(_fake)
def quantized_linear_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    block_n: int,
    block_k: int,
) -> torch.Tensor:
    """x [..., K] of up to MOST_ROWS rows, in fp32 of MAX_ROWS; block_n 0: scale is one number, or one a row."""
    out, (n, k), device = _fake(x, weight, scale, bias, residual, block_n, block_k), weight.shape, x.get_device()
    if x.numel() == 0 or n == 0:
        out = out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        return out if residual is None else out.add_(residual)
    rows = x.reshape(-1, k)
    rows, weight = (aligned(t if t.stride(1) == 1 else t.contiguous()) for t in (rows, weight))
    scales = BLOCKS if block_n else ROWS if scale.numel() == n else ONE
    scale, y, m = scale if block_n else scale.reshape(-1), out.view(-1, n), rows.shape[0]
    has_bias, adds, overlap = bias is not None, residual is not None, overlaps(device)
    sizes = (scales, block_n, block_k)
    behind = (bias if has_bias else 0, residual.reshape(-1, n) if adds else 0, y)
    if m == 1 or x.dtype is torch.float32:
        plan = gemv_plan(n, k, weight.dtype.is_floating_point, bool(block_n), m == 1, device)
        args = (rows, weight, scale, *behind, *sizes, has_bias, adds, k, plan.tile_n, plan.tile_k, overlap)
        launch(out, (plan.blocks, m), plan.kernel, args, overlap)
        return out
    plan = rows_plan(m, n, k, block_n, device)
    tile_m = plan.tile_m
    tiles = (k, plan.splits, tile_m, plan.tile_n, plan.tile_k, overlap)
    if plan.splits == 1:
        args = (rows, weight, scale, *behind, *sizes, has_bias, adds, *tiles)
        launch(out, (plan.blocks, 1, -(-m // tile_m)), plan.kernel, args, overlap)
        return out
    partial = x.new_empty((plan.splits, n, tile_m), dtype=torch.float32)
    args = (rows, weight, scale, 0, 0, partial, *sizes, False, False, *tiles)
    launch(out, (plan.blocks, plan.splits), plan.kernel, args, overlap)
    args = (partial, *behind, has_bias, adds, 1.0, plan.splits, tile_m, MERGED, overlap)
    launch(out, (-(-n // MERGED),), merge_rows_kernel, args, overlap)
    return out


@register_impl("quantized_linear", "cutile")
def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    block_size: tuple[int, int] | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    check_operands(x, weight, scale, bias, block_size, residual)
    check_supported(x, DTYPES)
    check_supported(weight, WEIGHTS)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, scale, bias, residual)):
        raise UnsupportedError("it has no backward kernel")
    if x.shape[:-1].numel() > (MAX_ROWS if x.dtype is torch.float32 else MOST_ROWS):
        wide = dequantized(weight, scale, block_size, x.dtype)
        if residual is None:
            return ops.linear(x, wide, bias, backend="cutile")
        return decode_ops.linear_add(x, wide, residual, bias, backend="cutile")
    block_n, block_k = block_size or (0, 0)
    if block_n % BLOCK_N or block_k % BLOCK_K:
        raise UnsupportedError(f"it takes blocks of multiples of {BLOCK_N} rows and {BLOCK_K} columns")
    return quantized_linear_forward(x, weight, scale, bias, residual, block_n, block_k)
