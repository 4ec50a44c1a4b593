"""Entry points of Solutions: matrix products."""

from tilegym.ops import bmm as bmm_op
from tilegym.ops import linear as linear_op
from tilegym.ops import matmul as matmul_op
from tilegym.ops import quantized_linear as quantized_linear_op


def quantized_linear(x, weight, scale):
    return quantized_linear_op(x, weight, scale, backend="cutile")


def linear(x, weight):
    return linear_op(x, weight, backend="cutile")


def linear_bias(x, weight, bias):
    return linear_op(x, weight, bias, backend="cutile")


def matmul(a, b):
    return matmul_op(a, b, backend="cutile")


def bmm(a, b):
    return bmm_op(a, b, backend="cutile")
