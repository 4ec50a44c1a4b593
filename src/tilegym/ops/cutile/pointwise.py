"""What the elementwise ops share: their tiles, and the functions of one value that several of them compute."""

import functools

import cuda.tile as ct
import torch

from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import is_small
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span


def indices(y, TILE_M: Int, TILE_N: Int):
    """In a kernel: what indexes this block's tile of ``y``, [M, N] or [B, S, N]; columns, [1, TILE_N], come last."""
    across = ct.cdiv(y.shape[y.ndim - 1], TILE_N)
    return at(y, span(ct.bid(0) // across, TILE_M)[:, None], span(ct.bid(0) % across, TILE_N)[None, :])


def over_one_plus_exp(x, a, dtype):
    """In a kernel: x / (1 + exp(-a)), to fp32's precision for results in fp32, else to well beyond ``dtype``'s."""
    if dtype == ct.float32:
        return x / (1.0 + ct.exp(-a))
    power = ct.exp2(a.astype(ct.float32) * -1.4426950408889634, flush_to_zero=True)
    return ct.truediv(x, 1.0 + power, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)


@functools.lru_cache(maxsize=1024)
def plan(m: int, n: int, device: int) -> tuple[tuple[int], int, int]:
    """(grid, TILE_M, TILE_N) for arrays of [m, n] on CUDA device ``device`` (-1: CPU)."""
    elements = 2048 if m * n >= 4096 * sm_count(device) else 512
    # The widest tile of which little is beside the columns: of 768 columns one of 1024 would leave a quarter idle.
    widths = [min(elements, next_power_of_2(n)) >> i for i in range(5)]
    padded = [ct.cdiv(n, width) * width for width in widths if width >= 64] or [n]
    tile_n = next(width for width, columns in zip(widths, padded, strict=False) if 16 * columns <= 17 * min(padded))
    tile_m = elements // tile_n
    return (ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n),), tile_m, tile_n


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
