"""``fmha_decode`` in cuTile: attention of one query a head, its keys split among blocks (flash-decoding).

All there is to do is to read the keys and values once, at the speed of memory: for that enough blocks must be at work.
A block takes one kv head, hence all query heads of its group at a time, and a share of the keys that are valid now.
Another launch merges the shares, or, in eager calls where it is cheap, the last block of a kv head to finish does, in
their order: which block that is does not show in the result, and neither does which of the two ways it is. Launches
follow each other without a gap where the GPU can do that (programmatic dependent launch), in a decoding graph from op
to op.
"""

import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import LONGEST_WINDOW
from tilegym.ops.cutile.attention_common import cap_scores
from tilegym.ops.cutile.attention_common import check_supported
from tilegym.ops.cutile.attention_common import prepare_mask
from tilegym.ops.cutile.attention_common import truth
from tilegym.ops.cutile.attention_common import update_softmax
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.flash_decode_fp32 import decode_rows_kernel
from tilegym.ops.cutile.flash_decode_plan import LAST_BLOCK
from tilegym.ops.cutile.flash_decode_plan import NEXT_LAUNCH
from tilegym.ops.cutile.flash_decode_plan import ONE_SPLIT
from tilegym.ops.cutile.flash_decode_plan import make_plan
from tilegym.ops.cutile.flash_decode_plan import tiles_of_split
from tilegym.ops.cutile.splitk_reduce import merge_in_order
from tilegym.ops.cutile.splitk_reduce import merge_kernel
from tilegym.ops.cutile.splitk_reduce import product_in_parts
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.workspace import workspace
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.checks import wants_gradient
from tilegym.ops.pytorch.flash_decode import check_query


@ct.kernel(occupancy=2)
def decode_kernel(
    q,  # [B, Hq, 1, D]
    k,  # [B, Hkv, Skv, D]
    v,  # [B, Hkv, Skv, Dv]
    out,  # [B, Hq, 1, Dv]
    partial,  # [B, Hq, splits, Dv + STATE_COLUMNS], as merge_kernel takes it; 0 if ONE_SPLIT
    counters,  # [B * Hkv or more] zeros, which they are again afterwards, if LAST_BLOCK, else 0
    mask,  # [B or 1, Hq or 1, 1, Skv] if MASK, else 0
    sinks,  # [Hq] if SINKS, else 0
    kv_len,  # [B] if KV_LEN, else 0
    scaling: float,
    soft_cap: float,
    window: int,
    TILE_M: Int,  # at least as many as query heads in a group, or as a block has of them
    TILE_N: Int,
    TILE_D: Int,
    TILE_DV: Int,
    DV: Int,
    GROUP: Int,  # query heads that share a kv head
    WINDOW: Bool,
    SOFT_CAP: Bool,
    MASK: Int,
    MASK_HEADS: Int,  # TILE_M, or 1 for a mask that all heads share
    SINKS: Bool,
    KV_LEN: Bool,
    EXACT: Bool,
    MERGE: Int,
    TILE_S: Int,  # holds all splits, if LAST_BLOCK
    OVERLAP: Bool,
):
    begin(OVERLAP)
    zero = ct.PaddingMode.ZERO
    batch, kv_head = ct.bid(0) // k.shape[1], ct.bid(0) % k.shape[1]
    split = ct.bid(1)
    # A large group is shared by several blocks, along axis 2.
    head, next_head = kv_head * GROUP + ct.bid(2) * TILE_M, (kv_head + 1) * GROUP
    first, last, first_key, keys = tiles_of_split(k, kv_len, batch, window, TILE_N, WINDOW, KV_LEN)

    # The group's queries, padded with zeros to what ct.mma takes, are the columns of the right operand; the left one,
    # which the tensor cores want tall, are the keys. So scores are [keys, queries], and the output is [Dv, queries].
    # They are gathered, and results scattered: a slice of an array whose bounds come from the grid has no tensor map
    # until the kernel has made one, for which the first keys would wait (on an H200 B1 T8192 takes 17.0 us, with slices
    # and 16 columns 19.1).
    rows, dims = ct.arange(TILE_M, dtype=ct.int32), ct.arange(TILE_DV, dtype=ct.int32)
    real = head + rows < next_head
    at = (batch, head + rows[:, None], 0, ct.arange(TILE_D, dtype=ct.int32)[None, :])
    q_tile = ct.transpose(ct.gather(q, at, mask=real[:, None]))
    unit = 1.0 if SOFT_CAP or MASK == ADDITIVE_MASK else scaling
    acc = ct.zeros((TILE_DV, TILE_M), dtype=ct.float32)
    col_max = ct.full((1, TILE_M), -math.inf, dtype=ct.float32)
    col_sum = ct.zeros((1, TILE_M), dtype=ct.float32)
    if SINKS and split == 0:
        # A sink is one more key, with a score of its own and the value zero.
        sink = ct.gather(sinks, head + rows, mask=real).astype(ct.float32)
        col_max = sink.reshape((1, TILE_M)) / unit
        col_sum = ct.ones((1, TILE_M), dtype=ct.float32)
    full = keys // TILE_N
    for j in range(first, last):
        k_tile = ct.load(k, (batch, kv_head, j, 0), (1, 1, TILE_N, TILE_D), padding_mode=zero)
        k_tile = k_tile.reshape((TILE_N, TILE_D))
        if k.dtype == ct.float32:
            s = product_in_parts(k_tile, q_tile)
        else:
            s = ct.mma(k_tile, q_tile, ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
        if SOFT_CAP:
            s = cap_scores(s * scaling, soft_cap, EXACT)
        if MASK == BOOLEAN_MASK:
            s = ct.where(load_mask(mask, batch, head, next_head, j, MASK_HEADS, TILE_N), s, -math.inf)
        if MASK == ADDITIVE_MASK:
            if not SOFT_CAP:
                s = s * scaling
            s = s + load_mask(mask, batch, head, next_head, j, MASK_HEADS, TILE_N).astype(ct.float32)
        v_tile = ct.load(v, (batch, kv_head, 0, j), (1, 1, TILE_DV, TILE_N), order=(0, 1, 3, 2), padding_mode=zero)
        v_tile = v_tile.reshape((TILE_DV, TILE_N))
        # Without a window it is one comparison with the number of the tile, of which cuTile makes two loops.
        if (j * TILE_N < first_key or j >= full) if WINDOW else j >= full:
            row = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
            s = ct.where(((row >= first_key) & (row < keys))[:, None], s, -math.inf)
            if KV_LEN:
                # What a cache holds behind its last key may be NaN, which times zero would be NaN.
                v_tile = ct.where((row < keys)[None, :], v_tile, ct.zeros((TILE_DV, TILE_N), dtype=v.dtype))
        p, col_max, col_sum, acc = update_softmax(s, col_max, col_sum, acc, unit, 0, EXACT)
        if v.dtype == ct.float32:
            acc = acc + product_in_parts(v_tile, p)
        else:
            acc = ct.mma(v_tile, p.astype(v_tile.dtype), acc)

    # [Dv, queries], as it is in registers.
    wanted = real[None, :] & (dims < DV)[:, None]
    if MERGE == ONE_SPLIT:
        acc = acc * (1.0 / ct.where(col_sum == 0.0, 1.0, col_sum))
        ct.scatter(out, (batch, head + rows[None, :], 0, dims[:, None]), acc.astype(out.dtype), mask=wanted)
    else:
        # Kept as they are until all splits are known, they are merged as exactly as the tiles of one split.
        ct.scatter(partial, (batch, head + rows[None, :], split, dims[:, None]), acc, mask=wanted)
        ct.scatter(partial, (batch, head + rows, split, DV), col_max.reshape((TILE_M,)), mask=real)
        ct.scatter(partial, (batch, head + rows, split, DV + 1), col_sum.reshape((TILE_M,)), mask=real)
    if MERGE == LAST_BLOCK:
        # It acquires and releases: see workspace.py.
        if ct.atomic_add(counters, (ct.bid(0),), 1) == ct.num_blocks(1) - 1:
            ct.atomic_xchg(counters, (ct.bid(0),), 0, memory_order=ct.MemoryOrder.RELAXED)
            nth = ct.arange(ct.static_eval(next_power_of_2(GROUP)), dtype=ct.int32)[:, None]
            heads = head + ct.minimum(nth, GROUP - 1)  # those that are none are the last one again
            merged = merge_in_order(partial, batch, heads, ct.num_blocks(1), unit, TILE_S, TILE_DV, DV)
            wanted = (nth < GROUP) & (dims < DV)[None, :]
            ct.scatter(out, (batch, heads, 0, dims[None, :]), merged.astype(out.dtype), mask=wanted)


def load_mask(mask, batch, head, next_head, j, HEADS: Int, TILE_N: Int):
    """The mask of a group's heads for a tile of keys, [keys, heads]; a dimension of one is broadcast (x % 1 is 0)."""
    if HEADS > 1:
        mask = mask.slice(1, head, next_head)
    index = (batch % mask.shape[0], 0, 0, j)
    tile = ct.load(mask, index, (1, HEADS, 1, TILE_N), padding_mode=ct.PaddingMode.ZERO)
    return ct.transpose(truth(tile.reshape((HEADS, TILE_N))))


small_decode_kernel = decode_kernel.replace_hints(occupancy=3)


def _fake(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[3])


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    kv_len_per_split: int | None,
    kv_len: torch.Tensor | None,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    eager: bool,
) -> torch.Tensor:
    plan = make_plan(q, k, v, scaling, kv_len_per_split, kv_len, window_size, soft_cap, sinks, attention_mask)
    out = q.new_empty(plan.out_shape)
    grid = plan.grid
    if grid[1] == 0:
        return out.zero_()
    partial = counters = mask = 0
    merge = plan.merge
    if merge == LAST_BLOCK:
        lent = workspace(q, plan.partial_shape) if eager else None
        partial, counters = lent or (0, 0)
        merge = LAST_BLOCK if lent else NEXT_LAUNCH
    if merge == NEXT_LAUNCH:
        partial = q.new_empty(plan.partial_shape, dtype=torch.float32)
    if attention_mask is not None:
        mask = prepare_mask(attention_mask, k.shape[2])[1]
    arrays = (
        with_unit_stride(q),
        with_unit_stride(k),
        with_unit_stride(v),
        out,
        partial,
        counters,
        mask,
        0 if sinks is None else sinks,
        0 if kv_len is None else kv_len,
    )
    kernel, overlap = small_decode_kernel if plan.small else decode_kernel, plan.overlap
    if plan.rows:
        kernel = decode_rows_kernel
    how = (merge, plan.tile_s if merge == LAST_BLOCK else 1, overlap)
    launch(out, grid, kernel, (*arrays, *plan.scalars, *plan.constants, *how), overlap)
    if merge == NEXT_LAUNCH:
        heads = (grid[0] * (q.shape[1] // k.shape[1]),)
        launch(out, heads, merge_kernel, (partial, out, *plan.merge_args), overlap)
    return out


@compilable(_fake)
def decode_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    kv_len_per_split: int | None,
    kv_len: torch.Tensor | None,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    # Compiled code may run in a pool of memory that has to give everything back, and mostly in graphs.
    options = (scaling, kv_len_per_split, kv_len, window_size, soft_cap, sinks, attention_mask)
    return _forward(q, k, v, *options, False)


@register_impl("fmha_decode", "cutile")
def fmha_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    kv_len_per_split: int | None = None,
    kv_len: torch.Tensor | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    if wants_gradient(q, k, v, sinks, attention_mask):
        raise UnsupportedError("it has no backward kernel")
    check_query(q, kv_len_per_split)
    check_arguments("fmha_decode", q, k, v, window_size, soft_cap, sinks, attention_mask, kv_len)
    scaling = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    check_supported(q, k, v, scaling, sinks, attention_mask, True)
    if window_size is not None:
        window_size = min(window_size, LONGEST_WINDOW)
    options = (scaling, kv_len_per_split, kv_len, window_size, soft_cap, sinks, attention_mask)
    return decode_forward(q, k, v, *options) if torch.compiler.is_compiling() else _forward(q, k, v, *options, True)
