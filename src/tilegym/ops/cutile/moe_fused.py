"""``fused_moe`` in cuTile: the choice between the forward pass alone and the one that keeps what gradients need."""

import torch

from tilegym.backend import register_impl
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.moe_backward import FusedMoE
from tilegym.ops.cutile.moe_experts import moe_forward
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.pytorch.moe_experts import ACTIVATIONS
from tilegym.ops.pytorch.moe_experts import check_fused_moe


@register_impl("fused_moe", "cutile")
def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    w1_up: torch.Tensor | None = None,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    shared_output: torch.Tensor | None = None,
) -> torch.Tensor:
    check_fused_moe(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, w1_up, b1, b2, interleaved, transposed, shared_output
    )
    if hidden_states.dtype not in FLOATS:
        raise UnsupportedError("hidden_states are not fp32, fp16 or bf16")
    tensors = (hidden_states, w1, w2, topk_weights, topk_ids)
    options = (w1_up, b1, b2, interleaved, transposed, alpha, limit, shared_output)
    kind = ACTIVATIONS.index(activation)
    if torch.is_grad_enabled():
        for tensor in (*tensors, w1_up, b1, b2, shared_output):
            if tensor is not None and tensor.requires_grad:
                return FusedMoE.apply(*tensors, kind, *options)
    return moe_forward(*tensors, kind, *options)
