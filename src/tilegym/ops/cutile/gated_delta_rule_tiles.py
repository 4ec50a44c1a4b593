"""What the kernels of the chunked gated delta rule share: loads of a chunk, and products of tiles.

A chunk has CHUNK tokens; what lies behind the last token is read as zeros, which neither decay nor change the state.
"""

import cuda.tile as ct

from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import span

LEVELS = 6
CHUNK = 2**LEVELS
# How fp32 tiles are multiplied: in tf32, with its 10 bits, or in three products of their upper and lower halves in
# tf32, with some 21 bits. (ct.mma on fp32 has no tensor cores, and its tiles no room in the registers.)
TF32, TF32_SPLIT = 1, 3
# The factors of a token, rows of ``factors``, [B * Hv, chunks, FACTORS, CHUNK]: what multiplies q @ S, k @ S, v, and k
# on its way into the state; then the decay since the start of the chunk.
OF_READ, OF_HELD, OF_VALUE, OF_WRITE, DECAY = range(5)
FACTORS = 5
ZERO = ct.PaddingMode.ZERO


def product(a, b, acc, PRECISION: Int):
    """``a @ b + acc``, in fp32."""
    x, y = a.astype(ct.float32), b.astype(ct.float32)
    high_x, high_y = x.astype(ct.tfloat32), y.astype(ct.tfloat32)
    if PRECISION == TF32_SPLIT:
        # What 16 bits hold has no lower half.
        if b.dtype == ct.float32:
            acc = ct.mma(high_x, (y - high_y.astype(ct.float32)).astype(ct.tfloat32), acc)
        if a.dtype == ct.float32:
            acc = ct.mma((x - high_x.astype(ct.float32)).astype(ct.tfloat32), high_y, acc)
    return ct.mma(high_x, high_y, acc)


def product_of(a, b, PRECISION: Int):
    """``a @ b`` in fp32."""
    return product(a, b, ct.zeros((a.shape[0], b.shape[1]), ct.float32), PRECISION)


def gram(a, b, PRECISION: Int):
    """``a @ b.T`` in fp32, for tiles in the dtype of the inputs: products of 16 bits are exact."""
    if a.dtype == ct.float32:
        return product_of(a, ct.transpose(b), PRECISION)
    return ct.mma(a, ct.transpose(b), ct.zeros((a.shape[0], b.shape[0]), ct.float32))


def chunk_of(x, batch, chunk, head, column, WIDTH: Int):
    """Tile ``column`` of a chunk of a head of ``x``, [B, T, H, D]: [CHUNK, WIDTH]."""
    tile = ct.load(x, (batch, chunk, head, column), (1, CHUNK, 1, WIDTH), padding_mode=ZERO)
    return tile.reshape((CHUNK, WIDTH))


def store_chunk(x, batch, chunk, head, column, tile):
    """Writes what :func:`chunk_of` reads."""
    ct.store(x, (batch, chunk, head, column), tile.astype(x.dtype).reshape((1, CHUNK, 1, tile.shape[1])))


def matrix_of(x, row, chunk, column, HEIGHT: Int, WIDTH: Int):
    """Tile ``column`` of matrix (row, chunk) of ``x``, [B * Hv, chunks, HEIGHT, ...]: [HEIGHT, WIDTH]."""
    return ct.load(x, (row, chunk, 0, column), (1, 1, HEIGHT, WIDTH), padding_mode=ZERO).reshape((HEIGHT, WIDTH))


def store_matrix(x, row, chunk, column, tile):
    """Writes what :func:`matrix_of` reads."""
    ct.store(x, (row, chunk, 0, column), tile.astype(x.dtype).reshape((1, 1, tile.shape[0], tile.shape[1])))


def factor(factors, row, chunk, WHICH: Int):
    """A column, [CHUNK, 1], of what each token is multiplied by."""
    return ct.load(factors, (row, chunk, WHICH, 0), (1, 1, 1, CHUNK)).reshape((CHUNK, 1))


def chunk_decay(factors, row, chunk):
    """The decay of the state over the whole chunk, [1, 1]."""
    return ct.load(factors, (row, chunk, DECAY, CHUNK - 1), (1, 1, 1, 1)).reshape((1, 1))


def inverse_norms(own, AXIS: Int, EPS: Float, NORM: Bool):
    """What rows of a tile x are multiplied by to be normalised, from ``own = gram(x, x)``; ones if they are not.

    A column for AXIS 1, a row for AXIS 0. The sums of squares are on the diagonal: to sum rows of x beside the products
    makes the compiler spill.
    """
    place = ct.arange(CHUNK, dtype=ct.int32)
    squares = ct.sum(ct.where(place[:, None] == place[None, :], own, 0.0), axis=AXIS, keepdims=True)
    return ct.rsqrt(squares + EPS) if NORM else ct.ones(squares.shape, ct.float32)


def numbers_of(x, batch, chunk, head):
    """The numbers of a chunk of a head of ``x``, [B, T, H]: [CHUNK] in fp32."""
    return ct.gather(x, (batch, span(chunk, CHUNK), head)).astype(ct.float32)


def decays(total):
    """exp(total_i - total_j) where i >= j, else 0: [CHUNK, CHUNK], from the sums of log decays within a chunk."""
    place = ct.arange(CHUNK, dtype=ct.int32)
    # Masked before exp: what runs backwards in time is positive, and may be large.
    between = ct.where(place[:, None] >= place[None, :], total[:, None] - total[None, :], float("-inf"))
    return ct.exp(between)


def strictly_lower(tile):
    place = ct.arange(CHUNK, dtype=ct.int32)
    return ct.where(place[:, None] > place[None, :], tile, 0.0)


def inverse(system, levels, PRECISION: Int):
    """(I + system)^-1 for a strictly lower triangular ``system``, [CHUNK, CHUNK].

    Inverses of neighbouring blocks on the diagonal are joined, ``[[A, 0], [C, B]]^-1 = [[A^-1, 0],
    [-B^-1 C A^-1, B^-1]]``, from blocks of one row to all rows. A power series of the system would cost no less, and
    lose all its digits where keys repeat. ``levels`` is LEVELS, given at run time: the compiler would unroll the loop,
    with shared memory for each level.
    """
    place = ct.arange(CHUNK, dtype=ct.int32)
    result = ct.where(place[:, None] == place[None, :], 1.0, -_below(system, 0))
    for level in range(1, levels):
        result = result - product_of(result, product_of(_below(system, level), result, PRECISION), PRECISION)
    return result


def _below(system, level):
    """What couples each odd block of 2^level rows with the even one above it, 0 elsewhere."""
    block = ct.arange(CHUNK, dtype=ct.int32) >> level
    rows, cols = block[:, None], block[None, :]
    return ct.where((rows % 2 == 1) & (rows == cols + 1), system, 0.0)
