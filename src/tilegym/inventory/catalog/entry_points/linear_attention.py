"""Entry points of Solutions: linear attention and the convolution before it."""

from tilegym.ops import causal_conv1d_fn
from tilegym.ops import causal_conv1d_update as causal_conv1d_update_op
from tilegym.ops import chunk_gated_delta_rule as chunk_gated_delta_rule_op
from tilegym.ops import gated_delta_step as gated_delta_step_op
from tilegym.ops import recurrent_gated_delta_rule as recurrent_gated_delta_rule_op


def recurrent_gated_delta_rule(query, key, value, g, beta, initial_state, normalize):
    return recurrent_gated_delta_rule_op(
        query, key, value, g, beta, initial_state, True, use_qk_l2norm_in_kernel=normalize, backend="cutile"
    )


def chunk_gated_delta_rule(query, key, value, g, beta, normalize):
    out, _ = chunk_gated_delta_rule_op(query, key, value, g, beta, use_qk_l2norm_in_kernel=normalize, backend="cutile")
    return out


def causal_conv1d(x, weight):
    return causal_conv1d_fn(x, weight, None, "silu", backend="cutile")


def causal_conv1d_update(x, conv_state, weight):
    return causal_conv1d_update_op(x, conv_state, weight, None, "silu", backend="cutile")


def gated_delta_step(qkv, z, b, a, conv_state, state, conv_weight, A_log, dt_bias, norm_weight, eps):
    return gated_delta_step_op(
        qkv, z, b, a, conv_state, state, conv_weight, None, A_log, dt_bias, norm_weight, eps, backend="cutile"
    )
