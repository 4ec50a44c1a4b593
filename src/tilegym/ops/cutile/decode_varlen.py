"""Attention of one token of each sequence, its keys split among blocks as ``fmha_decode`` does it: ``fmha_varlen`` of
single tokens, whose keys are packed, and ``fmha_paged_decode``, whose keys lie in pages."""

import math

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import cap_scores
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import update_softmax
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.flash_decode_plan import MAX_TILE_M
from tilegym.ops.cutile.flash_decode_plan import MERGED_AT_ONCE
from tilegym.ops.cutile.flash_decode_plan import MERGED_IN_ORDER
from tilegym.ops.cutile.flash_decode_plan import choose_splits
from tilegym.ops.cutile.flash_decode_plan import choose_tiles
from tilegym.ops.cutile.packed import keys_of_sequence
from tilegym.ops.cutile.packed import last_start
from tilegym.ops.cutile.packed import number_at
from tilegym.ops.cutile.splitk_reduce import AT_ONCE
from tilegym.ops.cutile.splitk_reduce import IN_ORDER
from tilegym.ops.cutile.splitk_reduce import IN_TURNS
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.splitk_reduce import TILE_S
from tilegym.ops.cutile.splitk_reduce import merge_kernel
from tilegym.ops.cutile.splitk_reduce import product_in_parts
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2


@ct.kernel(occupancy=2)
def decode_packed_kernel(
    q,  # [Tq, Hq, D]
    k,  # [1, Hkv, Tk, D], or [P, Hkv, S, D] if PAGE_TILES
    v,  # [1, Hkv, Tk, Dv], or [P, Hkv, S, Dv] if PAGE_TILES
    out,  # [Tq, Hq, 1, Dv]
    partial,  # [Tq, Hq, splits, Dv + STATE_COLUMNS], as merge_kernel takes it; 0 for one split
    starts_q,  # [N + 1]; 0 if PAGE_TILES: each sequence has one token
    starts_k,  # [N + 1]
    pages,  # [N, M] if PAGE_TILES, else 0
    sinks,  # [Hq] if SINKS, else 0
    scaling: float,
    soft_cap: float,
    window: int,
    TILE_M: Int,  # at least GROUP
    TILE_N: Int,
    TILE_D: Int,
    TILE_DV: Int,
    GROUP: Int,  # query heads that share a kv head
    PAGE_TILES: Int,  # tiles of keys in a page; 0 for packed keys
    WINDOW: Bool,
    SOFT_CAP: Bool,
    SINKS: Bool,
    EXACT: Bool,
    ONE_SPLIT: Bool,
):
    kv_heads = k.shape[1]
    token, kv_head, split = ct.bid(0) // kv_heads, ct.bid(0) % kv_heads, ct.bid(1)
    behind = number_at(starts_k, starts_k.shape[0] - 1)
    if PAGE_TILES:
        _, keys = keys_of_sequence(starts_k, token, behind)
    else:
        sequence = last_start(starts_q, token, 1, False)
        first_key, keys = keys_of_sequence(starts_k, sequence, behind)
        first_key = min(first_key, k.shape[2] - 1)  # of no keys it may be behind the array, where no slice may begin
        k = k.slice(2, first_key, first_key + keys)
        v = v.slice(2, first_key, first_key + keys)
    hidden = max(keys - window, 0) if WINDOW else 0
    first, last = hidden // TILE_N, ct.cdiv(keys, TILE_N)
    share = ct.cdiv(last - first, ct.num_blocks(1))
    first = first + split * share
    last = min(first + share, last)

    # Keys are the rows of the products and the group's queries the columns, as in decode_kernel.
    zero = ct.PaddingMode.ZERO
    rows, dims = ct.arange(TILE_M, dtype=ct.int32), ct.arange(TILE_DV, dtype=ct.int32)
    real, heads = rows < GROUP, kv_head * GROUP + rows
    at = (token, heads[:, None], ct.arange(TILE_D, dtype=ct.int32)[None, :])
    q_tile = ct.transpose(ct.gather(q, at, mask=real[:, None]))
    unit = 1.0 if SOFT_CAP else scaling
    acc = ct.zeros((TILE_DV, TILE_M), dtype=ct.float32)
    col_max = ct.full((1, TILE_M), -math.inf, dtype=ct.float32)
    col_sum = ct.zeros((1, TILE_M), dtype=ct.float32)
    if SINKS and split == 0:
        # A sink is one more key, with a score of its own and the value zero.
        sink = ct.gather(sinks, heads, mask=real).astype(ct.float32)
        col_max = sink.reshape((1, TILE_M)) / unit
        col_sum = ct.ones((1, TILE_M), dtype=ct.float32)
    full = keys // TILE_N
    for j in range(first, last):
        page, tile = 0, j
        if PAGE_TILES:
            page, tile = ct.load(pages, (token, j // PAGE_TILES), (1, 1)).astype(ct.int32).item(), j % PAGE_TILES
        k_tile = ct.load(k, (page, kv_head, tile, 0), (1, 1, TILE_N, TILE_D), padding_mode=zero)
        k_tile = k_tile.reshape((TILE_N, TILE_D))
        if k.dtype == ct.float32:
            s = product_in_parts(k_tile, q_tile)
        else:
            s = ct.mma(k_tile, q_tile, ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
        if SOFT_CAP:
            s = cap_scores(s * scaling, soft_cap, EXACT)
        v_tile = ct.load(v, (page, kv_head, 0, tile), (1, 1, TILE_DV, TILE_N), order=(0, 1, 3, 2), padding_mode=zero)
        v_tile = v_tile.reshape((TILE_DV, TILE_N))
        if (j * TILE_N < hidden or j >= full) if WINDOW else j >= full:
            row = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
            s = ct.where(((row >= hidden) & (row < keys))[:, None], s, -math.inf)
            if PAGE_TILES:
                # What a page holds behind the last key may be NaN, which times zero would be NaN.
                v_tile = ct.where((row < keys)[None, :], v_tile, ct.zeros((TILE_DV, TILE_N), dtype=v.dtype))
        p, col_max, col_sum, acc = update_softmax(s, col_max, col_sum, acc, unit, 0, EXACT)
        if v.dtype == ct.float32:
            acc = acc + product_in_parts(v_tile, p)
        else:
            acc = ct.mma(v_tile, p.astype(v_tile.dtype), acc)

    wanted = real[None, :] & (dims < out.shape[3])[:, None]
    if ONE_SPLIT:
        acc = acc * (1.0 / ct.where(col_sum == 0.0, 1.0, col_sum))
        ct.scatter(out, (token, heads[None, :], 0, dims[:, None]), acc.astype(out.dtype), mask=wanted)
    else:
        ct.scatter(partial, (token, heads[None, :], split, dims[:, None]), acc, mask=wanted)
        ct.scatter(partial, (token, heads, split, out.shape[3]), col_max.reshape((TILE_M,)), mask=real)
        ct.scatter(partial, (token, heads, split, out.shape[3] + 1), col_sum.reshape((TILE_M,)), mask=real)


def launch_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor | int,
    starts_k: torch.Tensor,
    pages: torch.Tensor | int,
    longest: int,
    scaling: float,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Launches the kernel, and what merges its splits, for sequences of at most ``longest`` keys."""
    tokens, heads, head_dim = q.shape
    _, kv_heads, rows, v_dim = v.shape
    out = q.new_empty(tokens, heads, v_dim)
    dtype, index, group = q.dtype, q.get_device(), heads // kv_heads
    visible = longest if window_size is None else min(longest, window_size)
    tile_m, tile_n, tile_d, tile_dv = choose_tiles(group, head_dim, v_dim, dtype.itemsize, index)
    page_tiles = 0
    if isinstance(pages, torch.Tensor):
        tile_n = min(tile_n, whole_tile(rows))
        page_tiles = rows // tile_n
    splits = choose_splits(tokens * kv_heads, visible, None, index)
    partial = 0
    if splits > 1:
        partial = q.new_empty(tokens, heads, splits, v_dim + STATE_COLUMNS, dtype=torch.float32)
    arrays = (q, k, v, out[:, :, None], partial, starts_q, starts_k, pages, 0 if sinks is None else sinks)
    scalars = (scaling, 1.0 if soft_cap is None else soft_cap, 0 if window_size is None else window_size)
    options = (window_size is not None, soft_cap is not None, sinks is not None, needs_exact(dtype, NO_MASK))
    constants = (tile_m, tile_n, tile_d, tile_dv, group, page_tiles, *options, splits == 1)
    kernel = hinted(decode_packed_kernel, num_worker_warps=8) if tile_m > MAX_TILE_M else decode_packed_kernel
    launch(out, (tokens * kv_heads, splits), kernel, (*arrays, *scalars, *constants))
    if splits > 1:
        how = IN_ORDER if splits <= MERGED_IN_ORDER else AT_ONCE if splits <= MERGED_AT_ONCE else IN_TURNS
        tile_s = TILE_S if how == IN_TURNS else next_power_of_2(splits)
        unit = 1.0 if soft_cap is not None else scaling
        merge = (partial, out[:, :, None], unit, tile_s, tile_dv, v_dim, how, False)
        launch(out, (tokens * heads,), merge_kernel, merge)
    return out


def whole_tile(rows: int) -> int:
    """The largest power of two that divides ``rows``."""
    return rows & -rows


def _fake(q, k, v, *_):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@compilable(_fake)
def decode_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int | None,
    scaling: float,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """:func:`tilegym.ops.fmha_varlen` of sequences that have one query each, or none."""
    keys = k.shape[0]
    if keys == 0:
        return _fake(q, k, v).zero_()
    k, v = (with_unit_stride(x.transpose(0, 1)[None]) for x in (k, v))
    longest = keys if max_seqlen_k is None else min(max(max_seqlen_k, 1), keys)
    starts = (cu_seqlens_q, cu_seqlens_k)
    return launch_decode(q, k, v, *starts, 0, longest, scaling, window_size, soft_cap, sinks)
