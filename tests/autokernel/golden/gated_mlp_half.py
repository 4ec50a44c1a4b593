"""``gated_mlp_half``, with PyTorch's rounding at every step. Without it:

gate = linear(x, gate_proj_weight)
up = linear(x, up_proj_weight)
y = silu(gate) * up
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.linear import weight_tile
from tilegym.ops.cutile.matmul import GROUP_M
from tilegym.ops.cutile.matmul import load_tile
from tilegym.ops.cutile.matmul import tile_of_block
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rounded(value, dtype):
    """In a kernel: ``value`` as PyTorch keeps it between two steps, in fp32."""
    return value.astype(dtype).astype(ct.float32)


@ct.kernel
def gated_mlp_half_gemv_kernel(x, gate_proj_weight, up_proj_weight, y, K: Int, TILE_N: Int, TILE_K: Int, OVERLAP: Bool):
    """One row; a block computes TILE_N elements of the result."""
    n = ct.bid(0)
    begin(OVERLAP)
    gate_sums = ct.zeros((TILE_N, TILE_K), ct.float32)
    up_sums = ct.zeros((TILE_N, TILE_K), ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        x_tile = weight_tile(x, 0, k, 1, TILE_K)
        gate_sums = gate_sums + weight_tile(gate_proj_weight, n, k, TILE_N, TILE_K) * x_tile
        up_sums = up_sums + weight_tile(up_proj_weight, n, k, TILE_N, TILE_K) * x_tile
    gate = ct.sum(gate_sums, axis=1).reshape((1, TILE_N))
    up = ct.sum(up_sums, axis=1).reshape((1, TILE_N))
    gate2 = rounded(gate, y.dtype)
    up2 = rounded(up, y.dtype)
    ct.store(y, (0, n), (rounded(over_one_plus_exp(gate2, gate2, y.dtype), y.dtype) * up2).astype(y.dtype))


@ct.kernel
def gated_mlp_half_gemm_kernel(x, gate_proj_weight, up_proj_weight, y, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    """One block a tile of the result; ``matmul.py`` says in which order."""
    m, n = tile_of_block(ct.bid(0), ct.cdiv(x.shape[0], TILE_M), ct.cdiv(gate_proj_weight.shape[0], TILE_N), GROUP_M)
    gate = ct.zeros((TILE_M, TILE_N), ct.float32)
    up = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        x_tile = load_tile(x, m, k, TILE_M, TILE_K, False, True)
        gate = ct.mma(x_tile, load_tile(gate_proj_weight, k, n, TILE_K, TILE_N, True, True), gate)
        up = ct.mma(x_tile, load_tile(up_proj_weight, k, n, TILE_K, TILE_N, True, True), up)
    gate2 = rounded(gate, y.dtype)
    up2 = rounded(up, y.dtype)
    ct.store(y, (m, n), (rounded(over_one_plus_exp(gate2, gate2, y.dtype), y.dtype) * up2).astype(y.dtype))


@functools.lru_cache(maxsize=1024)
def gemv_plan(n: int, k: int, bits: int, device: int) -> tuple[ct.kernel, tuple[int], int, int, bool]:
    """(kernel, grid, TILE_N, TILE_K, OVERLAP) for one row of k and results of n on CUDA device ``device`` (-1: CPU)."""
    if device < 0:
        return gated_mlp_half_gemv_kernel, (ct.cdiv(n, 8),), 8, 64, False
    kernel = hinted(gated_mlp_half_gemv_kernel, occupancy=4)
    return kernel, (ct.cdiv(n, 4),), 4, min(8192 // bits, next_power_of_2(k)), overlaps(device)


@functools.lru_cache(maxsize=1024)
def gemm_plan(m: int, n: int, bits: int, device: int) -> tuple[ct.kernel, tuple[int], int, int, int]:
    """(kernel, grid, TILE_M, TILE_N, TILE_K) for results of [m, n] on CUDA device ``device`` (-1: CPU)."""
    if device < 0:
        tile_m, tile_n, tile_k = 32, 32, 32
    else:
        tile_m, tile_n = max(16, min(128, next_power_of_2(m))), 128
        # Rather smaller tiles than idle multiprocessors; with more of a row at a time, to have as much under way.
        while 2 * ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n) <= sm_count(device) and max(tile_m, tile_n) > 64:
            tile_m, tile_n = (tile_m // 2, tile_n) if tile_m >= tile_n else (tile_m, tile_n // 2)
        tile_k = 1024 // bits * (2 if tile_m * tile_n <= 4096 else 1)
    kernel = hinted(gated_mlp_half_gemm_kernel, num_worker_warps=8 if tile_m == 128 else 4)
    return kernel, (ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n),), tile_m, tile_n, tile_k


def _gated_mlp_half_outputs(x, gate_proj_weight, up_proj_weight):
    return x.new_empty(*x.shape[:-1], gate_proj_weight.shape[0])


@compilable(fake=_gated_mlp_half_outputs)
def gated_mlp_half_forward(
    x: torch.Tensor, gate_proj_weight: torch.Tensor, up_proj_weight: torch.Tensor
) -> torch.Tensor:
    y = _gated_mlp_half_outputs(x, gate_proj_weight, up_proj_weight)
    rows, bits, device = rows_of(x), x.dtype.itemsize * 8, x.get_device()
    (m, k), n = rows.shape, gate_proj_weight.shape[0]
    if m == 1:
        kernel, grid, tile_n, tile_k, overlap = gemv_plan(n, k, bits, device)
        arrays = (rows, gate_proj_weight, up_proj_weight, y.view(m, n))
        launch(x, grid, kernel, (*arrays, k, tile_n, tile_k, overlap), overlap)
        return y
    kernel, grid, tile_m, tile_n, tile_k = gemm_plan(m, n, bits, device)
    arrays = (rows, gate_proj_weight, up_proj_weight, y.view(m, n))
    launch(x, grid, kernel, (*arrays, tile_m, tile_n, tile_k))
    return y


def gated_mlp_half(x: torch.Tensor, gate_proj_weight: torch.Tensor, up_proj_weight: torch.Tensor) -> torch.Tensor:
    """Computes ``y`` as at the top of this file.

    Args:
        x: [..., K], in one of DTYPES.
        gate_proj_weight: [N, K], in one of DTYPES.
        up_proj_weight: [N, K], in one of DTYPES.

    Raises:
        UnsupportedError: the kernels do not serve these arguments.
    """
    if x.dtype not in DTYPES or gate_proj_weight.dtype != x.dtype or up_proj_weight.dtype != x.dtype:
        raise UnsupportedError("a dtype is none that the kernels are for")
    if (
        gate_proj_weight.dim() != 2
        or gate_proj_weight.shape[1] != x.shape[-1]
        or up_proj_weight.shape != gate_proj_weight.shape
        or not x.is_contiguous()
        or not gate_proj_weight.is_contiguous()
        or not up_proj_weight.is_contiguous()
    ):
        raise UnsupportedError("the shapes or strides are not those of the region")
    if torch.is_grad_enabled() and (x.requires_grad or gate_proj_weight.requires_grad or up_proj_weight.requires_grad):
        raise UnsupportedError("there is no gradient of one of its inputs")
    return gated_mlp_half_forward(x, gate_proj_weight, up_proj_weight)
