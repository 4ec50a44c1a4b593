"""Ops on weights of 8 bits, declared once, as in :mod:`tilegym.ops.ops`."""

import torch

from tilegym.backend import dispatch

Tensor = torch.Tensor


@dispatch("quantized_linear")
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    block_size: tuple[int, int] | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``residual + x @ (weight * scale).T + bias`` for a weight of 8 bits: weight-only quantisation to int8 or fp8.

    x is not quantised. Up to 1024 rows of it, in fp32 up to 16, read the weight as it is; for more it is first written
    out in x's dtype.

    Args:
        x: [..., K], fp32, fp16 or bf16.
        weight: [N, K], int8 or float8_e4m3fn.
        scale: what whole numbers are multiplied with, fp32, fp16 or bf16: one number; one a row, [N] or [N, 1]; or,
            with ``block_size`` (rows, columns), one a block, [ceil(N / rows), ceil(K / columns)].
        bias: [N] in x's dtype, or None.
        block_size: of DeepSeek-V3's fp8 checkpoints (128, 128) (arXiv:2412.19437, 3.3).
        residual: [..., N] in x's dtype, or None; the rest is rounded before it is added.

    Returns:
        [..., N] in x's dtype, summed in fp32. Differentiable in x, bias and residual by the pytorch backend.
    """
