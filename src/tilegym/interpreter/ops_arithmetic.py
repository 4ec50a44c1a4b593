"""Arithmetic, comparison, bit and math functions, select and conversion."""

from __future__ import annotations

import operator

import numpy as np
import torch
from cuda import tile as ct
from cuda.tile import RoundingMode

from . import _cutile
from . import exact
from ._cutile import arithmetic_ops as A
from ._cutile import core_ops as C
from .dtypes import as_numpy
from .dtypes import from_numpy
from .dtypes import wrap
from .program import describe
from .program import dtype_of
from .program import evaluates
from .program import evaluates_scalars
from .program import result_dtype
from .program import result_shape
from .rounding import NEAREST
from .rounding import narrow
from .rounding import round_sum
from .rounding import round_to_odd
from .rounding import rounds_twice
from .rounding import two_product
from .rounding import two_sum
from .values import cast
from .values import constant
from .values import decode

_LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149


def flush(x: torch.Tensor) -> torch.Tensor:
    """Subnormal float32 numbers become zeros of their sign."""
    return torch.copysign(torch.hardshrink(x, _LARGEST_SUBNORMAL), x)


def flushing(function):
    return lambda *operands: flush(function(*[flush(x) for x in operands]))


@evaluates(C.TypedConst)
def typed_const(op):
    ty = op.result_vars[0].get_type()
    if not isinstance(ty, _cutile.TileTy) or _cutile.is_pointer_dtype(ty.dtype):
        return lambda: op.value
    tile = constant(op.value, tuple(ty.shape), ty.dtype)
    return lambda: tile


@evaluates_scalars(C.TypedConst)
def typed_const_number(op):
    dtype = result_dtype(op)
    number = bool(op.value) if _cutile.is_boolean(dtype) else wrap(int(op.value), dtype)
    return lambda: number


# Integers

_TORCH_INTEGER = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "and_": torch.bitwise_and,
    "or_": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


def _ceil_divide(a, b):
    quotient = np.floor_divide(a, b)
    return quotient + (quotient * b != a)


_NUMPY_INTEGER = {
    "floordiv": np.floor_divide,
    "cdiv": _ceil_divide,
    "c_mod": np.fmod,
    "min": np.minimum,
    "max": np.maximum,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}


def integer_function(name: str, dtype):
    """A binary function of two integer (or bool) tiles, wrapping on overflow."""
    if name in _TORCH_INTEGER:
        return _TORCH_INTEGER[name]
    function = _NUMPY_INTEGER[name]

    def compute(x, y):
        with np.errstate(all="ignore"):
            return from_numpy(function(as_numpy(x, dtype), as_numpy(y, dtype)), dtype)

    return compute


def _trunc_mod(a, b):
    remainder = abs(a) % abs(b)
    return -remainder if a < 0 else remainder


_PYTHON_INTEGER = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": lambda a, b: a // b if b else 0,
    "cdiv": lambda a, b: -(-a // b) if b else 0,
    "c_mod": lambda a, b: _trunc_mod(a, b) if b else 0,
    "min": min,
    "max": max,
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
}


@evaluates_scalars(A.RawBinaryArithmeticOperation, A.RawBinaryBitwiseOperation)
def binary_numbers(op):
    dtype = dtype_of(op.lhs)
    function = _PYTHON_INTEGER.get(op.fn)
    if function is None or _cutile.is_boolean(dtype):
        return function
    if op.fn in ("add", "sub", "mul", "floordiv", "cdiv"):
        return lambda a, b: wrap(function(a, b), dtype)
    return function


@evaluates(A.RawBinaryBitwiseOperation, A.RawBitwiseShiftOperation)
def bitwise(op):
    return integer_function(op.fn, dtype_of(op.lhs))


# Floats

_FLOAT_FUNCTIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": lambda x, y: torch.floor(x / y),
    "pow": torch.pow,
    "atan2": torch.atan2,
    "c_mod": torch.fmod,
}


def _exact_sum(name: str):
    """``s, e`` in float64 for x op y: ``s`` the rounded result, ``e`` of the sign of what rounding lost."""

    def compute(x, y):
        x, y = x.to(torch.float64), y.to(torch.float64)
        if name == "add":
            return two_sum(x, y)
        if name == "sub":
            return two_sum(x, -y)
        if name == "mul":
            return two_product(x, y)
        quotient = x / y
        product, error = two_product(quotient, y)
        remainder = (x - product) - error
        return quotient, torch.sign(remainder) * torch.sign(y)

    return compute


def _ignoring_nan(function):
    """torch's fmin or fmax, also of signaling NaN, which C lets through."""

    def compute(x, y):
        result = function(x, y)
        if bool(result.isnan().any()):
            result = torch.where(x.isnan(), y, torch.where(y.isnan(), x, result))
        return result

    return compute


def float_function(name: str, dtype, mode=None, flush_to_zero=False, propagate_nan=False):
    """A binary function of two tiles of an arithmetic float dtype."""
    if name in ("min", "max"):
        function = getattr(torch, f"{name}imum") if propagate_nan else _ignoring_nan(getattr(torch, f"f{name}"))
    elif mode in NEAREST:
        function = _FLOAT_FUNCTIONS[name]
    else:
        rounded = "truediv" if name == "floordiv" else name
        sum_of, of_fractions = _exact_sum(rounded), getattr(operator, rounded)

        def function(x, y):
            result = round_sum(*sum_of(x, y), x.dtype, dtype.name, mode)
            if x.dtype == torch.float64:
                result = exact.repair(result, (x, y), lambda a, b: exact.round_fraction(of_fractions(a, b), mode))
            return torch.floor(result) if name == "floordiv" else result

    return flushing(function) if flush_to_zero else function


@evaluates(A.RawBinaryArithmeticOperation)
def binary_arithmetic(op):
    dtype = dtype_of(op.lhs)
    if _cutile.is_float(dtype):
        return float_function(op.fn, dtype, op.rounding_mode, op.flush_to_zero, op.propagate_nan)
    return integer_function(op.fn, dtype)


@evaluates(A.RawFPowIOperation)
def power_of_integer(op):
    return lambda base, exponent: narrow(torch.pow(base.to(torch.float64), exponent.to(torch.float64)), base.dtype)


def _fused_float64(x, y, z, mode):
    product, lost = two_product(x, y)
    low, lower = two_sum(z, lost)
    high, middle = two_sum(product, low)
    total, error = two_sum(high, round_to_odd(*two_sum(lower, middle)))
    plain = torch.where(x.isfinite() & y.isfinite() & ~z.isfinite(), z, x * y + z)
    trivial = ~(x.isfinite() & y.isfinite() & z.isfinite()) | (x == 0) | (y == 0)
    result = torch.where(trivial, plain, round_sum(total, error, x.dtype, "float64", mode))
    return exact.repair(result, (x, y, z), lambda a, b, c: exact.round_fraction(a * b + c, mode))


def _fused_float32(x, y, z):
    # The rescaling of an online softmax is a handful of numbers at a time: numpy, which begins sooner than torch.
    with np.errstate(all="ignore"):
        addend = z.numpy()
        product = np.asarray(np.multiply(x.numpy(), y.numpy(), dtype=np.float64))
        total = np.asarray(product + addend)
        if not rounds_twice(total, product, addend, torch.float32, "float32"):
            return torch.from_numpy(total.astype(np.float32))
    product, z = torch.from_numpy(product), z.to(torch.float64)
    return round_sum(*two_sum(product, z), torch.float32, "float32", RoundingMode.RN)


@evaluates(_cutile.ops.FusedMulAddOperation)
def fused_multiply_add(op):
    dtype = result_dtype(op)
    mode, name = op.rounding_mode, dtype.name

    def compute(x, y, z):
        if x.dtype == torch.float32 and mode in NEAREST:
            return _fused_float32(x, y, z)
        wide = x.to(torch.float64), y.to(torch.float64), z.to(torch.float64)
        if x.dtype == torch.float64:
            return _fused_float64(x, y, z, mode)
        product = wide[0] * wide[1]  # exact: twice the precision of the operands fits
        total = product + wide[2]
        if mode in NEAREST:
            with np.errstate(all="ignore"):
                twice = rounds_twice(*(value.numpy() for value in (total, product, wide[2])), x.dtype, name)
            if not twice:
                return narrow(total, x.dtype)
        return round_sum(*two_sum(product, wide[2]), x.dtype, name, mode)

    return flushing(compute) if op.flush_to_zero else compute


def _correct_root(x):
    # torch.sqrt may be a unit off. 16-bit formats round once more, which changes nothing after float32.
    wide = x if x.element_size() > 2 else x.to(torch.float32)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.asarray(np.sqrt(wide.numpy()))).to(x.dtype)


def _square_root(dtype, mode):
    if mode in NEAREST:
        return _correct_root

    def compute(x):
        root = _correct_root(x.to(torch.float64))
        product, error = two_product(root, root)
        remainder = (x.to(torch.float64) - product) - error
        result = round_sum(root, torch.sign(remainder), x.dtype, dtype.name, mode)
        if x.dtype != torch.float64:
            return result
        return exact.repair(result, (x.clamp(min=0),), lambda a: exact.root(a, mode))

    return compute


_UNARY_FLOAT = {
    name: getattr(torch, name)
    for name in "exp exp2 sin cos sinh cosh tan tanh log log2 rsqrt floor ceil abs neg".split()
}
_UNARY_INTEGER = {
    "abs": torch.abs,
    "neg": torch.neg,
    "invert": torch.bitwise_not,
    "bitwise_not": torch.bitwise_not,
}


@evaluates(A.Unary)
def unary(op):
    dtype = dtype_of(op.operand)
    if not _cutile.is_float(dtype):
        if op.fn == "abs" and not _cutile.is_signed(dtype):
            return lambda x: x
        return _UNARY_INTEGER[op.fn]
    function = _square_root(dtype, op.rounding_mode) if op.fn == "sqrt" else _UNARY_FLOAT[op.fn]
    if op.flush_to_zero and op.fn == "exp2":  # which is 1 of a subnormal number as of zero
        return lambda x: flush(torch.exp2(x))
    return flushing(function) if op.flush_to_zero else function


@evaluates_scalars(A.Unary)
def unary_number(op):
    dtype = dtype_of(op.operand)
    if _cutile.is_boolean(dtype):
        return operator.not_ if op.fn in ("invert", "bitwise_not") else None
    function = {"abs": abs, "neg": operator.neg, "invert": operator.invert, "bitwise_not": operator.invert}[op.fn]
    return lambda a: wrap(function(a), dtype)


# Comparison and selection

_TORCH_COMPARE = {name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_PYTHON_COMPARE = {name: getattr(operator, name) for name in _TORCH_COMPARE}


@evaluates(A.RawComparisonOperation)
def compare(op):
    dtype = dtype_of(op.lhs)
    function = _TORCH_COMPARE[op.fn]
    if _cutile.is_float(dtype):
        return lambda x, y: function(decode(x, dtype), decode(y, dtype))
    if _cutile.is_signed(dtype) or _cutile.is_boolean(dtype) or dtype.bitwidth == 8 or op.fn in ("eq", "ne"):
        return function
    ufunc = _PYTHON_COMPARE[op.fn]
    return lambda x, y: torch.from_numpy(np.asarray(ufunc(as_numpy(x, dtype), as_numpy(y, dtype))))


@evaluates_scalars(A.RawComparisonOperation)
def compare_numbers(op):
    return _PYTHON_COMPARE[op.fn]


@evaluates(A.RawWhereOperation)
def where(op):
    if _cutile.is_pointer_dtype(result_dtype(op)):
        if result_shape(op) != ():
            raise NotImplementedError(f"a choice of pointers has to be of one, not of a tile ({describe(op.loc)})")
        return lambda condition, x, y: x if condition else y
    return torch.where


@evaluates_scalars(A.RawWhereOperation)
def where_numbers(op):
    return lambda condition, x, y: x if condition else y


@evaluates(A.TileAsType)
def astype(op):
    source, target, mode = dtype_of(op.x), result_dtype(op), op.rounding_mode
    plain = ("float16", "bfloat16", "float32", "float64")
    if source.name in plain and target.name in plain and mode in (None, RoundingMode.RN):
        torch_dtype = getattr(torch, target.name)
        return (lambda x: narrow(x, torch_dtype)) if source.name == "float64" else (lambda x: x.to(torch_dtype))
    return lambda x: cast(x, source, target, mode)


@evaluates_scalars(A.TileAsType)
def astype_number(op):
    target = result_dtype(op)
    return bool if _cutile.is_boolean(target) else lambda a: wrap(int(a), target)


@evaluates(_cutile.ops.TileArange)
def arange(op):
    (size,), dtype = result_shape(op), result_dtype(op)
    if _cutile.is_float(dtype):
        tile = cast(torch.arange(size, dtype=torch.int32), ct.int32, dtype)
    else:
        tile = from_numpy(np.arange(size).astype(dtype.name), dtype)
    return lambda: tile
