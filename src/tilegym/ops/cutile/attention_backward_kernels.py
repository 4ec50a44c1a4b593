"""The gradients of ``fmha`` in cuTile, two passes that compute the scores again (FlashAttention-2, arXiv:2307.08691).

With P the probabilities, dP = dO v^T and delta = rowsum(dO * O):

    dS = P * (dP - delta),  dq = scaling * dS k,  dk = scaling * dS^T q,  dv = P^T dO

A block of the first kernel takes TILE_M queries of one head and walks along the keys; it has dq and delta. A block of
the second takes TILE_N keys of one kv head and walks along the queries of all heads of its group, or, where that gives
few blocks, of one; it has dk and dv.
Nobody else adds to what a block writes: no atomics, and the same bits in every run.

Queries and keys come in PARTS of TILE_P columns: a head dimension need not be a power of two of them, and of what the
second kernel adds to dq one part at a time is in registers. Behind them can be one more of TILE_R columns: 80 are 64
and 16. The positional part in latent attention is one that lies in arrays of its own. Values come in TILE_DV columns
and, if any are behind them, TILE_RV.

The second kernel can do the whole: it adds what its keys give to dq in fp32, atomically, TILE_DQ columns at a time,
where the first kernel would compute scores and dP again; then prepare_fused_kernel comes before it and
finish_fused_kernel behind it.
"""

import math

import cuda.tile as ct

from tilegym.ops.cutile.attention_backward_tiles import add_products
from tilegym.ops.cutile.attention_backward_tiles import keep_rows
from tilegym.ops.cutile.attention_backward_tiles import load_parts
from tilegym.ops.cutile.attention_backward_tiles import load_statistic
from tilegym.ops.cutile.attention_backward_tiles import store_parts
from tilegym.ops.cutile.attention_backward_tiles import sum_of_products
from tilegym.ops.cutile.attention_backward_tiles import zero_parts
from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import LOG2E
from tilegym.ops.cutile.attention_common import cap_scores
from tilegym.ops.cutile.attention_tiles import for_each_tile
from tilegym.ops.cutile.attention_tiles import interleaved_block
from tilegym.ops.cutile.attention_tiles import key_tiles
from tilegym.ops.cutile.attention_tiles import load_mask_tile
from tilegym.ops.cutile.attention_tiles import partial_tile
from tilegym.ops.cutile.attention_tiles import query_tiles
from tilegym.ops.cutile.attention_tiles import seen_keys
from tilegym.ops.cutile.attention_tiles import valid_keys
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int


def softmax_backward(
    s, dp, mask, place, index, partial, limits, statistics, scaling, soft_cap, CAUSAL: Bool, WINDOW: Bool,
    SOFT_CAP: Bool, MASK: Int, MASK_ROWS: Int, KV_LEN: Bool, EXACT: Bool, TILE_N: Int, KEYS_FIRST: Bool,
):  # fmt: skip
    """P, dP where keys are seen, and the gradient of ``scaling * q k^T``, of a tile of products ``s`` = q k^T and dP.

    KEYS_FIRST: the tiles are [TILE_N, TILE_M], else [TILE_M, TILE_N]; the numbers in ``index`` (where queries stand,
    and which keys these are) and the statistics of the queries are shaped accordingly. ``partial``: some query must not
    see some key.
    """
    batch, head, i, j = place
    positions, columns = index
    keys, window = limits
    lse, rest, delta = statistics
    slope = 1.0
    if SOFT_CAP:
        s = cap_scores(s * scaling, soft_cap, EXACT)
        ratio = s * (1.0 / soft_cap)
        slope = 1.0 - ratio * ratio
    if MASK == BOOLEAN_MASK:
        s = ct.where(load_mask_tile(mask, batch, head, i, j, MASK_ROWS, TILE_N, KEYS_FIRST), s, -math.inf)
    if MASK == ADDITIVE_MASK:
        if not SOFT_CAP:
            s = s * scaling
        s = s + load_mask_tile(mask, batch, head, i, j, MASK_ROWS, TILE_N, KEYS_FIRST).astype(ct.float32)
    if partial:
        visible = seen_keys(columns, positions, keys, CAUSAL)
        if KV_LEN and CAUSAL:
            # Rows behind the last query are zeros, but what they would be multiplied by here may be NaN.
            visible = visible & (columns < keys)
        if WINDOW:
            visible = visible & (positions - columns < window)
        if MASK == KEY_MASK:
            visible = visible & load_mask_tile(mask, batch, head, 0, j, 1, TILE_N, KEYS_FIRST)
        s = ct.where(visible, s, -math.inf)
        if KV_LEN:
            # What a cache holds behind its last key may be NaN, which times zero would be NaN.
            dp = ct.where(visible, dp, 0.0)
            if SOFT_CAP:
                slope = ct.where(visible, slope, 0.0)
    unit = 1.0 if SOFT_CAP or MASK == ADDITIVE_MASK else scaling
    if EXACT:
        p = ct.exp((s - lse) * unit) * rest
    else:
        p = ct.exp2(s * (unit * LOG2E) - lse, flush_to_zero=True)
    ds = p * (dp - delta)
    if SOFT_CAP:
        ds = ds * slope
    return p, dp, ds


def cast_operand(tile, like, TF32: Bool):
    return tile.astype(ct.tfloat32) if TF32 else tile.astype(like.dtype)


def add_to_dq(
    state, q_tiles, do_tiles, k, kpe, v, mask, place, kv_head, positions, partial, limits, statistics, scaling,
    soft_cap, TILE_N: Int, TILE_P: Int, PARTS: Int, TILE_R: Int, TILE_DV: Int, TILE_RV: Int, KV_LEN: Bool, TF32: Bool,
    SUMS: Bool, options,
):  # fmt: skip
    """What tile ``j`` of the keys adds to dq / scaling, unless that is None, and if SUMS to delta: P * dP."""
    dq, delta = state
    batch, head, i, j = place
    k_tiles = load_parts(k, kpe, batch, kv_head, 0, j, TILE_N, TILE_P, PARTS, TILE_R, TF32)
    v_tiles = load_parts(v, 0, batch, kv_head, 0, j, TILE_N, TILE_DV, 1, TILE_RV, TF32)
    zeros = ct.zeros((do_tiles[0].shape[0], TILE_N), dtype=ct.float32)
    s = sum_of_products(q_tiles, k_tiles, zeros)
    dp = sum_of_products(do_tiles, v_tiles, zeros)
    index = (positions, j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :])
    p, dp, ds = softmax_backward(
        s, dp, mask, place, index, partial, limits, statistics, scaling, soft_cap, *options, TILE_N, False
    )
    if SUMS:
        delta = delta + ct.sum(p * dp, axis=1)
    if dq is None:
        return None, delta
    if KV_LEN and partial:
        rows = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None]
        kept = ()
        for part in ct.static_iter(range(len(k_tiles))):
            nothing = ct.zeros(k_tiles[part].shape, dtype=k_tiles[part].dtype)
            kept = (*kept, ct.where(rows < limits[0], k_tiles[part], nothing))
        k_tiles = kept
    return add_products(cast_operand(ds, k, TF32), k_tiles, dq), delta


@ct.kernel
def attention_dq_kernel(
    q,  # [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]
    v,  # [B, Hkv, Skv, Dv]
    out,  # [B, Hq, Sq, Dv]
    do,  # [B, Hq, Sq, Dv]
    lse,  # [2 if EXACT else 1, B, Hq, Sq] as attention_kernel writes it
    mask,  # mask and kv_len as in attention_kernel
    kv_len,
    dq,  # [B, Hq, Sq, D]
    delta,  # [2 if SINKS else 1, B, Hq, Sq]
    qpe,  # [B, Hq, Sq, R]: the last columns of the queries, TILE_R in a tile; or 0 where q has all
    kpe,  # [B, 1, Skv, R]: those of the keys, the same for all heads; or 0
    dqpe,  # [B, Hq, Sq, R], or 0
    scaling: float,
    soft_cap: float,
    window: int,
    TILE_M: Int,
    TILE_N: Int,
    TILE_P: Int,
    PARTS: Int,
    TILE_R: Int,
    TILE_DV: Int,
    TILE_RV: Int,
    CAUSAL: Bool,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    MASK: Int,
    MASK_ROWS: Int,
    KV_LEN: Bool,
    EXACT: Bool,
    BOUNDED: Bool,
    TWO_LOOPS: Bool,
    TF32: Bool,
    INTERLEAVE: Int,
    SINKS: Bool,  # whether the sinks have gradients
):
    """dq, and delta for the second kernel. The constants are those of attention_kernel."""
    q_tiles = ct.cdiv(q.shape[2], TILE_M)
    n, batch, head = interleaved_block(ct.bid(0), q_tiles, q, INTERLEAVE)
    i = q_tiles - 1 - n
    kv_head = head // (q.shape[1] // k.shape[1])
    keys = valid_keys(k, kv_len, batch, KV_LEN)
    start = keys - q.shape[2] + i * TILE_M
    positions = start + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    tiles = key_tiles(mask, batch, head, start, keys, window, TILE_M, TILE_N, CAUSAL, WINDOW, MASK)

    do_tiles = load_parts(do, 0, batch, head, head, i, TILE_M, TILE_DV, 1, TILE_RV, False)
    out_tiles = load_parts(out, 0, batch, head, head, i, TILE_M, TILE_DV, 1, TILE_RV, False)
    row_delta = ct.sum(do_tiles[0].astype(ct.float32) * out_tiles[0].astype(ct.float32), axis=1)
    if TILE_RV:
        row_delta = row_delta + ct.sum(do_tiles[1].astype(ct.float32) * out_tiles[1].astype(ct.float32), axis=1)
    row_lse = load_statistic(lse, 0, batch, head, i, TILE_M)[:, None]
    rest = load_statistic(lse, 1, batch, head, i, TILE_M)[:, None] if EXACT else 0.0
    q_tiles = load_parts(q, qpe, batch, head, head, i, TILE_M, TILE_P, PARTS, TILE_R, TF32)
    if TF32:
        do_tiles = (do_tiles[0].astype(ct.tfloat32),)  # in fp32 there is one

    zero_delta = ct.zeros((TILE_M,), dtype=ct.float32)
    options = (CAUSAL, WINDOW, SOFT_CAP, MASK, MASK_ROWS, KV_LEN, EXACT)
    where = (do_tiles, k, kpe, v, mask)
    tail = (scaling, soft_cap, TILE_N, TILE_P, PARTS, TILE_R, TILE_DV, TILE_RV, KV_LEN, TF32)
    if do.dtype == ct.float32 and not TF32:
        # As a sum of P * dP, not by way of ``out``: a query that sees one key has P = 1, and dP - delta must be zero.
        def sum_up(state, j, partial):
            statistics = (row_lse, rest, zero_delta[:, None])
            return add_to_dq(
                state, q_tiles, *where, (batch, head, i, j), kv_head, positions, partial, (keys, window), statistics,
                *tail, True, options,
            )  # fmt: skip

        _, row_delta = for_each_tile(sum_up, (None, zero_delta), tiles, BOUNDED, TWO_LOOPS)
    ct.store(delta, (0, batch, head, i), row_delta.reshape((1, 1, 1, TILE_M)))
    statistics = (row_lse, rest, row_delta[:, None])

    def step(state, j, partial):
        return add_to_dq(
            state, q_tiles, *where, (batch, head, i, j), kv_head, positions, partial, (keys, window), statistics,
            *tail, SINKS, options,
        )  # fmt: skip

    state = (zero_parts(TILE_M, TILE_P, PARTS, TILE_R), zero_delta)
    acc, exact_delta = for_each_tile(step, state, tiles, BOUNDED, TWO_LOOPS)
    if SINKS:
        # Not by way of the rounded output: all queries' errors would add up in the gradient of a sink.
        ct.store(delta, (1, batch, head, i), exact_delta.reshape((1, 1, 1, TILE_M)))
    store_parts(dq, dqpe, batch, head, i, acc, scaling, PARTS)


def product_for_dq(dq, ds, k_tile):
    """What ``k_tile`` gives to dq / scaling, by dS / scaling [TILE_N, TILE_M]; transposed if dq is."""
    if dq.ndim == 5:
        return ct.mma(ct.transpose(k_tile), ds, ct.zeros((k_tile.shape[1], ds.shape[1]), dtype=ct.float32))
    return ct.mma(ct.transpose(ds), k_tile, ct.zeros((ds.shape[1], k_tile.shape[1]), dtype=ct.float32))


def reduce_dq(dq, product, batch, head, i, part):
    """Adds to columns ``part`` of tile ``i`` of the queries. On sm_90 the tensor memory accelerator does, and nobody
    waits for it.
    """
    if dq.ndim == 5:
        product = product.reshape((1, 1, 1, *product.shape))
        dq.tiled_view(product.shape).atomic_store_add((0, batch, head, part, i), product)
    else:
        product = product.reshape((1, 1, *product.shape))
        dq.tiled_view(product.shape).atomic_store_add((batch, head, i, part), product)


def load_early(x, batch, head, i, ROWS: Int, COLUMNS: Int):
    """As load_rows, with a hint by which dS and all columns of dq lie apart: neither waits for the other's room."""
    index, shape = (batch, head, i, 0), (1, 1, ROWS, COLUMNS)
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO, latency=1).reshape((ROWS, COLUMNS))


def add_to_dk_dv(
    state, k_tiles, v_tiles, k_parts, q, qpe, do, lse, delta, mask, dq, dqpe, place, columns, partial, limits, scaling,
    soft_cap, TILE_M: Int, TILE_P: Int, PARTS: Int, TILE_R: Int, TILE_DV: Int, TILE_RV: Int, EXACT: Bool, TF32: Bool,
    DV_LAST: Bool, options,
):  # fmt: skip
    """What tile ``i`` of the queries of a head adds to dk / scaling and dv, and ``k_parts`` to dq / scaling."""
    batch, head, i, j = place
    dk, dv = state
    keys, window, queries = limits
    tile_n = v_tiles[0].shape[0]
    # To transpose a tile costs nothing: the tensor cores take it either way from shared memory.
    if DV_LAST and len(k_parts) == 1:
        q_tiles = (load_early(q, batch, head, i, TILE_M, TILE_P),)
        do_tiles = (load_early(do, batch, head, i, TILE_M, TILE_DV),)
    else:
        q_tiles = load_parts(q, qpe, batch, head, head, i, TILE_M, TILE_P, PARTS, TILE_R, TF32)
        do_tiles = load_parts(do, 0, batch, head, head, i, TILE_M, TILE_DV, 1, TILE_RV, TF32)
    zeros = ct.zeros((tile_n, TILE_M), dtype=ct.float32)
    s = sum_of_products(k_tiles, q_tiles, zeros)
    dp = sum_of_products(v_tiles, do_tiles, zeros)
    row_lse = load_statistic(lse, 0, batch, head, i, TILE_M)[None, :]
    rest = load_statistic(lse, 1, batch, head, i, TILE_M)[None, :] if EXACT else 0.0
    row_delta = load_statistic(delta, 0, batch, head, i, TILE_M)[None, :]
    positions = keys - queries + i * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[None, :]
    if options[3] == ADDITIVE_MASK:
        # Where there is no query, q and dO are zero, and that is enough as long as P is finite. What an additive mask
        # adds to a score may be anything. Not by padding with infinity: on an H200 that loaded zeros.
        row_lse = ct.where(positions < keys, row_lse, math.inf)
    p, _, ds = softmax_backward(
        s, dp, mask, place, (positions, columns), partial, (keys, window), (row_lse, rest, row_delta), scaling,
        soft_cap, *options, tile_n, True,
    )  # fmt: skip
    p = cast_operand(p, do, TF32)
    if not DV_LAST:
        dv = add_products(p, do_tiles, dv)
    ds = cast_operand(ds, q, TF32)
    dk = add_products(ds, q_tiles, dk)
    parts = len(k_parts) - 1 if TILE_R else len(k_parts)
    for part in ct.static_iter(range(len(k_parts))):
        if part == parts:
            reduce_dq(dqpe, product_for_dq(dqpe, ds, k_parts[part]), batch, head, i, 0)
        else:
            product = product_for_dq(dq, ds, k_parts[part])
            if DV_LAST and part == 0:
                # The queries are read by now, so that the next ones come while dv and dq are computed.
                dv = add_products(p, do_tiles, dv)
            reduce_dq(dq, product, batch, head, i, part)
    return dk, dv


def head_and_tile(n, count, j, GROUP: Int):
    """Which head of a group, and which of ``count`` tiles of its queries, step ``n`` takes.

    Head after head; with a GROUP, of all its heads a tile, the last tiles first. Then the blocks of other keys are at
    the same queries, which the L2 cache holds once; each begins with another head, to add to another part of dq.
    """
    if GROUP:
        return (n + j) % GROUP, count - 1 - n // GROUP
    return n // count, n % count


@ct.kernel
def attention_dkdv_kernel(
    q,  # [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]
    v,  # [B, Hkv, Skv, Dv]
    do,  # [B, Hq, Sq, Dv]
    lse,  # [2 if EXACT else 1, B, Hq, Sq]
    delta,  # [.., B, Hq, Sq]
    mask,
    kv_len,
    dk,  # [B, H, Skv, D], H a multiple of Hkv and a divisor of Hq: the sums of Hq / H heads each
    dv,  # [B, H, Skv, Dv]
    dq,  # of fp32, if TILE_DQ: what dq / scaling is added to, [B, Hq, Sq, D] or [1, B, Hq, D, >= Sq]; else 0
    qpe,  # as in attention_dq_kernel
    kpe,
    dkpe,  # [B, H, Skv, R], or 0
    dqpe,  # as dq, [B, Hq, Sq, R], if TILE_DQ; or 0
    scaling: float,
    soft_cap: float,
    window: int,
    TILE_M: Int,
    TILE_N: Int,
    TILE_P: Int,
    PARTS: Int,
    TILE_R: Int,
    TILE_DV: Int,
    TILE_RV: Int,
    CAUSAL: Bool,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    MASK: Int,
    MASK_ROWS: Int,
    KV_LEN: Bool,
    EXACT: Bool,
    BOUNDED: Bool,
    TWO_LOOPS: Bool,
    TF32: Bool,
    INTERLEAVE: Int,
    TILE_DQ: Int,  # dq is added to in PARTS_DQ parts of so many columns; 0: another kernel computes it
    PARTS_DQ: Int,
    GROUP: Int,  # as many heads as are summed up, if they take turns; 0: one after the other
    DV_LAST: Bool,  # dv behind dk and the first part of dq
):
    """The constants are those of attention_kernel; a KEY_MASK is the same for all heads."""
    # Of a causal mask the first keys are seen by the most queries: they go first.
    j, batch, block_head = interleaved_block(ct.bid(0), ct.cdiv(k.shape[2], TILE_N), dk, INTERLEAVE)
    group = q.shape[1] // dk.shape[1]
    kv_head = block_head // (dk.shape[1] // k.shape[1])
    keys = valid_keys(k, kv_len, batch, KV_LEN)
    columns = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None]
    first, full_first, full_last, last = query_tiles(
        q.shape[2], keys, j * TILE_N, window, TILE_M, TILE_N, CAUSAL, WINDOW
    )
    if TILE_DQ and j * TILE_N + TILE_N > keys:
        # Behind the last key P may be infinite, which must not reach dq.
        full_last = full_first
    kept = columns < keys
    if MASK == KEY_MASK:
        # What is masked for all queries needs no look in the loop: its gradients are not kept.
        kept = kept & load_mask_tile(mask, batch, 0, 0, j, 1, TILE_N, True)
        # The largest of 64 numbers: for sm_90 that does not compile beside these loops. Of more, it does.
        if ct.max(ct.broadcast_to(kept, (TILE_N, 8)).astype(ct.int32)).item() == 0:
            first, full_first, full_last, last = 0, 0, 0, 0

    k_tiles = load_parts(k, kpe, batch, kv_head, 0, j, TILE_N, TILE_P, PARTS, TILE_R, TF32)
    v_tiles = load_parts(v, 0, batch, kv_head, 0, j, TILE_N, TILE_DV, 1, TILE_RV, TF32)
    k_parts = ()
    if TILE_DQ == TILE_P:
        k_parts = k_tiles
    elif TILE_DQ:
        k_parts = load_parts(k, kpe, batch, kv_head, 0, j, TILE_N, TILE_DQ, PARTS_DQ, TILE_R, TF32)
    state = (zero_parts(TILE_N, TILE_P, PARTS, TILE_R), zero_parts(TILE_N, TILE_DV, 1, TILE_RV))
    limits = (keys, window, q.shape[2])
    options = (CAUSAL, WINDOW, SOFT_CAP, 0 if MASK == KEY_MASK else MASK, MASK_ROWS, False, EXACT)
    tail = (limits, scaling, soft_cap, TILE_M, TILE_P, PARTS, TILE_R, TILE_DV, TILE_RV, EXACT, TF32, DV_LAST, options)
    arrays = (k_tiles, v_tiles, k_parts, q, qpe, do, lse, delta, mask, dq, dqpe)
    first_head = block_head * group
    # One loop for the tiles of all heads of the group, so that loads run ahead from one head to the next.
    if not BOUNDED:
        for n in range(group * (last - first)):
            head, i = head_and_tile(n, last - first, j, GROUP)
            place = (batch, first_head + head, first + i, j)
            state = add_to_dk_dv(state, *arrays, place, columns, False, *tail)
    elif TWO_LOOPS:
        full = full_last - full_first
        for n in range(group * full):
            head, i = head_and_tile(n, full, j, GROUP)
            place = (batch, first_head + head, full_first + i, j)
            state = add_to_dk_dv(state, *arrays, place, columns, False, *tail)
        others = full_first - first + last - full_last
        for n in range(group * others):
            head, i = head_and_tile(n, others, j, GROUP)
            place = (batch, first_head + head, partial_tile(i, first, full_first, full_last), j)
            state = add_to_dk_dv(state, *arrays, place, columns, True, *tail)
    else:
        for n in range(group * (last - first)):
            head, i = head_and_tile(n, last - first, j, GROUP)
            i = first + i
            place = (batch, first_head + head, i, j)
            state = add_to_dk_dv(state, *arrays, place, columns, i < full_first or i >= full_last, *tail)

    dk_tiles, dv_tiles = state
    if KV_LEN or MASK == KEY_MASK:
        dv_tiles = keep_rows(kept, dv_tiles)
        dk_tiles = keep_rows(kept, dk_tiles)
    store_parts(dk, dkpe, batch, block_head, j, dk_tiles, scaling, PARTS)
    store_parts(dv, 0, batch, block_head, j, dv_tiles, None, 1)
