"""Residual addition, RMS norm, and the gated first half of the MLP, as in a decoder layer of Llama.

residual_out = residual + hidden_states
x = norm_weight * (residual_out * rsqrt(mean(residual_out * residual_out) + 1e-05))
y = silu(linear(x, gate_weight)) * linear(x, up_weight)

with PyTorch's rounding at every step. Forward only. Kept by ``tilegym autokernel`` on an NVIDIA H200, 2026-11-22, in
Llama-3.1-8B in bf16: H = 4096, I = 14336, 39.7% of the model's time. The region is ``LlamaDecoderLayer.forward``,
lines 317 to 321 of modeling_llama.py in transformers 5.17.0, with the products of ``LlamaMLP.forward``.
"""

import torch

from tilegym.ops.cutile.add_rms_norm_gate_up import add_rms_norm_gate_up


def llama_add_rms_norm_gate_up(
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
    return add_rms_norm_gate_up(residual, hidden_states, norm_weight, gate_weight, up_weight, 1e-05, False)
