"""Tile values: constants, and conversion between dtypes as the hardware does it."""

from __future__ import annotations

import math

import numpy as np
import torch
from cuda import tile as ct
from cuda.tile import PaddingMode
from cuda.tile import RoundingMode

from . import _cutile
from .dtypes import CARRIER
from .dtypes import TORCH_FLOAT8
from .dtypes import as_numpy
from .dtypes import from_numpy
from .dtypes import integer_range
from .dtypes import wrap_carrier
from .rounding import FORMATS
from .rounding import NEAREST
from .rounding import narrow
from .rounding import quantize

_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")  # whatever the default device is
_FLOAT4_CODES = torch.cat((_FLOAT4, -_FLOAT4))
_NATIVE_FLOATS = ("float16", "bfloat16", "float32", "float64")


def decode(x: torch.Tensor, dtype) -> torch.Tensor:
    """The numbers that a float tile stands for, in a torch dtype that can compute with them."""
    name = dtype.name
    if name in TORCH_FLOAT8:
        return x.view(TORCH_FLOAT8[name]).to(torch.float32)
    if name == "float4_e2m1fn":
        return _FLOAT4_CODES[x.long()]
    if name == "float8_e5m3fnu":
        return _decode_e5m3(x)
    return x


def _decode_e5m3(x: torch.Tensor) -> torch.Tensor:
    # Unsigned, bias 15, no infinity, all ones is NaN.
    exponent = (x >> 3).to(torch.float32)
    mantissa = (x & 7).to(torch.float32)
    subnormal = mantissa * 2.0**-17
    normal = (1 + mantissa / 8) * torch.exp2(exponent - 15)
    return torch.where(x == 255, torch.nan, torch.where(exponent == 0, subnormal, normal))


def _encode_e5m3(x: torch.Tensor) -> torch.Tensor:
    # A number of the format times 2^-112 has its exponent and mantissa in a float32's bits; what is negative becomes 0.
    bits = (x.clamp(min=0) * 2.0**-112).view(torch.int32) >> 20
    return torch.where(x.isnan(), 255, bits).to(torch.uint8)


def encode(x: torch.Tensor, dtype, mode=None) -> torch.Tensor:
    """A floating torch tensor rounded to ``dtype``, as a carrier. 8- and 4-bit floats saturate."""
    name = dtype.name
    if name in _NATIVE_FLOATS:
        if mode in NEAREST or x.dtype == CARRIER[name]:
            return narrow(x, CARRIER[name])
        if name == "float64":
            return x.to(torch.float64)
        return quantize(x.to(torch.float64), FORMATS[name], mode).to(CARRIER[name])
    if name == "tfloat32":
        return quantize(x.to(torch.float64), FORMATS[name], mode).to(torch.float32)
    if name == "float8_e8m0fnu":
        return _encode_e8m0(x, mode)
    rounded = quantize(x.to(torch.float64), FORMATS[name], mode).to(torch.float32)
    if name == "float4_e2m1fn":
        rounded = torch.where(rounded.isnan(), 6.0, rounded)
        code = torch.searchsorted(_FLOAT4, rounded.abs().contiguous())
        return (code + torch.signbit(rounded) * 8).to(torch.uint8)
    if name == "float8_e5m3fnu":
        return _encode_e5m3(rounded)
    return rounded.to(TORCH_FLOAT8[name]).view(torch.uint8)


def _encode_e8m0(x: torch.Tensor, mode) -> torch.Tensor:
    """A power of two 2^(code - 127); 255 is NaN. RZ takes the power below, anything else the power above or equal."""
    magnitude = x.to(torch.float64)
    mantissa, exponent = torch.frexp(magnitude)  # magnitude = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent.to(torch.float64) - 1
    if mode == RoundingMode.RP:
        exponent = exponent + (mantissa > 0.5)
    elif mode in NEAREST:
        exponent = exponent + (mantissa > 0.75) + ((mantissa == 0.75) & (exponent % 2 == 0))
    code = (exponent + 127).clamp(0, 254)
    code = torch.where(magnitude > 0, code, 0.0)
    code = torch.where(magnitude == math.inf, 254.0, code)
    return torch.where(magnitude.isnan() | (magnitude < 0), 255.0, code).to(torch.uint8)


def constant(value, shape: tuple, dtype) -> torch.Tensor:
    """A tile filled with a Python number, or with a nested tuple of them."""
    if isinstance(value, tuple):
        numbers = np.array(value, dtype=object).reshape(-1)
        return torch.stack([constant(number, (), dtype) for number in numbers]).reshape(shape)
    if _cutile.is_boolean(dtype):
        return torch.full(shape, bool(value))
    if _cutile.is_integral(dtype):
        return torch.full(shape, wrap_carrier(int(value), dtype), dtype=CARRIER[dtype.name])
    if dtype.name in _NATIVE_FLOATS:
        # In two steps: torch refuses to fill with what rounds to the largest number, or to infinity.
        return torch.full(shape, float(value), dtype=torch.float64).to(CARRIER[dtype.name])
    return encode(torch.tensor(float(value), dtype=torch.float64), dtype).expand(shape)


def cast(x: torch.Tensor, source, target, mode=None) -> torch.Tensor:
    """``x`` of dtype ``source`` converted to ``target`` (both cuTile dtypes), rounding as ``mode`` says.

    Float to integer truncates and saturates; NaN becomes 0. Integer to integer wraps.
    """
    if source == target:
        return x
    if _cutile.is_boolean(target):
        return decode(x, source) != 0
    if _cutile.is_integral(target):
        if _cutile.is_float(source):
            return _float_to_integer(decode(x, source), target)
        if source.bitwidth == target.bitwidth and not _cutile.is_boolean(source):
            return x.view(CARRIER[target.name]) if x.dtype != CARRIER[target.name] else x
        if _cutile.is_signed(source) or source.bitwidth == 8 or _cutile.is_boolean(source):
            return x.to(CARRIER[target.name])
        with np.errstate(all="ignore"):
            return from_numpy(as_numpy(x, source).astype(target.name), target)
    if _cutile.is_float(source):
        return encode(decode(x, source), target, mode)
    return _integer_to_float(x, source, target, mode)


def _float_to_integer(x: torch.Tensor, target) -> torch.Tensor:
    low, high = integer_range(target)
    values = np.trunc(np.nan_to_num(x.to(torch.float64).numpy(), nan=0.0, posinf=np.inf, neginf=-np.inf))
    with np.errstate(all="ignore"):
        inside = values.astype(target.name)
    result = np.where(values >= float(high), np.array(high, target.name), inside)
    return from_numpy(np.where(values <= float(low), np.array(low, target.name), result), target)


def _integer_to_float(x: torch.Tensor, source, target, mode) -> torch.Tensor:
    if source.bitwidth < 64 or _cutile.is_boolean(source):
        wide = x if _cutile.is_boolean(source) else torch.from_numpy(as_numpy(x, source).astype(np.float64))
        return encode(wide.to(torch.float64), target, mode)
    if target.bitwidth >= 32 and mode in NEAREST:
        exact = as_numpy(x, source).astype(np.float64 if target == ct.float64 else np.float32)
        return encode(torch.from_numpy(np.asarray(exact)), target)
    # 64 bits do not fit a float64: round to odd so that the second rounding is the only one.
    numbers = as_numpy(x, source)
    high = numbers & ~np.array(2047, numbers.dtype)
    sticky = ((numbers & np.array(2047, numbers.dtype)) != 0).astype(numbers.dtype) << np.array(11, numbers.dtype)
    return encode(torch.from_numpy(np.asarray((high | sticky).astype(np.float64))), target, mode)


_PADDING = {
    PaddingMode.ZERO: 0.0,
    PaddingMode.NEG_ZERO: -0.0,
    PaddingMode.NAN: math.nan,
    PaddingMode.POS_INF: math.inf,
    PaddingMode.NEG_INF: -math.inf,
}


NUM_POISONS = 4


def padding_number(mode, dtype, garbage: int = 0):
    """The Python number that fills padding; ``garbage`` picks what undetermined padding holds, see ``BlockState``."""
    if mode != PaddingMode.UNDETERMINED:
        return _PADDING[mode]
    kinds = _poisons(dtype)
    return kinds[(garbage - 1) % len(kinds)] if garbage else 0


def _poisons(dtype) -> tuple:
    """Up to ``NUM_POISONS`` contents of undetermined padding: NaN, which only minima and maxima hide; large and small
    values, of which a minimum and a maximum hide one each; zero, an index within bounds, which a mask takes for false.
    """
    if _cutile.is_boolean(dtype):
        return True, False
    if _cutile.is_integral(dtype):
        low, high = integer_range(dtype)
        return high - 1, low, 0, 77
    if dtype.name == "float8_e8m0fnu":  # powers of two
        return math.nan, 4.0, 0.25
    if dtype.name == "float4_e2m1fn":
        return 6.0, -6.0, 0.0
    large = 448.0 if dtype.bitwidth == 8 else 12345.0
    return math.nan, large, -large, 0.0
