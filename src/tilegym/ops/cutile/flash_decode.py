"""``fmha_decode`` in cuTile: attention of one query a head, its keys split among blocks (flash-decoding).

All there is to do is to read the keys and values once, at the speed of memory: for that enough blocks must be at work.
A block takes one kv head, hence all query heads of its group at a time, and a share of the keys that are valid now.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.attention import ADDITIVE_MASK
from tilegym.ops.cutile.attention import BOOLEAN_MASK
from tilegym.ops.cutile.attention import cap_scores
from tilegym.ops.cutile.attention import check_supported
from tilegym.ops.cutile.attention import needs_exact
from tilegym.ops.cutile.attention import prepare_mask
from tilegym.ops.cutile.attention import tile_of
from tilegym.ops.cutile.attention import update_softmax
from tilegym.ops.cutile.attention import with_unit_stride
from tilegym.ops.cutile.splitk_reduce import splitk_reduce_forward
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.flash_decode import check_query


@ct.kernel
def decode_kernel(
    q,  # [B, Hq, 1, D]
    k,  # [B, Hkv, Skv, D]
    v,  # [B, Hkv, Skv, Dv]
    out,  # [B, Hq, splits, Dv]
    lse,  # [B, Hq, splits] unless FINAL
    mask,  # [B or 1, Hq or 1, 1, Skv] if MASK
    sinks,  # [Hq] if SINKS
    kv_len,  # [B] if KV_LEN
    scaling: float,
    soft_cap: float,
    window: int,
    TILE_M: Int,  # at least as many as query heads in a group
    TILE_N: Int,
    TILE_D: Int,
    TILE_DV: Int,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    MASK: Int,
    MASK_ROWS: Int,  # TILE_M, or 1 for a mask that all heads share
    SINKS: Bool,
    KV_LEN: Bool,
    EXACT: Bool,
    FINAL: Bool,  # one split: its output is the result
):
    zero = ct.PaddingMode.ZERO
    batch, kv_head = ct.bid(0) // k.shape[1], ct.bid(0) % k.shape[1]
    split = ct.bid(1)
    group = q.shape[1] // k.shape[1]
    head, next_head = kv_head * group, (kv_head + 1) * group
    keys = k.shape[2]
    if KV_LEN:
        keys = min(max(ct.load(kv_len, (batch,), (1,)).astype(ct.int32).item(), 0), keys)
    first_key = max(keys - window, 0) if WINDOW else 0

    # The tiles that hold a visible key, shared out evenly.
    first_tile, last_tile = first_key // TILE_N, ct.cdiv(keys, TILE_N)
    share = ct.cdiv(last_tile - first_tile, ct.num_blocks(1))
    first = first_tile + split * share
    last = min(first + share, last_tile)

    # The group's queries are the rows of a matrix, padded with zeros to what ct.mma takes.
    q_tile = ct.load(q.slice(1, head, next_head), (batch, 0, 0, 0), (1, TILE_M, 1, TILE_D), padding_mode=zero)
    q_tile = q_tile.reshape((TILE_M, TILE_D))
    unit = 1.0 if SOFT_CAP or MASK == ADDITIVE_MASK else scaling
    acc = ct.zeros((TILE_M, TILE_DV), dtype=ct.float32)
    if SINKS:
        sink = ct.load(sinks.slice(0, head, next_head), (0,), (TILE_M,), padding_mode=zero).astype(ct.float32)
        row_max = sink.reshape((TILE_M, 1)) / unit
        row_sum = ct.ones((TILE_M, 1), dtype=ct.float32)
    else:
        row_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
        row_sum = ct.zeros((TILE_M, 1), dtype=ct.float32)
    for j in range(first, last):
        k_tile = ct.load(k, (batch, kv_head, 0, j), (1, 1, TILE_D, TILE_N), order=(0, 1, 3, 2), padding_mode=zero)
        s = ct.mma(q_tile, k_tile.reshape((TILE_D, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
        if SOFT_CAP:
            s = cap_scores(s * scaling, soft_cap)
        if MASK == BOOLEAN_MASK:
            s = ct.where(load_mask(mask, batch, head, next_head, j, MASK_ROWS, TILE_N), s, -math.inf)
        if MASK == ADDITIVE_MASK:
            if not SOFT_CAP:
                s = s * scaling
            s = s + load_mask(mask, batch, head, next_head, j, MASK_ROWS, TILE_N).astype(ct.float32)
        v_tile = ct.load(v, (batch, kv_head, j, 0), (1, 1, TILE_N, TILE_DV), padding_mode=zero)
        v_tile = v_tile.reshape((TILE_N, TILE_DV))
        if j * TILE_N < first_key or (j + 1) * TILE_N > keys:
            column = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
            s = ct.where(((column >= first_key) & (column < keys))[None, :], s, -math.inf)
            if KV_LEN:
                # What a cache holds behind its last key may be NaN, which times zero would be NaN.
                v_tile = ct.where((column < keys)[:, None], v_tile, ct.zeros((TILE_N, TILE_DV), dtype=v.dtype))
        p, row_max, row_sum, acc = update_softmax(s, row_max, row_sum, acc, unit, EXACT)
        acc = ct.mma(p.astype(v_tile.dtype), v_tile, acc)

    acc = acc / ct.where(row_sum == 0.0, 1.0, row_sum)
    tile = acc.reshape((1, TILE_M, 1, TILE_DV)).astype(out.dtype)
    ct.store(out.slice(1, head, next_head), (batch, 0, split, 0), tile)
    if not FINAL:
        # log(sum of exp(score)) with scores in natural units; -inf where no key was seen.
        logits = row_max * unit + ct.log(row_sum)
        ct.store(lse.slice(1, head, next_head), (batch, 0, split), logits.reshape((1, TILE_M, 1)))


def load_mask(mask, batch, head, next_head, j, TILE_R: Int, TILE_C: Int):
    """The mask of a group's heads for a tile of keys; a dimension of size one is broadcast (x % 1 is 0)."""
    if TILE_R > 1:
        mask = mask.slice(1, head, next_head)
    index = (batch % mask.shape[0], 0, 0, j)
    return ct.load(mask, index, (1, TILE_R, 1, TILE_C), padding_mode=ct.PaddingMode.ZERO).reshape((TILE_R, TILE_C))


TILE_N = 64
MIN_KEYS_PER_SPLIT = 128
MAX_SPLITS = 256


@functools.lru_cache(maxsize=4096)
def choose_splits(kv_heads: int, keys: int, keys_per_split: int | None, device_index: int) -> int:
    """How many blocks share the keys of each of ``kv_heads`` (in all batch entries): enough to fill the GPU twice.

    It depends on shapes only, not on ``kv_len``, so that a captured graph stays right; the blocks share what is valid.
    """
    if keys_per_split is not None:
        splits = -(-keys // keys_per_split)
    elif device_index < 0:
        splits = -(-keys // 32)
    else:
        splits = min(2 * sm_count(device_index) // kv_heads, keys // MIN_KEYS_PER_SPLIT)
    return max(1, min(splits, MAX_SPLITS))


def _fake(q, k, v, sm_scale, kv_len_per_split, kv_len, window_size, soft_cap, sinks, attention_mask):
    batch, heads, _, _ = q.shape
    return q.new_empty((batch, heads, 1, v.shape[3]))


@compilable(_fake)
def decode_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    kv_len_per_split: int | None,
    kv_len: torch.Tensor | None,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, _, head_dim = q.shape
    _, kv_heads, keys, _ = k.shape
    v_dim = v.shape[3]
    out = q.new_empty((batch, heads, 1, v_dim))
    if keys == 0:
        return out.zero_()
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    device_index = q.get_device()
    splits = choose_splits(batch * kv_heads, keys, kv_len_per_split, device_index)
    final = splits == 1
    if final:
        partial = lse = out
    else:
        partial = q.new_empty((batch, heads, splits, v_dim), dtype=torch.float32)
        lse = q.new_empty((batch, heads, splits), dtype=torch.float32)
    mask_kind, mask = prepare_mask(attention_mask, q, keys)
    tile_m = tile_of(heads // kv_heads)
    has_sinks = sinks is not None and final  # else they join when the splits are merged
    launch(
        out,
        (batch * kv_heads, splits),
        decode_kernel,
        (
            q,
            k,
            v,
            partial,
            lse,
            mask,
            sinks if has_sinks else q,
            q if kv_len is None else kv_len,
            sm_scale,
            1.0 if soft_cap is None else soft_cap,
            0 if window_size is None else window_size,
            tile_m,
            TILE_N if device_index >= 0 else 16,
            tile_of(head_dim),
            tile_of(v_dim),
            window_size is not None,
            soft_cap is not None,
            mask_kind,
            tile_m if mask.shape[1] > 1 else 1,
            has_sinks,
            kv_len is not None,
            needs_exact(q, mask_kind),
            final,
        ),
    )
    return out if final else splitk_reduce_forward(partial, lse, q.dtype, sinks)


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
    check_query(q, kv_len_per_split)
    check_arguments("fmha_decode", q, k, v, window_size, soft_cap, sinks, attention_mask, kv_len)
    if sm_scale is None:
        sm_scale = q.shape[3] ** -0.5
    check_supported(q, k, v, sm_scale, sinks, attention_mask)
    return decode_forward(
        q, k, v, sm_scale, kv_len_per_split, kv_len, window_size, soft_cap, sinks, attention_mask
    )
