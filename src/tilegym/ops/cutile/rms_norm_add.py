"""``rms_norm_add`` in cuTile: a block a row, its weight on its way while the launch in front still runs."""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops import ops
from tilegym.ops.cutile.fused_gemv import add_residual
from tilegym.ops.cutile.rms_norm import OVERLAPPED
from tilegym.ops.cutile.row_norms import MAX_CACHED
from tilegym.ops.cutile.row_norms import forward_warps
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import row_sum
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import scaled
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import wants_gradient
from tilegym.ops.pytorch.fused_gemv import check_rms_norm_add


@ct.kernel
def rms_norm_add_kernel(
    x, weight, residual, out, eps, OFFSET: Float, ROUND: Bool, N: Int, TILE_N: Int, WARPS: Int, OVERLAP: Bool
):  # fmt: skip
    """x, residual, out: [M, N], weight: [N]; WARPS as for ``row_sum``."""
    let_next_begin(OVERLAP)
    rows, cols, check = span(ct.bid(0), 1), span(0, TILE_N), TILE_N != N
    w = ct.gather(weight, cols, check_bounds=check)[None, :]
    if OVERLAP:
        ct.grid_dependency_control_wait()
    row, other = load(x, rows, cols, check).astype(ct.float32), load(residual, rows, cols, check)
    rstd = rstd_of(row_sum(row * row, x.dtype, WARPS, True, w, other), eps, N)
    y = scaled(row * rstd, w, None, x.dtype, OFFSET, ROUND).astype(x.dtype)
    store(out, rows, cols, other.astype(ct.float32) + y.astype(ct.float32), check)


@functools.lru_cache(maxsize=256)
def plan(rows: int, n: int, device: int) -> tuple[ct.kernel, int, int, bool]:
    """(kernel, TILE_N, WARPS, OVERLAP), as ``rms_norm`` has them for as many rows."""
    tile_n = next_power_of_2(n)
    warps = forward_warps(rows, tile_n, device)
    return hinted(rms_norm_add_kernel, num_worker_warps=warps, occupancy=1), tile_n, warps, overlaps(device)


@compilable(lambda x, *_: x.new_empty(x.shape))
def rms_norm_add_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor, offset: float, rounded: bool
) -> torch.Tensor:
    """x, residual [..., N], not empty; [..., N], contiguous."""
    out, rows = x.new_empty(x.shape), rows_of(x)
    m, n = rows.shape
    kernel, *tiles = plan(m, n, x.get_device())
    args = (rows, weight, rows_of(residual), out.view(m, n), eps, offset, rounded, n, *tiles)
    launch(x, (m,), kernel, args, tiles[-1])
    return out


@register_impl("rms_norm_add", "cutile")
def rms_norm_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    check_rms_norm_add(x, weight, residual, casting)
    if x.dtype not in FLOATS:
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    gradient, n = wants_gradient(x, weight, residual), x.shape[-1]
    if not gradient and 0 < n <= MAX_CACHED and 0 < x.numel() <= OVERLAPPED * n:
        return rms_norm_add_forward(x, weight, float(eps), residual, float(offset), casting == "llama")
    y = ops.rms_norm(x, weight.shape, weight, eps, None, None, offset, casting, backend="cutile")
    return residual + y if gradient else add_residual(y, residual)
