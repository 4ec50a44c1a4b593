"""The kernels of ``mla_decoding``: one query a head, one latent a token, which is the key and the value of all heads.

A block takes a tile of heads and a share of the keys that are valid now. It loads each tile of latents once: in shared
memory it is an operand of the scores and, transposed, of the weighted sum. With few heads the work is to read the
latents at the speed of memory; with 128 it is as much computing, and the rows of both products are the heads.
"""

import math

import cuda.tile as ct

from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import softmax_step
from tilegym.ops.cutile.attention_common import truth
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.splitk_reduce import add_in_order
from tilegym.ops.cutile.splitk_reduce import add_in_turns
from tilegym.ops.cutile.splitk_reduce import no_state
from tilegym.ops.cutile.splitk_reduce import normalised
from tilegym.ops.cutile.splitk_reduce import product_in_parts
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin

ZERO = ct.PaddingMode.ZERO


def load_queries(q, qpe, batch, head_tile, TILE_H: Int, TILE_D: Int, PARTS: Int, TILE_R: Int, KEYS_LEFT: Bool):
    """The queries of a tile of heads: PARTS tiles [TILE_H, TILE_D] and one [TILE_H, TILE_R]; KEYS_LEFT: transposed."""
    parts = ()
    for i in ct.static_iter(range(PARTS)):
        tile = ct.load(q, (batch, head_tile, i), (1, TILE_H, TILE_D), padding_mode=ZERO).reshape((TILE_H, TILE_D))
        parts = (*parts, ct.transpose(tile) if KEYS_LEFT else tile)
    tile = ct.load(qpe, (batch, head_tile, 0), (1, TILE_H, TILE_R), padding_mode=ZERO).reshape((TILE_H, TILE_R))
    return parts, ct.transpose(tile) if KEYS_LEFT else tile


def scores_of(queries, kv, kpe, batch, j, TILE_N: Int, KEYS_LEFT: Bool):
    """The scores of tile ``j`` of the keys, unscaled, [TILE_N, TILE_H] if KEYS_LEFT, else transposed, and its latents,
    in the parts that the queries have."""
    parts, qpe_tile = queries
    side = 0 if KEYS_LEFT else 1
    heads = qpe_tile.shape[1 - side]
    s = ct.zeros((TILE_N, heads) if KEYS_LEFT else (heads, TILE_N), dtype=ct.float32)
    latents = ()
    for i in ct.static_iter(range(len(parts))):
        width = parts[i].shape[side]
        tile = ct.load(kv, (batch, j, i), (1, TILE_N, width), padding_mode=ZERO).reshape((TILE_N, width))
        s = add_product(s, parts[i], tile, KEYS_LEFT)
        latents = (*latents, tile)
    width = qpe_tile.shape[side]
    positions = ct.load(kpe, (batch, j, 0), (1, TILE_N, width), padding_mode=ZERO).reshape((TILE_N, width))
    return add_product(s, qpe_tile, positions, KEYS_LEFT), latents


def add_product(s, q_tile, keys, KEYS_LEFT: Bool):
    """``s`` and the products of queries and keys."""
    left, right = (keys, q_tile) if KEYS_LEFT else (q_tile, ct.transpose(keys))
    if keys.dtype == ct.float32:
        s = s + product_in_parts(left, right)
    else:
        s = ct.mma(left, right, s)
    return s


def attend(
    queries,
    kv,
    kpe,
    mask,
    place,
    j,
    keys,
    state,
    scaling,
    TILE_N: Int,
    KEYS_LEFT: Bool,
    MASK: Int,
    MASK_HEADS: Int,
    EXACT: Bool,
    PARTIAL: Bool,
):
    """Takes tile ``j`` of the latents into ``state``; PARTIAL: some of its keys are behind the last one."""
    batch, head_tile = place
    row_max, row_sums, accs = state
    s, latents = scores_of(queries, kv, kpe, batch, j, TILE_N, KEYS_LEFT)
    if MASK != NO_MASK:
        index = (batch % mask.shape[0], head_tile if MASK_HEADS > 1 else 0, 0, j)
        tile = ct.load(mask, index, (1, MASK_HEADS, 1, TILE_N), padding_mode=ZERO)
        tile = truth(tile.reshape((MASK_HEADS, TILE_N)))
        if KEYS_LEFT:
            tile = ct.transpose(tile)
        s = ct.where(tile, s, -math.inf) if MASK == BOOLEAN_MASK else s * scaling + tile.astype(ct.float32)
    if PARTIAL:
        numbers = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        s = ct.where((numbers[:, None] if KEYS_LEFT else numbers[None, :]) < keys, s, -math.inf)
    unit = 1.0 if MASK == ADDITIVE_MASK else scaling
    p, row_max, row_sums, shrink = softmax_step(s, row_max, row_sums, unit, 0 if KEYS_LEFT else 1, EXACT)
    p = p.astype(kv.dtype)
    sums = ()
    for i in ct.static_iter(range(len(accs))):
        acc = accs[i] * shrink
        left, right = (ct.transpose(latents[i]), p) if KEYS_LEFT else (p, latents[i])
        if kv.dtype == ct.float32:
            # A tile's own sum first: product by product, each would round the sum over all keys so far.
            sums = (*sums, acc + ct.mma(left, right, ct.zeros(acc.shape, ct.float32)))
        else:
            sums = (*sums, ct.mma(left, right, acc))
    return row_max, row_sums, sums


@ct.kernel
def mla_decoding_kernel(
    q,  # [B, H, D]
    qpe,  # [B, H, Dr]
    kv,  # [B, S, D]
    kpe,  # [B, S, Dr]
    out,  # [B, H, D] if FINAL, else [B, H, splits, D + STATE_COLUMNS]: what merge_kernel takes
    lse,  # [B, H] if FINAL, else 0
    mask,  # [B or 1, H or 1, 1, S] if MASK, else 0
    kv_len,  # [B] if KV_LEN, else 0
    scaling: float,
    TILE_H: Int,
    TILE_N: Int,
    TILE_D: Int,  # columns of a part of the latents
    PARTS: Int,  # parts of the latents: as soon as one has been used, its place is free for that of the next tile
    TILE_R: Int,
    KEYS_LEFT: Bool,  # scores are [keys, heads], not [heads, keys]
    MASK: Int,
    MASK_HEADS: Int,  # TILE_H, or 1 for a mask that all heads share
    KV_LEN: Bool,
    EXACT: Bool,
    FINAL: Bool,  # one split: its output is the result
    OVERLAP: Bool,
):
    begin(OVERLAP)
    # The blocks of one batch entry follow each other: what one of them reads the others find in the L2 cache.
    head_tiles = ct.cdiv(q.shape[1], TILE_H)
    batch, head_tile = ct.bid(0) // head_tiles, ct.bid(0) % head_tiles
    split = ct.bid(1)
    keys = kv.shape[1]
    if KV_LEN:
        keys = min(max(ct.load(kv_len, (batch,), (1,)).astype(ct.int32).item(), 0), keys)
    tiles = ct.cdiv(keys, TILE_N)
    share = ct.cdiv(tiles, ct.num_blocks(1))
    first = split * share
    last = min(first + share, tiles)
    full = min(last, keys // TILE_N)

    queries = load_queries(q, qpe, batch, head_tile, TILE_H, TILE_D, PARTS, TILE_R, KEYS_LEFT)
    place = (batch, head_tile)
    axis = 0 if KEYS_LEFT else 1
    accs = ()
    for _ in ct.static_iter(range(PARTS)):
        accs = (*accs, ct.zeros((TILE_D, TILE_H) if KEYS_LEFT else (TILE_H, TILE_D), dtype=ct.float32))
    sums = (TILE_N, TILE_H) if KEYS_LEFT else (TILE_H, TILE_N)  # of the keys of a tile: see sums_of_keys
    row = (1, TILE_H) if KEYS_LEFT else (TILE_H, 1)
    state = (ct.full(row, -math.inf, dtype=ct.float32), ct.zeros(sums, dtype=ct.float32), accs)

    # Two loops, so that tiles seen as a whole go from memory to the tensor cores without passing through registers.
    options = (TILE_N, KEYS_LEFT, MASK, MASK_HEADS, EXACT)
    for j in range(first, full):
        state = attend(queries, kv, kpe, mask, place, j, keys, state, scaling, *options, False)
    if KV_LEN:
        # What a cache holds behind its last key may be NaN, which times zero would be NaN.
        kv = kv.slice(1, 0, keys)
    for j in range(max(first, full), last):
        state = attend(queries, kv, kpe, mask, place, j, keys, state, scaling, *options, True)

    row_max, row_sums, accs = state
    row_sum = ct.sum(row_sums, axis=axis, keepdims=True)
    if FINAL:
        unit = 1.0 if MASK == ADDITIVE_MASK else scaling
        scale = 1.0 / ct.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: zeros
        ct.store(lse, (batch, head_tile), log_sum_exp(row_max, row_sum, unit).reshape((1, TILE_H)))
    columns = out.shape[2 if FINAL else 3] - (0 if FINAL else STATE_COLUMNS)
    for i in ct.static_iter(range(PARTS)):
        acc = accs[i] * scale if FINAL else accs[i]
        if KEYS_LEFT:
            acc = ct.transpose(acc)
        if FINAL:
            ct.store(out, (batch, head_tile, i), acc.reshape((1, TILE_H, TILE_D)).astype(out.dtype))
        else:
            # Kept as they are until all splits are known, they are merged as exactly as the tiles of one split.
            index = (batch, head_tile, split, i)
            ct.store(out.slice(3, 0, columns), index, acc.reshape((1, TILE_H, 1, TILE_D)))
    if not FINAL:
        ct.store(out, (batch, head_tile, split, columns), row_max.reshape((1, TILE_H, 1, 1)))
        ct.store(out, (batch, head_tile, split, columns + 1), row_sum.reshape((1, TILE_H, 1, 1)))


def log_sum_exp(top, total, unit):
    """The natural logarithm of the sum of exponentials; -inf where no key was seen."""
    return top * unit + ct.log(total)


@ct.kernel
def merge_kernel(
    partial,  # [B, H, splits, D + STATE_COLUMNS], as mla_decoding_kernel leaves it
    out,  # [B, H, D]
    lse,  # [B, H]
    unit: float,
    TILE_S: Int,  # splits that are in registers at a time
    TILE_C: Int,
    IN_TURNS: Bool,  # more splits than TILE_S
    DIVIDES: Bool,  # TILE_C divides D
    OVERLAP: Bool,
):
    begin(OVERLAP)
    # A block has TILE_C columns of a row of the output.
    batch, head, part = ct.bid(0) // partial.shape[1], ct.bid(0) % partial.shape[1], ct.bid(1)
    splits, width = partial.shape[2], partial.shape[3] - STATE_COLUMNS
    columns = part * TILE_C + ct.arange(TILE_C, dtype=ct.int32)[None, :]
    heads = head + ct.zeros((1, 1), dtype=ct.int32)
    where = (batch, heads, 0, columns, width)
    if IN_TURNS:
        state = no_state(1, TILE_C)
        state = add_in_turns(partial, 0, where, splits, state, unit, TILE_S, TILE_C, DIVIDES, False)
    else:
        nothing = (0, 0, 0)
        state = add_in_order(partial, 0, where, 0, splits, nothing, unit, TILE_S, TILE_C, True, DIVIDES, False)
    acc = normalised(state)
    if DIVIDES:
        ct.scatter(out, (batch, heads, columns), acc.astype(out.dtype), check_bounds=False)
    else:
        ct.scatter(out, (batch, heads, columns), acc.astype(out.dtype), mask=columns < width)
    if part == 0:
        ct.store(lse, (batch, head), log_sum_exp(state[0], state[1], unit))
