"""Rows times a weight in tiles of 128 x 192, which are no power of two: two accumulators side by side.

With these, 512 rows and 6144 columns fill a GPU of 132 multiprocessors once, where tiles of 128 x 256 leave 36 of them
idle and tiles of 128 x 128 come in two waves.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.ops.cutile.bmm import load_tile as load_batch_tile
from tilegym.ops.cutile.matmul import GROUP_M
from tilegym.ops.cutile.matmul import load_tile
from tilegym.ops.cutile.matmul import tile_of_block
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import sm_count

TILE_M, WIDE, NARROW, BYTES_K = 128, 128, 64, 128
COLUMNS = WIDE + NARROW


def with_bias(acc, bias, n, part, TILE_N: Int):
    return acc + ct.load(bias, (n, part), (1, TILE_N)).astype(ct.float32)


@ct.kernel(num_worker_warps=ct.ByTarget(sm_90=8))
def wide_gemm_kernel(
    x,  # [M, K]
    weight,  # [G, WIDE + NARROW, K]
    bias,  # [G, WIDE + NARROW] if BIAS, else 0
    out,  # [M, G, WIDE + NARROW]
    TILE_M: Int,
    WIDE: Int,
    NARROW: Int,
    TILE_K: Int,
    GROUP_M: Int,
    BIAS: Bool,
):
    m, n = tile_of_block(ct.bid(0), ct.cdiv(out.shape[0], TILE_M), out.shape[1], GROUP_M)
    wide = ct.zeros((TILE_M, WIDE), dtype=ct.float32)
    narrow = ct.zeros((TILE_M, NARROW), dtype=ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        rows = load_tile(x, m, k, TILE_M, TILE_K, False, True)
        wide = ct.mma(rows, load_batch_tile(weight, n, k, 0, TILE_K, WIDE, True), wide)
        narrow = ct.mma(rows, load_batch_tile(weight, n, k, WIDE // NARROW, TILE_K, NARROW, True), narrow)
    if BIAS:
        wide, narrow = with_bias(wide, bias, n, 0, WIDE), with_bias(narrow, bias, n, WIDE // NARROW, NARROW)
    ct.store(out, (m, n, 0), wide.astype(out.dtype).reshape((TILE_M, 1, WIDE)))
    ct.store(out, (m, n, WIDE // NARROW), narrow.astype(out.dtype).reshape((TILE_M, 1, NARROW)))


@functools.lru_cache(maxsize=1024)
def fits_better(m: int, n: int, dtype: torch.dtype, device: int) -> bool:
    """Whether these tiles fill the multiprocessors so much better than 128 x 256 and 128 x 128 that they are faster."""
    if n % COLUMNS or dtype == torch.float32 or device < 0 or torch.cuda.get_device_capability(device)[0] != 9:
        return False

    def time(width: int) -> float:
        waves = -(-(-(-m // TILE_M) * -(-n // width)) // sm_count(device))
        # As in matmul.py.
        return waves * width * (TILE_M + width) ** 0.3 / width**0.3

    return time(COLUMNS) <= 0.85 * min(time(128), time(256))


def launch_wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Writes ``x @ weight.T + bias`` to out; x [M, K], weight [N, K], out [M, N], each with unit stride in its rows."""
    groups = weight.shape[0] // COLUMNS
    views = weight.unflatten(0, (groups, COLUMNS)), 0 if bias is None else bias.view(groups, COLUMNS)
    sizes = (TILE_M, WIDE, NARROW, BYTES_K // x.element_size(), GROUP_M, bias is not None)
    args = (x, *views, out.view(-1, groups, COLUMNS), *sizes)
    launch(x, (-(-x.shape[0] // TILE_M) * groups,), wide_gemm_kernel, args)
