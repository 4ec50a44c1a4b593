"""The backward pass of ``fmha`` for so few queries and keys that one tile holds those of a head: a single launch."""

import cuda.tile as ct

from tilegym.ops.cutile.attention_backward_kernels import softmax_backward
from tilegym.ops.cutile.attention_backward_tiles import load_statistic
from tilegym.ops.cutile.attention_common import load_rows
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int


@ct.kernel
def attention_short_backward_kernel(
    q,  # [B, Hq, Sq, D], Sq at most TILE
    k,  # [B, Hkv, Skv, D], Skv at most TILE
    v,  # [B, Hkv, Skv, Dv]
    out,  # [B, Hq, Sq, Dv]
    do,  # [B, Hq, Sq, Dv]
    lse,  # [1, B, Hq, Sq] as attention_kernel writes it
    dq,  # [B, Hq, Sq, D]
    dk,  # [B, H, Skv, D], H a multiple of Hkv and a divisor of Hq: the sums of Hq / H heads each
    dv,  # [B, H, Skv, Dv]
    scaling: float,
    soft_cap: float,
    window: int,
    TILE: Int,
    TILE_D: Int,
    TILE_DV: Int,
    CAUSAL: Bool,
    WINDOW: Bool,
    SOFT_CAP: Bool,
):
    """A block takes the heads that it sums up one after the other: nobody adds to what another has."""
    batch, block_head = ct.bid(0) // dk.shape[1], ct.bid(0) % dk.shape[1]
    group, kv_head = q.shape[1] // dk.shape[1], block_head // (dk.shape[1] // k.shape[1])
    keys = k.shape[2]
    columns = ct.arange(TILE, dtype=ct.int32)[:, None]
    positions = keys - q.shape[2] + ct.arange(TILE, dtype=ct.int32)[None, :]
    k_tile = load_rows(k, batch, kv_head, 0, TILE, TILE_D, False)
    v_tile = load_rows(v, batch, kv_head, 0, TILE, TILE_DV, False)
    dk_tile = ct.zeros((TILE, TILE_D), dtype=ct.float32)
    dv_tile = ct.zeros((TILE, TILE_DV), dtype=ct.float32)
    zeros = ct.zeros((TILE, TILE), dtype=ct.float32)
    for n in range(group):
        head = block_head * group + n
        q_tile = load_rows(q, batch, head, 0, TILE, TILE_D, False)
        do_tile = load_rows(do, batch, head, 0, TILE, TILE_DV, False)
        out_tile = load_rows(out, batch, head, 0, TILE, TILE_DV, False)
        row_delta = ct.sum(do_tile.astype(ct.float32) * out_tile.astype(ct.float32), axis=1)[None, :]
        row_lse = load_statistic(lse, 0, batch, head, 0, TILE)[None, :]
        p, _, ds = softmax_backward(
            ct.mma(k_tile, ct.transpose(q_tile), zeros), ct.mma(v_tile, ct.transpose(do_tile), zeros), 0,
            (batch, head, 0, 0), (positions, columns), True, (keys, window), (row_lse, 0.0, row_delta), scaling,
            soft_cap, CAUSAL, WINDOW, SOFT_CAP, 0, 1, False, False, TILE, True,
        )  # fmt: skip
        dv_tile = ct.mma(p.astype(do.dtype), do_tile, dv_tile)
        ds = ds.astype(q.dtype)
        dk_tile = ct.mma(ds, q_tile, dk_tile)
        dq_tile = ct.mma(ct.transpose(ds), k_tile, ct.zeros((TILE, TILE_D), dtype=ct.float32)) * scaling
        ct.store(dq, (batch, head, 0, 0), dq_tile.reshape((1, 1, TILE, TILE_D)).astype(dq.dtype))
    dk_tile = (dk_tile * scaling).reshape((1, 1, TILE, TILE_D))
    ct.store(dk, (batch, block_head, 0, 0), dk_tile.astype(dk.dtype))
    ct.store(dv, (batch, block_head, 0, 0), dv_tile.reshape((1, 1, TILE, TILE_DV)).astype(dv.dtype))
