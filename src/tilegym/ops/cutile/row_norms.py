"""What the normalisations of rows share: pieces of their kernels, their tiles, and the sums of blocks.

With ``xhat = x * rstd``, or ``(x - mean) * rstd`` where a mean is taken off (CENTER), and
``g = dy * (offset + weight)``, backward is ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))``, without mean(g) where
no mean is taken off, and over the rows ``dweight = sum(dy * xhat)`` and ``dbias = sum(dy)``: ``row_norms_backward.py``.
Each block sums over rows of its own, then the blocks' sums are added in a fixed order: the gradients are the same in
every run.

Constants of the kernels: WEIGHT, BIAS, DWEIGHT, DBIAS and THROUGH say whether that array is given (else 0 or any array
stands in its place, untouched); ROUND, whether xhat is rounded to the dtype of y before it is scaled; AT_ONCE, whether
all blocks of a forward pass run at once; AXIS, along which axis its grid counts them; WARPS, :func:`row_sum`'s.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.ops.cutile.pointwise import MAX_BLOCKS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import SMALL
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span

# A row of up to this many elements is held in the registers of one block; the backward pass holds four times as much.
MAX_CACHED = 16384
MAX_CACHED_BACKWARD = 8192


def outside(N: Int, TILE_M: Int, TILE_N: Int):
    """Whether a tile of whole rows may lie partly outside of them: what does not needs no checks, which take several
    instructions an element."""
    return N != TILE_N or TILE_M > 1


def load(x, rows, cols, CHECK: Bool = True):
    return ct.gather(x, at(x, rows[:, None], cols[None, :]), check_bounds=CHECK)


def load_vector(vector, cols, GIVEN: Bool, CHECK: Bool = True):
    return ct.gather(vector, cols, check_bounds=CHECK)[None, :] if GIVEN else None


def store(y, rows, cols, value, CHECK: Bool = True):
    ct.scatter(y, at(y, rows[:, None], cols[None, :]), value.astype(y.dtype), check_bounds=CHECK)


def put(y, tile, piece, value):
    """In a loop: stores a tile of whole rows, or a piece of them. Scatters into one array, each of which may write what
    another wrote, would take a barrier for every 16 bytes of a thread."""
    ct.store(y, (tile, piece), value.astype(y.dtype), allow_tma=False)


def store_piece(y, rows, piece, value, TILE_N: Int, PIECES: Int, AXIS: Int, CHECK: Bool):
    """Stores one of the PIECES of the rows of this block."""
    if PIECES == 1:
        store(y, rows, span(0, TILE_N), value, CHECK)
    else:
        put(y, ct.bid(AXIS), piece, value)


def behind(row, *others):
    """``row`` in fp32, which is known only when the others are: so they are read before a reduction over it. The
    compiler sinks loads to where they are used, and a block would wait for memory twice."""
    # Grids have no third axis, which the compiler does not know.
    zero = ct.full((1, 1), ct.bid(2), ct.int32).astype(ct.uint32)
    bits = ct.bitcast(row.astype(ct.float32), ct.uint32)
    for other in ct.static_iter(others):
        bits = bits | (ct.bitcast(other.astype(ct.float32), ct.uint32) & zero)
    return ct.bitcast(bits, ct.float32)


def row_sum(values, dtype, WARPS: Int, EARLY: Bool, *vectors):
    """The sums over rows in fp32, [M, N] -> [M, 1]; ``dtype`` is the rows' in memory, WARPS the block's, 0: ``ct.sum``.

    Each warp adds up what its threads hold, and every thread what the warps have found: one barrier, where ``ct.sum``
    takes two and more exchanges between threads, one after the other. On an H200 in bf16 layer_norm of 1x8192 takes
    6.1 us instead of 6.4, of 8192x5120 50.0 instead of 51.0, rms_norm of 8192x1536 17.1 instead of 17.8.

    EARLY: of a single row, it is known only when the ``vectors`` [1, N] are, as with :func:`behind`. Of the 16 bytes
    that a thread reads at once one element is looked at: layer_norm of 1x4096 in 5.86 us on an H200 instead of 6.05.
    Not where a vector has another dtype: threads read other elements of it than of the row.
    """
    each, same = min(max(1, values.shape[1] // (32 * max(4, WARPS))), 4 if dtype == ct.float32 else 8), True
    for vector in ct.static_iter(vectors):
        if vector is not None:
            same = same and vector.dtype == dtype
    if EARLY and same:
        groups = values.shape[1] // each
        values = ct.sum(values.reshape((groups, each)), axis=1, keepdims=True)
        for vector in ct.static_iter(vectors):
            if vector is not None:
                values = behind(values, ct.extract(vector.reshape((groups, each)), (0, 0), (groups, 1)))
        values, each = values.reshape((1, groups)), 1
    elif EARLY:
        for vector in ct.static_iter(vectors):
            if vector is not None:
                values = behind(values, vector)
    m, n = values.shape
    if WARPS == 0 or n < 32 * WARPS:
        total = ct.sum(values, axis=1, keepdims=True)
    else:
        warps = ct.sum(values.reshape((m, n // (32 * each * WARPS), WARPS, 32 * each)), axis=1)
        warps = ct.sum(warps, axis=2)
        total = ct.extract(warps, (0, 0), (m, 1))
        for warp in ct.static_iter(range(1, WARPS)):
            total = total + ct.extract(warps, (0, warp), (m, 1))
    return total


def scale_of(weight, OFFSET: Float):
    """offset + weight in fp32, as a tile or a number."""
    scale = 1.0 if weight is None else weight.astype(ct.float32)
    return scale if OFFSET == 0.0 else scale + OFFSET


def scaled(xhat, weight, bias, dtype, OFFSET: Float, ROUND: Bool):
    """xhat * (offset + weight) + bias in fp32."""
    if ROUND:
        xhat = xhat.astype(dtype).astype(ct.float32)
    out = xhat * scale_of(weight, OFFSET)
    return out if bias is None else out + bias.astype(ct.float32)


def rstd_of(squares, eps, N: Int):
    return ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / N) + eps)


def centered(row, mean, cols, N: Int):
    """row - mean, and 0 beyond the row's end, so that it adds nothing to sums."""
    return ct.where(cols[None, :] < N, row - mean, 0.0)


def add_pairs(a, b, c, d):
    return a + c, b + d


@ct.kernel
def add_blocks_kernel(parts0, parts1, out0, out1, TILE_M: Int, TILE_N: Int, FIRST: Bool, OVERLAP: Bool):
    """out [N] = sums over the rows of parts; blocks (., 0) the first pair, if there is one, the next the second."""
    if OVERLAP:
        ct.grid_dependency_control_wait()
    if FIRST and ct.bid(1) == 0:
        _add_rows(parts0, out0, TILE_M, TILE_N)
    else:
        _add_rows(parts1, out1, TILE_M, TILE_N)


def _add_rows(parts, out, TILE_M: Int, TILE_N: Int):
    cols = span(ct.bid(0), TILE_N)
    total = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.cdiv(parts.shape[0], TILE_M)):
        total = total + load(parts, span(tile, TILE_M), cols)
    ct.scatter(out, cols, ct.sum(total, axis=0).astype(out.dtype))


def whole_rows(rows: int, n: int, device: int) -> tuple[int, int]:
    """(TILE_M, TILE_N) for whole rows of [rows, n] in registers: short rows share a block, as long as there are blocks
    for every multiprocessor."""
    tile_n = next_power_of_2(n)
    return max(1, min(4096 // tile_n, next_power_of_2(rows // (4 * sm_count(device))))), tile_n


def at_once(rows: int, elements: int, device: int) -> int:
    """How many blocks a multiprocessor has where all blocks of a forward pass, of a row of ``elements`` each, run at
    once, so that none works while another waits for memory; else 0."""
    return 1 if rows <= sm_count(device) else 4 if rows <= 4 * sm_count(device) and elements <= 4096 else 0


def in_pieces(rows: int, n: int) -> bool:
    """Whether a forward pass holds rows in pieces, instead of in one tile of which a part is idle, or two in one.

    rms_norm on an H200 in bf16: 8192x1536 17.8 us instead of 20.3, x2048 22.5 instead of 23.9, x2560 26.7 instead of
    30.2, x5120 46.7 instead of 56.2; copies of as many bytes take 16.6, 21.2, 26.0 and 44.8.
    """
    return rows * n > SMALL and (1024 < n <= 3072 or 4096 < n <= 6144)


def piece_plan(n: int) -> tuple[int, int, int]:
    """(TILE_N, warps, occupancy) for rows in pieces."""
    return (512, 4, 8) if n <= 3072 else (1024, 8, 4)


def grid_of(blocks: int) -> tuple[tuple[int, ...], int]:
    """A grid of so many blocks, and the axis along which it counts them: the second if they are not too many, since
    sm_90 gets a block's number along it in a fifth of the instructions."""
    return ((1, blocks), 1) if blocks <= MAX_BLOCKS else ((blocks,), 0)


def forward_warps(tiles: int, elements: int, device: int) -> int:
    """Warps of a block that holds a tile of ``elements``. Where there are fewer tiles than multiprocessors, what counts
    is how long one takes: with 8 warps each thread issues half as many instructions."""
    return 8 if elements >= 8192 or (elements >= 2048 and tiles < sm_count(device)) else 4


def sums_of_blocks(
    like: torch.Tensor, blocks: int, n: int, wanted: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the blocks put their sums, [blocks, n], and where :func:`add_blocks` adds them, [n] in ``dtype``.

    A single block writes the result itself. If it is not wanted: ``like``, and an empty tensor.
    """
    if not wanted:
        return like, like.new_empty(0, dtype=dtype)
    out = like.new_empty(n, dtype=dtype) if blocks else like.new_zeros(n, dtype=dtype)
    return (out.view(1, n) if blocks <= 1 else like.new_empty(blocks, n, dtype=torch.float32)), out


def add_blocks(blocks: int, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Adds up the sums of one or two pairs from :func:`sums_of_blocks`, of up to ``blocks`` blocks, in one launch."""
    wanted = [pair for pair in pairs if pair[1].numel() and pair[0].shape[0] > 1]
    if blocks > 1 and wanted:
        add_rows(*wanted)


@functools.lru_cache(maxsize=1024)
def add_tile(m: int) -> tuple[int, int]:
    """(TILE_M, TILE_N) to add up m rows: all of them at once, since each further turn would wait for memory again.

    512x2048 in tiles of 16 columns instead of 8: a microsecond less on an H200.
    """
    tile_m = min(1024, next_power_of_2(m))
    return tile_m, 16 if 384 < m <= 512 else max(4, min(128, 4096 // tile_m))


def add_rows(*pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Adds up the rows of the first of one or two pairs, fp32 [M, N], into the second, [N] of any dtype.

    M and N of two pairs may differ.
    """
    (parts0, out0), (parts1, out1) = pairs[0], pairs[-1]
    tile_m, tile_n = add_tile(max(parts0.shape[0], parts1.shape[0]))
    grid = (ct.cdiv(max(out0.shape[0], out1.shape[0]), tile_n), len(pairs))
    overlap = overlaps(out0.get_device())
    args = (parts0, parts1, out0, out1, tile_m, tile_n, len(pairs) == 2, overlap)
    launch(out0, grid, add_blocks_kernel, args, overlap)


def rows_over(x: torch.Tensor, dims: int) -> torch.Tensor:
    """``x`` as [M, N], N over its last ``dims`` dimensions."""
    if dims == 1:
        return rows_of(x)
    n = x.shape[-dims:].numel()
    rows = x.reshape(x.shape[:-dims].numel(), n)
    return rows if rows.stride(0) <= INT32_MAX else rows.contiguous()


def contiguous_like(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def sums_dtype(weight: torch.Tensor | None, bias_dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype the gradients of weight and bias are written: theirs, or fp32 if they have two."""
    dtypes = {t for t in (None if weight is None else weight.dtype, bias_dtype) if t is not None}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
