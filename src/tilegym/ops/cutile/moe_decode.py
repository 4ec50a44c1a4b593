"""Experts of one or a few tokens: matrix-vector products, one for each (token, expert) pair.

Hardly any two pairs share an expert, so every weight is used once: as in ``linear.py``, products are added up without
tensor cores, and nothing is sorted. Two launches do it all: up with the activation, and down with the weighted sum.
Where that leaves too few blocks to keep memory busy, each pair's product is a block's, and a third launch adds them up.
"""

import cuda.tile as ct

from tilegym.ops.cutile.bmm import load_tile as load_batch_tile
from tilegym.ops.cutile.moe_activation import activated
from tilegym.ops.cutile.moe_gemm import INTERLEAVED
from tilegym.ops.cutile.moe_gemm import NO_GATE
from tilegym.ops.cutile.moe_gemm import SPLIT
from tilegym.ops.cutile.moe_gemm import every_other
from tilegym.ops.cutile.moe_gemm import load_bias
from tilegym.ops.cutile.moe_gemm import scalar_at
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import span


def load_row(x, row, k, TILE_K: Int):
    return ct.load(x, (row, k), (1, TILE_K), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)


def products(w, expert, n, k, row, TILE_N: Int, TILE_K: Int, TRANSPOSED: Bool):
    """In a kernel: tile (n, k) of the expert's matrix times a tile of a row, not summed yet, [TILE_N, TILE_K]."""
    return load_batch_tile(w, expert, n, k, TILE_N, TILE_K, TRANSPOSED).astype(ct.float32) * row


@ct.kernel(occupancy=4)
def moe_gemv_up_kernel(
    x,  # [T, H]
    w_gate,  # as in moe_up_kernel
    w_up,
    b_gate,
    b_up,
    ids,  # [T * TOP_K]
    h,  # [T * TOP_K, I]
    alpha,
    limit,
    TOP_K: Int,
    TILE_N: Int,
    TILE_K: Int,
    TRANSPOSED: Bool,
    GATE: Int,
    BIAS: Bool,
    KIND: Int,
    LIMITED: Bool,
    OVERLAP: Bool,
):
    begin(OVERLAP)
    tiles = ct.cdiv(h.shape[1], TILE_N)
    pair, n = ct.bid(0) // tiles, ct.bid(0) % tiles
    named = scalar_at(ids, pair)
    if (named >= 0) & (named < w_gate.shape[0]):
        expert = named.astype(ct.int32)
        steps = ct.cdiv(x.shape[1], TILE_K)
        WIDE = 2 * TILE_N if GATE == INTERLEAVED else TILE_N
        acc = ct.zeros((WIDE, TILE_K), dtype=ct.float32)
        acc_up = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
        for k in range(steps):
            row = load_row(x, pair // TOP_K, k, TILE_K)
            acc = acc + products(w_gate, expert, n, k, row, WIDE, TILE_K, TRANSPOSED)
            if GATE == SPLIT:
                acc_up = acc_up + products(w_up, expert, n, k, row, TILE_N, TILE_K, TRANSPOSED)
        total = ct.sum(acc, axis=1).reshape((1, WIDE))
        if GATE == INTERLEAVED:
            gate, up = every_other(total, 0, 1, TILE_N, False), every_other(total, 1, 1, TILE_N, False)
        else:
            gate, up = total, ct.sum(acc_up, axis=1).reshape((1, TILE_N))
        if BIAS:
            gate = gate + load_bias(b_gate, expert, n, TILE_N, False)
            if GATE != NO_GATE:
                up = up + load_bias(b_up, expert, n, TILE_N, False)
        value = activated(gate, up, alpha, limit, h.dtype, KIND, GATE != NO_GATE, LIMITED)
        ct.store(h, (pair, n), value.astype(h.dtype))


@ct.kernel(occupancy=4)
def moe_gemv_down_kernel(
    h,  # [T * TOP_K, I]
    w,  # [E, H, I], or [E, I, H] if TRANSPOSED
    bias,  # [E, H] if BIAS, else 0
    ids,  # [T * TOP_K]
    weights,  # [T * TOP_K]
    shared,  # [T, H] if SHARED, else 0
    out,  # [T, H], or [T * TOP_K, H] if PAIRWISE
    TOP_K: Int,
    TILE_N: Int,
    TILE_K: Int,
    TRANSPOSED: Bool,
    BIAS: Bool,
    SHARED: Bool,
    PAIRWISE: Bool,
    OVERLAP: Bool,
):
    begin(OVERLAP)
    tiles = ct.cdiv(out.shape[1], TILE_N)
    row_out, n = ct.bid(0) // tiles, ct.bid(0) % tiles
    pairs = 1 if PAIRWISE else TOP_K
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    total = ct.zeros((1, TILE_N), dtype=ct.float32)
    for j in range(pairs):
        pair = row_out * pairs + j
        named = scalar_at(ids, pair)
        if (named >= 0) & (named < w.shape[0]):
            expert = named.astype(ct.int32)
            weight = scalar_at(weights, pair).astype(ct.float32)
            for k in range(ct.cdiv(h.shape[1], TILE_K)):
                row = load_row(h, pair, k, TILE_K) * weight
                acc = acc + products(w, expert, n, k, row, TILE_N, TILE_K, TRANSPOSED)
            if BIAS:
                total = total + load_bias(bias, expert, n, TILE_N, False) * weight
    total = total + ct.sum(acc, axis=1).reshape((1, TILE_N))
    if SHARED:
        total = total + ct.gather(shared, (row_out, span(n, TILE_N)))[None, :].astype(ct.float32)
    ct.store(out, (row_out, n), total.astype(out.dtype))
