"""Softmax of many rows of 16 bits, each by a block whose warps meet once; and rows read 16 bytes at a time.

Warps take powers relative to a maximum of their own, so that they exchange maxima and sums at the same time, behind one
barrier. And where a row's last columns are not known to come by sixteens, as those of 1000 or 3000, the compiler reads
what may lie outside one element at a time, unless it sees that eight neighbours lie inside or outside together.
"""

import functools
import math

import cuda.tile as ct

from tilegym.ops.cutile.pointwise import block
from tilegym.ops.cutile.row_norms import row_sum
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count

EIGHT = 8  # elements of 16 bits that a thread reads at once
MAX_ROWS = 65535  # of one launch: blocks along axis 1 or 2
# Warps and occupancy by columns, rounded up to a power of two, where there are more rows than run at once: of whole
# tiles, and of rows that eight divides, but not sixteen. In us on an H200, in bf16 (to copy as many bytes): 8192x4096
# 36.7 instead of 37.4 (36.4), 8192x1024 12.3 instead of 12.5 (11.7), 8192x3000 29.1 instead of 34.6 (28.5), 8192x1000
# 12.3 instead of 15.8 (11.5); in the backward pass 8192x3000 41.2 instead of 47.1 (39.8). 2048 and 8192 columns, and
# others that sixteen divides, are as fast or faster held as they come, and so are those of fp32.
WHOLE, EIGHTS, EIGHTS_BACKWARD = (
    {1024: (4, 8), 4096: (8, 4)},
    {1024: (4, 8), 2048: (4, 8), 4096: (4, 8)},
    {4096: (8, 4)},
)
ON_CPU = {512: (2, 4)}


def exp_of(difference, dtype):
    """exp, to fp32's precision for fp32 inputs, else to well beyond that of their dtype."""
    if dtype == ct.float32:
        return ct.exp(difference)
    return ct.exp2(difference * 1.4426950408889634, flush_to_zero=True)


def base_of(top):
    # While all seen so far is -inf, differences to it would be NaN.
    return ct.where(top == -math.inf, 0.0, top)


def eights(x, row, TILE: Int):
    """The indices of a row's columns, [TILE / 8, 8], and which are inside, [TILE / 8, 1]; eight divides the columns."""
    groups = ct.arange(TILE // EIGHT, dtype=ct.int32)[:, None]
    cols = groups * EIGHT + ct.arange(EIGHT, dtype=ct.int32)[None, :]
    return at(x, row, cols), groups < x.shape[x.ndim - 1] // EIGHT


@ct.kernel
def softmax_joint_kernel(x, y, TILE: Int, WARPS: Int, FULL: Bool):
    """Each block takes a row of TILE columns of 16 bits, a multiple of 256 * WARPS; unless FULL, of fewer, a multiple
    of eight."""
    row, cols = ct.bid(1), ct.arange(TILE, dtype=ct.int32)
    if FULL:
        values = ct.gather(x, at(x, row, cols), check_bounds=False)
    else:
        where, inside = eights(x, row, TILE)
        values = ct.gather(x, where, mask=inside, padding_value=-math.inf, check_bounds=False)
    values = values.reshape((TILE // (256 * WARPS), WARPS, 256))  # 16 bytes a thread, and one warp beside the other
    tops = ct.max(ct.max(values, axis=0, keepdims=True), axis=2, keepdims=True).astype(ct.float32)
    powers = exp_of(values.astype(ct.float32) - base_of(tops), x.dtype)
    sums = ct.sum(ct.sum(powers, axis=0, keepdims=True), axis=2, keepdims=True)
    top = ct.extract(tops, (0, 0, 0), (1, 1, 1))
    for warp in ct.static_iter(range(1, WARPS)):
        top = ct.maximum(top, ct.extract(tops, (0, warp, 0), (1, 1, 1)))
    total = ct.zeros((1, 1, 1), ct.float32)
    for warp in ct.static_iter(range(WARPS)):
        shrink = exp_of(ct.extract(tops, (0, warp, 0), (1, 1, 1)) - top, x.dtype)
        total = total + ct.extract(sums, (0, warp, 0), (1, 1, 1)) * shrink
    # An exact quotient would take a branch.
    share = ct.truediv(1.0, total, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    out = powers * (exp_of(tops - top, x.dtype) * share)
    if FULL:
        ct.scatter(y, at(y, row, cols), out.reshape((TILE,)).astype(y.dtype), check_bounds=False)
    else:
        out = out.reshape((TILE // EIGHT, EIGHT)).astype(y.dtype)
        ct.scatter(y, where, out, mask=inside, check_bounds=False)


@ct.kernel
def softmax_backward_eights_kernel(dy, y, dx, TILE: Int, WARPS: Int):
    """Each block takes a row of fewer columns than TILE, a multiple of eight, the last first."""
    where, inside = eights(y, block(1, True), TILE)
    out = ct.gather(y, where, mask=inside, padding_value=0, check_bounds=False).reshape((1, TILE))
    up = ct.gather(dy, where, mask=inside, padding_value=0, check_bounds=False).reshape((1, TILE))
    total = row_sum(out.astype(ct.float32) * up.astype(ct.float32), y.dtype, WARPS, False)
    grad = out.astype(ct.float32) * (up.astype(ct.float32) - total)
    grad = grad.reshape((TILE // EIGHT, EIGHT)).astype(dx.dtype)
    ct.scatter(dx, where, grad, mask=inside, check_bounds=False)


@functools.lru_cache(maxsize=1024)
def joint_plan(m: int, n: int, device: int, backward: bool, size: int) -> tuple[ct.kernel, tuple] | None:
    """(kernel, tile constants) for rows [m, n] of ``size`` bytes an element, a block each; None for others."""
    tile = next_power_of_2(n)
    if size != 2 or not 4 * sm_count(device) < m <= MAX_ROWS or (n != tile and n % 16 != EIGHT):
        return None
    if n == tile:
        plans = {} if backward else WHOLE
    else:
        plans = EIGHTS_BACKWARD if backward else EIGHTS
    warps, occupancy = (ON_CPU if device < 0 and plans else plans).get(tile, (0, 0))
    if not warps:
        return None
    kernel = softmax_backward_eights_kernel if backward else softmax_joint_kernel
    kernel = hinted(kernel, num_worker_warps=max(4, warps), occupancy=occupancy)
    return kernel, (tile, warps) if backward else (tile, warps, n == tile)
