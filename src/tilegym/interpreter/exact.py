"""float64 arithmetic of numbers so large or small that the error of a result is itself out of range.

Error-free transformations hold only within the range of float64. The few operands beyond that are taken one by one,
as fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from cuda.tile import RoundingMode

_SAFE = 2.0**450  # products, quotients and their errors of numbers within 1 / _SAFE and _SAFE are normal numbers


def round_fraction(x: Fraction, mode=None) -> float:
    """``x`` rounded to float64; overflow and underflow as IEEE 754 has it in each rounding mode."""
    if x == 0:
        return -0.0 if mode == RoundingMode.RM else 0.0
    try:
        near = x.numerator / x.denominator  # rounded to nearest even, subnormal numbers included
    except OverflowError:
        near = math.inf if x > 0 else -math.inf
    return _adjust(near, (near > x) - (near < x), mode)


def root(x: Fraction, mode=None) -> float:
    """The square root of a positive float64 number, rounded."""
    near = math.sqrt(x)
    square = Fraction(near) ** 2
    return _adjust(near, (square > x) - (square < x), mode)


def _adjust(near: float, excess: int, mode) -> float:
    """The nearest number ``near``, which is too large or small by the sign of ``excess``, as ``mode`` wants it."""
    if excess > 0 and (mode == RoundingMode.RM or (mode == RoundingMode.RZ and near > 0)):
        return math.nextafter(near, -math.inf)
    if excess < 0 and (mode == RoundingMode.RP or (mode == RoundingMode.RZ and near < 0)):
        return math.nextafter(near, math.inf)
    return near


def repair(result: torch.Tensor, operands: tuple, function: Callable[..., float]) -> torch.Tensor:
    """float64 ``result``, computed anew by ``function`` (of fractions) where ``operands`` are out of the safe range.

    Elements with an infinite, NaN or zero operand are left alone, save that a third operand may be zero.
    """
    sizes = [x.abs() for x in operands]
    beyond = torch.zeros_like(result, dtype=torch.bool)
    for size in sizes:
        beyond = beyond | (size > _SAFE) | ((size < 1 / _SAFE) & (size != 0))
    if not bool(beyond.any()):
        return result
    for size in sizes:
        beyond = beyond & size.isfinite()
    for size in sizes[:2]:
        beyond = beyond & (size != 0)
    where = beyond.reshape(-1).nonzero().reshape(-1)
    columns = [x.expand(result.shape).reshape(-1)[where].tolist() for x in operands]
    values = [function(*map(Fraction, row)) for row in zip(*columns, strict=True)]
    repaired = result.reshape(-1).clone()
    repaired[where] = torch.tensor(values, dtype=torch.float64)
    return repaired.reshape(result.shape)
