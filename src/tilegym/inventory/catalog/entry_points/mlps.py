"""Entry points of Solutions: whole MLPs, of the ops that they are made of."""

from tilegym.ops import geglu
from tilegym.ops import linear
from tilegym.ops import silu_and_mul
from tilegym.ops import swiglu


def swiglu_mlp(x, gate_weight, up_weight, down_weight):
    gate, up = linear(x, gate_weight, backend="cutile"), linear(x, up_weight, backend="cutile")
    return linear(swiglu(gate, up, backend="cutile"), down_weight, backend="cutile")


def geglu_tanh_mlp(x, gate_weight, up_weight, down_weight):
    gate, up = linear(x, gate_weight, backend="cutile"), linear(x, up_weight, backend="cutile")
    return linear(geglu(gate, up, "tanh", backend="cutile"), down_weight, backend="cutile")


def swiglu_mlp_packed(x, gate_up_weight, down_weight):
    gate_up = linear(x, gate_up_weight, backend="cutile")
    return linear(silu_and_mul(gate_up, backend="cutile"), down_weight, backend="cutile")
