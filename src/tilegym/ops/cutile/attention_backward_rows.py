"""What comes before and behind the kernels of attention's backward pass: one pass over memory each."""

import cuda.tile as ct

from tilegym.ops.cutile.attention_common import load_rows
from tilegym.ops.cutile.attention_tiles import interleaved_block
from tilegym.ops.cutile.tiling import Int


@ct.kernel
def prepare_fused_kernel(
    out,  # [B, Hq, Sq, Dv]
    do,  # [B, Hq, Sq, Dv]
    delta,  # [1, B, Hq, Sq]
    dq,  # [B, Hq, Sq, D], fp32
    dqpe,  # [B, Hq, Sq, R], fp32, if TILE_R; else 0
    TILE_M: Int,
    TILE_D: Int,
    TILE_R: Int,
    TILE_DV: Int,
):
    """delta, and zeros for the fused kernel to add to."""
    i, batch, head = interleaved_block(ct.bid(0), ct.cdiv(do.shape[2], TILE_M), do, 1)
    # One pass over memory: many small blocks keep more in flight than the tensor memory accelerator for few.
    index, shape, zero = (batch, head, i, 0), (1, 1, TILE_M, TILE_DV), ct.PaddingMode.ZERO
    do_tile = ct.load(do, index, shape, padding_mode=zero, allow_tma=False).astype(ct.float32)
    out_tile = ct.load(out, index, shape, padding_mode=zero, allow_tma=False).astype(ct.float32)
    row_delta = ct.sum(do_tile * out_tile, axis=3).reshape((1, 1, 1, TILE_M))
    ct.store(delta, (0, batch, head, i), row_delta, allow_tma=False)
    ct.store(dq, index, ct.zeros((1, 1, TILE_M, TILE_D), dtype=ct.float32), allow_tma=False)
    if TILE_R:
        ct.store(dqpe, index, ct.zeros((1, 1, TILE_M, TILE_R), dtype=ct.float32), allow_tma=False)


def sum_of_heads(parts, batch, head, j, TILE_N: Int, TILE_D: Int, GROUP: Int):
    total = ct.zeros((1, 1, TILE_N, TILE_D), dtype=ct.float32)
    for n in ct.static_iter(range(GROUP)):
        index, shape = (batch, head * GROUP + n, j, 0), (1, 1, TILE_N, TILE_D)
        total = total + ct.load(parts, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    return total


def store_sums(dk_parts, dv_parts, dk, dv, block, TILE_N: Int, TILE_D: Int, TILE_DV: Int, GROUP: Int):
    j, batch, head = interleaved_block(block, ct.cdiv(dk.shape[2], TILE_N), dk, 1)
    total = sum_of_heads(dk_parts, batch, head, j, TILE_N, TILE_D, GROUP)
    ct.store(dk, (batch, head, j, 0), total.astype(dk.dtype), allow_tma=False)
    total = sum_of_heads(dv_parts, batch, head, j, TILE_N, TILE_DV, GROUP)
    ct.store(dv, (batch, head, j, 0), total.astype(dv.dtype), allow_tma=False)


@ct.kernel
def sum_heads_kernel(
    dk_parts,  # [B, Hkv * GROUP, Skv, D], fp32
    dv_parts,  # [B, Hkv * GROUP, Skv, Dv], fp32
    dk,  # [B, Hkv, Skv, D]
    dv,  # [B, Hkv, Skv, Dv]
    TILE_N: Int,
    TILE_D: Int,
    TILE_DV: Int,
    GROUP: Int,
):
    """dk and dv as sums over the heads of a group."""
    store_sums(dk_parts, dv_parts, dk, dv, ct.bid(0), TILE_N, TILE_D, TILE_DV, GROUP)


@ct.kernel
def finish_fused_kernel(
    total,  # [B, Hq, Sq, D] or [1, B, Hq, D, >= Sq], fp32
    dq,  # [B, Hq, Sq, D]
    totalpe,  # [B, Hq, Sq, R], fp32, if TILE_R; else 0
    dqpe,  # [B, Hq, Sq, R] if TILE_R, else 0
    dk_parts,  # as in sum_heads_kernel if GROUP > 1, dk and dv too; else 0
    dv_parts,
    dk,
    dv,
    scaling: float,
    TILE_M: Int,
    TILE_D: Int,
    TILE_R: Int,
    TILE_N: Int,
    TILE_DV: Int,
    GROUP: Int,
):
    """dq, and by the blocks behind those, if GROUP > 1, what sum_heads_kernel computes."""
    blocks = ct.cdiv(dq.shape[2], TILE_M) * dq.shape[0] * dq.shape[1]
    if GROUP == 1 or ct.bid(0) < blocks:
        i, batch, head = interleaved_block(ct.bid(0), ct.cdiv(dq.shape[2], TILE_M), dq, 1)
        if total.ndim == 5:
            index, shape = (0, batch, head, 0, i), (1, 1, 1, TILE_D, TILE_M)
            tile = ct.load(total, index, shape, padding_mode=ct.PaddingMode.ZERO).reshape((TILE_D, TILE_M))
            tile = ct.transpose(tile) * scaling
        else:
            tile = load_rows(total, batch, head, i, TILE_M, TILE_D, False) * scaling
        ct.store(dq, (batch, head, i, 0), tile.astype(dq.dtype).reshape((1, 1, TILE_M, TILE_D)))
        if TILE_R:
            tile = load_rows(totalpe, batch, head, i, TILE_M, TILE_R, False) * scaling
            ct.store(dqpe, (batch, head, i, 0), tile.astype(dq.dtype).reshape((1, 1, TILE_M, TILE_R)))
    else:
        store_sums(dk_parts, dv_parts, dk, dv, ct.bid(0) - blocks, TILE_N, TILE_D, TILE_DV, GROUP)
