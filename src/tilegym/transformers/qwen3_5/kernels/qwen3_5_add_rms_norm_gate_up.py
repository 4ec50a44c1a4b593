"""Residual addition, RMS norm, and the gated first half of the MLP, as in a decoder layer of Qwen3.5.

residual_out = residual + hidden_states
product = residual_out * rsqrt(mean(residual_out * residual_out) + 1e-06) * (1 + norm_weight)
y = silu(linear(product, gate_weight)) * linear(product, up_weight)

with PyTorch's rounding at every step. One row takes one launch, more of them two: the norm, then both products.
Forward only. Written by the code generator and kept by ``tilegym autokernel`` on an NVIDIA H200, 2026-11-22, in
Qwen3.5-0.8B in bf16: H = 1024, I = 3584, 16.1% of the model's time. The region is ``Qwen3_5DecoderLayer.forward``,
lines 906 to 910 of modeling_qwen3_5.py in transformers 5.17.0, with the products of ``Qwen3_5MLP.forward``.
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


@ct.kernel
def qwen3_5_add_rms_norm_gate_up_prologue_kernel(
    residual, hidden_states, norm_weight, product, residual_rows, N: Int, TILE_M: Int, TILE_N: Int
):
    """Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    residual_tile = load(residual, rows, cols).astype(ct.float32)
    hidden_states_tile = load(hidden_states, rows, cols).astype(ct.float32)
    norm_weight_row = ct.gather(norm_weight, cols)[None, :].astype(ct.float32)
    total = rounded(residual_tile + hidden_states_tile, residual.dtype)
    normed = total * ct.rsqrt(ct.sum(total * total, axis=1, keepdims=True) * (1.0 / N) + 1e-06)
    store(product, rows, cols, normed * (norm_weight_row + 1.0))
    store(residual_rows, rows, cols, total)


@functools.lru_cache(maxsize=1024)
def prologue_plan(m: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int]:
    """(kernel, grid, TILE_M, TILE_N) for [m, n] on CUDA device ``device`` (-1: CPU)."""
    m = m if n else 0  # without columns there is nothing to launch
    tile_m, tile_n = whole_rows(m, n, device)
    elements = tile_m * tile_n
    tiles, occupancy = ct.cdiv(m, tile_m), max(1, min(8, 16384 // elements))
    # With fewer blocks than multiprocessors what counts is how long one takes.
    warps = 8 if elements >= 8192 or (elements >= 2048 and tiles < sm_count(device)) else 4
    # Blocks that run at once anyway may as well have more registers.
    occupancy = max(1, occupancy // 2) if tiles <= occupancy * sm_count(device) else occupancy
    kernel = hinted(qwen3_5_add_rms_norm_gate_up_prologue_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (tiles,), tile_m, tile_n


@ct.kernel
def qwen3_5_add_rms_norm_gate_up_gemv_kernel(
    residual,
    hidden_states,
    norm_weight,
    gate_weight,
    up_weight,
    residual_out,
    y,
    K: Int,
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
    rstd = ct.rsqrt(sum_of_square * (1.0 / K) + 1e-06)
    gate_sums = ct.zeros((TILE_N, TILE_K), ct.float32)
    up_sums = ct.zeros((TILE_N, TILE_K), ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        residual_tile = weight_tile(residual, 0, k, 1, TILE_K)
        hidden_states_tile = weight_tile(hidden_states, 0, k, 1, TILE_K)
        norm_weight_row = load_bias(norm_weight, k, TILE_K)
        total = rounded(residual_tile + hidden_states_tile, y.dtype)
        product = rounded(total * rstd * (norm_weight_row + 1.0), y.dtype)
        if n == 0:
            ct.store(residual_out, (0, k), total.astype(residual_out.dtype))
        gate_sums = gate_sums + weight_tile(gate_weight, n, k, TILE_N, TILE_K) * product
        up_sums = up_sums + weight_tile(up_weight, n, k, TILE_N, TILE_K) * product
    gate = ct.sum(gate_sums, axis=1).reshape((1, TILE_N))
    up = ct.sum(up_sums, axis=1).reshape((1, TILE_N))
    gate_rounded = rounded(gate, y.dtype)
    silu = rounded(over_one_plus_exp(gate_rounded, gate_rounded, y.dtype), y.dtype)
    up_rounded = rounded(up, y.dtype)
    ct.store(y, (0, n), (silu * up_rounded).astype(y.dtype))


@ct.kernel
def qwen3_5_add_rms_norm_gate_up_gemm_kernel(product, gate_weight, up_weight, y, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    """One block a tile of the result; ``matmul.py`` says in which order."""
    m, n = tile_of_block(ct.bid(0), ct.cdiv(product.shape[0], TILE_M), ct.cdiv(gate_weight.shape[0], TILE_N), GROUP_M)
    gate = ct.zeros((TILE_M, TILE_N), ct.float32)
    up = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.cdiv(product.shape[1], TILE_K)):
        product_tile = load_tile(product, m, k, TILE_M, TILE_K, False, True)
        gate = ct.mma(product_tile, load_tile(gate_weight, k, n, TILE_K, TILE_N, True, True), gate)
        up = ct.mma(product_tile, load_tile(up_weight, k, n, TILE_K, TILE_N, True, True), up)
    gate_rounded = rounded(gate, y.dtype)
    silu = rounded(over_one_plus_exp(gate_rounded, gate_rounded, y.dtype), y.dtype)
    up_rounded = rounded(up, y.dtype)
    ct.store(y, (m, n), (silu * up_rounded).astype(y.dtype))


@functools.lru_cache(maxsize=1024)
def gemv_plan(n: int, k: int, bits: int, device: int) -> tuple[ct.kernel, tuple[int], int, int, bool]:
    """(kernel, grid, TILE_N, TILE_K, OVERLAP) for one row of k and results of n on CUDA device ``device`` (-1: CPU)."""
    if device < 0:
        return qwen3_5_add_rms_norm_gate_up_gemv_kernel, (ct.cdiv(n, 8),), 8, 64, False
    kernel = hinted(qwen3_5_add_rms_norm_gate_up_gemv_kernel, occupancy=4)
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
    kernel = hinted(qwen3_5_add_rms_norm_gate_up_gemm_kernel, num_worker_warps=8 if tile_m == 128 else 4)
    return kernel, (ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n),), tile_m, tile_n, tile_k


def _qwen3_5_add_rms_norm_gate_up_outputs(residual, hidden_states, norm_weight, gate_weight, up_weight):
    return residual.new_empty(residual.shape), residual.new_empty(*residual.shape[:-1], gate_weight.shape[0])


@compilable(fake=_qwen3_5_add_rms_norm_gate_up_outputs)
def qwen3_5_add_rms_norm_gate_up_forward(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = residual, hidden_states, norm_weight, gate_weight, up_weight
    residual_out, y = _qwen3_5_add_rms_norm_gate_up_outputs(*inputs)
    rows, bits, device = rows_of(residual), residual.dtype.itemsize * 8, residual.get_device()
    (m, k), n = rows.shape, gate_weight.shape[0]
    if m == 1:
        kernel, grid, tile_n, tile_k, overlap = gemv_plan(n, k, bits, device)
        arrays = (
            rows,
            rows_of(hidden_states),
            norm_weight,
            gate_weight,
            up_weight,
            residual_out.view(m, k),
            y.view(m, n),
        )
        launch(residual, grid, kernel, (*arrays, k, tile_n, tile_k, overlap), overlap)
        return residual_out, y
    product = rows.new_empty(m, k)
    residual_rows = residual_out.view(m, k)
    kernel, grid, tile_m, tile_n = prologue_plan(m, k, residual.get_device())
    arrays = (rows, rows_of(hidden_states), norm_weight, product, residual_rows)
    launch(residual, grid, kernel, (*arrays, k, tile_m, tile_n))
    kernel, grid, tile_m, tile_n, tile_k = gemm_plan(m, n, bits, device)
    arrays = (product, gate_weight, up_weight, y.view(m, n))
    launch(residual, grid, kernel, (*arrays, tile_m, tile_n, tile_k))
    return residual_out, y


def qwen3_5_add_rms_norm_gate_up(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``residual_out``, [..., H], and ``y``, [..., I], in the dtype of residual, as at the top of this file.

    Args:
        residual: [..., H], in one of DTYPES.
        hidden_states: [..., H], as residual.
        norm_weight: [H], in that dtype.
        gate_weight: [I, H], in that dtype.
        up_weight: [I, H], in that dtype.

    Raises:
        UnsupportedError: another dtype, other shapes or strides, or a gradient is asked for.
    """
    if (
        residual.dtype not in DTYPES
        or hidden_states.dtype != residual.dtype
        or norm_weight.dtype != residual.dtype
        or gate_weight.dtype != residual.dtype
        or up_weight.dtype != residual.dtype
    ):
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
    if torch.is_grad_enabled() and (
        residual.requires_grad
        or hidden_states.requires_grad
        or norm_weight.requires_grad
        or gate_weight.requires_grad
        or up_weight.requires_grad
    ):
        raise UnsupportedError("there is no gradient of one of its inputs")
    return qwen3_5_add_rms_norm_gate_up_forward(residual, hidden_states, norm_weight, gate_weight, up_weight)
