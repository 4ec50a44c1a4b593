"""2 to 16 rows times a weight, on tensor cores: as fast as memory delivers the weight, which is all the work there is.

The weight is the left operand, whose tiles may be tall, and the rows of x, padded with zeros, are the few columns of
the right one.
"""

import functools
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.ops.cutile.matmul import load_bias
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span

MAX_ROWS = 16  # the columns of the right operand
LONG = 14336  # columns in 16 bits from which on rows are split
MERGED = 32  # rows of splits that a block merges


def columns(x, n, TILE_N: Int, TILE_M: Int):
    """In a kernel: the n-th TILE_N columns of x, [M, N] or [M, 1, N], as [TILE_N, TILE_M]."""
    zero = ct.PaddingMode.ZERO
    if x.ndim == 2:
        tile = ct.load(x, (n, 0), (TILE_N, TILE_M), order=(1, 0), padding_mode=zero)
    else:
        tile = ct.load(x, (n, 0, 0), (TILE_N, 1, TILE_M), order=(2, 1, 0), padding_mode=zero)
        tile = tile.reshape((TILE_N, TILE_M))
    return tile


def put_columns(out, n, tile, TILE_N: Int, TILE_M: Int):
    """In a kernel: stores what :func:`columns` would load."""
    if out.ndim == 2:
        ct.store(out, (n, 0), tile, order=(1, 0))
    else:
        ct.store(out, (n, 0, 0), tile.reshape((TILE_N, 1, TILE_M)), order=(2, 1, 0))


def products(x, weights, n, first, last, TILE_M: Int, TILE_N: Int, TILE_K: Int, TF32: Bool):
    """In a kernel: the n-th TILE_N rows of each weight [N, K] times the rows of x, as [TILE_N, TILE_M] in fp32; of K
    the tiles from ``first`` to ``last``."""
    sums = ()
    for _ in ct.static_iter(weights):
        sums = (*sums, ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
    for k in range(first, last):
        x_tile, former, sums = columns(x, k, TILE_K, TILE_M), sums, ()
        for weight, acc in ct.static_iter(zip(weights, former, strict=True)):
            tile = ct.load(weight, (n, k), (TILE_N, TILE_K), padding_mode=ct.PaddingMode.ZERO)
            if TF32:
                acc = ct.mma(tile.astype(ct.tfloat32), x_tile.astype(ct.tfloat32), acc)
            else:
                acc = ct.mma(tile, x_tile, acc)
            sums = (*sums, acc)
    return sums


def onto(y, residual, SCALE: Float, dtype):
    """In a kernel: ``residual``, None for none, and SCALE times y, in ``dtype``, to which each step rounds."""
    y = y.astype(dtype)
    if SCALE != 1.0:
        y = (y.astype(ct.float32) * SCALE).astype(dtype)
    return y if residual is None else (y.astype(ct.float32) + residual).astype(dtype)


def finished(acc, bias, residual, dtype, n, BIAS: Bool, ADD: Bool, SCALE: Float, TILE_M: Int, TILE_N: Int):
    """In a kernel: a tile of products with the bias, and with the residual if ADD, in ``dtype``."""
    if BIAS:
        acc = acc + load_bias(bias, n, TILE_N).reshape((TILE_N, 1))
    rest = columns(residual, n, TILE_N, TILE_M).astype(ct.float32) if ADD else None
    return onto(acc, rest, SCALE, dtype)


@ct.kernel
def few_rows_kernel(
    x, weight, bias, residual, out, BIAS: Bool, ADD: Bool, SCALE: Float, SPLITS: Int, TILE_M: Int, TILE_N: Int,
    TILE_K: Int, TF32: Bool, OVERLAP: Bool,
):  # fmt: skip
    # x [M, K] with M <= TILE_M, weight [N, K], bias [N] if BIAS (else 0), residual [M, N] if ADD, out [M, N]; or
    # x [M, 1, K] and out [M, 1, N]. With several SPLITS of K out is [SPLITS, N, TILE_M] in fp32, for merge_rows_kernel.
    begin(OVERLAP)
    n, split = ct.bid(0), ct.bid(1)
    tiles = ct.cdiv(weight.shape[1], TILE_K)
    first, last = tiles * split // SPLITS, tiles * (split + 1) // SPLITS
    (acc,) = products(x, (weight,), n, first, last, TILE_M, TILE_N, TILE_K, TF32)
    if SPLITS > 1:
        ct.store(out, (split, n, 0), acc.reshape((1, TILE_N, TILE_M)))
    else:
        put_columns(
            out, n, finished(acc, bias, residual, out.dtype, n, BIAS, ADD, SCALE, TILE_M, TILE_N), TILE_N, TILE_M
        )


@ct.kernel
def merge_rows_kernel(
    partial, bias, residual, out, BIAS: Bool, ADD: Bool, SCALE: Float, SPLITS: Int, TILE_M: Int, TILE_N: Int,
    OVERLAP: Bool,
):  # fmt: skip
    """The sums of what few_rows_kernel has split, always in the same order."""
    begin(OVERLAP)
    n, tiles = ct.bid(0), ()
    at = span(n, TILE_N)[:, None], ct.arange(TILE_M, dtype=ct.int32)[None, :]
    for split in ct.static_iter(range(SPLITS)):  # all loads before the first sum
        tiles = (*tiles, ct.gather(partial, (split, *at)))
    acc = tiles[0]
    for split in ct.static_iter(range(1, SPLITS)):
        acc = acc + tiles[split]
    y = finished(acc, bias, residual, out.dtype, n, BIAS, ADD, SCALE, TILE_M, TILE_N)
    put_columns(out, n, y, TILE_N, TILE_M)


class Plan(NamedTuple):
    """Sizes of the tiles, and how many blocks share a multiprocessor and the columns of a weight."""

    tile_m: int
    tile_n: int
    tile_k: int
    occupancy: int
    splits: int = 1


def gpu_plan(rows: int, n: int, k: int, bits: int, processors: int) -> Plan:
    """For one weight [n, k], as measured on an H200 with bf16.

    In GB/s, cuBLAS in brackets: 14336x4096 2992 (2861), 6144x4096 2366 (2222), 128256x4096 4269 (4083), for up to 16
    rows alike. Smaller tiles have too little memory traffic under way, and larger ones spill, unless a block has a
    multiprocessor for itself, as where there are few: 16 rows of 2560x10240 take 18.9 us so (with half as wide a tile
    22.4; cuBLAS 20.6), of 4096x14336 32.4 (34.5; 34.5), of 2048x4096 10.6 (11.8; 11.8), of 6144x4096 the same.

    In a graph of layers long rows are split: one with the sizes of Llama-3.1-8B, whose last weight is 4096x14336, takes
    129.8 us for 16 rows so and 138.4 without, for 8 rows 143.6 and 144.9; with two splits 137.2 and 146.4. Of Qwen3-8B,
    4096x12288, and Llama-3.2-1B, 2048x8192, it takes up to 2 us more. To read weights ahead of the wait, as for one
    row, gains nothing in any of them, and costs up to 35 us: a block has as much on its way as shared memory holds.
    """
    blocks = ct.cdiv(n, 64)
    alone = 2 * blocks <= processors
    if alone and bits == 16 and k >= LONG:
        return Plan(tile_m_of(rows, 64), 64, 128, 2, 4)
    width = 4096 if alone or blocks > processors else 2048
    return Plan(tile_m_of(rows, 64), 64, min(width // bits, max(32, next_power_of_2(k))), 1 if alone else 2)


def tile_m_of(rows: int, tile_n: int) -> int:
    """How many columns the right operand has: 8 of them go without tensor cores where tiles of the weight are small."""
    return 8 if rows <= 8 and tile_n >= 64 else MAX_ROWS


@functools.lru_cache(maxsize=1024)
def plan_of(rows: int, n: int, k: int, bits: int, device_index: int) -> Plan:
    if device_index < 0:
        return Plan(tile_m_of(rows, 64), 32, 64, 2, 2 if 128 <= k <= 192 else 1)
    return gpu_plan(rows, n, k, bits, sm_count(device_index))


def launch_few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Writes ``residual + scale * (x @ weight.T + bias)`` to out.

    x [M, K] or [M, 1, K], residual and out [M, N] or [M, 1, N].
    """
    (n, k), index = weight.shape, x.get_device()
    has_bias, adds, overlap = bias is not None, residual is not None, overlaps(index)
    tile_m, tile_n, tile_k, occupancy, splits = plan_of(x.shape[0], n, k, x.dtype.itemsize * 8, index)
    behind = (bias if has_bias else 0, residual if adds else 0, out, has_bias, adds, scale)
    sizes = (splits, tile_m, tile_n, tile_k, uses_tf32(x.dtype), overlap)
    grid, kernel = (-(-n // tile_n), splits), hinted(few_rows_kernel, occupancy=occupancy)
    if splits == 1:
        launch(out, grid, kernel, (x, weight, *behind, *sizes), overlap)
        return
    partial = x.new_empty((splits, n, tile_m), dtype=torch.float32)
    launch(out, grid, kernel, (x, weight, 0, 0, partial, False, False, 1.0, *sizes), overlap)
    args = (partial, *behind, splits, tile_m, MERGED, overlap)
    launch(out, (-(-n // MERGED),), merge_rows_kernel, args, overlap)
