"""The interpreter's products with the rounding of a GPU's tensor cores, which its own have not."""

import contextlib
import weakref
from collections.abc import Iterator
from unittest import mock

import torch
from cuda.tile._ir import ops as ir

from tilegym.interpreter import frontend
from tilegym.interpreter import program
from tilegym.interpreter.program import dtype_of
from tilegym.interpreter.values import decode

AT_ONCE = {"tfloat32": 8, "bfloat16": 16, "float16": 16}  # products that one step adds to an accumulator
BITS = 24  # behind the first one of the largest number that a step adds; an H200 keeps 24 or 25


def _unit(largest: torch.Tensor, bits: int) -> torch.Tensor:
    """What the last of so many bits behind the first one counts."""
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - bits)


def _cut_off(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return (x / unit).trunc_().mul_(unit)


def _product(x: torch.Tensor, y: torch.Tensor, acc: torch.Tensor, at_once: int) -> torch.Tensor:
    x, y, acc = x.double(), y.double(), acc.double()
    for start in range(0, x.shape[-1], at_once):
        step = slice(start, start + at_once)
        products = x[..., :, step, None] * y[..., None, step, :]
        unit = _unit(torch.maximum(products.amax(-2), products.amin(-2).neg()).maximum(acc.abs()), BITS)
        total = _cut_off(products, unit.unsqueeze(-2)).sum(-2) + _cut_off(acc, unit)
        acc = _cut_off(total, _unit(total, 23))
    return acc.float()


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Within it products of floating-point tiles are added to fp32 as tensor cores do it: all that are added at once,
    and the accumulator, are cut off behind the last bit that is kept of the largest, and so is their sum."""
    own = program.TENSOR_FUNCTIONS[ir.TileMma]

    def mma(op):
        dtypes = [dtype_of(operand) for operand in (op.x, op.y, op.acc)]
        if dtypes[0].name not in AT_ONCE or dtypes[2].name != "float32":
            return own(op)
        return lambda x, y, acc: _product(decode(x, dtypes[0]), decode(y, dtypes[1]), acc, AT_ONCE[dtypes[0].name])

    programs = weakref.WeakKeyDictionary()  # of kernels that were made with it
    with mock.patch.dict(program.TENSOR_FUNCTIONS, {ir.TileMma: mma}), mock.patch.object(frontend, "_caches", programs):
        yield
