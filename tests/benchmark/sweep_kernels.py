"""Kernels that the sweep tries beside TileGym's own: each changes one thing that might be faster."""

import math

import cuda.tile as ct

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
