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
from tilegym.ops.cutile.decode_varlen_tiles import add_by_head
from tilegym.ops.cutile.decode_varlen_tiles import keys_of
from tilegym.ops.cutile.decode_varlen_tiles import page_of
from tilegym.ops.cutile.decode_varlen_tiles import place_of
from tilegym.ops.cutile.decode_varlen_tiles import scatter_new
from tilegym.ops.cutile.decode_varlen_tiles import values_of
from tilegym.ops.cutile.flash_decode_plan import MAX_TILE_M
from tilegym.ops.cutile.flash_decode_plan import MAX_TILE_N
from tilegym.ops.cutile.flash_decode_plan import UNSPLIT_KEYS
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
from tilegym.ops.cutile.tiling import sm_count

# Rows of a tile in pages, which lie in one page: ct.mma takes no fewer by tensor cores. Where a page has fewer keys,
# they are those of several heads; where that is not possible, each row is addressed. On an H200, Hq32 Hkv8, pages of
# 16, 8 and 32 tokens behind 1024 to 2048 keys take 25.3 and 69.2 us, with rows that are addressed 50.4 and 152 (a copy
# of as many bytes 13.8 and 49.7), 128 behind half as many 121 and 501, 32 of Hq16 D256 117 and 405, of Hq64 D64 79.3
# and 77.3.
SHORTEST_TILE = 64
MANY_ROWS = 1024  # of the output; more are merged four in a block
# Blocks a multiprocessor, and of small tiles, half of TILE_BYTES. Pages take small ones: on an H200, pages of 256, 8
# and 32 tokens behind 1024 to 2048 keys take 21.4 and 60.3 us so (two blocks of them 21.4 and 57.1, large tiles 22.7
# and 64.5), 8 behind 4096 to 8192 57.4 (59.5, 64.2), 128 behind 512 to 1024 105 (113, 123).
BLOCKS, BLOCKS_OF_SMALL = 2, 4
# From so many kv heads for each multiprocessor on, of all sequences, packed keys get small tiles too; it is in pages
# that they were compared.
MANY_HEADS = 6


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


def unsplit_keys(device_index: int) -> int:
    """Up to how many keys one block takes a token's alone."""
    return UNSPLIT_KEYS if device_index >= 0 else 32


def wants_splits(longest: int, keys: int, kv_heads: int, device_index: int) -> bool:
    """Whether a sequence of ``longest`` of all ``keys`` is so long that with a block for it too few blocks are at work,
    and that another launch for the tokens among prompts is worth its time: on an H100, Hq32 Hkv8 D128, a prompt of 512
    and 4 tokens behind 16384 to 32768 keys take 186 us with one and 329 without; 31 tokens behind 512 to 1024 76 and
    59, 32 behind 1024 to 2048, with two prompts, 143 and 132."""
    if longest <= unsplit_keys(device_index):
        return False
    return device_index < 0 or keys * kv_heads < longest * sm_count(device_index)


def tile_of_keys(
    tiles: tuple[int, int, int, int], itemsize: int, size: int, kv_heads: int, device_index: int
) -> tuple[int, int]:
    """How many keys a tile has, given those of :func:`choose_tiles`, and how many blocks a multiprocessor: in pages of
    ``size`` (0: no pages), for so many ``kv_heads`` of all sequences."""
    tile_m, tile_n, *dims = tiles
    can_be_small = device_index >= 0 and itemsize == 2 and tile_m <= 16 and tile_n == MAX_TILE_N and max(dims) == 128
    small = whole_tile(size) >= SHORTEST_TILE if size else kv_heads > MANY_HEADS * sm_count(device_index)
    if can_be_small and small:
        tile_n //= 2
    if size and whole_tile(size) >= min(tile_n, SHORTEST_TILE):
        tile_n = min(tile_n, whole_tile(size))
    return tile_n, BLOCKS_OF_SMALL if can_be_small and tile_n < MAX_TILE_N else BLOCKS


def heads_of_tile(
    tiles: tuple[int, int, int, int], itemsize: int, size: int, group: int, kv_heads: int, device_index: int
) -> int:
    """How many of ``kv_heads``, of ``group`` query heads each, a tile of a page of ``size`` has the keys of: enough for
    SHORTEST_TILE rows. One where a page has as many keys, or heads are too few or too many, and of packed keys (0)."""
    _, tile_n, *dims = tiles
    shortest, rows, heads = min(tile_n, SHORTEST_TILE), whole_tile(size), 1
    if size == 0 or itemsize != 2 or (device_index >= 0 and (tile_n < SHORTEST_TILE or max(dims) < 128)):
        return 1
    while rows * heads < shortest and kv_heads % (2 * heads) == 0:
        heads *= 2
    return heads if rows * heads >= shortest and group * heads <= MAX_TILE_M else 1


def blocks_of(sequences: int, kv_heads: int, keys: int, tile_n: int, each: int, device_index: int) -> int:
    """How many blocks share the tiles of all ``sequences``, of at most ``keys`` each, for every kv head; 0: each token
    has one.

    As many as run at once, ``each`` a multiprocessor; for few sequences no more than 16 for each, since merging costs
    too: see :func:`tilegym.ops.cutile.flash_decode_plan.max_splits`.
    """
    if sequences == 0 or keys <= unsplit_keys(device_index):
        return 0
    if device_index < 0:
        return 4
    multiprocessors = sm_count(device_index)
    most = max(1, min(each * multiprocessors // kv_heads, max(16 * sequences, multiprocessors // kv_heads)))
    return min(most, sequences * ct.cdiv(keys, tile_n))


def merged_at_once(rows: int, blocks: int, sequences: int) -> tuple[int, int]:
    """Of how many rows of the output, and how many parts of each, one block merges the sums at a time: as many parts as
    a sequence has where each has as many. Of up to 16 of one row, and 8 of four, the sums take no more registers than
    the rest of the kernel; loads of parts that are none cost a little: on an H200 8 tokens behind 1024 to 2048 keys, of
    which each has 8 parts, take 18.9 us with 8 and 19.7 with 16, and in pages of 16 keys, 16 parts, 24.5 and 22.4."""
    tile_h = 1 if rows <= MANY_ROWS else 4
    return tile_h, min(max(next_power_of_2(blocks // sequences), 4), 16 if tile_h == 1 else 8)


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
    tiles, paged = choose_tiles(group, head_dim, v_dim, dtype.itemsize, index), isinstance(pages, torch.Tensor)
    tile_m, _, tile_d, tile_dv = tiles
    page_size = size if paged else 0
    tile_n, each = tile_of_keys(tiles, dtype.itemsize, page_size, sequences * kv_heads, index)
    together = heads_of_tile(tiles, dtype.itemsize, page_size, group, kv_heads, index)
    if together > 1:
        tile_m, tile_n = max(8, next_power_of_2(group * together)), whole_tile(size) * together
        each = BLOCKS if max(tile_d, tile_dv) <= 128 else 1  # with more the compiler has no warps that only load
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
    tiles = (tile_m, tile_n, tile_d, tile_dv, group, together, page_size, full)
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
    return launch_decode(q, k, v, *starts, 0, (0, 0), longest, scaling, window_size, soft_cap, sinks)
