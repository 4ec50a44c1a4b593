"""Correct rounding of exact results to any float format, in any rounding mode.

An operation that must round once is evaluated in float64 as a sum ``s + e`` with ``e`` the error of ``s`` (error-free
transformations: Dekker 1971, Knuth TAOCP 4.2.2). Rounding ``s`` to odd first makes the second rounding, to the target
format, equal to a single rounding of the exact result (Boldo and Melquiond 2008).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from cuda.tile import RoundingMode

NEAREST = (None, RoundingMode.RN, RoundingMode.FULL, RoundingMode.APPROX)


@dataclass(frozen=True)
class Format:
    precision: int  # significant bits, the implicit one included
    min_exponent: int  # of the smallest normal number, 2^min_exponent
    largest: float
    saturates: bool  # overflow goes to the largest finite number, not to infinity


FORMATS = {
    "float16": Format(11, -14, 65504.0, False),
    "bfloat16": Format(8, -126, torch.finfo(torch.bfloat16).max, False),
    "tfloat32": Format(11, -126, (2 - 2.0**-10) * 2.0**127, False),
    "float32": Format(24, -126, torch.finfo(torch.float32).max, False),
    "float8_e4m3fn": Format(4, -6, 448.0, True),
    "float8_e5m2": Format(3, -14, 57344.0, True),
    "float8_e5m3fnu": Format(4, -14, 114688.0, True),
    "float4_e2m1fn": Format(2, 0, 6.0, True),
}


def quantize(x: torch.Tensor, fmt: Format, mode=None) -> torch.Tensor:
    """float64 ``x`` rounded to ``fmt``, still as float64. NaN stays NaN; signed zeros stay."""
    _, exponent = torch.frexp(x)  # x = m * 2^exponent with 0.5 <= |m| < 1
    exponent = (exponent - 1).clamp(min=fmt.min_exponent) - (fmt.precision - 1)
    scaled = _ldexp(x, -exponent)
    if mode in NEAREST:
        whole = torch.round(scaled)
    elif mode in (RoundingMode.RZ, RoundingMode.RZI):
        whole = torch.trunc(scaled)
    elif mode == RoundingMode.RM:
        whole = torch.floor(scaled)
    elif mode == RoundingMode.RP:
        whole = torch.ceil(scaled)
    elif mode == RoundingMode.RA:
        whole = torch.copysign(torch.floor(scaled.abs() + 0.5), scaled)
    else:
        raise NotImplementedError(f"rounding mode {mode}")
    result = torch.copysign(_ldexp(whole, exponent), x)
    result = torch.where(x.isfinite(), result, x)
    over = result.abs() > fmt.largest
    if not bool(over.any()):
        return result
    limit = torch.full_like(x, fmt.largest)
    if not fmt.saturates and mode != RoundingMode.RZ:
        infinity = torch.full_like(x, math.inf)
        if mode == RoundingMode.RP:
            limit = torch.where(x < 0, limit, infinity)
        elif mode == RoundingMode.RM:
            limit = torch.where(x > 0, limit, infinity)
        else:
            limit = infinity
    if not fmt.saturates:  # an infinite input is not an overflow
        over = over & x.isfinite()
    return torch.where(over, torch.copysign(limit, x), result)


def _ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    # torch.ldexp goes through a float32 power of two, which overflows.
    return torch.from_numpy(np.asarray(np.ldexp(x.numpy(), exponent.numpy())))


def two_sum(x: torch.Tensor, y: torch.Tensor) -> tuple:
    """float64 ``s, e`` with ``s = fl(x + y)`` and ``s + e = x + y`` exactly."""
    s = x + y
    t = s - x
    return s, (x - (s - t)) + (y - t)


def two_product(x: torch.Tensor, y: torch.Tensor) -> tuple:
    """float64 ``p, e`` with ``p = fl(x * y)`` and ``p + e = x * y`` exactly, short of overflow."""
    p = x * y
    xh, yh = _high_half(x), _high_half(y)
    xl, yl = x - xh, y - yh
    return p, ((xh * yh - p) + xh * yl + xl * yh) + xl * yl


def _high_half(x: torch.Tensor) -> torch.Tensor:
    c = 134217729.0 * x  # 2^27 + 1
    return c - (c - x)


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to the nearest number of ``dtype``, once."""
    if x.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return x.to(dtype)
    single = x.to(torch.float32)  # torch goes through float32, so that must be rounded to odd
    lost = x - single.to(torch.float64)
    even = (single.view(torch.int32) & 1) == 0
    toward = torch.where(lost > 0, math.inf, -math.inf).to(torch.float32)
    return torch.where((lost != 0) & even & single.isfinite(), torch.nextafter(single, toward), single).to(dtype)


def round_to_odd(s: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """The exact ``s + e`` as float64: ``s``, or where that is even and inexact its neighbour toward the exact sum."""
    inexact = (e != 0) & e.isfinite() & s.isfinite()
    even = (s.view(torch.int64) & 1) == 0
    toward = torch.where(e > 0, math.inf, -math.inf).to(torch.float64)
    return torch.where(inexact & even, torch.nextafter(s, toward), s)


def round_sum(s: torch.Tensor, e: torch.Tensor, dtype: torch.dtype, name: str, mode=None) -> torch.Tensor:
    """The exact ``s + e`` (float64, ``|e|`` below an ulp of ``s``) rounded once to ``dtype`` in ``mode``."""
    inexact = (e != 0) & e.isfinite() & s.isfinite()
    if dtype == torch.float64:
        if mode in NEAREST:
            return s
        toward_zero = mode == RoundingMode.RZ
        up = inexact & (e > 0) & ((s < 0) if toward_zero else torch.tensor(mode == RoundingMode.RP))
        down = inexact & (e < 0) & ((s > 0) if toward_zero else torch.tensor(mode == RoundingMode.RM))
        infinity = torch.full_like(s, math.inf)
        s = torch.where(up, torch.nextafter(s, infinity), s)
        return torch.where(down, torch.nextafter(s, -infinity), s)
    odd = round_to_odd(s, e)
    return narrow(odd, dtype) if mode in NEAREST else quantize(odd, FORMATS[name], mode).to(dtype)


# A float64 rounds twice on its way to a narrower format only from a midpoint: these low bits, and no others.
_MIDPOINT = {torch.float32: 29, torch.float16: 42, torch.bfloat16: 45}


def rounds_twice(s: np.ndarray, x: np.ndarray, y: np.ndarray, dtype: torch.dtype, name: str) -> bool:
    """Whether some element of the float64 ``s = fl(x + y)`` may differ from ``x + y`` once converted to ``dtype``."""
    width = _MIDPOINT[dtype]
    doubtful = s.view(np.int64) & ((1 << width) - 1) == 1 << (width - 1)
    doubtful |= np.abs(s) < 2.0 ** FORMATS[name].min_exponent
    if not np.count_nonzero(doubtful):  # as good as always, and soon known: any() takes four times as long
        return False
    t = s - x
    lost = (x - (s - t)) + (y - t)  # nothing of a true midpoint: it is rounded once
    return bool((doubtful & (lost != 0)).any())
