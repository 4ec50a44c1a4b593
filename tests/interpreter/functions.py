"""Tables of element-wise functions of the language, with what torch or numpy computes for each and how exact it is.

``ulps`` is how many units in the last place of the result the kernel may be off: 0 where the operation is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import numpy as np
import torch

RZ, RM, RP = ct.RoundingMode.RZ, ct.RoundingMode.RM, ct.RoundingMode.RP


@dataclass(frozen=True)
class Function:
    name: str
    tile: Callable  # of tiles, in a kernel
    reference: Callable | None  # of float64 tensors or integer numpy arrays
    ulps: float = 0.0
    dtypes: tuple[str, ...] | None = None  # all of the table's when None

    def __str__(self) -> str:
        return self.name

    def takes(self, dtype: torch.dtype) -> bool:
        return self.dtypes is None or str(dtype).removeprefix("torch.") in self.dtypes


# The helpers below are compiled by cuTile: one statement each.


def add_rz(x, y):
    return ct.add(x, y, rounding_mode=RZ)


def add_rm(x, y):
    return ct.add(x, y, rounding_mode=RM)


def sub_rp(x, y):
    return ct.sub(x, y, rounding_mode=RP)


def mul_rz(x, y):
    return ct.mul(x, y, rounding_mode=RZ)


def mul_rm(x, y):
    return ct.mul(x, y, rounding_mode=RM)


def mul_rp(x, y):
    return ct.mul(x, y, rounding_mode=RP)


def truediv_rz(x, y):
    return ct.truediv(x, y, rounding_mode=RZ)


def truediv_rm(x, y):
    return ct.truediv(x, y, rounding_mode=RM)


def truediv_rp(x, y):
    return ct.truediv(x, y, rounding_mode=RP)


def truediv_approx(x, y):
    return ct.truediv(x, y, rounding_mode=ct.RoundingMode.APPROX)


def sqrt_rz(x):
    return ct.sqrt(x, rounding_mode=RZ)


def sqrt_rm(x):
    return ct.sqrt(x, rounding_mode=RM)


def sqrt_rp(x):
    return ct.sqrt(x, rounding_mode=RP)


def add_ftz(x, y):
    return ct.add(x, y, flush_to_zero=True)


def mul_ftz(x, y):
    return ct.mul(x, y, flush_to_zero=True)


def maximum_ftz(x, y):
    return ct.maximum(x, y, flush_to_zero=True)


def exp2_ftz(x):
    return ct.exp2(x, flush_to_zero=True)


def multiply_add(x, y):
    return x * y + x


def multiply_subtract(x, y):
    return x * y - y


def square(x):
    return x**2


def square_root(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, which torch's is not everywhere."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.numpy()))


def _quiet(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.nan, x)  # of a signaling NaN, torch makes NaN


def lowest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmin(_quiet(x), _quiet(y))


def highest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmax(_quiet(x), _quiet(y))


FLOATS = ("float16", "bfloat16", "float32", "float64")
SINGLE = ("float32",)

FLOAT_UNARY = (
    Function("exp", ct.exp, torch.exp, 3),
    Function("exp2", ct.exp2, torch.exp2, 3),
    Function("exp2_ftz", exp2_ftz, torch.exp2, 3, SINGLE),
    Function("log", ct.log, torch.log, 3),
    Function("log2", ct.log2, torch.log2, 3),
    Function("sqrt", ct.sqrt, square_root),
    Function("rsqrt", ct.rsqrt, torch.rsqrt, 2),
    Function("sin", ct.sin, torch.sin, 4),
    Function("cos", ct.cos, torch.cos, 4),
    Function("tan", ct.tan, torch.tan, 6),
    Function("sinh", ct.sinh, torch.sinh, 4),
    Function("cosh", ct.cosh, torch.cosh, 4),
    Function("tanh", ct.tanh, torch.tanh, 3),
    Function("floor", ct.floor, torch.floor),
    Function("ceil", ct.ceil, torch.ceil),
    Function("abs", ct.abs, torch.abs),
    Function("negative", ct.negative, torch.neg),
    Function("square", square, torch.square, 1),
    Function("sqrt_rz", sqrt_rz, None),
    Function("sqrt_rm", sqrt_rm, None),
    Function("sqrt_rp", sqrt_rp, None),
)

FLOAT_BINARY = (
    Function("add", ct.add, torch.add),
    Function("sub", ct.sub, torch.sub),
    Function("mul", ct.mul, torch.mul),
    Function("truediv", ct.truediv, torch.true_divide),
    Function("minimum", ct.minimum, lowest),
    Function("maximum", ct.maximum, highest),
    Function("floordiv", ct.floordiv, None),
    Function("mod", ct.mod, torch.remainder, 1),
    Function("atan2", ct.atan2, torch.atan2, 4),
    Function("multiply_add", multiply_add, None),
    Function("multiply_subtract", multiply_subtract, None),
    Function("add_rz", add_rz, None),
    Function("add_rm", add_rm, None),
    Function("sub_rp", sub_rp, None),
    Function("mul_rz", mul_rz, None),
    Function("mul_rm", mul_rm, None),
    Function("mul_rp", mul_rp, None),
    Function("truediv_rz", truediv_rz, None),
    Function("truediv_rm", truediv_rm, None),
    Function("truediv_rp", truediv_rp, None),
    Function("truediv_approx", truediv_approx, torch.true_divide, 2, SINGLE),
    Function("add_ftz", add_ftz, None, 0, SINGLE),
    Function("mul_ftz", mul_ftz, None, 0, SINGLE),
    Function("maximum_ftz", maximum_ftz, None, 0, SINGLE),
)

COMPARISONS = (
    Function("equal", ct.equal, np.equal),
    Function("not_equal", ct.not_equal, np.not_equal),
    Function("less", ct.less, np.less),
    Function("less_equal", ct.less_equal, np.less_equal),
    Function("greater", ct.greater, np.greater),
    Function("greater_equal", ct.greater_equal, np.greater_equal),
)


def ceil_divide(x: Any, y: Any) -> Any:
    return -(-x.astype(object) // y.astype(object))


INTEGER_UNARY = (
    Function("abs", ct.abs, np.abs),
    Function("negative", ct.negative, np.negative),
    Function("bitwise_not", ct.bitwise_not, np.invert),
)

INTEGER_BINARY = (
    Function("add", ct.add, np.add),
    Function("sub", ct.sub, np.subtract),
    Function("mul", ct.mul, np.multiply),
    Function("floordiv", ct.floordiv, np.floor_divide),
    Function("mod", ct.mod, np.mod),
    Function("cdiv", ct.cdiv, ceil_divide),
    Function("minimum", ct.minimum, np.minimum),
    Function("maximum", ct.maximum, np.maximum),
    Function("bitwise_and", ct.bitwise_and, np.bitwise_and),
    Function("bitwise_or", ct.bitwise_or, np.bitwise_or),
    Function("bitwise_xor", ct.bitwise_xor, np.bitwise_xor),
)

SHIFTS = (
    Function("bitwise_lshift", ct.bitwise_lshift, np.left_shift),
    Function("bitwise_rshift", ct.bitwise_rshift, np.right_shift),
)

INTEGER_DTYPES = tuple(getattr(torch, name) for name in "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split())
FLOAT_DTYPES = tuple(getattr(torch, name) for name in FLOATS)


def unary_kernel(functions: tuple) -> ct.kernel:
    """Row i of ``y`` becomes ``functions[i](x)``."""
    tile_functions = tuple(function.tile for function in functions)

    @ct.kernel
    def unary(x, y, size: ct.Constant[int]):
        tile = ct.load(x, (0,), (size,))
        row = 0
        for function in ct.static_iter(tile_functions):
            ct.store(y, (row, 0), ct.reshape(function(tile).astype(y.dtype), (1, size)))
            row += 1

    return unary


def binary_kernel(functions: tuple) -> ct.kernel:
    """Row i of ``z`` becomes ``functions[i](x, y)``."""
    tile_functions = tuple(function.tile for function in functions)

    @ct.kernel
    def binary(x, y, z, size: ct.Constant[int]):
        left = ct.load(x, (0,), (size,))
        right = ct.load(y, (0,), (size,))
        row = 0
        for function in ct.static_iter(tile_functions):
            ct.store(z, (row, 0), ct.reshape(function(left, right).astype(z.dtype), (1, size)))
            row += 1

    return binary
