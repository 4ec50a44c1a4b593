"""Entry points of Solutions: what a decoding step computes in one launch, and its choice of a token."""

from tilegym.ops import argmax as argmax_op
from tilegym.ops import linear_add as linear_add_op
from tilegym.ops import rms_norm_add as rms_norm_add_op
from tilegym.ops import rms_norm_linear
from tilegym.ops import rms_norm_swiglu as rms_norm_swiglu_op
from tilegym.ops import rope_and_cache as rope_and_cache_op
from tilegym.ops import rope_fmha_decode


def rms_norm_qkv(x, norm_weight, eps, q_weight, k_weight, v_weight):
    return tuple(rms_norm_linear(x, norm_weight, eps, [q_weight, k_weight, v_weight], backend="cutile"))


def rms_norm_swiglu(x, norm_weight, eps, gate_weight, up_weight):
    return rms_norm_swiglu_op(x, norm_weight, eps, gate_weight, up_weight, backend="cutile")


def linear_add(x, weight, residual):
    return linear_add_op(x, weight, residual, backend="cutile")


def rms_norm_add(hidden_states, weight, eps, residual):
    return rms_norm_add_op(hidden_states, weight, eps, residual, 1.0, "gemma", backend="cutile")


def rope_and_cache(q, k, v, cos, sin, keys, values, position):
    return rope_and_cache_op(q, k, v, cos, sin, keys, values, position, backend="cutile")


def rope_attention_decode(q, k, v, cos, sin, keys, values, position, scaling):
    return rope_fmha_decode(q, k, v, cos, sin, keys, values, position, scaling, backend="cutile")


def argmax(logits):
    return argmax_op(logits, backend="cutile")
