"""Which tiles of scores an attention kernel looks at, and the part of a mask that belongs to one."""

import functools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.tuning_key import bucket
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import prepare_mask
from tilegym.ops.cutile.attention_common import truth
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import sm_count

KEY_MASK_CHUNK = 4096
WIDE = 160  # dimensions of a head; of more a multiprocessor holds one tile of 128 queries


def interleaved_block(block, tiles, x, INTERLEAVE: Int):
    """Tile, batch entry and head of a block, of ``tiles`` for each head of x [B, H, ..], the longest ones first.

    INTERLEAVE heads, of whatever batch entry, take turns (0: all): blocks start with the first tile of each, then the
    second. With 1 a head's blocks follow each other, and the last head's longest block starts when hardly any other is
    left to run beside it. The more heads, the fewer of the blocks that run at once share keys in the L2 cache.
    """
    heads = x.shape[1]
    if INTERLEAVE == 0:
        head = block % (x.shape[0] * heads)
        return block // (x.shape[0] * heads), head // heads, head % heads
    if INTERLEAVE == 1:
        return block % tiles, block // tiles // heads, block // tiles % heads
    first = block // (tiles * INTERLEAVE) * INTERLEAVE
    width = min(INTERLEAVE, x.shape[0] * heads - first)
    head = first + block % (tiles * INTERLEAVE) % width
    return block % (tiles * INTERLEAVE) // width, head // heads, head % heads


def load_mask(mask, batch, head, i, j, TILE_R: Int, TILE_C: Int):
    """Rows and columns of a mask [B or 1, H or 1, Sq or 1, Skv]; a dimension of one is broadcast (x % 1 is 0)."""
    index = (batch % mask.shape[0], head % mask.shape[1], i if TILE_R > 1 else 0, j)
    tile = ct.load(mask, index, (1, 1, TILE_R, TILE_C), padding_mode=ct.PaddingMode.ZERO)
    return truth(tile.reshape((TILE_R, TILE_C)))


def load_mask_tile(mask, batch, head, i, j, TILE_R: Int, TILE_C: Int, KEYS_FIRST: Bool):
    """:func:`load_mask`, or with KEYS_FIRST its transpose."""
    if not KEYS_FIRST:
        return load_mask(mask, batch, head, i, j, TILE_R, TILE_C)
    index = (batch % mask.shape[0], head % mask.shape[1], j, i if TILE_R > 1 else 0)
    tile = ct.load(mask, index, (1, 1, TILE_C, TILE_R), order=(0, 1, 3, 2), padding_mode=ct.PaddingMode.ZERO)
    return truth(tile.reshape((TILE_C, TILE_R)))


def visible_range(mask, batch, head, keys, CHUNK: Int):
    """The first visible key of a row of KEY_MASK, the one after the last, and how many there are."""
    low, high, count = keys, 0, 0
    for c in range(ct.cdiv(keys, CHUNK)):
        columns = c * CHUNK + ct.arange(CHUNK, dtype=ct.int32)
        seen = load_mask(mask, batch, head, 0, c, 1, CHUNK).reshape((CHUNK,)) & (columns < keys)
        low = min(low, ct.min(ct.where(seen, columns, keys)).item())
        high = max(high, ct.max(ct.where(seen, columns + 1, 0)).item())
        count = count + ct.sum(seen.astype(ct.int32)).item()
    return low, high, count


def valid_keys(k, kv_len, batch, KV_LEN: Bool):
    """How many keys of ``k`` [B, Hkv, Skv, D] a batch entry has."""
    keys = k.shape[2]
    if KV_LEN:
        keys = min(max(ct.load(kv_len, (batch,), (1,)).astype(ct.int32).item(), 0), keys)
    return keys


def key_tiles(
    mask, batch, head, start, keys, window, TILE_M: Int, TILE_N: Int, CAUSAL: Bool, WINDOW: Bool, MASK: Int
):  # fmt: skip
    """The tiles of keys that TILE_M queries see, the first of them standing at position ``start`` among the keys.

    Returns (first, full_first, full_last, last): [first, full_first) and [full_last, last) are seen in part,
    [full_first, full_last) as a whole.
    """
    first, full_first = 0, 0
    last, full_last = ct.cdiv(keys, TILE_N), keys // TILE_N
    if CAUSAL:
        last = ct.cdiv(min(keys, max(start + TILE_M, 0)), TILE_N)
        full_last = min(keys, max(start + 1, 0)) // TILE_N
    if WINDOW:
        first = max(start - window + 1, 0) // TILE_N
        full_first = ct.cdiv(max(start + TILE_M - window, 0), TILE_N)
    if MASK == KEY_MASK:
        # Padding is at one end or the other: between its ends nothing need be looked up.
        low, high, count = visible_range(mask, batch, head, keys, KEY_MASK_CHUNK)
        first, full_first = max(first, low // TILE_N), max(full_first, ct.cdiv(low, TILE_N))
        last, full_last = min(last, ct.cdiv(high, TILE_N)), min(full_last, high // TILE_N)
        if count < high - low:
            full_last = 0
    full_first = min(max(full_first, first), last)
    full_last = min(max(full_last, full_first), last)
    return first, full_first, full_last, last


def seen_keys(columns, positions, keys, CAUSAL: Bool):
    """Which keys, of ``columns``, queries at ``positions`` see among ``keys`` of them.

    One comparison: no query stands behind the last key. Rows behind the last query do, and see keys that are none.
    """
    return columns <= positions if CAUSAL else columns < keys


def query_tiles(
    queries, keys, column, window, TILE_M: Int, TILE_N: Int, CAUSAL: Bool, WINDOW: Bool
):  # fmt: skip
    """The tiles of queries that see some of TILE_N keys, the first of them number ``column``; as for key_tiles."""
    first, full_first = 0, 0
    last = ct.cdiv(queries, TILE_M)
    full_last = last
    row = column - (keys - queries)  # the query that stands at that key
    if CAUSAL:
        first = max(row, 0) // TILE_M
        full_first = ct.cdiv(max(row + TILE_N - 1, 0), TILE_M)
    if WINDOW:
        last = ct.cdiv(min(max(row + TILE_N - 1 + window, 0), queries), TILE_M)
        full_last = max(row + window, 0) // TILE_M
    if column >= keys:
        last = 0
    first = min(first, last)
    full_first = min(max(full_first, first), last)
    full_last = min(max(full_last, full_first), last)
    return first, full_first, full_last, last


def partial_tile(n, first, full_first, full_last):
    """Number ``n`` of the tiles in [first, full_first) and from full_last on."""
    return first + n if first + n < full_first else full_last + n - (full_first - first)


def for_each_tile(step, state, tiles, BOUNDED: Bool, TWO_LOOPS: Bool, PARTIAL_HEAD: Bool = True):
    """``state = step(state, j, partial)`` for each tile j, of what key_tiles returned.

    PARTIAL_HEAD: the first tiles too may be seen in part. Else one comparison tells, of which cuTile makes two loops.
    """
    first, full_first, full_last, last = tiles
    if not BOUNDED:
        for j in range(first, last):
            state = step(state, j, False)
    elif TWO_LOOPS:
        for j in range(full_first, full_last):
            state = step(state, j, False)
        for n in range(full_first - first + last - full_last):
            state = step(state, partial_tile(n, first, full_first, full_last), True)
    elif PARTIAL_HEAD:
        for j in range(first, last):
            state = step(state, j, j < full_first or j >= full_last)
    else:
        for j in range(first, last):
            state = step(state, j, j >= full_last)
    return state


def tallest_tile(q: torch.Tensor) -> int:
    """How many of the queries [B, Hq, Sq, D] a tile may have: hardly more than there are, and no more than 64 where
    tiles of 128 leave half of the multiprocessors idle, of heads so wide that a second tile would not fit beside one.

    On an H200 a causal pass of 4 heads over one of keys, D 256, S2048, takes 39 us with 64 queries and 53 with 128, its
    dq 30 us less; of 8 heads over 4, S1024, 22 and 30, and 15 us less; of twice as many queries 62 and 53.
    Sizes are rounded as for the keys of the tuning results, so that one token more does not tune again.
    """
    batch, heads, queries, head_dim = q.shape
    if head_dim > WIDE and 2 * batch * heads * -(-queries // 128) <= sm_count(q.get_device()):
        return 64
    return max(64, bucket(queries))


def interleave_of(cfg: Config, is_causal: bool) -> int:
    """INTERLEAVE of a configuration, default 1: it matters where some blocks are longer than others."""
    return vars(cfg).get("INTERLEAVE", 1) if is_causal else 1


def mask_of_rows(attention_mask: torch.Tensor | None, keys: int) -> tuple[int, torch.Tensor | int, bool]:
    """What prepare_mask gives, a boolean row that all queries share being a KEY_MASK, and whether there is one row."""
    kind, mask = prepare_mask(attention_mask, keys)
    one_row = kind == NO_MASK or mask.shape[2] == 1
    return (KEY_MASK if one_row and kind == BOOLEAN_MASK else kind), mask, one_row


@functools.lru_cache(maxsize=4096)
def may_keep_first_maximum(dtype: torch.dtype, keys: int, mask_kind: int, windowed: bool, device_index: int) -> bool:
    """Whether the softmax of so many ``keys`` may be relative to the first tile's maximum, see ``attend_all``: in fp16
    e^11 overflows, fp32 is exact, and behind a window or a mask most queries do not see the first tile. With few keys
    the first tile, and another look at the sums, cost more than is gained."""
    if dtype != torch.bfloat16 or windowed or mask_kind not in (NO_MASK, KEY_MASK):
        return False
    return keys > 32 if device_index < 0 else keys >= 512
