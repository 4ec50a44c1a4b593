"""How ``fmha_decode`` divides its work: tiles, splits, and what merges them, for each shape of its arguments."""

import functools
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import prepare_mask
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.splitk_reduce import AT_ONCE
from tilegym.ops.cutile.splitk_reduce import IN_ORDER
from tilegym.ops.cutile.splitk_reduce import IN_TURNS
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.splitk_reduce import TILE_S
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.workspace import COUNTERS

# Measured on an H200, D 128 in bf16, Hq32 Hkv8: with tiles of 128 keys (32 KB) and two blocks a multiprocessor B8 T8192
# takes 69.1 us (64 keys: 70.0; cuDNN 72.2; to copy as many bytes 69.2), B1 T8192 17.0, B1 T1024 9.6, B32 T2048 66.6;
# with 64 keys, four blocks and twice the splits 68.9, 16.6, 10.0. Wider rows get fewer keys.
TILE_BYTES = 32768
MAX_TILE_M = 64  # query heads of a block; more share a kv head in few models (Falcon-7B: 71)
LARGE_GROUP, FEW_KV_HEADS = 16, 12  # see heads_of_block
MAX_GROUP = 8  # whose sums the registers of decode_rows_kernel hold
MAX_TILE_N = 128
MAX_SPLITS = 256
UNSPLIT_KEYS = 512
# How the splits become one: there is only one; the block that finishes last merges them; another launch does.
ONE_SPLIT, LAST_BLOCK, NEXT_LAUNCH = 0, 1, 2
# Splits of which everything is in registers at once. In order is the faster way: on an H200 B1 Hq32 Hkv8 D128 takes at
# T640 8.5 us for 10.0, at T2048 10.3 for 12.4, at T8192 16.1 for 17.2; B8 T8192 68.8 for 69.1.
MERGED_AT_ONCE, MERGED_IN_ORDER = 64, 16
MERGED_BY_LAST = 8192  # numbers: half of the registers of the last block
TILES_NOT_AHEAD = 2


def tiles_of_split(k, kv_len, batch, window, TILE_N: Int, WINDOW: Bool, KV_LEN: Bool):
    """In a kernel: the tiles of keys from ``first`` to ``last`` that this block's split has, and the visible keys, from
    ``first_key`` to ``keys``: (first, last, first_key, keys). Tiles that hold a visible key are shared out evenly."""
    keys = k.shape[2]
    if KV_LEN:
        keys = min(max(ct.load(kv_len, (batch,), (1,)).astype(ct.int32).item(), 0), keys)
    first_key = max(keys - window, 0) if WINDOW else 0
    first_tile, last_tile = first_key // TILE_N, ct.cdiv(keys, TILE_N)
    share = ct.cdiv(last_tile - first_tile, ct.num_blocks(1))
    first = first_tile + ct.bid(1) * share
    return first, min(first + share, last_tile), first_key, keys


@functools.lru_cache(maxsize=1024)
def choose_tiles(group: int, head_dim: int, v_dim: int, itemsize: int, device_index: int) -> tuple[int, int, int, int]:
    """TILE_M, TILE_N, TILE_D and TILE_DV for ``group`` query heads that share a kv head."""
    # Queries are columns of the right operand of ct.mma, of which eight will do.
    tile_m, tile_d, tile_dv = max(8, next_power_of_2(group)), tile_of(head_dim), tile_of(v_dim)
    tile_n = 16 if device_index < 0 else min(MAX_TILE_N, TILE_BYTES // (max(tile_d, tile_dv) * itemsize))
    if itemsize == 4 and group <= MAX_GROUP and device_index >= 0:
        tile_n = min(32, max(8, 8192 // (max(tile_d, tile_dv) * next_power_of_2(group))))
    if tile_m > MAX_TILE_M and itemsize == 4:
        tile_n = min(tile_n, 32)  # larger ones compile for a quarter of a minute
    return tile_m, tile_n, tile_d, tile_dv


@functools.lru_cache(maxsize=1024)
def heads_of_block(tile_m: int, kv_heads: int, tile_d: int, itemsize: int) -> int:
    """How many of a group's query heads, which a tile of ``tile_m`` would hold, a block takes; the others have blocks
    of their own, which find the keys in the L2 cache. Those of a large group fill more multiprocessors so, if
    ``kv_heads`` of all batch entries are few.

    On an H200 Falcon-7B's 71 heads over one, D 64, take 4.8, 6.5, 7.5, 7.8 and 11.7 us for 1, 2, 4, 6 and 12 texts of
    2048 keys by eights; by 16s 4.7, 6.2, 8.4, 8.8 and 12.6; all in a block 8.2 and 10.4 for 1 and 6 (SDPA 6.0, 6.9,
    8.1, 8.4 and 10.8). Of D 128 48 heads by 16s 4.9, 6.0, 7.4, 9.0 and 10.9, by eights 4.3, 5.9, 8.2, 9.6 and 13.9,
    together 7.1, 8.1, 9.3, 9.9 and 11.4; 24 heads by 16s 4.9, 5.5, 6.6, 6.8 and 9.7, together 5.8, 5.7, 6.5, 8.4 and
    10.3. But of 29 heads over each of 16, D 64, 9.4 by eights and 8.9 together.
    """
    if tile_m > LARGE_GROUP and kv_heads <= FEW_KV_HEADS and (itemsize == 2 or tile_m > MAX_TILE_M):
        return 8 if tile_d <= 64 else LARGE_GROUP
    return tile_m if tile_m <= MAX_TILE_M else MAX_TILE_M // 2


@functools.lru_cache(maxsize=1024)
def max_splits(kv_heads: int, device_index: int) -> int:
    """How many blocks at most share the keys of each of ``kv_heads`` (in all batch entries).

    Enough to fill the GPU, but for few heads not more than once: on an H200 8 heads of 8192 keys take 17.0 us in 16
    splits and 17.8 in 32, since merging costs too; 64 heads in 4 splits 69.1, in 8 71.3.
    """
    multiprocessors, kv_heads = sm_count(device_index), max(1, kv_heads)
    return max(1, min(2 * multiprocessors // kv_heads, max(16, multiprocessors // kv_heads), MAX_SPLITS))


@functools.lru_cache(maxsize=1024)
def is_uneven(kv_heads: int, tiles: tuple[int, int, int, int], itemsize: int, device_index: int) -> bool:
    """Whether one block for each of ``kv_heads`` gives some multiprocessors two and others one, which then wait for the
    former: with half as many keys in a tile and three blocks a multiprocessor, in two splits, they are faster; rows of
    more than 128 dimensions, whose tiles are too small to be halved, in four splits.

    On an H200 D128 of 2048 keys, Hq32 Hkv8, takes B17 36.7 us (one split: 44.1), B20 42.9 (55.4), B24 51.1 (57.6), but
    B28 60.4 (61.4); Hq32 Hkv32 B5 43.9 (56.0), B6 49.6 (57.2), of D96 B5 35.0 (42.8); Hq8 Hkv4 D256 B40 83.6 (109.2).
    Rows of 64 dimensions gain nothing. All merged by another launch; by the last block of each head B20 takes 47.9.
    """
    if device_index < 0 or itemsize != 2 or tiles[0] > 16 or max(tiles[2:]) < 128:
        return False
    return sm_count(device_index) < kv_heads <= 3 * sm_count(device_index) // 2


def choose_splits(kv_heads: int, keys: int, keys_per_split: int | None, device_index: int) -> int:
    """How many blocks share ``keys``, the most that a query can see, of each of ``kv_heads``.

    It depends on shapes only, not on ``kv_len``, so that a captured graph stays right; the blocks share what is valid.
    One block a multiprocessor reads as fast as two, and has nothing to merge: on an H200 B16 Hq32 Hkv8 D128 T2048 takes
    33.5 us so, in two splits 35.5.
    """
    if keys_per_split is not None:
        return min(-(-keys // keys_per_split), MAX_SPLITS)
    if device_index < 0:
        return min(-(-keys // 32), MAX_SPLITS)
    # What a block does with a few tiles of keys takes less time than launching the merge.
    enough = keys <= UNSPLIT_KEYS or 0.9 * sm_count(device_index) <= kv_heads <= sm_count(device_index)
    return 1 if enough else min(-(-keys // MAX_TILE_N), max_splits(kv_heads, device_index))


def choose_merge(
    kv_heads: int, group: int, keys: int, splits: int, tiles: tuple[int, int, int, int], device_index: int
) -> int:
    """Who merges the splits of an eager call, for whose launches the host needs longer than the GPU for the merge.

    A block that is going to count itself reads no tiles ahead (by the compiler of CUDA 13.4), which shows where it has
    several, and has a multiprocessor for itself. On an H200, B1 Hq32 Hkv8 D128, in us, by the last block and by another
    launch: T640 9.0 and 8.5, T2048 10.8 and 10.3, T8192 18.7 and 16.1, T32768 45.3 and 37.8; B8 T2048 22.7 and 24.1,
    T8192 67.3 and 68.8. The host needs 7 and 13 of its own.
    """
    if splits == 1:
        return ONE_SPLIT
    of_all = next_power_of_2(group) * next_power_of_2(splits) * tiles[3]
    if splits > MERGED_IN_ORDER or of_all > MERGED_BY_LAST or kv_heads > COUNTERS:
        return NEXT_LAUNCH
    few_tiles = keys <= TILES_NOT_AHEAD * splits * tiles[1]
    return LAST_BLOCK if few_tiles or kv_heads * splits > sm_count(device_index) else NEXT_LAUNCH


class Plan(NamedTuple):
    """What a call needs to know of its arguments besides where they are."""

    grid: tuple[int, int, int]  # (kv heads of all batch entries, splits, blocks of a group)
    rows: bool  # by decode_rows_kernel
    small: bool  # three blocks a multiprocessor fit
    scalars: tuple[float, float, int]  # scaling, soft_cap, window
    constants: tuple[int | bool, ...]  # those of decode_kernel
    merge: int
    tile_s: int  # of the splits that are merged
    out_shape: tuple[int, ...]
    partial_shape: tuple[int, ...]
    merge_args: tuple  # of merge_kernel behind its arrays
    overlap: bool  # whether launches may begin before their predecessors end


def make_plan(
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
) -> Plan:
    """The plan for these arguments of ``fmha_decode``, which have been checked."""
    batch, heads, _, head_dim = q.shape
    _, kv_heads, keys, v_dim = v.shape
    dtype, device_index = q.dtype, q.get_device()
    group = heads // kv_heads
    visible = keys if window_size is None else min(keys, window_size)
    rows = dtype == torch.float32 and group <= MAX_GROUP
    tiles = choose_tiles(group, head_dim, v_dim, dtype.itemsize, device_index)
    tiles = (heads_of_block(tiles[0], batch * kv_heads, max(tiles[2:]), dtype.itemsize), *tiles[1:])
    parts = -(-group // tiles[0])
    blocks = batch * kv_heads * parts
    if rows and kv_len_per_split is None and device_index >= 0:
        # Without tensor cores the products take longer than the reading: two tiles are enough for a block.
        splits = min(-(-visible // (2 * tiles[1])), max_splits(blocks, device_index))
    else:
        splits = choose_splits(blocks, visible, kv_len_per_split, device_index)
    uneven = splits == 1 and kv_len_per_split is None and visible > UNSPLIT_KEYS
    uneven = uneven and parts == 1 and is_uneven(blocks, tiles, dtype.itemsize, device_index)
    small = uneven and max(tiles[2:]) == 128
    if uneven:
        splits = 2 if small else 4
    if small:
        tiles = (tiles[0], tiles[1] // 2, *tiles[2:])
    overlap = overlaps(device_index)
    mask_kind, mask = prepare_mask(attention_mask, keys)
    constants = (
        *tiles,
        v_dim,
        group,
        window_size is not None,
        soft_cap is not None,
        mask_kind,
        tiles[0] if mask_kind != NO_MASK and mask.shape[1] > 1 else 1,
        sinks is not None,
        kv_len is not None,
        needs_exact(dtype, mask_kind),
    )
    how = IN_ORDER if splits <= MERGED_IN_ORDER else AT_ONCE if splits <= MERGED_AT_ONCE else IN_TURNS
    tile_s = TILE_S if how == IN_TURNS else next_power_of_2(splits)
    merge = choose_merge(blocks, group, visible, splits, tiles, device_index)
    if (rows or uneven or parts > 1) and merge == LAST_BLOCK:
        merge = NEXT_LAUNCH
    unit = 1.0 if soft_cap is not None or mask_kind == ADDITIVE_MASK else float(scaling)
    return Plan(
        (batch * kv_heads, splits if keys else 0, parts),
        rows,
        small,
        (float(scaling), 1.0 if soft_cap is None else float(soft_cap), 0 if window_size is None else window_size),
        constants,
        merge,
        tile_s,
        (batch, heads, 1, v_dim),
        (batch, heads, splits, v_dim + STATE_COLUMNS),
        (unit, tile_s, tiles[3], v_dim, how, overlap),
        overlap,
    )
