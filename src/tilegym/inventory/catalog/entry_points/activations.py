"""Entry points of Solutions: activations, gated or not, and dropout."""

from tilegym.ops import dropout as dropout_op
from tilegym.ops import geglu as geglu_op
from tilegym.ops import gelu as gelu_op
from tilegym.ops import relu as relu_op
from tilegym.ops import sigmoid_mul as sigmoid_mul_op
from tilegym.ops import silu_and_mul as silu_and_mul_op
from tilegym.ops import swiglu as swiglu_op


def swiglu(gate, up):
    return swiglu_op(gate, up, backend="cutile")


def silu_and_mul(gate_up):
    return silu_and_mul_op(gate_up, backend="cutile")


def geglu_tanh(gate, up):
    return geglu_op(gate, up, "tanh", backend="cutile")


def geglu(gate, up):
    return geglu_op(gate, up, "none", backend="cutile")


def gelu_tanh(x):
    return gelu_op(x, "tanh", backend="cutile")


def gelu(x):
    return gelu_op(x, "none", backend="cutile")


def relu(x):
    return relu_op(x, backend="cutile")


def dropout(x, seed, p):
    return dropout_op(x, seed, p, backend="cutile")


def sigmoid_mul(x, gate):
    return sigmoid_mul_op(x, gate, backend="cutile")
