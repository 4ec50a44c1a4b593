"""Kernels that the sweep tries beside TileGym's own: each changes one thing that might be faster."""

import math

import cuda.tile as ct

from tilegym.ops.cutile.attention_common import LOG2E
from tilegym.ops.cutile.attention_common import update_softmax
from tilegym.ops.cutile.matmul import tile_of_block

Bool = ct.Constant[bool]
Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def gemm_experiment(a, b, c, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP_M: Int, LATENCY: Int):
    # matmul_kernel with latency hints
    m, n = tile_of_block(ct.bid(0), ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N), GROUP_M)
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for k in range(ct.cdiv(a.shape[1], TILE_K)):
        at = ct.load(a, (m, k), (TILE_M, TILE_K), latency=LATENCY if LATENCY > 0 else None, padding_mode=ZERO)
        bt = ct.load(
            b, (k, n), (TILE_K, TILE_N), order=(1, 0), latency=LATENCY if LATENCY > 0 else None, padding_mode=ZERO
        )
        acc = ct.mma(at, bt, acc)
    ct.store(c, (m, n), acc.astype(c.dtype))


def attention_step(
    q_low,
    q_high,
    k,
    v,
    batch,
    kv_head,
    j,
    positions,
    row_max,
    row_sum,
    acc_low,
    acc_high,
    unit,
    TILE_M: Int,
    TILE_N: Int,
    LOW: Int,
    HIGH: Int,
    MASKED: Bool,
    K_LATENCY: Int,
    V_LATENCY: Int,
    EARLY_V: Bool,
):
    # D is cut in LOW + HIGH columns (HIGH may be 0), both powers of two.
    order = (0, 1, 3, 2)
    kt = ct.load(
        k,
        (batch, kv_head, 0, j),
        (1, 1, LOW, TILE_N),
        order=order,
        padding_mode=ZERO,
        latency=K_LATENCY if K_LATENCY > 0 else None,
    )
    s = ct.mma(q_low, kt.reshape((LOW, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
    if HIGH > 0:
        kt = ct.load(
            k,
            (batch, kv_head, LOW // HIGH, j),
            (1, 1, HIGH, TILE_N),
            order=order,
            padding_mode=ZERO,
            latency=K_LATENCY if K_LATENCY > 0 else None,
        )
        s = ct.mma(q_high, kt.reshape((HIGH, TILE_N)), s)
    if EARLY_V:
        early = ct.load(
            v,
            (batch, kv_head, j, 0),
            (1, 1, TILE_N, LOW),
            padding_mode=ZERO,
            latency=V_LATENCY if V_LATENCY > 0 else None,
        )
    if MASKED:
        columns = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        s = ct.where(columns <= positions, s, -math.inf)
    one = ct.ones((TILE_M, 1), dtype=ct.float32)
    p, row_max, row_sum, shrink = update_softmax(s, row_max, row_sum, one, unit, 1, False)
    if EARLY_V:
        vt = early
    else:
        vt = ct.load(
            v,
            (batch, kv_head, j, 0),
            (1, 1, TILE_N, LOW),
            padding_mode=ZERO,
            latency=V_LATENCY if V_LATENCY > 0 else None,
        )
    p = p.astype(v.dtype)
    acc_low = ct.mma(p, vt.reshape((TILE_N, LOW)), acc_low * shrink)
    if HIGH > 0:
        vt = ct.load(
            v,
            (batch, kv_head, j, LOW // HIGH),
            (1, 1, TILE_N, HIGH),
            padding_mode=ZERO,
            latency=V_LATENCY if V_LATENCY > 0 else None,
        )
        acc_high = ct.mma(p, vt.reshape((TILE_N, HIGH)), acc_high * shrink)
    return row_max, row_sum, acc_low, acc_high


@ct.kernel
def attention_experiment(
    q,
    k,
    v,
    out,
    scaling: float,
    TILE_M: Int,
    TILE_N: Int,
    D: Int,
    CAUSAL: Bool,
    SPLIT_LOOP: Bool,
    K_LATENCY: Int,
    V_LATENCY: Int,
    SPLIT_D: Bool,
    EARLY_V: Bool,
):
    # Attention with nothing but causality, Sq = Skv a multiple of the tiles.
    LOW = ct.static_eval((1 << (D.bit_length() - 1)) if SPLIT_D else (1 << (D - 1).bit_length()))
    HIGH = ct.static_eval((D - (1 << (D.bit_length() - 1))) if SPLIT_D else 0)
    q_tiles = ct.cdiv(q.shape[2], TILE_M)
    i = q_tiles - 1 - ct.bid(0) % q_tiles
    batch, head = ct.bid(0) // q_tiles // q.shape[1], ct.bid(0) // q_tiles % q.shape[1]
    kv_head = head // (q.shape[1] // k.shape[1])
    positions = i * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    unit = scaling
    q_low = ct.load(q, (batch, head, i, 0), (1, 1, TILE_M, LOW), padding_mode=ZERO).reshape((TILE_M, LOW))
    q_high = q_low
    if HIGH > 0:
        q_high = ct.load(q, (batch, head, i, LOW // HIGH), (1, 1, TILE_M, HIGH)).reshape((TILE_M, HIGH))
    row_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    row_sum = ct.zeros((TILE_M, 1), dtype=ct.float32)
    acc_low = ct.zeros((TILE_M, LOW), dtype=ct.float32)
    acc_high = ct.zeros((TILE_M, HIGH if HIGH > 0 else 1), dtype=ct.float32)
    full = i * TILE_M // TILE_N if CAUSAL else k.shape[2] // TILE_N
    last = ct.cdiv((i + 1) * TILE_M, TILE_N) if CAUSAL else full
    if SPLIT_LOOP:
        for j in range(0, full):
            row_max, row_sum, acc_low, acc_high = attention_step(
                q_low, q_high, k, v, batch, kv_head, j, positions, row_max, row_sum, acc_low, acc_high, unit,
                TILE_M, TILE_N, LOW, HIGH, False, K_LATENCY, V_LATENCY, EARLY_V,
            )  # fmt: skip
        for j in range(full, last):
            row_max, row_sum, acc_low, acc_high = attention_step(
                q_low, q_high, k, v, batch, kv_head, j, positions, row_max, row_sum, acc_low, acc_high, unit,
                TILE_M, TILE_N, LOW, HIGH, True, K_LATENCY, V_LATENCY, EARLY_V,
            )  # fmt: skip
    else:
        for j in range(0, last):
            row_max, row_sum, acc_low, acc_high = attention_step(
                q_low, q_high, k, v, batch, kv_head, j, positions, row_max, row_sum, acc_low, acc_high, unit,
                TILE_M, TILE_N, LOW, HIGH, CAUSAL, K_LATENCY, V_LATENCY, EARLY_V,
            )  # fmt: skip
    ct.store(out, (batch, head, i, 0), (acc_low / row_sum).reshape((1, 1, TILE_M, LOW)).astype(out.dtype))
    if HIGH > 0:
        tile = (acc_high / row_sum).reshape((1, 1, TILE_M, HIGH)).astype(out.dtype)
        ct.store(out, (batch, head, i, LOW // HIGH), tile)


@ct.kernel
def decode_experiment(
    q,
    k,
    v,
    out,
    lse,
    kv_len,
    scaling: float,
    TILE_M: Int,
    TILE_N: Int,
    D: Int,
    LATENCY: Int,
    SLICED: Bool,
    KEYS_LEFT: Bool,
):
    batch, kv_head = ct.bid(0) // k.shape[1], ct.bid(0) % k.shape[1]
    split = ct.bid(1)
    group = q.shape[1] // k.shape[1]
    head, next_head = kv_head * group, (kv_head + 1) * group
    keys = ct.load(kv_len, (batch,), (1,)).item()
    if SLICED:
        k = k.slice(2, 0, keys)
        v = v.slice(2, 0, keys)
    share = ct.cdiv(ct.cdiv(keys, TILE_N), ct.num_blocks(1))
    first = split * share
    last = min(first + share, ct.cdiv(keys, TILE_N))
    unit = scaling * LOG2E
    q_tile = ct.load(q.slice(1, head, next_head), (batch, 0, 0, 0), (1, TILE_M, 1, D), padding_mode=ZERO)
    q_tile = q_tile.reshape((TILE_M, D))
    if KEYS_LEFT:
        # scores as [keys, queries]: the tall operand is on the left, where Hopper's wide instruction wants it
        q_tile = ct.transpose(q_tile)
        row_max = ct.full((1, TILE_M), -math.inf, dtype=ct.float32)
        row_sum = ct.zeros((1, TILE_M), dtype=ct.float32)
        acc = ct.zeros((D, TILE_M), dtype=ct.float32)
        for j in range(first, last):
            k_tile = ct.load(
                k,
                (batch, kv_head, j, 0),
                (1, 1, TILE_N, D),
                padding_mode=ZERO,
                latency=LATENCY if LATENCY > 0 else None,
            )
            s = ct.mma(k_tile.reshape((TILE_N, D)), q_tile, ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
            if (j + 1) * TILE_N > keys:
                s = ct.where(j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None] < keys, s, -math.inf)
            new_max = ct.maximum(row_max, ct.max(s, axis=0, keepdims=True))
            p = ct.exp2(s * unit - new_max * unit, flush_to_zero=True)
            shrink = ct.exp2((row_max - new_max) * unit, flush_to_zero=True)
            row_sum = row_sum * shrink + ct.sum(p, axis=0, keepdims=True)
            v_tile = ct.load(
                v,
                (batch, kv_head, 0, j),
                (1, 1, D, TILE_N),
                order=(0, 1, 3, 2),
                padding_mode=ZERO,
                latency=LATENCY if LATENCY > 0 else None,
            )
            acc = ct.mma(v_tile.reshape((D, TILE_N)), p.astype(v.dtype), acc * shrink)
            row_max = new_max
        acc = ct.transpose(acc / row_sum)
        logits = row_max * scaling + ct.log(row_sum)
    else:
        row_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
        row_sum = ct.zeros((TILE_M, 1), dtype=ct.float32)
        acc = ct.zeros((TILE_M, D), dtype=ct.float32)
        for j in range(first, last):
            k_tile = ct.load(
                k,
                (batch, kv_head, 0, j),
                (1, 1, D, TILE_N),
                order=(0, 1, 3, 2),
                padding_mode=ZERO,
                latency=LATENCY if LATENCY > 0 else None,
            )
            s = ct.mma(q_tile, k_tile.reshape((D, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
            if (j + 1) * TILE_N > keys:
                s = ct.where(j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :] < keys, s, -math.inf)
            p, row_max, row_sum, acc = update_softmax(s, row_max, row_sum, acc, scaling, 1, False)
            v_tile = ct.load(
                v,
                (batch, kv_head, j, 0),
                (1, 1, TILE_N, D),
                padding_mode=ZERO,
                latency=LATENCY if LATENCY > 0 else None,
            )
            acc = ct.mma(p.astype(v.dtype), v_tile.reshape((TILE_N, D)), acc)
        acc = acc / row_sum
        logits = row_max * scaling + ct.log(row_sum)
    ct.store(out.slice(1, head, next_head), (batch, 0, split, 0), acc.reshape((1, TILE_M, 1, D)))
    ct.store(lse.slice(1, head, next_head), (batch, 0, split), logits.reshape((1, TILE_M, 1)))
