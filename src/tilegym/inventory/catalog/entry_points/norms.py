"""Entry points of Solutions: norms and softmax."""

from tilegym.ops import dual_rms_norm as dual_rms_norm_op
from tilegym.ops import fused_add_rms_norm as fused_add_rms_norm_op
from tilegym.ops import group_norm as group_norm_op
from tilegym.ops import layer_norm as layer_norm_op
from tilegym.ops import rms_norm as rms_norm_op
from tilegym.ops import rms_norm_gated as rms_norm_gated_op
from tilegym.ops import softmax as softmax_op


def rms_norm(hidden_states, weight, eps):
    return rms_norm_op(hidden_states, weight.shape, weight, eps, backend="cutile")


def rms_norm_offset(hidden_states, weight, eps):
    return rms_norm_op(hidden_states, weight.shape, weight, eps, offset=1.0, casting="gemma", backend="cutile")


def rms_norm_fp32_weight(hidden_states, weight, eps):
    return rms_norm_op(hidden_states, weight.shape, weight, eps, casting="gemma", backend="cutile")


def fused_add_rms_norm(hidden_states, residual, weight, eps):
    return fused_add_rms_norm_op(hidden_states, residual, weight, eps, backend="cutile")


def fused_add_rms_norm_offset(hidden_states, residual, weight, eps):
    return fused_add_rms_norm_op(hidden_states, residual, weight, eps, 1.0, "gemma", backend="cutile")


def layer_norm(hidden_states, weight, bias, eps):
    return layer_norm_op(hidden_states, weight.shape, weight, bias, eps, backend="cutile")


def softmax(scores):
    return softmax_op(scores, backend="cutile")


def rms_norm_gated(hidden_states, gate, weight, eps):
    return rms_norm_gated_op(hidden_states, gate, weight, eps, backend="cutile")


def dual_rms_norm(q, k, q_weight, k_weight, eps):
    return dual_rms_norm_op(q, k, q_weight, k_weight, eps, backend="cutile")


def group_norm(x, groups, weight, bias, eps):
    return group_norm_op(x, groups, weight, bias, eps, backend="cutile")
