"""Matrix multiply-accumulate, with the accumulator's type as on the hardware."""

from __future__ import annotations

import torch

from . import _cutile
from ._cutile import ops as O
from .dtypes import as_numpy
from .dtypes import from_numpy
from .program import dtype_of
from .program import evaluates
from .values import decode


def _integer_mma(x_dtype, y_dtype, acc_dtype):
    def compute(x, y, acc):
        # Products of 8-bit integers and their sums stay exact in float64, which has a fast matmul.
        x, y = (torch.from_numpy(as_numpy(t, d)).to(torch.float64) for t, d in ((x, x_dtype), (y, y_dtype)))
        product = torch.matmul(x, y).to(torch.int64)
        return from_numpy((product + acc).numpy().astype("int32"), acc_dtype)

    return compute


@evaluates(O.TileMma)
def mma(op):
    x_dtype, y_dtype, acc_dtype = dtype_of(op.x), dtype_of(op.y), dtype_of(op.acc)
    if _cutile.is_integral(x_dtype):
        return _integer_mma(x_dtype, y_dtype, acc_dtype)
    wide = torch.float64 if x_dtype.name == "float64" else torch.float32
    if {x_dtype.name, y_dtype.name, acc_dtype.name} == {"float32"}:
        return lambda x, y, acc: torch.matmul(x, y).add_(acc)

    def compute(x, y, acc):
        product = torch.matmul(decode(x, x_dtype).to(wide), decode(y, y_dtype).to(wide))
        return (product + acc).to(acc.dtype)  # a float16 accumulator is rounded once a tile

    return compute


def _scaled(x, dtype, scale, scale_dtype, axis):
    """Numbers of a block-scaled operand: each scale covers ``size / num_scales`` elements along ``axis``."""
    numbers, scales = decode(x, dtype).to(torch.float32), decode(scale, scale_dtype).to(torch.float32)
    return numbers * scales.repeat_interleave(numbers.shape[axis] // scales.shape[axis], axis)


@evaluates(O.TileMmaScaled)
def mma_scaled(op):
    x_dtype, y_dtype = dtype_of(op.x), dtype_of(op.y)
    x_scale_dtype, y_scale_dtype = dtype_of(op.x_scale), dtype_of(op.y_scale)

    def compute(x, x_scale, y, y_scale, acc):
        x = _scaled(x, x_dtype, x_scale, x_scale_dtype, -1)  # [.., M, K]
        y = _scaled(y, y_dtype, y_scale, y_scale_dtype, -2)  # [.., K, N]
        return torch.matmul(x, y) + acc

    return compute
