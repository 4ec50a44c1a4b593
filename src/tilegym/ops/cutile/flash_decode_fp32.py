"""``decode_kernel`` for fp32, which has no tensor cores: each query's products with a tile of keys, added up.

``ct.mma`` of fp32 tiles is compiled to sums of products in which most registers are spilled. Here a query is a row that
lies beside every key; what it has of the values stays in as many sums as a tile has keys, and they are added up at the
end.
"""

import math

import cuda.tile as ct

from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import cap_scores
from tilegym.ops.cutile.attention_common import truth
from tilegym.ops.cutile.flash_decode_plan import ONE_SPLIT
from tilegym.ops.cutile.flash_decode_plan import tiles_of_split
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin


def queries_of(q, batch, head, dims, GROUP: Int):
    """The rows [1, D] of a group's queries."""
    out = ()
    for g in ct.static_iter(range(GROUP)):
        out = (*out, ct.gather(q, (batch, head + g, 0, dims[None, :])))
    return out


def states_of(sinks, head, split, unit, TILE_N: Int, TILE_DV: Int, GROUP: Int, SINKS: Bool):
    """For each query the largest score [1, 1], the weights [TILE_N, 1] and the values [TILE_N, TILE_DV] so far."""
    out = ()
    for g in ct.static_iter(range(GROUP)):
        top = ct.full((1, 1), -math.inf, dtype=ct.float32)
        total = ct.zeros((TILE_N, 1), dtype=ct.float32)
        if SINKS:
            # A sink is one more key, with a score of its own and the value zero.
            if split == 0:
                top = ct.load(sinks, (head + g,), (1,)).astype(ct.float32).reshape((1, 1)) / unit
                total = (ct.arange(TILE_N, dtype=ct.int32) == 0).astype(ct.float32)[:, None]
        out = (*out, (top, total, ct.zeros((TILE_N, TILE_DV), dtype=ct.float32)))
    return out


def column_of(mask, batch, head, j, TILE_N: Int):
    """What a mask [B or 1, H or 1, 1, Skv] says of a tile of keys, [TILE_N, 1]."""
    index = (batch % mask.shape[0], head % mask.shape[1], 0, j)
    tile = ct.load(mask, index, (1, 1, 1, TILE_N), padding_mode=ct.PaddingMode.ZERO)
    return truth(tile.reshape((TILE_N, 1)))


@ct.kernel(occupancy=2)
def decode_rows_kernel(
    q,  # these as decode_kernel takes them
    k,
    v,
    out,
    partial,
    counters,
    mask,
    sinks,
    kv_len,
    scaling: float,
    soft_cap: float,
    window: int,
    TILE_M: Int,
    TILE_N: Int,
    TILE_D: Int,
    TILE_DV: Int,
    DV: Int,
    GROUP: Int,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    MASK: Int,
    MASK_HEADS: Int,
    SINKS: Bool,
    KV_LEN: Bool,
    EXACT: Bool,
    MERGE: Int,  # not LAST_BLOCK
    TILE_S: Int,
    OVERLAP: Bool,
):
    begin(OVERLAP)
    zero = ct.PaddingMode.ZERO
    batch, kv_head = ct.bid(0) // k.shape[1], ct.bid(0) % k.shape[1]
    split, head = ct.bid(1), kv_head * GROUP
    first, last, first_key, keys = tiles_of_split(k, kv_len, batch, window, TILE_N, WINDOW, KV_LEN)

    unit = 1.0 if SOFT_CAP or MASK == ADDITIVE_MASK else scaling
    queries = queries_of(q, batch, head, ct.arange(TILE_D, dtype=ct.int32), GROUP)
    states = states_of(sinks, head, split, unit, TILE_N, TILE_DV, GROUP, SINKS)
    for j in range(first, last):
        k_tile = ct.load(k, (batch, kv_head, j, 0), (1, 1, TILE_N, TILE_D), padding_mode=zero).reshape((TILE_N, TILE_D))
        v_tile = ct.load(v, (batch, kv_head, j, 0), (1, 1, TILE_N, TILE_DV), padding_mode=zero)
        row = (j * TILE_N + ct.arange(TILE_N, dtype=ct.int32))[:, None]
        # What a cache holds behind its last key may be NaN, which times zero would be NaN.
        v_tile = ct.where(row < keys, v_tile.reshape((TILE_N, TILE_DV)), 0.0)
        visible = (row >= first_key) & (row < keys)
        taken = ()
        for g in ct.static_iter(range(GROUP)):
            top, total, acc = states[g]
            s = ct.sum(k_tile * queries[g], axis=1, keepdims=True)  # [TILE_N, 1]
            if SOFT_CAP:
                s = cap_scores(s * scaling, soft_cap, EXACT)
            if MASK == BOOLEAN_MASK:
                s = ct.where(column_of(mask, batch, head + g, j, TILE_N), s, -math.inf)
            if MASK == ADDITIVE_MASK:
                if not SOFT_CAP:
                    s = s * scaling
                s = s + column_of(mask, batch, head + g, j, TILE_N).astype(ct.float32)
            s = ct.where(visible, s, -math.inf)
            new_top = ct.maximum(top, ct.max(s, axis=0, keepdims=True))
            # A query that has seen no key yet has a maximum of -inf, and -inf - -inf is not a number.
            base = ct.where(new_top == -math.inf, 0.0, new_top)
            p, shrink = ct.exp((s - base) * unit), ct.exp((top - base) * unit)
            taken = (*taken, (new_top, total * shrink + p, acc * shrink + p * v_tile))
        states = taken

    columns, one = ct.arange(TILE_DV, dtype=ct.int32)[None, :], ct.arange(1, dtype=ct.int32)[None, :]
    for g in ct.static_iter(range(GROUP)):
        top, total, acc = states[g]
        total, acc = ct.sum(total, axis=0, keepdims=True), ct.sum(acc, axis=0, keepdims=True)
        if MERGE == ONE_SPLIT:
            acc = acc * (1.0 / ct.where(total == 0.0, 1.0, total))
            ct.scatter(out, (batch, head + g, 0, columns), acc.astype(out.dtype), mask=columns < DV)
        else:
            ct.scatter(partial, (batch, head + g, split, columns), acc, mask=columns < DV)
            ct.scatter(partial, (batch, head + g, split, DV + one), top)
            ct.scatter(partial, (batch, head + g, split, DV + 1 + one), total)
