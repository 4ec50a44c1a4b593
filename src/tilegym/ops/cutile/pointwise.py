"""What the elementwise ops share: their tiles, and the functions of one value that several of them compute."""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import is_small
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span


def block(axis: Int, LAST_FIRST: Bool):
    """In a kernel: this block's number along an axis of the grid, counted from the other end if LAST_FIRST."""
    return ct.num_blocks(axis) - 1 - ct.bid(axis) if LAST_FIRST else ct.bid(axis)


def indices(y, TILE_M: Int, TILE_N: Int, LAST_FIRST: Bool = False):
    """In a kernel: what indexes this block's tile of ``y``, [M, N] or [B, S, N]; columns, [1, TILE_N], come last."""
    across, number = ct.cdiv(y.shape[y.ndim - 1], TILE_N), block(0, LAST_FIRST)
    return at(y, span(number // across, TILE_M)[:, None], span(number % across, TILE_N)[None, :])


# How a grid counts tiles. sm_90 gets a block's number along the second and third axis in a third of the instructions
# that it takes along the first, and needs no division by a number of tiles: a block of geglu issues its first load
# after 85 instructions with LINEAR, 30 with AXES. Rows of a single sequence, [1, S, N], need no division by S either.
LINEAR, AXES, ONE_SEQUENCE = range(3)
MAX_BLOCKS = 65535  # along the second and third axis


def tile_of(y, TILE_M: Int, TILE_N: Int, GRID: Int, LAST_FIRST: Bool = False):
    """In a kernel: as :func:`indices`, for a :func:`layout`.

    LAST_FIRST, in backward passes: the last tiles come first, which the forward pass has left in the cache. On an H200
    in bf16 both passes of swiglu take 36.8 us instead of 38.3 for 512x14336; 35.0 where their launches overlap too.
    """
    if GRID == LINEAR:
        return indices(y, TILE_M, TILE_N, LAST_FIRST)
    rows, cols = span(block(2, LAST_FIRST), TILE_M)[:, None], span(block(1, LAST_FIRST), TILE_N)[None, :]
    return (0, rows, cols) if GRID == ONE_SEQUENCE else at(y, rows, cols)


def over_one_plus_exp(x, a, dtype):
    """In a kernel: x / (1 + exp(-a)), to fp32's precision for results in fp32, else to well beyond ``dtype``'s."""
    if dtype == ct.float32:
        return x / (1.0 + ct.exp(-a))
    power = ct.exp2(a.astype(ct.float32) * -1.4426950408889634, flush_to_zero=True)
    return ct.truediv(x, 1.0 + power, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


@functools.lru_cache(maxsize=1024)
def plan(m: int, n: int, device: int) -> tuple[tuple[int], int, int]:
    """(grid, TILE_M, TILE_N) for arrays of [m, n] on CUDA device ``device`` (-1: CPU)."""
    tile_m, tile_n = _tile(m, n, 2048 if m * n >= 4096 * sm_count(device) else 512, WASTE)
    return (ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n),), tile_m, tile_n


WASTE = 17 / 16  # to how many times their columns tiles may extend


@functools.lru_cache(maxsize=1024)
def layout(
    kernel: ct.kernel, shape: tuple[int, ...], device: int, inputs: int = 2
) -> tuple[ct.kernel, tuple[int, ...], tuple[int, int, int, bool]]:
    """``kernel`` with its warps, and :func:`cover`, for arrays of this shape on CUDA device ``device`` (-1: CPU).

    Few elements of several ``inputs`` get twice as many threads, and wide tiles even if some of these are idle. On an
    H200 in bf16 512x2880 takes silu_and_mul so 5.95 us instead of 6.18, its backward pass 7.42 instead of 7.52, geglu
    6.05 instead of 6.24; but 512x10240 geglu's backward pass 16.80 instead of 16.42, and gelu 9.47 instead of 8.77.
    """
    size = math.prod(shape)
    few = size < 2048 * sm_count(device)
    if inputs > 1 and size < 3 * 2**20 and not (few and size == shape[-1]):
        return hinted(kernel, num_worker_warps=8), *cover(shape, 1024, 4 / 3)
    return kernel, *cover(shape, 512 if few else 1024 if size < 2**25 else 2048)


def cover(
    shape: tuple[int, ...], elements: int, waste: float = WASTE
) -> tuple[tuple[int, ...], tuple[int, int, int, bool]]:
    """(grid, (TILE_M, TILE_N, GRID, CHECK)) for tiles of so many elements of [M, N] or [B, S, N].

    CHECK: some tiles are partly beside the array.
    """
    m, n = math.prod(shape[:-1]), shape[-1]
    tile_m, tile_n = _tile(m, n, elements, waste)
    down, across, check = ct.cdiv(m, tile_m), ct.cdiv(n, tile_n), m % tile_m + n % tile_n > 0
    if max(down, across) > MAX_BLOCKS:
        return (down * across,), (tile_m, tile_n, LINEAR, check)
    return (1, across, down), (tile_m, tile_n, ONE_SEQUENCE if len(shape) == 3 and shape[0] == 1 else AXES, check)


def _tile(m: int, n: int, elements: int, waste: float) -> tuple[int, int]:
    """The widest tile of so many elements of which little is beside n columns, next to narrower ones."""
    if m == 1:  # its few blocks have multiprocessors of their own: silu_and_mul 1x768 5.1 us instead of 5.3 on an H200
        return 1, min(elements, next_power_of_2(n))
    widths = [min(elements, next_power_of_2(n)) >> i for i in range(5)]
    padded = [ct.cdiv(n, width) * width for width in widths if width >= 64] or [n]
    tile_n = next(width for width, columns in zip(widths, padded, strict=False) if columns <= waste * min(padded))
    return elements // tile_n, tile_n


def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of one shape as [M, N]: as a single row if all are contiguous, else over the last dimension."""
    if tensors[0].numel() <= INT32_MAX and all(t.is_contiguous() for t in tensors):
        return tuple(t.view(1, -1) for t in tensors)
    return tuple(rows_of(t) if t.dim() else t.view(1, 1) for t in tensors)


def small_or_flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of one shape as they are, [M, N] or [B, S, N], if all are small and contiguous, else :func:`flat`."""
    for t in tensors:
        if not is_small(t):
            return flat(*tensors)
    return tensors
