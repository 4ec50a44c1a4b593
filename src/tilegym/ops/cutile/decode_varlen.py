"""Attention of one token of each sequence, whose numbers of keys may differ much: ``fmha_varlen`` of single tokens,
whose keys are packed, and ``fmha_paged_decode``, whose keys lie in pages and to which it adds the last ones.

Blocks share the keys as :mod:`tilegym.ops.cutile.decode_shares` says; another launch merges the parts.
"""

import math

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import cap_scores
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import sums_of_keys
from tilegym.ops.cutile.attention_common import update_softmax
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.decode_shares import LEAST_AT_ONCE
from tilegym.ops.cutile.decode_shares import MOST_AT_ONCE
from tilegym.ops.cutile.decode_shares import parts_of_sequence
from tilegym.ops.cutile.decode_shares import share_of_block
from tilegym.ops.cutile.decode_shares import tiles_of_one
from tilegym.ops.cutile.decode_varlen_plan import blocks_of
from tilegym.ops.cutile.decode_varlen_plan import merged_at_once
from tilegym.ops.cutile.decode_varlen_plan import packed_tiles
from tilegym.ops.cutile.decode_varlen_plan import paged_tiles
from tilegym.ops.cutile.decode_varlen_tiles import add_by_head
from tilegym.ops.cutile.decode_varlen_tiles import keys_of
from tilegym.ops.cutile.decode_varlen_tiles import page_of
from tilegym.ops.cutile.decode_varlen_tiles import place_of
from tilegym.ops.cutile.decode_varlen_tiles import scatter_new
from tilegym.ops.cutile.decode_varlen_tiles import values_of
from tilegym.ops.cutile.flash_decode_plan import MAX_TILE_M
from tilegym.ops.cutile.flash_decode_plan import choose_tiles
from tilegym.ops.cutile.packed import last_start
from tilegym.ops.cutile.packed import number_at
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.splitk_reduce import add_in_order
from tilegym.ops.cutile.splitk_reduce import add_in_turns
from tilegym.ops.cutile.splitk_reduce import no_state
from tilegym.ops.cutile.splitk_reduce import normalised
from tilegym.ops.cutile.splitk_reduce import product_in_parts
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin_alone
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps


@ct.kernel(occupancy=2)
def decode_packed_kernel(
    q,  # [Tq, Hq, D]
    k,  # [1, Hkv, Tk, D], or [P, Hkv, S, D] if PAGED, or [P, Hkv / HEADS, S, HEADS, D]
    v,  # as k, of Dv columns
    out,  # [Tq, Hq, Dv]
    partial,  # [1, Hq, parts, Dv + STATE_COLUMNS], as add_in_order takes it, if SPLIT, else 0
    starts_q,  # [N + 1]; 0 if PAGED: each sequence has one token
    starts_k,  # [N + 1]
    pages,  # [N, M] if PAGED, else 0
    new_k,  # [N, Hkv, D] if PAGED, else 0: the last key of each sequence, which is written to its page
    new_v,  # [N, Hkv, Dv] if PAGED, else 0
    k_out,  # k and v themselves if PAGED, to write to, else 0; see launch_decode
    v_out,
    sinks,  # [Hq] if SINKS, else 0
    scaling: float,
    soft_cap: float,
    window: int,
    blocks: int,  # that share all tiles, if SPLIT
    TILE_M: Int,  # at least GROUP * HEADS
    TILE_N: Int,
    TILE_D: Int,
    TILE_DV: Int,
    GROUP: Int,  # query heads that share a kv head
    HEADS: Int,  # kv heads whose keys a tile has: see decode_varlen_tiles
    SIZE: Int,  # S if PAGED, else 0
    FULL: Bool,  # TILE_D is D and TILE_DV is Dv
    PAGED: Bool,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    SINKS: Bool,
    EXACT: Bool,
    SPLIT: Bool,  # else each block along axis 1 has a token
    CHUNK: Int,
    CHUNKS: Int,  # see way_of
    OVERLAP: Bool,
):
    begin_alone(OVERLAP)
    KEYS = TILE_N // HEADS
    first_head, block, options = ct.bid(0), ct.bid(1), (KEYS, WINDOW, PAGED)
    rows, dims = ct.arange(TILE_M, dtype=ct.int32), ct.arange(TILE_DV, dtype=ct.int32)
    columns = ct.arange(TILE_D, dtype=ct.int32)
    real, heads = rows < GROUP * HEADS, first_head * (GROUP * HEADS) + rows
    kv_heads = first_head * HEADS + rows // GROUP
    unit = 1.0 if SOFT_CAP else scaling

    def attend(n, token, number, begin, end, tile, count, first_key, keys):
        """Takes the tiles from ``begin`` to ``end`` of sequence n, which has ``count`` from ``tile`` on; if that is not
        all of them, as part ``number``."""
        q_rows = ct.gather(q, (token, heads[:, None], columns[None, :]), mask=real[:, None])
        k_own, v_own = k, v
        if not PAGED:
            start = min(number_at(starts_k, n), k.shape[2] - 1)  # no slice may begin behind the array
            k_own, v_own = k.slice(2, start, start + keys), v.slice(2, start, start + keys)
        # In pages the last key is not read from where it is written to.
        old = keys - 1 if PAGED else keys
        own = PAGED and keys > 0 and end == tile + count
        if PAGED and own:
            at = page_of(pages, n, old, SIZE), first_head, old % SIZE
            scatter_new(k_out, at, new_k, n, HEADS, TILE_D)
            scatter_new(v_out, at, new_v, n, HEADS, TILE_DV)

        def attended(MASKED: bool):
            """The state behind all tiles; unless MASKED, values that are not seen must be finite."""
            acc = ct.zeros((TILE_DV, TILE_M), dtype=ct.float32)
            col_max = ct.full((1, TILE_M), -math.inf, dtype=ct.float32)
            col_sum = ct.zeros((1, TILE_M), dtype=ct.float32)
            if SINKS and begin == tile:
                # A sink is one more key, with a score of its own and the value zero.
                sink = ct.gather(sinks, heads, mask=real).astype(ct.float32)
                col_max, col_sum = sink.reshape((1, TILE_M)) / unit, ct.ones((1, TILE_M), dtype=ct.float32)
            if PAGED and own:
                key = ct.gather(new_k, (n, kv_heads[:, None], columns[None, :]), mask=real[:, None])
                value = ct.gather(new_v, (n, kv_heads[None, :], dims[:, None]), mask=real[None, :])
                s = ct.sum(q_rows.astype(ct.float32) * key.astype(ct.float32), axis=1).reshape((1, TILE_M))
                if SOFT_CAP:
                    s = cap_scores(s * scaling, soft_cap, EXACT)
                p, col_max, col_sum, acc = update_softmax(s, col_max, col_sum, acc, unit, 0, EXACT)
                acc = acc + value.astype(ct.float32) * p
            # Keys are the rows of the products and the queries the columns, as in decode_kernel.
            q_tile, col_sums = ct.transpose(q_rows), sums_of_keys(col_sum, TILE_N)
            for j in range(begin, min(end, ct.cdiv(old, KEYS))):
                row_of_tile = ct.arange(TILE_N, dtype=ct.int32)
                nth = j * KEYS + row_of_tile // HEADS
                seen = (nth >= first_key) & (nth < old)
                page, row = place_of(pages, n, j, seen, TILE_N, HEADS, SIZE)
                k_tile = keys_of(k_own, page, first_head, row, seen, TILE_N, TILE_D, HEADS, SIZE, FULL)
                if k.dtype == ct.float32:
                    s = product_in_parts(k_tile, q_tile)
                else:
                    s = ct.mma(k_tile, q_tile, ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
                if SOFT_CAP:
                    s = cap_scores(s * scaling, soft_cap, EXACT)
                visible = seen[:, None]
                if HEADS > 1:
                    visible = visible & (row_of_tile[:, None] % HEADS == rows[None, :] // GROUP)
                s = ct.where(visible, s, -math.inf)
                v_tile = values_of(v_own, page, first_head, row, seen, TILE_N, TILE_DV, HEADS, SIZE, FULL, MASKED)
                p, col_max, col_sums, acc = update_softmax(s, col_max, col_sums, acc, unit, 0, EXACT)
                if v.dtype == ct.float32:
                    acc = acc + product_in_parts(v_tile, p)
                elif HEADS > 1 and MASKED:
                    acc = add_by_head(acc, v_tile, p.astype(v_tile.dtype), seen, rows // GROUP, HEADS)
                else:
                    acc = ct.mma(v_tile, p.astype(v_tile.dtype), acc)
            return col_max, ct.sum(col_sums, axis=0, keepdims=True), acc

        col_max, col_sum, acc = attended(False)
        if PAGED and SIZE * HEADS % TILE_N == 0:
            # A value that is not seen weighs zero, which makes NaN of it if it is not finite.
            check = ct.sum(acc * 0.0)
            if check != check:
                col_max, col_sum, acc = attended(True)
        wanted, split = real[None, :] & (dims < out.shape[2])[:, None], end - begin < count
        if not SPLIT or not split:
            whole = acc * (1.0 / ct.where(col_sum == 0.0, 1.0, col_sum))
            ct.scatter(out, (token, heads[None, :], dims[:, None]), whole.astype(out.dtype), mask=wanted)
        if SPLIT:
            ct.scatter(partial, (0, heads[None, :], number, dims[:, None]), acc, mask=wanted & split)
            ct.scatter(partial, (0, heads, number, out.shape[2]), col_max.reshape((TILE_M,)), mask=real & split)
            ct.scatter(partial, (0, heads, number, out.shape[2] + 1), col_sum.reshape((TILE_M,)), mask=real & split)

    if SPLIT:
        shared = (starts_q, starts_k, window, block, blocks, CHUNK, CHUNKS, *options)
        n, first, place, end, step = share_of_block(*shared)
        while place < end:
            tile, count, first_key, keys = tiles_of_one(starts_q, starts_k, n, window, *options)
            behind = min(first + count, end)
            if count > 0:
                token, begin = n if PAGED else number_at(starts_q, n), tile + place - first
                number = block + n * step
                attend(n, token, number, begin, begin + behind - place, tile, count, first_key, keys)
            place, first, n = behind, first + count, n + 1
    else:
        n = block if PAGED else last_start(starts_q, block, 1, False)
        tile, count, first_key, keys = tiles_of_one(starts_q, starts_k, n, window, *options)
        attend(n, block, 0, tile, tile + count, tile, count, first_key, keys)


@ct.kernel
def merge_packed_kernel(
    partial, out, starts_q, starts_k, unit: float, window: int, blocks: int, TILE_N: Int, TILE_H: Int, TILE_DV: Int,
    DV: Int, TILE_S: Int, WINDOW: Bool, PAGED: Bool, MIXED: Bool, CHUNK: Int, CHUNKS: Int, OVERLAP: Bool,
):  # fmt: skip
    """Merges, for TILE_H heads of a token of ``out``, [Tq, Hq, Dv], the parts that :func:`decode_packed_kernel` has
    left, if there are several; zeros if the token sees no key. MIXED: of a sequence, if it has one token."""
    let_next_begin(OVERLAP)
    token, first_head = ct.bid(0), ct.bid(1) * TILE_H
    options = (TILE_N, WINDOW, PAGED)
    n, single = token, True
    if MIXED:
        token = number_at(starts_q, n)
        single = number_at(starts_q, n + 1) - token == 1
    elif not PAGED:
        n = last_start(starts_q, token, 1, False)
    _, count, _, _ = tiles_of_one(starts_q, starts_k, n, window, *options)
    begin, end = parts_of_sequence(starts_q, starts_k, window, n, count, blocks, CHUNK, CHUNKS, *options)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    at = (token, first_head + ct.arange(TILE_H, dtype=ct.int32)[:, None], ct.arange(TILE_DV, dtype=ct.int32)[None, :])
    if single and count == 0:
        ct.scatter(out, at, ct.zeros((TILE_H, TILE_DV), out.dtype))
    elif end - begin > 1:
        where = (0, ct.minimum(at[1], out.shape[1] - 1), begin, at[2], DV)
        parts, whole = end - begin, TILE_DV == DV
        state = no_state(TILE_H, TILE_DV)
        if parts <= TILE_S:
            state = add_in_order(partial, 0, where, 0, parts, state, unit, TILE_S, TILE_DV, True, whole, False)
        else:
            # Rare, and few at a time: a loop loads ahead, in registers, and then fewer blocks are at work.
            state = add_in_turns(partial, 0, where, parts, state, unit, 2, TILE_DV, whole, False)
        ct.scatter(out, at, normalised(state).astype(out.dtype))


def launch_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor | int,
    starts_k: torch.Tensor,
    pages: torch.Tensor | int,
    new: tuple[torch.Tensor, torch.Tensor] | tuple[int, int],
    longest: int,
    scaling: float,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launches the kernel, and what merges its parts, for sequences of at most ``longest`` keys. With ``out`` the rows
    of sequences that have one query are written to it, and there may be others."""
    tokens, heads, head_dim = q.shape
    _, kv_heads, size, v_dim = v.shape
    mixed = out is not None
    if not mixed:
        out = q.new_empty(tokens, heads, v_dim)
    dtype, index, group, sequences = q.dtype, q.get_device(), heads // kv_heads, starts_k.shape[0] - 1
    window = 0 if window_size is None else window_size
    chosen, paged = choose_tiles(group, head_dim, v_dim, dtype.itemsize, index), isinstance(pages, torch.Tensor)
    if paged:
        page_size, (tiles, together, each) = size, paged_tiles(chosen, dtype.itemsize, size, group, kv_heads, index)
    else:
        page_size, (tiles, together, each) = 0, packed_tiles(chosen, dtype.itemsize, sequences * kv_heads, index)
    tile_m, tile_n, tile_d, tile_dv = tiles
    if together > 1:
        k, v = (x.unflatten(1, (-1, together)).transpose(2, 3) for x in (k, v))
    keys_of_tile, groups = tile_n // together, kv_heads // together
    blocks = blocks_of(sequences, groups, min(longest, window or longest), keys_of_tile, each, index)
    split, overlap, parts = blocks > 0, overlaps(index), max(blocks, sequences)
    partial = q.new_empty(1, heads, parts + sequences, v_dim + STATE_COLUMNS, dtype=torch.float32) if split else 0
    chunk = next_power_of_2(min(max(sequences, LEAST_AT_ONCE), MOST_AT_ONCE))
    # Of packed keys it is known how many there are, and so whether one sequence may have most of them.
    even = not paged and not mixed and longest * sequences <= 2 * k.shape[2]
    chunks = (chunk, 0 if even else ct.cdiv(sequences, chunk))
    # The compiler orders loads and stores of an array, and waits for each load where there are stores: these are of
    # rows that no block reads for what they hold, and so go by another name.
    written = (k, v) if paged else (0, 0)
    arrays = (q, k, v, out, partial, starts_q, starts_k, pages, *new, *written, 0 if sinks is None else sinks)
    scalars = (scaling, 1.0 if soft_cap is None else soft_cap, window, blocks)
    full = tile_d == head_dim and tile_dv == v_dim
    tiles = (*tiles, group, together, page_size, full)
    options = (paged, window > 0, soft_cap is not None, sinks is not None, needs_exact(dtype, NO_MASK), split)
    hints = {"num_worker_warps": 8} if tile_m > MAX_TILE_M else {"occupancy": each}
    kernel = hinted(decode_packed_kernel, **hints)
    grid = (groups, parts if split else tokens)
    launch(out, grid, kernel, (*arrays, *scalars, *tiles, *options, *chunks, overlap), overlap)
    if split:
        rows = sequences if mixed else tokens
        tile_h, tile_s = merged_at_once(rows * heads, blocks, sequences)
        args = (partial, out, starts_q, starts_k, 1.0 if soft_cap is not None else scaling, window, blocks)
        options = (keys_of_tile, tile_h, tile_dv, v_dim, tile_s, window > 0, paged, mixed, *chunks, overlap)
        launch(out, (rows, ct.cdiv(heads, tile_h)), merge_packed_kernel, (*args, *options), overlap)
    return out


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
    return launch_decode(q, k, v, *starts, 0, (0, 0), longest, scaling, window_size, soft_cap, sinks)
