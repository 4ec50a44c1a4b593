"""Rotary position embedding of queries and keys with heads of 128, as in the attention of Llama.

y = x * cos + where(column < 64, -x[column + 64], x[column - 64]) * sin

with PyTorch's rounding at every step, one launch each for x = q and x = k. Unlike the op ``rope`` it assumes nothing of
the two halves of cos and sin. Forward only. Written by the code generator and kept by ``tilegym autokernel`` on an
NVIDIA H200, 2026-11-22, in Llama-3.1-8B in bf16: 32 and 8 heads, 8.9% of the model's time. The region is the call of
``apply_rotary_pos_emb`` in ``LlamaAttention.forward``, line 259 of modeling_llama.py in transformers 5.17.0.
"""

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import plan
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import span

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rounded(value, dtype):
    """In a kernel: ``value`` as PyTorch keeps it between two steps, in fp32."""
    return value.astype(dtype).astype(ct.float32)


@ct.kernel
def llama_rope_query_key_kernel(
    x, cos, sin, y, cos_outer, cos_inner, sin_outer, sin_inner, N: Int, TILE_M: Int, TILE_N: Int
):
    """One block a tile, neighbours along a row."""
    across = ct.cdiv(N, TILE_N)
    rows, cols = span(ct.bid(0) // across, TILE_M), span(ct.bid(0) % across, TILE_N)
    x_tile = load(x, rows, cols).astype(ct.float32)
    cos_rows = rows // cos_outer * cos_inner + rows % cos_inner
    cos_tile = load(cos, cos_rows, cols).astype(ct.float32)
    x_ahead = load(x, rows, cols + 64).astype(ct.float32)
    x_behind = load(x, rows, cols - 64).astype(ct.float32)
    sin_rows = rows // sin_outer * sin_inner + rows % sin_inner
    sin_tile = load(sin, sin_rows, cols).astype(ct.float32)
    product = rounded(ct.where(cols[None, :] < 64, -x_ahead, x_behind) * sin_tile, x.dtype)
    store(y, rows, cols, rounded(x_tile * cos_tile, x.dtype) + product)


def _llama_rope_query_key_outputs(x, cos, sin):
    return contiguous_like(x)


@compilable(fake=_llama_rope_query_key_outputs)
def llama_rope_query_key_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = _llama_rope_query_key_outputs(x, cos, sin)
    rows = rows_of(x)
    m, n = rows.shape[0], 128
    grid, tile_m, tile_n = plan(m, n, x.get_device())
    arrays = (
        rows,
        cos.reshape(-1, 128),
        sin.reshape(-1, 128),
        y.view(m, 128),
        x.shape[1:-1].numel(),
        x.shape[2:-1].numel(),
        x.shape[1:-1].numel(),
        x.shape[2:-1].numel(),
    )
    launch(x, grid, llama_rope_query_key_kernel, (*arrays, n, tile_m, tile_n))
    return y


def llama_rope_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Computes ``y`` as at the top of this file.

    Args:
        x: [B, N, S, 128], in one of DTYPES.
        cos: [B, S, 128], in that dtype.
        sin: [B, S, 128], in that dtype.

    Raises:
        UnsupportedError: another dtype, other shapes, or a gradient is asked for.
    """
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    if x.dtype not in DTYPES or cos.dtype != x.dtype or sin.dtype != x.dtype:
        raise UnsupportedError("a dtype is none that the kernels are for")
    if (
        x.shape[-1] != 128
        or x.dim() != 4
        or cos.shape != (*x.shape[:1], 1, *x.shape[2:])
        or sin.shape != (*x.shape[:1], 1, *x.shape[2:])
    ):
        raise UnsupportedError("the shapes are not those of the region")
    if torch.is_grad_enabled() and (x.requires_grad or cos.requires_grad or sin.requires_grad):
        raise UnsupportedError("there is no gradient of one of its inputs")
    return llama_rope_query_key_forward(x, cos, sin)


def llama_rope_query_key(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` and ``k`` rotated, each in its own shape and dtype, as at the top of this file.

    Args:
        q: [B, N, S, 128], in one of DTYPES.
        k: [B, G, S, 128], in that dtype.
        cos: [B, S, 128], in that dtype.
        sin: [B, S, 128], in that dtype.

    Raises:
        UnsupportedError: another dtype, other shapes, or a gradient is asked for.
    """
    return (
        llama_rope_one(q, cos, sin),
        llama_rope_one(k, cos, sin),
    )
