"""Entry points of Solutions: losses."""

from tilegym.ops import cross_entropy as cross_entropy_op
from tilegym.ops import fused_linear_cross_entropy as fused_linear_cross_entropy_op


def cross_entropy(logits, target, ignore_index):
    return cross_entropy_op(logits, target, ignore_index, backend="cutile")


def fused_linear_cross_entropy(hidden_states, weight, target, ignore_index):
    return fused_linear_cross_entropy_op(hidden_states, weight, target, ignore_index=ignore_index, backend="cutile")


def causal_lm_loss(logits, target):
    return cross_entropy_op(logits[:, :-1], target[:, 1:], backend="cutile")


def fused_linear_causal_lm_loss(hidden_states, weight, target):
    return fused_linear_cross_entropy_op(hidden_states[:, :-1], weight, target[:, 1:], backend="cutile")
