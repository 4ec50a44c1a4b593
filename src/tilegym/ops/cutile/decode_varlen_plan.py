"""How :mod:`tilegym.ops.cutile.decode_varlen` divides its work: tiles of keys, blocks, and how parts are merged."""

import functools

import cuda.tile as ct

from tilegym.ops.cutile.flash_decode_plan import MAX_TILE_M
from tilegym.ops.cutile.flash_decode_plan import MAX_TILE_N
from tilegym.ops.cutile.flash_decode_plan import TILE_BYTES
from tilegym.ops.cutile.flash_decode_plan import UNSPLIT_KEYS
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count

Tiles = tuple[int, int, int, int]  # TILE_M, TILE_N, TILE_D, TILE_DV

# Rows of a tile in pages, which lie in one page, that ct.mma multiplies well: where they meet at least SEVERAL queries,
# half as many will do. Where a page has fewer keys, they are those of as many kv heads as it takes; where that is not
# possible, each row is addressed. On an H200, 32 tokens behind 1024 to 2048 keys, in pages of 16, D64, Hq64 Hkv8, take
# with two heads, of 32 rows, 41.1 us, with four 49.8, with rows that are addressed 76.0; Hq32 Hkv8, two heads of which
# meet eight queries, 68.8, four 37.9; D128 Hq64 Hkv8 two 61.2, four 78.5, Hq32 Hkv8 two 300, four 61.8, addressed 152;
# D256 Hq16 Hkv2 two 39.2, addressed 121. In pages of 32, D64, two heads, Hq64 Hkv8 36.7 and Hq32 Hkv8 33.3, addressed
# 72.7 and 74.7. To copy as many bytes takes 26 us, of D128 51.
SHORTEST_TILE, SEVERAL = 64, 16
MANY_ROWS = 1024  # of the output; more are merged four in a block
# Blocks a multiprocessor, and of small tiles. Pages take these where they can: on an H200, D128, pages of 256, 8
# and 32 tokens behind 1024 to 2048 keys take 21.4 and 60.3 us so (two blocks of them 21.4 and 57.1, large tiles 22.7
# and 64.5), 8 behind 4096 to 8192 57.4 (59.5, 64.2), 128 behind 512 to 1024 105 (113, 123). D64, pages of 64, 8 and 32
# tokens 12.2 and 33.1 (two blocks 14.2 and 38.6), but pages of 256, in tiles of 128 keys, two blocks, 32.0 (of 64,
# four, 33.1).
BLOCKS, BLOCKS_OF_SMALL = 2, 4
# From so many kv heads for each multiprocessor on, of all sequences, packed keys get small tiles too; it is in pages
# that they were compared.
MANY_HEADS = 6


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


def _half_wide(tiles: Tiles, itemsize: int, device_index: int) -> bool:
    """Whether tiles of half as many keys are small ones: those of 128 dimensions and few queries."""
    tile_m, tile_n, *dims = tiles
    return device_index >= 0 and itemsize == 2 and tile_m <= 16 and tile_n == MAX_TILE_N and max(dims) == 128


def packed_tiles(tiles: Tiles, itemsize: int, kv_heads: int, device_index: int) -> tuple[Tiles, int, int]:
    """The tiles of packed keys, given those of :func:`choose_tiles`, for so many ``kv_heads`` of all sequences; how
    many heads a tile has the keys of, and how many blocks a multiprocessor."""
    tile_m, tile_n, *dims = tiles
    if _half_wide(tiles, itemsize, device_index) and kv_heads > MANY_HEADS * sm_count(device_index):
        return (tile_m, tile_n // 2, *dims), 1, BLOCKS_OF_SMALL
    return tiles, 1, BLOCKS


@functools.lru_cache(maxsize=1024)
def paged_tiles(
    tiles: Tiles, itemsize: int, size: int, group: int, kv_heads: int, device_index: int
) -> tuple[Tiles, int, int]:
    """As :func:`packed_tiles`, in pages of ``size`` keys, of ``kv_heads`` that ``group`` query heads share each."""
    tile_m, tile_n, *dims = tiles
    rows, heads, shortest = whole_tile(size), 1, min(tile_n, SHORTEST_TILE)
    joined = itemsize == 2 and (device_index < 0 or tile_n >= SHORTEST_TILE)

    def columns() -> int:
        return max(8, next_power_of_2(group * heads))

    def suffices() -> bool:
        return rows * heads >= (shortest // 2 if joined and device_index >= 0 and columns() >= SEVERAL else shortest)

    while joined and not suffices() and kv_heads % (2 * heads) == 0 and 2 * heads * group <= MAX_TILE_M:
        heads *= 2
    if not suffices():
        return tiles, 1, BLOCKS
    if heads > 1:
        tile_m, tile_n = columns(), rows * heads
        # With more than one of whole ones the compiler has no warps that only load.
        each = min(max(TILE_BYTES // (tile_n * max(dims) * itemsize), 1), BLOCKS_OF_SMALL)
    elif rows >= SHORTEST_TILE and _half_wide(tiles, itemsize, device_index):
        tile_n, each = tile_n // 2, BLOCKS_OF_SMALL
    else:
        tile_n = min(tile_n, rows)
        small = itemsize == 2 and tile_n * max(dims) * itemsize <= TILE_BYTES // BLOCKS_OF_SMALL
        each = BLOCKS_OF_SMALL if small else BLOCKS
    return (tile_m, tile_n, *dims), heads, each


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


def whole_tile(rows: int) -> int:
    """The largest power of two that divides ``rows``."""
    return rows & -rows
