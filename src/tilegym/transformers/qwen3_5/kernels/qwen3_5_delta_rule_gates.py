"""The gates of Qwen3.5's gated delta rule: beta, and the logarithm of the decay in fp32.

beta = sigmoid(b)
g = -exp(A_log) * softplus(a + dt_bias)

with PyTorch's rounding at every step, one launch each. Forward only. Written by the code generator and kept by
``tilegym autokernel`` on an NVIDIA H200, 2026-11-22, in Qwen3.5-0.8B in bf16: 16 heads, 4.4% of the model's time. The
region is in ``Qwen3_5GatedDeltaNet.forward``, lines 617 to 619 of modeling_qwen3_5.py in transformers 5.17.0.
"""

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import indices
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.pointwise import plan
from tilegym.ops.cutile.pointwise import small_or_flat
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import span

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def softplus(x):
    """In a kernel: log(1 + exp(x)), x itself beyond 20, as PyTorch has it."""
    e = ct.exp(x)
    sum = 1.0 + e
    # What is lost in the sum is made up for; where the sum is 1 the logarithm is e.
    log = ct.where(sum == 1.0, e, ct.log(sum) * e / (sum - 1.0))
    return ct.where(x > 20.0, x, log)


@ct.kernel
def qwen3_5_beta_kernel(b, beta, TILE_M: Int, TILE_N: Int):
    """One block a tile of elements, neighbours along a row."""
    place = indices(beta, TILE_M, TILE_N)
    b_tile = ct.gather(b, place).astype(ct.float32)
    ct.scatter(beta, place, over_one_plus_exp(1.0, b_tile, b.dtype).astype(beta.dtype))


def _qwen3_5_beta_outputs(b):
    return contiguous_like(b)


@compilable(fake=_qwen3_5_beta_outputs)
def qwen3_5_beta_forward(b: torch.Tensor) -> torch.Tensor:
    beta = _qwen3_5_beta_outputs(b)
    arrays = small_or_flat(b, beta)
    grid, tile_m, tile_n = plan(*size_of(arrays[0]), b.get_device())
    launch(b, grid, qwen3_5_beta_kernel, (*arrays, tile_m, tile_n))
    return beta


def qwen3_5_beta(b: torch.Tensor) -> torch.Tensor:
    """Computes ``beta`` as at the top of this file.

    Args:
        b: [..., N], in one of DTYPES.

    Raises:
        UnsupportedError: another dtype, other shapes, or a gradient is asked for.
    """
    if b.dtype not in DTYPES:
        raise UnsupportedError("a dtype is none that the kernels are for")
    if torch.is_grad_enabled() and b.requires_grad:
        raise UnsupportedError("there is no gradient of one of its inputs")
    return qwen3_5_beta_forward(b)


@ct.kernel
def qwen3_5_decay_kernel(a, A_log, dt_bias, g, N: Int, TILE_M: Int, TILE_N: Int):
    """One block a tile, neighbours along a row."""
    across = ct.cdiv(N, TILE_N)
    rows, cols = span(ct.bid(0) // across, TILE_M), span(ct.bid(0) % across, TILE_N)
    A_log_row = ct.gather(A_log, cols)[None, :].astype(ct.float32)
    a_tile = load(a, rows, cols).astype(ct.float32)
    dt_bias_row = ct.gather(dt_bias, cols)[None, :].astype(ct.float32)
    decay = -ct.exp(A_log_row) * softplus(a_tile + dt_bias_row)
    store(g, rows, cols, decay)


def _qwen3_5_decay_outputs(a, A_log, dt_bias):
    return a.new_empty(*a.shape[:-1], a.shape[-1], dtype=torch.float32)


@compilable(fake=_qwen3_5_decay_outputs)
def qwen3_5_decay_forward(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    g = _qwen3_5_decay_outputs(a, A_log, dt_bias)
    rows = rows_of(a)
    m, n = rows.shape
    grid, tile_m, tile_n = plan(m, n, a.get_device())
    arrays = (rows, A_log, dt_bias, g.view(m, n))
    launch(a, grid, qwen3_5_decay_kernel, (*arrays, n, tile_m, tile_n))
    return g


def qwen3_5_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Computes ``g``, [..., N] in fp32, as at the top of this file.

    Args:
        a: [..., N], in one of DTYPES.
        A_log: [N], in that dtype.
        dt_bias: [N], in that dtype.

    Raises:
        UnsupportedError: another dtype, other shapes, or a gradient is asked for.
    """
    if a.dtype not in DTYPES or A_log.dtype != a.dtype or dt_bias.dtype != a.dtype:
        raise UnsupportedError("a dtype is none that the kernels are for")
    if A_log.shape != a.shape[-1:] or dt_bias.shape != a.shape[-1:]:
        raise UnsupportedError("the shapes are not those of the region")
    if torch.is_grad_enabled() and (a.requires_grad or A_log.requires_grad or dt_bias.requires_grad):
        raise UnsupportedError("there is no gradient of one of its inputs")
    return qwen3_5_decay_forward(a, A_log, dt_bias)


def qwen3_5_delta_rule_gates(
    b: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``beta`` in the dtype of b and ``g`` in fp32, both [..., N], as at the top of this file.

    Args:
        b: [..., N], in one of DTYPES.
        a: [..., N], in one of DTYPES.
        A_log: [N], in that dtype.
        dt_bias: [N], in that dtype.

    Raises:
        UnsupportedError: another dtype, other shapes, or a gradient is asked for.
    """
    return (
        qwen3_5_beta(b),
        qwen3_5_decay(a, A_log, dt_bias),
    )
