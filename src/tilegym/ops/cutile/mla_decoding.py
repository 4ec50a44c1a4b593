"""``mla_decoding`` in cuTile: one query a head, one latent a token, which is the key and the value of all heads.

A block takes a tile of heads and a share of the keys that are valid now. It loads each tile of latents once: in shared
memory it is an operand of the scores and, transposed, of the weighted sum. With few heads the work is to read the
latents at the speed of memory; with 128 it is as much computing, and the rows of both products are the heads.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import DTYPES
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import prepare_mask
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.attention_common import truth
from tilegym.ops.cutile.attention_common import update_softmax
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.splitk_reduce import merge_splits
from tilegym.ops.cutile.splitk_reduce import product_in_parts
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.mla_decoding import check_decoding

ZERO = ct.PaddingMode.ZERO


def attend(
    queries,
    kv,
    kpe,
    mask,
    place,
    j,
    keys,
    state,
    scaling,
    TILE_N: Int,
    KEYS_LEFT: Bool,
    MASK: Int,
    MASK_HEADS: Int,
    EXACT: Bool,
    PARTIAL: Bool,
):
    """Takes tile ``j`` of the latents into ``state``; PARTIAL: some of its keys are behind the last one."""
    batch, head_tile = place
    q_tile, qpe_tile = queries
    row_max, row_sums, acc = state
    latents = ct.load(kv, (batch, j, 0), (1, TILE_N, q_tile.shape[0 if KEYS_LEFT else 1]), padding_mode=ZERO)
    latents = latents.reshape((TILE_N, latents.shape[2]))
    positions = ct.load(kpe, (batch, j, 0), (1, TILE_N, qpe_tile.shape[0 if KEYS_LEFT else 1]), padding_mode=ZERO)
    positions = positions.reshape((TILE_N, positions.shape[2]))
    if kv.dtype == ct.float32:
        if KEYS_LEFT:
            s = product_in_parts(latents, q_tile) + product_in_parts(positions, qpe_tile)
        else:
            s = product_in_parts(q_tile, ct.transpose(latents)) + product_in_parts(qpe_tile, ct.transpose(positions))
    elif KEYS_LEFT:
        s = ct.mma(latents, q_tile, ct.zeros((TILE_N, q_tile.shape[1]), dtype=ct.float32))
        s = ct.mma(positions, qpe_tile, s)
    else:
        s = ct.mma(q_tile, ct.transpose(latents), ct.zeros((q_tile.shape[0], TILE_N), dtype=ct.float32))
        s = ct.mma(qpe_tile, ct.transpose(positions), s)
    if MASK != NO_MASK:
        index = (batch % mask.shape[0], head_tile if MASK_HEADS > 1 else 0, 0, j)
        tile = ct.load(mask, index, (1, MASK_HEADS, 1, TILE_N), padding_mode=ZERO)
        tile = truth(tile.reshape((MASK_HEADS, TILE_N)))
        if KEYS_LEFT:
            tile = ct.transpose(tile)
        s = ct.where(tile, s, -math.inf) if MASK == BOOLEAN_MASK else s * scaling + tile.astype(ct.float32)
    if PARTIAL:
        columns = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        s = ct.where((columns[:, None] if KEYS_LEFT else columns[None, :]) < keys, s, -math.inf)
    unit = 1.0 if MASK == ADDITIVE_MASK else scaling
    p, row_max, row_sums, acc = update_softmax(s, row_max, row_sums, acc, unit, 0 if KEYS_LEFT else 1, EXACT)
    p = p.astype(kv.dtype)
    left, right = (ct.transpose(latents), p) if KEYS_LEFT else (p, latents)
    if kv.dtype == ct.float32:
        # A tile's own sum first: product by product, each would round the sum over all keys so far.
        acc = acc + ct.mma(left, right, ct.zeros(acc.shape, ct.float32))
    else:
        acc = ct.mma(left, right, acc)
    return row_max, row_sums, acc


@ct.kernel
def mla_decoding_kernel(
    q,  # [B, H, D]
    qpe,  # [B, H, Dr]
    kv,  # [B, S, D]
    kpe,  # [B, S, Dr]
    out,  # [B, H, D] if FINAL, else [B, H, splits, D + STATE_COLUMNS]: what merge_splits takes
    lse,  # [B, H] if FINAL, else 0
    mask,  # [B or 1, H or 1, 1, S] if MASK, else 0
    kv_len,  # [B] if KV_LEN, else 0
    scaling: float,
    TILE_H: Int,
    TILE_N: Int,
    TILE_D: Int,
    TILE_R: Int,
    KEYS_LEFT: Bool,  # scores are [keys, heads], not [heads, keys]
    MASK: Int,
    MASK_HEADS: Int,  # TILE_H, or 1 for a mask that all heads share
    KV_LEN: Bool,
    EXACT: Bool,
    FINAL: Bool,  # one split: its output is the result
    OVERLAP: Bool,
):
    begin(OVERLAP)
    # The blocks of one batch entry follow each other: what one of them reads the others find in the L2 cache.
    head_tiles = ct.cdiv(q.shape[1], TILE_H)
    batch, head_tile = ct.bid(0) // head_tiles, ct.bid(0) % head_tiles
    split = ct.bid(1)
    keys = kv.shape[1]
    if KV_LEN:
        keys = min(max(ct.load(kv_len, (batch,), (1,)).astype(ct.int32).item(), 0), keys)
    tiles = ct.cdiv(keys, TILE_N)
    share = ct.cdiv(tiles, ct.num_blocks(1))
    first = split * share
    last = min(first + share, tiles)
    full = min(last, keys // TILE_N)

    q_tile = ct.load(q, (batch, head_tile, 0), (1, TILE_H, TILE_D), padding_mode=ZERO).reshape((TILE_H, TILE_D))
    qpe_tile = ct.load(qpe, (batch, head_tile, 0), (1, TILE_H, TILE_R), padding_mode=ZERO).reshape((TILE_H, TILE_R))
    if KEYS_LEFT:
        q_tile, qpe_tile = ct.transpose(q_tile), ct.transpose(qpe_tile)
    row = (1, TILE_H) if KEYS_LEFT else (TILE_H, 1)
    acc = ct.zeros((TILE_D, TILE_H) if KEYS_LEFT else (TILE_H, TILE_D), dtype=ct.float32)
    sums = (TILE_N, TILE_H) if KEYS_LEFT else (TILE_H, TILE_N)  # of the keys of a tile: see sums_of_keys
    state = (ct.full(row, -math.inf, dtype=ct.float32), ct.zeros(sums, dtype=ct.float32), acc)

    # Two loops, so that tiles seen as a whole go from memory to the tensor cores without passing through registers.
    queries, place = (q_tile, qpe_tile), (batch, head_tile)
    options = (TILE_N, KEYS_LEFT, MASK, MASK_HEADS, EXACT)
    for j in range(first, full):
        state = attend(queries, kv, kpe, mask, place, j, keys, state, scaling, *options, False)
    if KV_LEN:
        # What a cache holds behind its last key may be NaN, which times zero would be NaN.
        kv = kv.slice(1, 0, keys)
    for j in range(max(first, full), last):
        state = attend(queries, kv, kpe, mask, place, j, keys, state, scaling, *options, True)

    row_max, row_sums, acc = state
    row_sum = ct.sum(row_sums, axis=0 if KEYS_LEFT else 1, keepdims=True)
    if FINAL:
        unit = 1.0 if MASK == ADDITIVE_MASK else scaling
        acc = acc * (1.0 / ct.where(row_sum == 0.0, 1.0, row_sum))  # no key seen: zeros
        ct.store(lse, (batch, head_tile), log_sum_exp(row_max, row_sum, unit).reshape((1, TILE_H)))
    if KEYS_LEFT:
        acc = ct.transpose(acc)
    if FINAL:
        ct.store(out, (batch, head_tile, 0), acc.reshape((1, TILE_H, TILE_D)).astype(out.dtype))
    else:
        # Kept as they are until all splits are known, they are merged as exactly as the tiles of one split.
        columns = out.shape[3] - STATE_COLUMNS
        ct.store(out.slice(3, 0, columns), (batch, head_tile, split, 0), acc.reshape((1, TILE_H, 1, TILE_D)))
        ct.store(out, (batch, head_tile, split, columns), row_max.reshape((1, TILE_H, 1, 1)))
        ct.store(out, (batch, head_tile, split, columns + 1), row_sum.reshape((1, TILE_H, 1, 1)))


def log_sum_exp(top, total, unit):
    """The natural logarithm of the sum of exponentials; -inf where no key was seen."""
    return top * unit + ct.log(total)


@ct.kernel
def merge_kernel(
    partial,  # [B, H, splits, D + STATE_COLUMNS], as mla_decoding_kernel leaves it
    out,  # [B, H, D]
    lse,  # [B, H]
    unit: float,
    TILE_S: Int,
    TILE_C: Int,
    OVERLAP: Bool,
):
    begin(OVERLAP)
    # A block has TILE_C columns of a row of the output: there are few rows where there are many splits.
    batch, head, column = ct.bid(0) // partial.shape[1], ct.bid(0) % partial.shape[1], ct.bid(1)
    width = partial.shape[3] - STATE_COLUMNS
    partial = partial.slice(1, head, head + 1)
    top, total = partial.slice(3, width, width + 1), partial.slice(3, width + 1, width + 2)
    part = partial.slice(3, column * TILE_C, min((column + 1) * TILE_C, width))
    nothing = (ct.full((1, 1), -math.inf, dtype=ct.float32), ct.zeros((1, 1), dtype=ct.float32))
    acc, state = merge_splits(part, top, total, batch, nothing, unit, 1, TILE_S, TILE_C, True)
    ct.store(out, (batch, head, column), acc.reshape((1, 1, TILE_C)).astype(out.dtype))
    if column == 0:
        ct.store(lse, (batch, head), log_sum_exp(*state, unit))


MAX_DIM = 512
# Taller tiles of heads do not fit: the accumulator of 64 x 512 takes half of a multiprocessor's registers.
MAX_TILE_H = 64
# Latents of 512 + 64 in bf16 are 72 KB for 64 of them, of which two fit beside the queries. Of few heads 128 are faster
# all the same, by a fifth for B128 H16 S4096 on an H200 (153 and 188 us), where their 144 KB fit.
TILE_N, WIDE_TILE_N = 64, 128
WIDE_SHARED_MEMORY = 200 * 2**10
MAX_SPLITS = 256


def fits_wide(device_index: int) -> bool:
    """Whether the shared memory of a CUDA device (-1: the CPU) holds tiles of WIDE_TILE_N latents."""
    if device_index < 0:
        return False
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin >= WIDE_SHARED_MEMORY


def merge_tile(rows: int, device_index: int) -> tuple[int, int]:
    """Splits and columns of a tile of the merge of so many rows: all columns where there are rows for every
    multiprocessor. On an H200 B16 H16 S8192 takes 65 us so, and 73.5 with a quarter of them; B1 H16 24.4 and 23.5."""
    return (8, 512) if rows >= sm_count(device_index) else (16, 128)


def choose_tiles(
    batch: int, heads: int, dim: int, rope_dim: int, itemsize: int, transpose: bool | None, device_index: int
) -> tuple[int, int, int, int, bool]:
    """TILE_H, TILE_N, TILE_D, TILE_R and KEYS_LEFT.

    The left operand is the one that Hopper's tensor cores take in units of 64 rows: the keys, unless there are as many
    heads. One batch entry has more blocks with half as many: B1 H128 S8192 takes 35 us on an H200 instead of 37.5.
    """
    tile_h, tile_d, tile_r = min(MAX_TILE_H if batch > 1 else 32, tile_of(heads)), tile_of(dim), tile_of(rope_dim)
    tile_n = WIDE_TILE_N if tile_h == 16 and fits_wide(device_index) else TILE_N
    if itemsize == 4:
        tile_h = tile_n = 16  # no tensor cores: larger tiles spill, and compile for a quarter of a minute
    if device_index < 0:
        tile_n = 16
    return tile_h, tile_n, tile_d, tile_r, tile_h < MAX_TILE_H if transpose is None else transpose


@functools.lru_cache(maxsize=4096)
def choose_splits(blocks: int, tiles: int, device_index: int) -> int:
    """How many blocks share ``tiles`` tiles of keys, where there are ``blocks`` of batch entries and tiles of heads.

    The number for which the last wave of blocks ends first, if starting a block takes as long as one tile and merging
    as long as two.
    """
    if device_index < 0:
        return min(-(-tiles // 2), MAX_SPLITS)
    multiprocessors = sm_count(device_index)

    def time(splits: int) -> int:
        waves = -(-blocks * splits // multiprocessors)
        return waves * (-(-tiles // splits) + 1) + (2 if splits > 1 else 0)

    most = min(tiles, MAX_SPLITS, -(-4 * multiprocessors // max(1, blocks)))
    return min(range(1, max(1, most) + 1), key=time)


@functools.lru_cache(maxsize=4096)
def plan(
    batch: int,
    heads: int,
    keys: int,
    dim: int,
    rope_dim: int,
    itemsize: int,
    transpose: bool | None,
    keys_per_split: int | None,
    device_index: int,
) -> tuple[tuple[int, int], tuple[int, int, int, int, bool], bool]:
    """The grid, what choose_tiles gives, and whether the tiles need the registers of eight warps.

    The grid depends on shapes only, not on ``kv_len``, so that a captured graph stays right; the blocks share what is
    valid.
    """
    tiles = choose_tiles(batch, heads, dim, rope_dim, itemsize, transpose, device_index)
    tile_h, tile_n, *_ = tiles
    blocks = batch * -(-heads // tile_h)
    if keys_per_split is None:
        splits = choose_splits(blocks, -(-keys // tile_n), device_index)
    else:
        splits = min(-(-keys // keys_per_split), MAX_SPLITS)
    return (blocks, splits), tiles, tile_h > 16 or itemsize == 4


def _fake(q, qpe, kv, kpe, sm_scale, transpose, kv_len_per_split, kv_len, attention_mask):
    batch, heads, dim = q.shape
    return q.new_empty(batch, heads, dim), q.new_empty(batch, heads, dtype=torch.float32)


@compilable(_fake)
def mla_decoding_forward(
    q: torch.Tensor,
    qpe: torch.Tensor,
    kv: torch.Tensor,
    kpe: torch.Tensor,
    sm_scale: float,
    transpose: bool | None,
    kv_len_per_split: int | None,
    kv_len: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, dim = q.shape
    keys = kv.shape[1]
    out, lse = q.new_empty(batch, heads, dim), q.new_empty(batch, heads, dtype=torch.float32)
    if keys == 0:
        return out.zero_(), lse.fill_(-math.inf)
    q, qpe, kv, kpe = with_unit_stride(q), with_unit_stride(qpe), with_unit_stride(kv), with_unit_stride(kpe)
    device_index, dtype = q.get_device(), q.dtype
    overlap = overlaps(device_index)
    grid, tiles, wide = plan(
        batch, heads, keys, dim, qpe.shape[2], dtype.itemsize, transpose, kv_len_per_split, device_index
    )
    splits = grid[1]
    final = splits == 1
    partial = out if final else q.new_empty(batch, heads, splits, dim + STATE_COLUMNS, dtype=torch.float32)
    mask_kind, mask = prepare_mask(attention_mask, keys)
    launch(
        partial,
        grid,
        hinted(mla_decoding_kernel, num_worker_warps=8) if wide else mla_decoding_kernel,
        (
            q,
            qpe,
            kv,
            kpe,
            partial,
            lse if final else 0,
            mask,
            0 if kv_len is None else kv_len,
            sm_scale,
            *tiles,
            mask_kind,
            tiles[0] if mask_kind != NO_MASK and mask.shape[1] > 1 else 1,
            kv_len is not None,
            needs_exact(dtype, mask_kind),
            final,
            overlap,
        ),
        overlap,
    )
    if not final:
        tile_s, tile_c = merge_tile(batch * heads, device_index)
        grid = (batch * heads, -(-dim // tile_c))
        unit = 1.0 if mask_kind == ADDITIVE_MASK else sm_scale
        launch(out, grid, merge_kernel, (partial, out, lse, unit, tile_s, tile_c, overlap), overlap)
    return out, lse


def _check_supported(q: torch.Tensor, qpe: torch.Tensor, kv: torch.Tensor, kpe: torch.Tensor, sm_scale: float) -> None:
    if q.dtype not in DTYPES:
        raise UnsupportedError("it takes fp32, fp16 and bf16")
    if q.shape[2] > MAX_DIM or qpe.shape[2] > MAX_DIM:
        raise UnsupportedError(f"it takes latents up to {MAX_DIM}")
    if kv.numel() > INT32_MAX and max(kv.stride()) > INT32_MAX:
        raise UnsupportedError("it takes strides below 2^31")
    if not sm_scale > 0:
        raise UnsupportedError("it takes positive scales only")  # the largest score would become the smallest
    if torch.is_grad_enabled() and (q.requires_grad or qpe.requires_grad or kv.requires_grad or kpe.requires_grad):
        raise UnsupportedError("it has no backward kernel")


@register_impl("mla_decoding", "cutile")
def mla_decoding(
    q: torch.Tensor,
    qpe: torch.Tensor,
    kv: torch.Tensor,
    kpe: torch.Tensor,
    sm_scale: float,
    transpose: bool | None = None,
    kv_len: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_decoding("mla_decoding", q, qpe, kv, kpe, None, kv_len, attention_mask)
    _check_supported(q, qpe, kv, kpe, sm_scale)
    return mla_decoding_forward(q, qpe, kv, kpe, sm_scale, transpose, None, kv_len, attention_mask)


@register_impl("mla_decoding_split_kv", "cutile")
def mla_decoding_split_kv(
    q: torch.Tensor,
    qpe: torch.Tensor,
    kv: torch.Tensor,
    kpe: torch.Tensor,
    sm_scale: float,
    kv_len_per_split: int | None = None,
    kv_len: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    check_decoding("mla_decoding_split_kv", q, qpe, kv, kpe, kv_len_per_split, kv_len, attention_mask)
    _check_supported(q, qpe, kv, kpe, sm_scale)
    return mla_decoding_forward(q, qpe, kv, kpe, sm_scale, None, kv_len_per_split, kv_len, attention_mask)[0]
