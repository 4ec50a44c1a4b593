"""What an attention kernel does with a tile of scores, however it came by them."""

import math

import cuda.tile as ct

from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import LOG2E
from tilegym.ops.cutile.attention_common import cap_scores
from tilegym.ops.cutile.attention_common import load_rows
from tilegym.ops.cutile.attention_common import softmax_step
from tilegym.ops.cutile.attention_tiles import for_each_tile
from tilegym.ops.cutile.attention_tiles import load_mask
from tilegym.ops.cutile.attention_tiles import seen_keys
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int


def take_scores(
    s,
    v,
    mask,
    place,
    j,
    partial,
    limits,
    state,
    scaling,
    soft_cap,
    TILE_N: Int,
    TILE_DV: Int,
    CAUSAL: Bool,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    MASK: Int,
    MASK_ROWS: Int,
    KV_LEN: Bool,
    EXACT: Bool,
    TF32: Bool,
    TILE_RV: Int = 0,
    FIXED: Bool = False,
):
    """Takes the products ``s`` of queries and tile ``j`` of the keys, and its values, into the softmax ``state``.

    That is (row_max, row_sum, acc), of TILE_DV columns of the values, and of the next TILE_RV, if any, one more acc.
    ``partial``: some query must not see some key of the tile. FIXED: row_max stays as it is, see :func:`attend_all`.
    """
    batch, head, _, i = place
    positions, keys, window = limits
    if SOFT_CAP:
        s = cap_scores(s * scaling, soft_cap, EXACT)
    if MASK == BOOLEAN_MASK:
        s = ct.where(load_mask(mask, batch, head, i, j, MASK_ROWS, TILE_N), s, -math.inf)
    if MASK == ADDITIVE_MASK:
        if not SOFT_CAP:
            s = s * scaling
        s = s + load_mask(mask, batch, head, i, j, MASK_ROWS, TILE_N).astype(ct.float32)
    if partial:
        columns = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        visible = seen_keys(columns, positions, keys, CAUSAL)
        if WINDOW:
            visible = visible & (positions - columns < window)
        if MASK == KEY_MASK:
            visible = visible & load_mask(mask, batch, head, 0, j, 1, TILE_N)
        s = ct.where(visible, s, -math.inf)
    # Scores are still q k^T where nothing but a factor follows, which then costs no operation of its own.
    unit = 1.0 if SOFT_CAP or MASK == ADDITIVE_MASK else scaling
    row_max, row_sum, acc = state[0], state[1], state[2]
    rest = state[3] if TILE_RV else 0
    if FIXED:
        p = ct.exp2(s * (unit * LOG2E) - row_max * (unit * LOG2E), flush_to_zero=True)
        row_sum = row_sum + ct.sum(p, axis=1, keepdims=True)
    else:
        p, row_max, row_sum, shrink = softmax_step(s, row_max, row_sum, unit, 1, EXACT)
        acc, rest = acc * shrink, rest * shrink if TILE_RV else 0
    options = (TILE_N, KV_LEN, TF32)
    sums = (add_values(acc, p, v, place, j, partial, keys, 0, TILE_DV, *options),)
    if TILE_RV:
        sums = (*sums, add_values(rest, p, v, place, j, partial, keys, TILE_DV // TILE_RV, TILE_RV, *options))
    return row_max, row_sum, *sums


def attend_all(online, fixed, state, tiles, FIXED: Bool, BOUNDED: Bool, TWO_LOOPS: Bool, PARTIAL_HEAD: Bool = True):
    """:func:`for_each_tile` of ``online``, a step of :func:`take_scores`; with FIXED all tiles but the first by
    ``fixed``, relative to the largest scores of the first: nothing waits for a later tile's, and no sums shrink.

    That is as exact, since all sums are floating-point numbers, until a score so much larger comes that one overflows,
    or where a query sees no key of the first tile: then a sum is not finite, and all is done again by ``online``.
    """
    if FIXED:
        first, full_first, full_last, last = tiles
        first = min(first, max(last - 1, 0))  # where there is no tile, one that lies in the array
        result = online(state, first, first < full_first or first >= full_last if BOUNDED else False)
        second = first + 1
        rest = (second, max(second, full_first), max(second, full_last), last)
        result = for_each_tile(fixed, result, rest, BOUNDED, TWO_LOOPS, PARTIAL_HEAD)
        check = ct.sum(result[1] * 0.0) + ct.sum(result[2] * 0.0)
        if len(result) > 3:
            check = check + ct.sum(result[3] * 0.0)
        if check != check:
            result = for_each_tile(online, state, tiles, BOUNDED, TWO_LOOPS, PARTIAL_HEAD)
    else:
        result = for_each_tile(online, state, tiles, BOUNDED, TWO_LOOPS, PARTIAL_HEAD)
    return result


def add_values(
    acc, p, v, place, j, partial, keys, part, TILE_DV: Int, TILE_N: Int, KV_LEN: Bool, TF32: Bool
):  # fmt: skip
    """``acc`` and the values of tile ``j`` weighted by ``p``, of columns ``part``, in units of TILE_DV."""
    batch, _, kv_head, _ = place
    v_tile = load_rows(v, batch, kv_head, j, TILE_N, TILE_DV, False, part)
    if KV_LEN and partial:
        # What a cache holds behind its last key may be NaN, which times zero would be NaN.
        rows = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None]
        v_tile = ct.where(rows < keys, v_tile, ct.zeros((TILE_N, TILE_DV), dtype=v_tile.dtype))
    # Returned once, at the end: of an early return cuTile makes a loop, and then no two of the loop around it.
    if TF32:
        v_tile = v_tile.astype(ct.tfloat32)
    return ct.mma(p.astype(v_tile.dtype), v_tile, acc)


def store_lse(lse, batch, head, i, row_max, row_sum, unit, TILE_M: Int, EXACT: Bool):
    """Writes the statistics of TILE_M queries for the backward pass into lse, [2 if EXACT else 1, B, Hq, Sq]."""
    # The logarithm of the sum of exponentials, base 2. Where scores are subtracted exactly, the largest score in
    # multiples of its unit, and one over the sum relative to it. Who sees no key has probabilities of zero.
    total = ct.where(row_sum == 0.0, 1.0, row_sum)
    if EXACT:
        largest = row_max
        ct.store(lse, (1, batch, head, i), (1.0 / total).reshape((1, 1, 1, TILE_M)))
    else:
        largest = row_max * (unit * LOG2E) + ct.log2(total)
    largest = ct.where(row_max == -math.inf, math.inf, largest)
    ct.store(lse, (0, batch, head, i), largest.reshape((1, 1, 1, TILE_M)))
