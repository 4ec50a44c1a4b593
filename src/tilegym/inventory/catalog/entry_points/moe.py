"""Entry points of Solutions: mixtures of experts, and grouped matrix products."""

from tilegym.ops import fused_moe as fused_moe_op
from tilegym.ops import group_gemm as group_gemm_op
from tilegym.ops import moe_align_block_size as moe_align_block_size_op
from tilegym.ops import moe_topk_routing
from tilegym.ops import ragged_group_gemm as ragged_group_gemm_op


def moe_routing(router_logits, top_k, renormalize):
    return moe_topk_routing(router_logits, top_k, renormalize=renormalize, backend="cutile")


def moe_routing_sigmoid(router_logits, correction_bias, top_k, scaling):
    return moe_topk_routing(
        router_logits, top_k, "sigmoid", True, correction_bias, scaling_factor=scaling, backend="cutile"
    )


def moe_routing_topk_softmax(router_logits, top_k):
    return moe_topk_routing(router_logits, top_k, "topk_softmax", backend="cutile")


def moe_align_block_size(topk_ids, block_size, num_experts):
    return moe_align_block_size_op(topk_ids, block_size, num_experts, backend="cutile")


def fused_moe(hidden_states, gate_up, down, topk_weights, topk_ids):
    return fused_moe_op(hidden_states, gate_up, down, topk_weights, topk_ids, backend="cutile")


def fused_moe_gpt_oss(hidden_states, gate_up, gate_up_bias, down, down_bias, topk_weights, topk_ids):
    return fused_moe_op(
        hidden_states,
        gate_up,
        down,
        topk_weights,
        topk_ids,
        "gpt_oss",
        b1=gate_up_bias,
        b2=down_bias,
        interleaved=True,
        transposed=True,
        limit=7.0,
        backend="cutile",
    )


def group_gemm(a0, a1, b0, b1):
    return tuple(group_gemm_op([a0, a1], [b0, b1], backend="cutile"))


def ragged_group_gemm(a, b, offsets):
    return ragged_group_gemm_op(a, b, offsets, backend="cutile")
