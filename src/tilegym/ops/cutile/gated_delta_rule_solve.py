"""The systems of the chunks of the gated delta rule: what every token writes once the others of its chunk have written.

``X = A (I + beta * A)^-1`` of a strictly lower triangular A, [CHUNK, CHUNK], beta a factor of the rows. X of
neighbouring blocks on the diagonal, W and Y, are joined, from blocks of one row to all rows: what couples them in A, C,
becomes ``(I - Y beta) C (I - beta * W)``. A power series of the system would cost no less, and lose all its digits
where keys repeat.
"""

import cuda.tile as ct

from tilegym.ops.cutile.gated_delta_rule_tiles import CHUNK
from tilegym.ops.cutile.gated_delta_rule_tiles import RATE
from tilegym.ops.cutile.gated_delta_rule_tiles import product_of
from tilegym.ops.cutile.gated_delta_rule_tiles import store_system
from tilegym.ops.cutile.tiling import Int

# Blocks of up to BLOCK rows are joined in tiles of the same size, whose upper halves and what is not coupled are zeros:
# tensor cores take no smaller ones. So that a block on the diagonal does not compute with the zeros of all the others,
# the tiles are those blocks, [CHUNK / BLOCK, BLOCK, BLOCK].
LEVELS = 4
BLOCK = 2**LEVELS


@ct.kernel
def chunk_solve_kernel(solved, factors, levels, PRECISION: Int):
    """X in the place of A, as ``store_system`` writes both. ``levels`` is LEVELS, given at run time: the compiler would
    unroll the loop, with shared memory for each level. On its own, since it needs less of that than the products before
    it. No TMA, whose warps take registers: on an H200 it was 120 us for 4096 systems with it and 90 without.
    """
    row, chunk = ct.bid(0) // solved.shape[1], ct.bid(0) % solved.shape[1]
    rate = ct.gather(factors, (row, chunk, RATE, ct.arange(CHUNK, dtype=ct.int32)), check_bounds=False)
    system = coupling(solved, row, chunk, 0, 0, BLOCK, BLOCK)
    rows, columns = rate.reshape((CHUNK // BLOCK, BLOCK, 1)), rate.reshape((CHUNK // BLOCK, 1, BLOCK))
    result = _below(system, 0)
    for level in range(1, levels):
        right = product_of(_below(system, level), _identity(BLOCK) - rows * result, PRECISION)
        result = result + product_of(_identity(BLOCK) - result * columns, right, PRECISION)
    result = joined(result, coupling(solved, row, chunk, BLOCK, 0, BLOCK, 2 * BLOCK), rate, PRECISION)
    result = joined(result, coupling(solved, row, chunk, 2 * BLOCK, 0, 2 * BLOCK, CHUNK), rate, PRECISION)
    store_system(solved, row, chunk, result.reshape((CHUNK, CHUNK)), False)


def coupling(solved, row, chunk, first_row, first_column, SIZE: Int, STEP: Int):
    """Blocks of A, [CHUNK / STEP, SIZE, SIZE], every STEP rows and columns from the first."""
    place = ct.arange(SIZE, dtype=ct.int32)
    start = ct.arange(CHUNK // STEP, dtype=ct.int32)[:, None, None] * STEP
    rows, columns = start + first_row + place[None, :, None], start + first_column + place[None, None, :]
    tile = ct.gather(solved, (row, chunk, rows, columns), check_bounds=False).astype(ct.float32)
    if solved.dtype == ct.bfloat16:
        low = ct.gather(solved, (row, chunk, rows, columns + CHUNK), check_bounds=False)
        tile = tile + low.astype(ct.float32)
    return tile


def joined(result, coupled, rate, PRECISION: Int):
    """X of blocks of twice the rows, from X of all blocks, [2 n, m, m], and what couples each two, [n, m, m]."""
    n, m = coupled.shape[0], coupled.shape[1]
    pairs = result.reshape((n, 2, m, m))
    above = ct.extract(pairs, (0, 0, 0, 0), (n, 1, m, m)).reshape((n, m, m))
    below = ct.extract(pairs, (0, 1, 0, 0), (n, 1, m, m)).reshape((n, m, m))
    rates = rate.reshape((n, 2, m))
    rows = ct.extract(rates, (0, 0, 0), (n, 1, m)).reshape((n, m, 1))
    columns = ct.extract(rates, (0, 1, 0), (n, 1, m)).reshape((n, 1, m))
    left = product_of(coupled, _identity(m) - rows * above, PRECISION)
    left = product_of(_identity(m) - below * columns, left, PRECISION)
    upper = ct.cat((above, ct.zeros((n, m, m), ct.float32)), 2)
    return ct.cat((upper, ct.cat((left, below), 2)), 1)


def _identity(SIZE: Int):
    place = ct.arange(SIZE, dtype=ct.int32)
    return ct.where(place[None, :, None] == place[None, None, :], 1.0, 0.0)


def _below(system, level):
    """What couples each odd block of 2^level rows with the even one above it, 0 elsewhere."""
    block = ct.arange(BLOCK, dtype=ct.int32) >> level
    rows, columns = block[None, :, None], block[None, None, :]
    return ct.where((rows % 2 == 1) & (rows == columns + 1), system, 0.0)
