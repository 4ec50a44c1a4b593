"""Residual addition, RMS norm and the gated first half of an MLP: what decoder layers of Llama and Qwen3.5 share.

residual_out = residual + hidden_states
x = norm(residual_out)
y = silu(linear(x, gate_weight)) * linear(x, up_weight)

with PyTorch's rounding at every step. One row takes one launch, more of them two: the norm, then both products.
Forward only. Written by the code generator of ``tilegym autokernel``; the families' kernels say where it was kept.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.linear import weight_tile
from tilegym.ops.cutile.matmul import GROUP_M
from tilegym.ops.cutile.matmul import load_bias
from tilegym.ops.cutile.matmul import load_tile
from tilegym.ops.cutile.matmul import tile_of_block
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.row_norms import whole_rows
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rounded(value, dtype):
    """In a kernel: ``value`` as PyTorch keeps it between two steps, in fp32."""
    return value.astype(dtype).astype(ct.float32)


def weighted(normed, weight, dtype, OFFSET: Bool):
    """In a kernel: the norm times its weight, which with OFFSET is one less and applied in fp32, as in Qwen3.5."""
    if OFFSET:
        result = normed * (weight + 1.0)
    else:
        result = weight * rounded(normed, dtype)
    return result


@ct.kernel
def add_rms_norm_gate_up_prologue_kernel(
    residual, hidden_states, norm_weight, x, residual_rows, N: Int, EPS: Float, OFFSET: Bool, TILE_M: Int, TILE_N: Int
):
    """Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    norm_weight_row = ct.gather(norm_weight, cols)[None, :].astype(ct.float32)
    residual_tile = load(residual, rows, cols).astype(ct.float32)
    hidden_states_tile = load(hidden_states, rows, cols).astype(ct.float32)
    total = rounded(residual_tile + hidden_states_tile, residual.dtype)
    normed = total * ct.rsqrt(ct.sum(total * total, axis=1, keepdims=True) * (1.0 / N) + EPS)
    store(x, rows, cols, weighted(normed, norm_weight_row, residual.dtype, OFFSET))
    store(residual_rows, rows, cols, total)


@functools.lru_cache(maxsize=1024)
def prologue_plan(m: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int]:
    """(kernel, grid, TILE_M, TILE_N) for [m, n] on CUDA device ``device`` (-1: CPU)."""
    m = m if n else 0  # without columns there is nothing to launch
    tile_m, tile_n = whole_rows(m, n, device)
    elements = tile_m * tile_n
    tiles, occupancy = ct.cdiv(m, tile_m), max(1, min(8, 16384 // elements))
    # Blocks that run at once anyway may as well have more registers.
    occupancy = max(1, occupancy // 2) if tiles <= occupancy * sm_count(device) else occupancy
    # With fewer blocks than multiprocessors what counts is how long one takes.
    warps = 8 if elements >= 8192 or (elements >= 2048 and tiles < sm_count(device)) else 4
    kernel = hinted(add_rms_norm_gate_up_prologue_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (tiles,), tile_m, tile_n


@ct.kernel
def add_rms_norm_gate_up_gemv_kernel(
    residual,
    hidden_states,
    norm_weight,
    gate_weight,
    up_weight,
    residual_out,
    y,
    K: Int,
    EPS: Float,
    OFFSET: Bool,
    TILE_N: Int,
    TILE_K: Int,
    OVERLAP: Bool,
):
    """One row; a block computes TILE_N elements of the result."""
    n = ct.bid(0)
    begin(OVERLAP)
    sums = ct.full((1, TILE_K), 0.0, ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        residual_tile = weight_tile(residual, 0, k, 1, TILE_K)
        hidden_states_tile = weight_tile(hidden_states, 0, k, 1, TILE_K)
        total = rounded(residual_tile + hidden_states_tile, y.dtype)
        sums = sums + total * total
    sum_of_square = ct.sum(sums, axis=1, keepdims=True)
    rstd = ct.rsqrt(sum_of_square * (1.0 / K) + EPS)
    gate_sums = ct.zeros((TILE_N, TILE_K), ct.float32)
    up_sums = ct.zeros((TILE_N, TILE_K), ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        norm_weight_row = load_bias(norm_weight, k, TILE_K)
        residual_tile = weight_tile(residual, 0, k, 1, TILE_K)
        hidden_states_tile = weight_tile(hidden_states, 0, k, 1, TILE_K)
        total = rounded(residual_tile + hidden_states_tile, y.dtype)
        x = rounded(weighted(total * rstd, norm_weight_row, y.dtype, OFFSET), y.dtype)
        if n == 0:
            ct.store(residual_out, (0, k), total.astype(residual_out.dtype))
        gate_sums = gate_sums + weight_tile(gate_weight, n, k, TILE_N, TILE_K) * x
        up_sums = up_sums + weight_tile(up_weight, n, k, TILE_N, TILE_K) * x
    gate = ct.sum(gate_sums, axis=1).reshape((1, TILE_N))
    up = ct.sum(up_sums, axis=1).reshape((1, TILE_N))
    gate_rounded = rounded(gate, y.dtype)
    silu = rounded(over_one_plus_exp(gate_rounded, gate_rounded, y.dtype), y.dtype)
    up_rounded = rounded(up, y.dtype)
    ct.store(y, (0, n), (silu * up_rounded).astype(y.dtype))


@ct.kernel
def add_rms_norm_gate_up_gemm_kernel(x, gate_weight, up_weight, y, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    """One block a tile of the result; ``matmul.py`` says in which order."""
    m, n = tile_of_block(ct.bid(0), ct.cdiv(x.shape[0], TILE_M), ct.cdiv(gate_weight.shape[0], TILE_N), GROUP_M)
    gate = ct.zeros((TILE_M, TILE_N), ct.float32)
    up = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.cdiv(x.shape[1], TILE_K)):
        x_tile = load_tile(x, m, k, TILE_M, TILE_K, False, True)
        gate = ct.mma(x_tile, load_tile(gate_weight, k, n, TILE_K, TILE_N, True, True), gate)
        up = ct.mma(x_tile, load_tile(up_weight, k, n, TILE_K, TILE_N, True, True), up)
    gate_rounded = rounded(gate, y.dtype)
    silu = rounded(over_one_plus_exp(gate_rounded, gate_rounded, y.dtype), y.dtype)
    up_rounded = rounded(up, y.dtype)
    ct.store(y, (m, n), (silu * up_rounded).astype(y.dtype))


@functools.lru_cache(maxsize=1024)
def gemv_plan(n: int, k: int, bits: int, device: int) -> tuple[ct.kernel, tuple[int], int, int, bool]:
    """(kernel, grid, TILE_N, TILE_K, OVERLAP) for one row of k and results of n on CUDA device ``device`` (-1: CPU)."""
    if device < 0:
        return add_rms_norm_gate_up_gemv_kernel, (ct.cdiv(n, 8),), 8, 64, False
    kernel = hinted(add_rms_norm_gate_up_gemv_kernel, occupancy=4)
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
    kernel = hinted(add_rms_norm_gate_up_gemm_kernel, num_worker_warps=8 if tile_m == 128 else 4)
    return kernel, (ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n),), tile_m, tile_n, tile_k


def _outputs(residual, hidden_states, norm_weight, gate_weight, up_weight, eps, offset):
    return residual.new_empty(residual.shape), residual.new_empty(*residual.shape[:-1], gate_weight.shape[0])


@compilable(fake=_outputs)
def add_rms_norm_gate_up_forward(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    eps: float,
    offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    residual_out, y = _outputs(residual, hidden_states, norm_weight, gate_weight, up_weight, eps, offset)
    rows, bits, device = rows_of(residual), residual.dtype.itemsize * 8, residual.get_device()
    (m, k), n = rows.shape, gate_weight.shape[0]
    residual_rows = residual_out.view(m, k)
    if m == 1:
        kernel, grid, tile_n, tile_k, overlap = gemv_plan(n, k, bits, device)
        arrays = (rows, rows_of(hidden_states), norm_weight, gate_weight, up_weight, residual_rows, y.view(m, n))
        launch(residual, grid, kernel, (*arrays, k, eps, offset, tile_n, tile_k, overlap), overlap)
        return residual_out, y
    x = rows.new_empty(m, k)
    kernel, grid, tile_m, tile_n = prologue_plan(m, k, device)
    arrays = (rows, rows_of(hidden_states), norm_weight, x, residual_rows)
    launch(residual, grid, kernel, (*arrays, k, eps, offset, tile_m, tile_n))
    kernel, grid, tile_m, tile_n, tile_k = gemm_plan(m, n, bits, device)
    launch(residual, grid, kernel, (x, gate_weight, up_weight, y.view(m, n), tile_m, tile_n, tile_k))
    return residual_out, y


def add_rms_norm_gate_up(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    eps: float,
    offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``residual_out``, [..., H], and ``y``, [..., I], in the dtype of residual, as at the top of this file.

    Args:
        residual: [..., H], in one of DTYPES.
        hidden_states: [..., H], as residual.
        norm_weight: [H], in that dtype.
        gate_weight: [I, H], in that dtype.
        up_weight: [I, H], in that dtype.
        eps: what is added to the mean of the squares.
        offset: the norm is ``normed * (1 + norm_weight)`` in fp32; else ``norm_weight * normed``, with ``normed``
            rounded to the dtype first.

    Raises:
        UnsupportedError: another dtype, other shapes or strides, or a gradient is asked for.
    """
    tensors = residual, hidden_states, norm_weight, gate_weight, up_weight
    if residual.dtype not in DTYPES or any(tensor.dtype != residual.dtype for tensor in tensors):
        raise UnsupportedError("a dtype is none that the kernels are for")
    if (
        gate_weight.dim() != 2
        or gate_weight.shape[1] != residual.shape[-1]
        or up_weight.shape != gate_weight.shape
        or hidden_states.shape != residual.shape
        or norm_weight.shape != (residual.shape[-1],)
        or not residual.is_contiguous()
        or not hidden_states.is_contiguous()
        or not gate_weight.is_contiguous()
        or not up_weight.is_contiguous()
    ):
        raise UnsupportedError("the shapes or strides are not those of the region")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedError("there is no gradient of one of its inputs")
    return add_rms_norm_gate_up_forward(*tensors, eps, offset)
