"""``fmha_varlen`` in cuTile: the attention of packed sequences, each with its own number of queries and of keys.

A block takes the query heads of one kv head together, for some queries of one sequence: a token that is decoded fills
as many rows as share its keys, and these are read once. Which sequence is found on the device. Calls of single tokens,
whose keys can be split among blocks, go to :mod:`tilegym.ops.cutile.decode_varlen`, and so do those among prompts where
a block would have to read much of all keys.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention import attend
from tilegym.ops.cutile.attention_common import LONGEST_WINDOW
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import check_supported
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.attention_scores import attend_all
from tilegym.ops.cutile.attention_tiles import key_tiles
from tilegym.ops.cutile.attention_tiles import may_keep_first_maximum
from tilegym.ops.cutile.decode_varlen import decode_packed
from tilegym.ops.cutile.decode_varlen import launch_decode
from tilegym.ops.cutile.decode_varlen_plan import wants_splits
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.packed import keys_of_sequence
from tilegym.ops.cutile.packed import last_start
from tilegym.ops.cutile.packed import number_at
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.pytorch.attention_varlen import check_packed
from tilegym.ops.pytorch.checks import wants_gradient


@ct.kernel
def varlen_kernel(
    q,  # [Tq, Hq, D]
    k,  # [1, Hkv, Tk, D]
    v,  # [1, Hkv, Tk, Dv]
    out,  # [Tq, Hq, Dv]
    starts_q,  # [N + 1]
    starts_k,  # [N + 1]
    sinks,  # [Hq] if SINKS, else 0
    scaling: float,
    soft_cap: float,
    window: int,
    TILE_Q: Int,  # queries of a block, each for GROUP heads
    TILE_M: Int,  # at least TILE_Q * GROUP
    TILE_N: Int,
    TILE_D: Int,
    TILE_DV: Int,
    GROUP: Int,  # query heads that share a kv head
    CAUSAL: Bool,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    SINKS: Bool,
    EXACT: Bool,
    TWO_LOOPS: Bool,
    TF32: Bool,
    FIXED: Bool,  # see attend_all
    MIXED: Bool,  # sequences of a single query are another launch's
):
    # kv heads take turns, and the last queries, which see the most keys, go first: see interleaved_block.
    kv_heads = k.shape[1]
    kv_head, t = ct.bid(0) % kv_heads, (ct.num_blocks(0) - 1 - ct.bid(0)) // kv_heads
    # Sequence n has the tiles from starts_q[n] // TILE_Q + n on, as many as it needs and sometimes one more, which has
    # no queries. Those behind the last sequence are one more, without keys.
    sequence = last_start(starts_q, t, TILE_Q, True)
    first_query, queries = keys_of_sequence(starts_q, sequence, q.shape[0])
    first_key, keys = keys_of_sequence(starts_k, sequence, number_at(starts_k, starts_k.shape[0] - 1))
    i = t - first_query // TILE_Q - sequence
    if MIXED and queries == 1 and sequence < starts_q.shape[0] - 1:
        queries, keys = 0, 0
    # Tiles of a slice end where the sequence does. No slice may begin behind the array, nor be empty.
    first_key = min(first_key, k.shape[2] - 1)
    k = k.slice(2, first_key, first_key + max(keys, 1))
    v = v.slice(2, first_key, first_key + max(keys, 1))

    rows = ct.arange(TILE_M, dtype=ct.int32)[:, None]
    query, head = i * TILE_Q + rows // GROUP, kv_head * GROUP + rows % GROUP
    real = (rows < TILE_Q * GROUP) & (query < queries)
    at = (first_query + query, head, ct.arange(TILE_D, dtype=ct.int32)[None, :])
    q_tile = ct.gather(q, at, mask=real)
    if TF32:
        q_tile = q_tile.astype(ct.tfloat32)
    row_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    row_sum = ct.zeros((TILE_M, 1), dtype=ct.float32)
    if SINKS:
        # A sink is one more key, with a score of its own and the value zero.
        sink = ct.gather(sinks, head, mask=real).astype(ct.float32)
        row_max = sink if SOFT_CAP else sink / scaling
        row_sum = ct.ones((TILE_M, 1), dtype=ct.float32)
    start = keys - queries + i * TILE_Q
    tiles = key_tiles(0, 0, 0, start, keys, window, TILE_Q, TILE_N, CAUSAL, WINDOW, NO_MASK)
    place, limits = (0, 0, kv_head, 0), (keys - queries + query, keys, window)
    options = (TILE_N, TILE_D, 0, TILE_DV, 0, CAUSAL, WINDOW, SOFT_CAP, NO_MASK, 1, False, EXACT, TF32)

    def online(state, j, partial):
        return attend((q_tile,), k, v, 0, place, j, partial, limits, state, scaling, soft_cap, *options, False)

    def fixed(state, j, partial):
        return attend((q_tile,), k, v, 0, place, j, partial, limits, state, scaling, soft_cap, *options, True)

    state = (row_max, row_sum, ct.zeros((TILE_M, TILE_DV), dtype=ct.float32))
    state = attend_all(online, fixed, state, tiles, FIXED, True, TWO_LOOPS)
    row_sum = ct.where(state[1] == 0.0, 1.0, state[1])  # no key seen: zeros
    columns = ct.arange(TILE_DV, dtype=ct.int32)[None, :]
    acc = (state[2] * (1.0 / row_sum)).astype(out.dtype)
    ct.scatter(out, (first_query + query, head, columns), acc, mask=real & (columns < out.shape[2]))


@functools.lru_cache(maxsize=1024)
def choose_tiles(
    group: int, tile_d: int, fp32: bool, device_index: int
) -> tuple[int, int, int, bool, bool, dict[str, int]]:
    """TILE_Q, TILE_M, TILE_N, TWO_LOOPS, FIXED where it may be, and the compiler's hints.

    The tiles are those that ``fmha`` tries first for few queries: not measured for packed sequences themselves.
    """
    hints = {}
    two_loops, fixed = False, device_index < 0
    if device_index < 0:
        tile_m, tile_n = 32, 16
    elif fp32:
        tile_m, tile_n = 64 if tile_d <= 128 else 32, 32
    elif torch.cuda.get_device_capability(device_index)[0] in (9, 10):
        tile_m, tile_n = 64, 64
        if tile_d <= 64:
            fixed, hints = torch.cuda.get_device_capability(device_index)[0] == 9, {"occupancy": 4}
        elif tile_d <= 128:
            tile_n, two_loops, hints = 128, True, {"occupancy": 2}
    else:
        tile_m, tile_n = 64, 64 if tile_d <= 128 else 32
        hints = {"occupancy": 2} if tile_d <= 128 else {}
    tile_m = max(tile_m, next_power_of_2(group))
    return tile_m // group, tile_m, tile_n, two_loops, fixed, hints


def _fake(q, k, v, *_):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@compilable(_fake)
def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scaling: float,
    is_causal: bool,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> torch.Tensor:
    queries, heads, head_dim = q.shape
    keys, kv_heads, v_dim = v.shape
    out = _fake(q, k, v)
    if keys == 0:
        return out.zero_()
    k, v = (with_unit_stride(x.transpose(0, 1)[None]) for x in (k, v))
    dtype, group, tile_d, tile_dv = q.dtype, heads // kv_heads, tile_of(head_dim), tile_of(v_dim)
    tile_q, tile_m, tile_n, two_loops, fixed, hints = choose_tiles(
        group, max(tile_d, tile_dv), dtype == torch.float32, q.get_device()
    )
    # However the sequences are cut, they have no more tiles than this.
    tiles = queries // tile_q + cu_seqlens_q.shape[0] if queries else 0
    arrays = (q, k, v, out, cu_seqlens_q, cu_seqlens_k, 0 if sinks is None else sinks)
    scalars = (scaling, 1.0 if soft_cap is None else soft_cap, 0 if window_size is None else window_size)
    options = (is_causal, window_size is not None, soft_cap is not None, sinks is not None)
    constants = (tile_q, tile_m, tile_n, tile_d, tile_dv, group, *options)
    sequences = cu_seqlens_q.shape[0] - 1
    longest = keys if max_seqlen_k is None else min(max_seqlen_k, keys)
    visible = longest if window_size is None else min(longest, window_size)
    # Where all sequences have as many queries as the longest one there are no single tokens.
    mixed = sequences > 1 and queries != sequences * (max_seqlen_q or 0)
    mixed = mixed and wants_splits(visible, keys, kv_heads, q.get_device())
    fixed = fixed and may_keep_first_maximum(dtype, longest, NO_MASK, window_size is not None, q.get_device())
    how = (needs_exact(dtype, NO_MASK), two_loops, uses_tf32(dtype), fixed, mixed)
    launch(out, (tiles * kv_heads,), hinted(varlen_kernel, **hints), (*arrays, *scalars, *constants, *how))
    if mixed:
        options = (longest, scaling, window_size, soft_cap, sinks)
        launch_decode(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, (0, 0), *options, out=out)
    return out


@register_impl("fmha_varlen", "cutile")
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scaling: float | None = None,
    is_causal: bool = True,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size, soft_cap, sinks)
    if scaling is None:
        scaling = q.shape[2] ** -0.5
    if wants_gradient(q, k, v, sinks):
        raise UnsupportedError("it has no backward kernel")
    check_supported(*(x.transpose(0, 1)[None] for x in (q, k, v)), scaling, sinks, None, True)
    if window_size is not None:
        window_size = min(window_size, LONGEST_WINDOW)
    starts = (cu_seqlens_q, cu_seqlens_k)
    if max_seqlen_q == 1:
        # A single query stands at its last key: causal or not is the same.
        return decode_packed(q, k, v, *starts, max_seqlen_k, scaling, window_size, soft_cap, sinks)
    options = (scaling, is_causal, window_size, soft_cap, sinks)
    return varlen_forward(q, k, v, *starts, *options, max_seqlen_q, max_seqlen_k)
