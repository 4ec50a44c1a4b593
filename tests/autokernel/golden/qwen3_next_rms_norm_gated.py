"""``qwen3_next_rms_norm_gated``, with PyTorch's rounding at every step. Without it:

variance = sum(hidden_states * hidden_states) / N
y = weight * (hidden_states * rsqrt(variance + 1e-06)) * silu(gate)
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.row_norms import MAX_CACHED
from tilegym.ops.cutile.row_norms import MAX_CACHED_BACKWARD
from tilegym.ops.cutile.row_norms import add_blocks
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.row_norms import sums_of_blocks
from tilegym.ops.cutile.row_norms import whole_rows
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import row_count
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def behind(first, other):
    """In a kernel: ``first``, once ``other`` has been read, too.

    A compiler puts what is read where it is used: behind a reduction memory would be waited for a second time.
    """
    bits = ct.uint32 if first.dtype == ct.float32 else ct.uint16
    zero = ct.bid(1).astype(bits)  # which no compiler knows
    return ct.bitcast(ct.bitcast(first, bits) | (ct.bitcast(other, bits) & zero), first.dtype)


def rounded(value, dtype):
    """In a kernel: ``value`` as PyTorch keeps it between two steps, in fp32."""
    return value.astype(dtype).astype(ct.float32)


@ct.kernel
def qwen3_next_rms_norm_gated_kernel(hidden_states, gate, weight, y, N: Int, TILE_M: Int, TILE_N: Int, AT_ONCE: Bool):
    """Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    gate_loaded = load(gate, rows, cols)
    weight_loaded = ct.gather(weight, cols)[None, :]
    hidden_states_loaded = load(hidden_states, rows, cols)
    if AT_ONCE:
        hidden_states_loaded = behind(hidden_states_loaded, gate_loaded)
        hidden_states_loaded = behind(hidden_states_loaded, weight_loaded)
    gate_tile = gate_loaded.astype(ct.float32)
    weight_row = weight_loaded.astype(ct.float32)
    hidden_states_tile = hidden_states_loaded.astype(ct.float32)
    variance = ct.sum(hidden_states_tile * hidden_states_tile, axis=1, keepdims=True) * (1.0 / N)
    scaled = weight_row * rounded(hidden_states_tile * ct.rsqrt(variance + 1e-06), hidden_states.dtype)
    silu = over_one_plus_exp(gate_tile, gate_tile, hidden_states.dtype)
    store(y, rows, cols, rounded(scaled, hidden_states.dtype) * silu)


@functools.lru_cache(maxsize=1024)
def plan(m: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int, bool]:
    """(kernel, grid, TILE_M, TILE_N, AT_ONCE) for [m, n] on CUDA device ``device`` (-1: CPU)."""
    m = m if n else 0  # without columns there is nothing to launch
    tile_m, tile_n = whole_rows(m, n, device)
    elements = tile_m * tile_n
    tiles, occupancy = ct.cdiv(m, tile_m), max(1, min(8, 16384 // elements))
    # With fewer blocks than multiprocessors what counts is how long one takes.
    warps = 8 if elements >= 8192 or (elements >= 2048 and tiles < sm_count(device)) else 4
    # Blocks that run at once anyway may as well have more registers.
    at_once = tiles <= occupancy * sm_count(device)
    occupancy = max(1, occupancy // 2) if at_once else occupancy
    kernel = hinted(qwen3_next_rms_norm_gated_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (tiles,), tile_m, tile_n, at_once


def _qwen3_next_rms_norm_gated_outputs(hidden_states, gate, weight):
    return contiguous_like(hidden_states)


@compilable(fake=_qwen3_next_rms_norm_gated_outputs)
def qwen3_next_rms_norm_gated_forward(
    hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    y = _qwen3_next_rms_norm_gated_outputs(hidden_states, gate, weight)
    rows = rows_of(hidden_states)
    m, n = rows.shape
    kernel, grid, tile_m, tile_n, at_once = plan(m, n, hidden_states.get_device())
    launch(hidden_states, grid, kernel, (rows, rows_of(gate), weight, y.view(m, n), n, tile_m, tile_n, at_once))
    return y


@ct.kernel
def qwen3_next_rms_norm_gated_backward_kernel(
    dy, hidden_states, gate, weight, d_hidden_states, d_gate, d_weight, N: Int, TILE_M: Int, TILE_N: Int
):
    """Blocks stride over the rows; row ``bid`` of a sum over rows is that block's part."""
    cols = span(0, TILE_N)
    weight_row = ct.gather(weight, cols)[None, :].astype(ct.float32)
    d_weight_sum = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.bid(0), ct.cdiv(row_count(dy), TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        dy_tile = load(dy, rows, cols).astype(ct.float32)
        gate_tile = load(gate, rows, cols).astype(ct.float32)
        hidden_states_tile = load(hidden_states, rows, cols).astype(ct.float32)
        d_scaled = dy_tile * over_one_plus_exp(gate_tile, gate_tile, dy.dtype)
        d_normed = d_scaled * weight_row
        variance = ct.sum(hidden_states_tile * hidden_states_tile, axis=1, keepdims=True) * (1.0 / N)
        rstd = ct.rsqrt(variance + 1e-06)
        d_rstd = ct.sum(d_normed * hidden_states_tile, axis=1, keepdims=True)
        d_total = d_rstd * -0.5 * (rstd * (rstd * rstd))
        d_sum_of_square = d_total * (1.0 / N)
        normed = rounded(hidden_states_tile * rstd, dy.dtype)
        d_silu = dy_tile * rounded(weight_row * normed, dy.dtype)
        sigmoid = over_one_plus_exp(1.0, gate_tile, dy.dtype)
        store(d_hidden_states, rows, cols, d_normed * rstd + d_sum_of_square * (hidden_states_tile * 2.0))
        store(d_gate, rows, cols, d_silu * (sigmoid * (1.0 + gate_tile * (1.0 - sigmoid))))
        d_weight_sum = d_weight_sum + ct.where(rows[:, None] < row_count(dy), d_scaled * normed, 0.0)
    ct.scatter(d_weight, (ct.bid(0), cols), ct.sum(d_weight_sum, axis=0).astype(d_weight.dtype))


@functools.lru_cache(maxsize=1024)
def backward_plan(m: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int]:
    """(kernel, grid, TILE_M, TILE_N) for [m, n] on CUDA device ``device`` (-1: CPU)."""
    m = m if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    warps, occupancy = (8 if tile_n >= 4096 else 4), max(1, min(4, 8192 // tile_n))
    blocks = occupancy * sm_count(device)
    tile_m = max(1, min(1024 // tile_n, next_power_of_2(m // blocks)))
    kernel = hinted(qwen3_next_rms_norm_gated_backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (min(ct.cdiv(m, tile_m), blocks),), tile_m, tile_n


def _qwen3_next_rms_norm_gated_gradients(dy, hidden_states, gate, weight):
    return contiguous_like(dy), contiguous_like(dy), dy.new_empty(dy.shape[-1], dtype=dy.dtype)


@compilable(fake=_qwen3_next_rms_norm_gated_gradients)
def qwen3_next_rms_norm_gated_backward(
    dy: torch.Tensor, hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_hidden_states = contiguous_like(dy)
    d_gate = contiguous_like(dy)
    rows = rows_of(dy)
    m, n = rows.shape
    kernel, grid, tile_m, tile_n = backward_plan(m, n, dy.get_device())
    d_weight_parts, d_weight = sums_of_blocks(dy, grid[0], n, True, dy.dtype)
    arrays = (
        rows,
        rows_of(hidden_states),
        rows_of(gate),
        weight,
        d_hidden_states.view(m, n),
        d_gate.view(m, n),
        d_weight_parts,
    )
    launch(dy, grid, kernel, (*arrays, n, tile_m, tile_n))
    add_blocks(grid[0], (d_weight_parts, d_weight))
    return d_hidden_states, d_gate, d_weight


class Qwen3NextRmsNormGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, gate, weight):
        ctx.save_for_backward(hidden_states, gate, weight)
        return qwen3_next_rms_norm_gated_forward(hidden_states, gate, weight)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise UnsupportedError("there is no second derivative")
        return qwen3_next_rms_norm_gated_backward(dy, *ctx.saved_tensors)


def qwen3_next_rms_norm_gated(hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes ``y`` as at the top of this file.

    Args:
        hidden_states: [..., N], in one of DTYPES.
        gate: [..., N], in one of DTYPES.
        weight: [N], in one of DTYPES.

    Raises:
        UnsupportedError: the kernels do not serve these arguments.
    """
    if hidden_states.dtype not in DTYPES or gate.dtype != hidden_states.dtype or weight.dtype != hidden_states.dtype:
        raise UnsupportedError("a dtype is none that the kernels are for")
    if gate.shape != hidden_states.shape or weight.shape != hidden_states.shape[-1:]:
        raise UnsupportedError("the shapes are not those of the region")
    if hidden_states.shape[-1] > MAX_CACHED:
        raise UnsupportedError("a row is longer than a block holds")
    if torch.is_grad_enabled() and (hidden_states.requires_grad or gate.requires_grad or weight.requires_grad):
        if hidden_states.shape[-1] > MAX_CACHED_BACKWARD:
            raise UnsupportedError("a row is longer than a block holds")
        return Qwen3NextRmsNormGated.apply(hidden_states, gate, weight)
    return qwen3_next_rms_norm_gated_forward(hidden_states, gate, weight)
