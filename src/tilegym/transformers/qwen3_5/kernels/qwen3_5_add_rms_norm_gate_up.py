"""Residual addition, RMS norm, and the gated first half of the MLP, as in a decoder layer of Qwen3.5.

residual_out = residual + hidden_states
x = residual_out * rsqrt(mean(residual_out * residual_out) + 1e-06) * (1 + norm_weight)
y = silu(linear(x, gate_weight)) * linear(x, up_weight)

with PyTorch's rounding at every step. Forward only. Kept by ``tilegym autokernel`` on an NVIDIA H200, 2026-11-22, in
Qwen3.5-0.8B in bf16: H = 1024, I = 3584, 16.1% of the model's time. The region is ``Qwen3_5DecoderLayer.forward``,
lines 906 to 910 of modeling_qwen3_5.py in transformers 5.17.0, with the products of ``Qwen3_5MLP.forward``.
"""

import torch

from tilegym.ops.cutile.add_rms_norm_gate_up import add_rms_norm_gate_up


def qwen3_5_add_rms_norm_gate_up(
    residual: torch.Tensor,
    hidden_states: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``residual_out``, [..., H], and ``y``, [..., I], in the dtype of residual, as at the top of this file.

    Args:
        residual: [..., H], bf16, fp16 or fp32.
        hidden_states: [..., H], as residual.
        norm_weight: [H], in that dtype.
        gate_weight: [I, H], in that dtype.
        up_weight: [I, H], in that dtype.

    Raises:
        UnsupportedError: another dtype, other shapes or strides, or a gradient is asked for.
    """
    return add_rms_norm_gate_up(residual, hidden_states, norm_weight, gate_weight, up_weight, 1e-06, True)
