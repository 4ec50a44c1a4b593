"""What the kernels of the gated delta rule share: loads of a chunk, products of tiles, what they do not serve.

A chunk has CHUNK tokens; what lies behind the last token is read as zeros, which neither decay nor change the state.
"""

import cuda.tile as ct
import torch

from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import wants_gradient

CHUNK = 64
# How fp32 tiles are multiplied: in tf32, with its 10 bits; by tiles in bf16, as their upper and lower halves in bf16,
# with 16 bits; in products of their upper and lower halves in tf32, with 22 bits; or in those of their three thirds in
# bf16, with all 24. Tensor cores cut off what does not fit beside the largest number of those that they add at once:
# products of two thirds, which have 16 bits, mostly do. (ct.mma on fp32 has no tensor cores, and its tiles no room in
# the registers; on fp64 it takes six times the code.)
TF32, BF16_PAIR, TF32_SPLIT, BF16_SPLIT = 1, 2, 4, 6
PART = 16
# The factors of a token, rows of ``factors``, [B * Hv, chunks, FACTORS, CHUNK]: what multiplies q @ S, k @ S, and k on
# its way into the state; beta; the decay since the start of the chunk.
OF_READ, OF_HELD, OF_WRITE, RATE, DECAY = range(5)
FACTORS = 5
ZERO = ct.PaddingMode.ZERO
LEAST_LOG = -1000.0  # far below where exp is 0; its sums leave differences enough digits, and -inf none
MAX_HEAD_DIM = 256
MAX_KEY_DIM_OF_GRADIENTS = 128  # tileiras 13.4 fails on wider tiles in bf16, and takes minutes in fp32


def product_onto(a, b, acc, PRECISION: Int):
    """``a @ b + acc`` in fp32, for an ``acc`` that is no larger than the product.

    Tensor cores cut off what they add to an accumulator, :func:`product` rounds it. Of that, in some of what follows a
    loop, tileiras 13.4 makes nothing ("Invalid use-def chain in schedule").
    """
    if PRECISION == BF16_SPLIT:
        x, y = thirds(a), thirds(b)
        return ct.mma(x[0], y[0], smaller_products(x, y, acc))
    if PRECISION == BF16_PAIR:
        return product_of_halves(as_halves(a), as_halves(b), acc)
    x, y = a.astype(ct.float32), b.astype(ct.float32)
    high_x, high_y = x.astype(ct.tfloat32), y.astype(ct.tfloat32)
    if PRECISION == TF32_SPLIT:
        low_x = (x - high_x.astype(ct.float32)).astype(ct.tfloat32)
        low_y = (y - high_y.astype(ct.float32)).astype(ct.tfloat32)
        # The smallest first. What 16 bits hold has no lower half.
        if a.dtype == ct.float32 and b.dtype == ct.float32:
            acc = ct.mma(low_x, low_y, acc)
        if b.dtype == ct.float32:
            acc = ct.mma(high_x, low_y, acc)
        if a.dtype == ct.float32:
            acc = ct.mma(low_x, high_y, acc)
    return ct.mma(high_x, high_y, acc)


def halves(x):
    """Two tiles in bf16 whose sum is the tile ``x`` in fp32 up to 2^-17 of it, the larger first."""
    high = x.astype(ct.bfloat16)
    return high, (x - high.astype(ct.float32)).astype(ct.bfloat16)


def as_halves(x):
    """:func:`halves` of a tile in fp32; one in bf16 has no lower half."""
    return (x,) if x.dtype == ct.bfloat16 else halves(x)


def product_of_halves(x, y, acc):
    """The product of two tiles given as one or two in bf16, added to ``acc``, the smallest first."""
    if len(y) > 1:
        acc = ct.mma(x[0], y[1], acc)
    if len(x) > 1:
        acc = ct.mma(x[1], y[0], acc)
    return ct.mma(x[0], y[0], acc)


def thirds(x):
    """Three tiles in bf16 whose sum is the tile ``x`` in fp32, the largest first."""
    x = x.astype(ct.float32)
    high = x.astype(ct.bfloat16)
    rest = x - high.astype(ct.float32)
    middle = rest.astype(ct.bfloat16)
    return high, middle, (rest - middle.astype(ct.float32)).astype(ct.bfloat16)


def smaller_products(x, y, acc):
    """What two tiles' thirds multiply to beside the products of the largest."""
    for i, j in ct.static_iter(((1, 2), (2, 1), (0, 2), (1, 1), (2, 0), (0, 1), (1, 0))):
        acc = ct.mma(x[i], y[j], acc)
    return acc


def product_of(a, b, PRECISION: Int):
    """``a @ b`` in fp32, of tiles or batches of them; not behind a loop, see :func:`product_onto`."""
    zeros = ct.zeros((*a.shape[:-1], b.shape[-1]), ct.float32)
    if PRECISION == BF16_SPLIT:
        # What is small is added up by itself, so that nothing of it is cut off.
        x, y = thirds(a), thirds(b)
        return ct.mma(x[0], y[0], zeros) + smaller_products(x, y, zeros)
    return product_onto(a, b, zeros, PRECISION)


def product_of_system(a, b, PRECISION: Int):
    """``a @ b`` in fp32, for the ``a`` of :func:`system_left`.

    Where keys repeat, this is about the differences of neighbouring rows of b, which may be much smaller than the rows,
    and small numbers in a correct them. Tensor cores would cut their products off beside the large ones, all of them
    toward zero, which adds up along the sequence. So a is cut into multiples of 2^-7, of 2^-15, and what is left, of 16
    bits, whose products are added up by themselves.
    """
    zeros = ct.zeros((a.shape[0], b.shape[1]), ct.float32)
    if PRECISION != BF16_SPLIT:
        return product_onto(a, b, zeros, PRECISION)
    high = ((a + 1.5 * 2.0**16) - 1.5 * 2.0**16).astype(ct.bfloat16)
    rest = a - high.astype(ct.float32)
    middle = ((rest + 1.5 * 2.0**8) - 1.5 * 2.0**8).astype(ct.bfloat16)
    rest = rest - middle.astype(ct.float32)
    low = rest.astype(ct.bfloat16)
    y = thirds(b)
    small = ct.mma((rest - low.astype(ct.float32)).astype(ct.bfloat16), y[0], zeros)
    return ct.mma(high, y[0], zeros) + smaller_products((high, middle, low), y, small)


def product(a, b, acc, PRECISION: Int):
    """``a @ b + acc`` in fp32, for an ``acc`` that may be much larger than the product."""
    if PRECISION == TF32 or PRECISION == BF16_PAIR:
        return product_onto(a, b, acc, PRECISION)
    return acc + product_of(a, b, PRECISION)


def system_product(x, row, chunk, b, acc, TRANSPOSED: Bool, PRECISION: Int):
    """``m @ b + acc`` for a matrix m of a chunk that :func:`store_system` wrote, or with its transpose."""
    high = matrix_of(x, row, chunk, 0, CHUNK, CHUNK)
    if TRANSPOSED:
        high = ct.transpose(high)
    if PRECISION != BF16_PAIR:
        return product(high, b, acc, PRECISION)
    low = matrix_of(x, row, chunk, 1, CHUNK, CHUNK)
    if TRANSPOSED:
        low = ct.transpose(low)
    return product_of_halves((high, low), as_halves(b), acc)


def gram(a, b, PRECISION: Int):
    """``a @ b.T`` in fp32, for tiles in the dtype of the inputs: products of 16 bits are exact."""
    if a.dtype == ct.float32:
        return product_of(a, ct.transpose(b), PRECISION)
    return ct.mma(a, ct.transpose(b), ct.zeros((a.shape[0], b.shape[0]), ct.float32))


def grams(q, k, batch, chunk, head, TILE_K: Int, PRECISION: Int):
    """``k @ k.T``, ``q @ q.T`` and ``q @ k.T`` of a chunk of a head, each as :func:`gram`.

    In fp32 from PART columns at a time: what tensor cores cut off at each step adds up where all that is summed is
    positive, as it is for equal keys. The scan, which multiplies otherwise, would miss what A says that it finds.
    """
    if k.dtype != ct.float32:
        kt, qt = chunk_of(k, batch, chunk, head, 0, TILE_K), chunk_of(q, batch, chunk, head, 0, TILE_K)
        return gram(kt, kt, PRECISION), gram(qt, qt, PRECISION), gram(qt, kt, PRECISION)
    same_k = ct.zeros((CHUNK, CHUNK), ct.float32)
    same_q = ct.zeros((CHUNK, CHUNK), ct.float32)
    across = ct.zeros((CHUNK, CHUNK), ct.float32)
    for part in range(ct.cdiv(k.shape[3], PART)):
        kt, qt = chunk_of(k, batch, chunk, head, part, PART), chunk_of(q, batch, chunk, head, part, PART)
        same_k = same_k + gram(kt, kt, PRECISION)
        same_q = same_q + gram(qt, qt, PRECISION)
        across = across + gram(qt, kt, PRECISION)
    return same_k, same_q, across


def key_tile(key_dim: int) -> int:
    """The width of a tile of keys. With 16 tileiras 13.4 fails on products of thirds."""
    return max(32, tile_of(key_dim))


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


def store_system(x, row, chunk, tile, TMA: Bool):
    """Writes a matrix of a chunk: into ``x`` in fp32, [B * Hv, chunks, CHUNK, CHUNK], or in bf16 as its upper and lower
    halves beside each other, [B * Hv, chunks, CHUNK, 2 * CHUNK]."""
    if x.dtype == ct.bfloat16:
        high, low = halves(tile)
        ct.store(x, (row, chunk, 0, 0), high.reshape((1, 1, CHUNK, CHUNK)), allow_tma=TMA)
        ct.store(x, (row, chunk, 0, 1), low.reshape((1, 1, CHUNK, CHUNK)), allow_tma=TMA)
    else:
        ct.store(x, (row, chunk, 0, 0), tile.reshape((1, 1, CHUNK, CHUNK)), allow_tma=TMA)


def saved(x, row, chunk, column, HEIGHT: Int, WIDTH: Int):
    """Tile ``column`` of matrix (row, chunk) that :func:`store_saved` wrote, as one in fp32 or two in bf16."""
    at, shape = (row, chunk, 0, 0, column), (1, 1, 1, HEIGHT, WIDTH)
    tile = ct.load(x, at, shape, padding_mode=ZERO).reshape((HEIGHT, WIDTH))
    if x.dtype != ct.bfloat16:
        return (tile,)
    low = ct.load(x, (row, chunk, 1, 0, column), shape, padding_mode=ZERO)
    return tile, low.reshape((HEIGHT, WIDTH))


def store_saved(x, row, chunk, column, tile):
    """Writes into ``x`` a tile in fp32, [B * Hv, chunks, 1, ...], or its halves in bf16, [B * Hv, chunks, 2, ...]."""
    shape = (1, 1, 1, tile.shape[0], tile.shape[1])
    if x.dtype == ct.bfloat16:
        high, low = halves(tile)
        ct.store(x, (row, chunk, 0, 0, column), high.reshape(shape))
        ct.store(x, (row, chunk, 1, 0, column), low.reshape(shape))
    else:
        ct.store(x, (row, chunk, 0, 0, column), tile.reshape(shape))


def whole(x):
    """The tile in fp32 that :func:`saved` gave."""
    if len(x) > 1:
        return x[0].astype(ct.float32) + x[1].astype(ct.float32)
    return x[0]


def product_transposed(x, y, acc, PRECISION: Int):
    """``x @ y.T + acc`` in fp32, for tiles as :func:`saved` gives them, and an ``acc`` that may be much larger."""
    if PRECISION == BF16_PAIR:
        flipped = (ct.transpose(y[0]),)
        if len(y) > 1:
            flipped = (*flipped, ct.transpose(y[1]))
        return product_of_halves(x, flipped, acc)
    return product(whole(x), ct.transpose(whole(y)), acc, PRECISION)


def factors_of(factors, row, chunk):
    """What each token of a chunk is multiplied by, RATE, OF_HELD, OF_READ and OF_WRITE, each [CHUNK, 1], and the decay
    of the state over the chunk.

    For a scan, which takes those of a chunk while it is at the one before: on an H200, where the compiler loads what it
    takes at once into one or two buffers, it waited for them in each, 320 us instead of 290 for 128 chunks.
    """
    token = ct.arange(CHUNK, dtype=ct.int32)[:, None]
    columns = ()
    for which in ct.static_iter((RATE, OF_HELD, OF_READ, OF_WRITE)):
        columns = (*columns, ct.gather(factors, (row, chunk, which, token)))
    return *columns, ct.gather(factors, (row, chunk, DECAY, CHUNK - 1))


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


def decay_sums(g, batch, chunk, head):
    """The sums of a chunk's ``g`` up to each token, as two numbers in fp32, [CHUNK], the second what the first lacks.

    The decays between tokens come from differences of sums, which may be large where the difference is small.
    """
    logs = ct.maximum(numbers_of(g, batch, chunk, head), LEAST_LOG, propagate_nan=True)
    total = ct.cumsum(logs.astype(ct.float64), axis=0)
    high = total.astype(ct.float32)
    return high, (total - high.astype(ct.float64)).astype(ct.float32)


def decays(high, low):
    """The decay from token j to token i where i >= j, else 0: [CHUNK, CHUNK], from :func:`decay_sums`."""
    place = ct.arange(CHUNK, dtype=ct.int32)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    # Masked before exp: what runs backwards in time is positive, and may be large.
    return ct.exp(ct.where(place[:, None] >= place[None, :], between, float("-inf")))


def decays_to_end(high, low):
    """The decay from each token to the last: [CHUNK]."""
    last = ct.arange(CHUNK, dtype=ct.int32) == CHUNK - 1
    rest = ct.sum(ct.where(last, high, 0.0)) - high
    return ct.exp(rest + (ct.sum(ct.where(last, low, 0.0)) - low))


def strictly_lower(tile):
    place = ct.arange(CHUNK, dtype=ct.int32)
    return ct.where(place[:, None] > place[None, :], tile, 0.0)


def system_left(solved, row, chunk, rate, x, TRANSPOSED: Bool, PRECISION: Int):
    """``(I - X beta) x``, where X is the matrix of a chunk of ``solved``, or if TRANSPOSED ``(I - beta * X)^T x``.

    These are (I + A beta)^-1 and (I + beta * A)^-T: differences of products with them cancel as those with X do not.
    """
    if PRECISION == BF16_PAIR:
        return system_product(solved, row, chunk, -rate * x, x, TRANSPOSED, PRECISION)
    tile = matrix_of(solved, row, chunk, 0, CHUNK, CHUNK)
    if TRANSPOSED:
        return product_of_system(ct.transpose(_identity() - rate * tile), x, PRECISION)
    return product_of_system(_identity() - tile * rate.reshape((1, CHUNK)), x, PRECISION)


def _identity():
    place = ct.arange(CHUNK, dtype=ct.int32)
    return ct.where(place[:, None] == place[None, :], 1.0, 0.0)


def check_supported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """Raises UnsupportedError for what the kernels of the gated delta rule do not serve."""
    dtype = q.dtype
    if dtype not in FLOATS or k.dtype != dtype or v.dtype != dtype:
        raise UnsupportedError("query, key and value are not all fp32, all fp16 or all bf16")
    if g.dtype not in FLOATS or beta.dtype not in FLOATS:
        raise UnsupportedError("g or beta is not fp32, fp16 or bf16")
    if initial_state is not None and initial_state.dtype not in FLOATS:
        raise UnsupportedError("initial_state is not fp32, fp16 or bf16")
    if k.shape[3] == 0 or v.shape[3] == 0:
        raise UnsupportedError("keys or values have no dimension")
    if k.shape[3] > MAX_HEAD_DIM or v.shape[3] > MAX_HEAD_DIM:
        raise UnsupportedError(f"it takes head dimensions up to {MAX_HEAD_DIM}")
    if cu_seqlens is not None:
        raise UnsupportedError("it does not take cu_seqlens")


def trains(*tensors: torch.Tensor | None) -> bool:
    """Whether one of ``tensors``, the first of which is the query, needs a gradient; UnsupportedError if too wide."""
    if not wants_gradient(*tensors):
        return False
    if tensors[0].shape[3] > MAX_KEY_DIM_OF_GRADIENTS:
        raise UnsupportedError(f"its backward pass takes keys up to {MAX_KEY_DIM_OF_GRADIENTS} wide")
    return True
