"""``mla_decoding`` in cuTile: which tiles and splits a call takes, and its launches."""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import DTYPES
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import prepare_mask
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.mla_decoding_kernels import merge_kernel
from tilegym.ops.cutile.mla_decoding_kernels import mla_decoding_kernel
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.mla_decoding import check_decoding

MAX_DIM = 512
MAX_SPLITS = 256
MERGED_AT_ONCE = 16  # splits whose sums are in registers at a time
# Below so many rows of the output a merging block has half of one.
FEW_ROWS, MERGED_COLUMNS = 64, 512
WIDE_SHARED_MEMORY = 200 * 2**10
KEYS_PLANNED = 64  # a cache that grows is planned for anew when it is so much longer


class Shape(NamedTuple):
    """Heads and keys of a tile, the columns of a part of its latents, whether keys are the left operand, the warps that
    multiply (None: as the compiler does), and microseconds on an H200: what a block takes to begin and end, what it
    takes more where its sums are to be merged, and what a tile of 512 + 64 in bf16 takes."""

    heads: int
    keys: int
    part: int
    keys_left: bool
    warps: int | None
    begin: float
    split: float
    tile: float


# The left operand is the one that Hopper's tensor cores take in units of 64 rows: the keys, unless there are as many
# heads. Taller tiles do not fit: the sums of 64 x 512 take half of a multiprocessor's registers. In parts, the latents
# of the next tile are loaded while the rest of this one are multiplied: 64 texts of 8192 keys, 128 heads, take 280 us
# on an H200 so, and 411 as a whole; in halves 349, in eighths 322.
SHAPES = (
    Shape(64, 64, 128, False, 8, 8.4, 3.6, 2.2),
    Shape(32, 128, 128, True, 8, 6.1, 0.0, 3.3),
    Shape(16, 128, 128, True, 8, 3.9, 0.0, 3.1),
    Shape(16, 64, 512, True, None, 4.1, 0.0, 2.2),
)
# Where shared memory does not hold 128 latents.
NARROW_SHAPES = (SHAPES[0], Shape(32, 64, 512, True, 8, 6.1, 0.0, 1.9), SHAPES[3])
# fp32 has no tensor cores: larger tiles spill, and compile for a quarter of a minute.
FP32_SHAPE = Shape(16, 16, 512, True, 8, 4.0, 0.0, 4.0)


def fits_wide(device_index: int) -> bool:
    """Whether the shared memory of a CUDA device holds tiles of 128 latents."""
    return torch.cuda.get_device_properties(device_index).shared_memory_per_block_optin >= WIDE_SHARED_MEMORY


def shapes_for(heads: int, itemsize: int, device_index: int) -> tuple[Shape, ...]:
    """The shapes that tiles of so many heads may have."""
    tile = tile_of(heads)
    if itemsize == 4:
        shapes = (FP32_SHAPE,)
    elif device_index < 0:
        shapes = (SHAPES[0 if tile >= SHAPES[0].heads else 2]._replace(keys=16, part=32),)
    else:
        shapes = SHAPES if fits_wide(device_index) else NARROW_SHAPES
    return tuple(shape for shape in shapes if shape.heads <= tile)


def time_of(shape: Shape, rows: int, blocks: int, tiles: int, splits: int, multiprocessors: int) -> float:
    """About how many microseconds ``blocks`` of batch entries and tiles of heads take where ``splits`` of them share
    ``tiles`` tiles of keys, and leave sums for so many rows of the output: to rank shapes and splits, fitted to 1 to 64
    texts of 512 to 32768 keys on an H200, of which the fastest are chosen, or those of up to 6 % more. That memory may
    set the pace, of all shapes alike, is left out."""
    waves = -(-blocks * splits // multiprocessors)
    time = waves * (shape.begin + -(-tiles // splits) * shape.tile)
    if splits > 1:
        turns = -(-splits // MERGED_AT_ONCE)
        time += shape.split + 1.5 + 0.0007 * rows * splits + 0.8 * (turns - 1) + 2 * max(turns - 4, 0)
    return time


def splits_for(blocks: int, tiles: int, multiprocessors: int) -> Iterator[int]:
    """The numbers of splits that differ in how many of ``tiles`` tiles a block has at most, while there are up to four
    blocks for every multiprocessor."""
    most = min(tiles, MAX_SPLITS, -(-4 * multiprocessors // max(1, blocks)))
    splits = 1
    while splits <= most:
        yield splits
        share = -(-tiles // splits)
        if share <= 1:
            break
        splits = -(-tiles // (share - 1))


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
) -> tuple[tuple[int, int], tuple[int, int, int, int, int, bool], int | None]:
    """The grid, the kernel's TILE_H, TILE_N, TILE_D, PARTS, TILE_R and KEYS_LEFT, and the warps that multiply.

    They depend on shapes only, not on ``kv_len``, so that a captured graph stays right; the blocks share what is valid.
    """
    multiprocessors = 8 if device_index < 0 else sm_count(device_index)

    def choices():
        for shape in shapes_for(heads, itemsize, device_index):
            blocks, tiles = batch * -(-heads // shape.heads), -(-keys // shape.keys)
            if keys_per_split is None:
                all_splits = tuple(splits_for(blocks, tiles, multiprocessors))
            else:
                all_splits = (min(-(-keys // keys_per_split), MAX_SPLITS),)
            for splits in all_splits:
                yield time_of(shape, batch * heads, blocks, tiles, splits, multiprocessors), splits, shape

    _, splits, shape = min(choices())
    part = min(tile_of(dim), shape.part)
    keys_left = shape.keys_left if transpose is None else transpose
    tiles = (shape.heads, shape.keys, part, -(-dim // part), tile_of(rope_dim), keys_left)
    return (batch * -(-heads // shape.heads), splits), tiles, shape.warps


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
    if kv_len_per_split is None:
        planned = -(-keys // KEYS_PLANNED) * KEYS_PLANNED
    else:
        planned = keys
    grid, tiles, warps = plan(
        batch, heads, planned, dim, qpe.shape[2], dtype.itemsize, transpose, kv_len_per_split, device_index
    )
    splits = grid[1]
    final = splits == 1
    partial = out if final else q.new_empty(batch, heads, splits, dim + STATE_COLUMNS, dtype=torch.float32)
    mask_kind, mask = prepare_mask(attention_mask, keys)
    launch(
        partial,
        grid,
        hinted(mla_decoding_kernel, num_worker_warps=warps) if warps else mla_decoding_kernel,
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
        rows = batch * heads
        columns = min(tile_of(dim), MERGED_COLUMNS if rows >= FEW_ROWS else MERGED_COLUMNS // 2)
        at_once = min(next_power_of_2(splits), MERGED_AT_ONCE)
        unit = 1.0 if mask_kind == ADDITIVE_MASK else sm_scale
        options = (at_once, columns, splits > at_once, dim % columns == 0, overlap)
        launch(out, (rows, -(-dim // columns)), merge_kernel, (partial, out, lse, unit, *options), overlap)
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
