"""Element-wise functions in the interpreter against torch, numpy and exact rational arithmetic, on any bit pattern."""

import functools
import math
from fractions import Fraction

import cuda.tile as ct
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from interpreter import functions as F
from interpreter.comparison import describe_difference
from tilegym.interpreter import launch

SIZE = 64
settings = hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


def bit_patterns(dtype: torch.dtype) -> st.SearchStrategy:
    """Tensors of SIZE elements whose bits are anything: NaN, infinities and subnormal numbers among them."""
    return st.binary(min_size=SIZE * dtype.itemsize, max_size=SIZE * dtype.itemsize).map(
        lambda data: torch.frombuffer(bytearray(data), dtype=RAW[dtype.itemsize]).view(dtype)
    )


def moderate(dtype: torch.dtype, low: float, high: float) -> st.SearchStrategy:
    return st.integers(0, 2**32 - 1).map(
        lambda seed: torch.from_numpy(np.random.default_rng(seed).uniform(low, high, SIZE)).to(dtype)
    )


@functools.cache
def kernel_of(function: F.Function, arity: int) -> ct.kernel:
    return (F.unary_kernel if arity == 1 else F.binary_kernel)((function,))


def evaluate(function: F.Function, *operands: torch.Tensor, result: torch.dtype | None = None) -> torch.Tensor:
    out = torch.zeros(1, SIZE, dtype=result or operands[0].dtype)
    launch((1,), kernel_of(function, len(operands)), (*operands, out, SIZE), sanitize=True)
    return out[0]


def check(function: F.Function, got: torch.Tensor, want: torch.Tensor) -> None:
    problems = describe_difference(function.name, got, want, function.ulps)
    assert not problems, problems[0]


def cases(functions: tuple, dtypes: tuple, exact: bool, with_reference: bool = True) -> list:
    return [
        pytest.param(function, dtype, id=f"{function}-{str(dtype).removeprefix('torch.')}")
        for function in functions
        for dtype in dtypes
        if function.takes(dtype)
        and (function.ulps == 0) is exact
        and (function.reference is not None) is with_reference
    ]


DOMAINS = {"log": (1e-3, 50), "log2": (1e-3, 50), "rsqrt": (1e-3, 50)}


@pytest.mark.parametrize("function, dtype", cases(F.FLOAT_UNARY, F.FLOAT_DTYPES, exact=True))
@settings
@hypothesis.given(data=st.data())
def test_exact_unary(function, dtype, data):
    x = data.draw(bit_patterns(dtype))
    check(function, evaluate(function, x), function.reference(x.to(torch.float64)).to(dtype))


@pytest.mark.parametrize("function, dtype", cases(F.FLOAT_UNARY, F.FLOAT_DTYPES, exact=False))
@settings
@hypothesis.given(data=st.data())
def test_rounded_unary(function, dtype, data):
    x = data.draw(moderate(dtype, *DOMAINS.get(function.name, (-6, 6))))
    check(function, evaluate(function, x), function.reference(x.to(torch.float64)).to(dtype))


@pytest.mark.parametrize("function, dtype", cases(F.FLOAT_BINARY, F.FLOAT_DTYPES, exact=True))
@settings
@hypothesis.given(data=st.data())
def test_exact_binary(function, dtype, data):
    x, y = data.draw(bit_patterns(dtype)), data.draw(bit_patterns(dtype))
    # float64 has more than twice the bits of the narrower formats: rounding twice is rounding once.
    want = function.reference(x.to(torch.float64), y.to(torch.float64)).to(dtype)
    got = evaluate(function, x, y)
    if function.name in ("minimum", "maximum"):  # of zeros of different signs either may come out
        got, want = got + 0.0, want + 0.0
    check(function, got, want)


@pytest.mark.parametrize("function, dtype", cases(F.FLOAT_BINARY, F.FLOAT_DTYPES, exact=False))
@settings
@hypothesis.given(data=st.data())
def test_rounded_binary(function, dtype, data):
    x, y = data.draw(moderate(dtype, -6, 6)), data.draw(moderate(dtype, 0.5, 6))
    check(function, evaluate(function, x, y), function.reference(x.to(torch.float64), y.to(torch.float64)).to(dtype))


# What an operation with one rounding would give without it.
EXACT = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "truediv": lambda x, y: x / y,
    "multiply_add": lambda x, y: x * y + x,
    "multiply_subtract": lambda x, y: x * y - y,
}


def next_number(x: torch.Tensor, up: bool) -> torch.Tensor:
    return torch.nextafter(x, torch.full_like(x, math.inf if up else -math.inf))


def is_rounded(exact: Fraction, got: torch.Tensor, mode: str) -> bool:
    """Whether ``got`` is ``exact`` rounded in a mode: rn, rz, rm or rp."""
    value = got.item()
    if math.isinf(value):
        limit = Fraction(torch.finfo(got.dtype).max)
        return abs(exact) > limit and (mode == "rn" or (mode == "rp") == (value > 0))
    error = Fraction(value) - exact
    if mode == "rz":
        mode = "rm" if exact > 0 else "rp"
    neighbour = next_number(got, up=error < 0).item()
    if mode == "rm" and error > 0 or mode == "rp" and error < 0:
        return False
    if math.isinf(neighbour) or error == 0:
        return True
    other = abs(Fraction(neighbour) - exact)
    return abs(error) <= other if mode == "rn" else abs(error) < abs(Fraction(neighbour) - Fraction(value))


ROUNDED = [
    (function, dtype, function.name.rsplit("_", 1)[0], function.name[-2:])
    for function in F.FLOAT_BINARY
    for dtype in F.FLOAT_DTYPES
    if function.name[-3:] in ("_rz", "_rm", "_rp")
]
FUSED = [
    (function, dtype, function.name, "rn")
    for function in F.FLOAT_BINARY
    for dtype in F.FLOAT_DTYPES
    if function.name.startswith("multiply_")
]


@pytest.mark.parametrize(
    "function, dtype, name, mode", [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in ROUNDED + FUSED]
)
@settings
@hypothesis.given(data=st.data())
def test_rounds_once_in_the_mode_asked_for(function, dtype, name, mode, data):
    wide = data.draw(st.booleans())
    x, y = (data.draw(bit_patterns(dtype) if wide else moderate(dtype, -4, 4)) for _ in "xy")
    y = torch.where(y == 0, torch.ones_like(y), y)
    got = evaluate(function, x, y)
    for a, b, result in zip(x, y, got, strict=True):
        if math.isfinite(a) and math.isfinite(b):
            exact = EXACT[name](Fraction(a.item()), Fraction(b.item()))
            assert is_rounded(exact, result, mode), f"{name}_{mode}({a.item()!r}, {b.item()!r}) = {result.item()!r}"


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("dtype", F.FLOAT_DTYPES, ids=str)
@settings
@hypothesis.given(data=st.data())
def test_square_root_rounds_once(dtype, mode, data):
    function = next(function for function in F.FLOAT_UNARY if function.name == f"sqrt_{mode}")
    x = data.draw(st.one_of(moderate(dtype, 1e-3, 9), bit_patterns(dtype))).abs()
    for a, root in zip(x, evaluate(function, x), strict=True):
        if a == 0 or not math.isfinite(a):
            continue
        exact, value = Fraction(a.item()), Fraction(root.item())
        low, high = (Fraction(next_number(root, up).item()) for up in (False, True))
        if mode == "rp":
            assert low**2 < exact <= value**2
        else:
            assert value**2 <= exact < high**2


@settings
@hypothesis.given(data=st.data())
def test_flush_to_zero(data):
    def flush(x):
        return torch.where(x.abs() < SMALLEST_NORMAL, torch.copysign(torch.zeros_like(x), x), x)

    x, y = data.draw(bit_patterns(torch.float32)), data.draw(bit_patterns(torch.float32))
    y = torch.where(y.abs() < 1e-30, y, y * 1e-38)
    for name, plain in (("add_ftz", torch.add), ("mul_ftz", torch.mul)):
        function = next(function for function in F.FLOAT_BINARY if function.name == name)
        check(function, evaluate(function, x, y), flush(plain(flush(x), flush(y))))


@pytest.mark.parametrize("dtype", F.INTEGER_DTYPES, ids=str)
@settings
@hypothesis.given(data=st.data())
def test_integers(dtype, data):
    name = str(dtype).removeprefix("torch.")
    x, y = data.draw(bit_patterns(dtype)), data.draw(bit_patterns(dtype))
    a = x.numpy()
    b = np.where((y.numpy() == 0) | (y.numpy() == np.array(-1).astype(name)), np.array(3, name), y.numpy())
    y = torch.from_numpy(b)
    with np.errstate(all="ignore"):
        for function in F.INTEGER_UNARY:
            if dtype.is_signed or function.name == "bitwise_not":
                check(function, evaluate(function, x), torch.from_numpy(function.reference(a)))
        for function in F.INTEGER_BINARY:
            if dtype.is_signed or function.name != "floordiv":
                want = function.reference(a, b).astype(name)
                check(function, evaluate(function, x, y), torch.from_numpy(want))
        count = b % np.array(dtype.itemsize * 8, name)
        for function in F.SHIFTS:
            want = torch.from_numpy(function.reference(a, count))
            check(function, evaluate(function, x, torch.from_numpy(count)), want)


@pytest.mark.parametrize("dtype", (*F.INTEGER_DTYPES, *F.FLOAT_DTYPES), ids=str)
@settings
@hypothesis.given(data=st.data())
def test_comparisons(dtype, data):
    x, y = data.draw(bit_patterns(dtype)), data.draw(bit_patterns(dtype))
    y = torch.from_numpy(np.where(np.arange(SIZE) % 3 == 0, *(t.view(RAW[dtype.itemsize]).numpy() for t in (x, y))))
    y = y.view(dtype)
    a, b = (t.to(torch.float64).numpy() if dtype.is_floating_point else t.numpy() for t in (x, y))
    for function in F.COMPARISONS:
        want = torch.from_numpy(function.reference(a, b))
        check(function, evaluate(function, x, y, result=torch.bool), want)


def test_unsigned_floor_division_is_rejected_as_the_compiler_does():
    x = torch.ones(SIZE, dtype=torch.uint32)
    floordiv = next(function for function in F.INTEGER_BINARY if function.name == "floordiv")
    with pytest.raises(ct.TileUnsupportedFeatureError, match="unsigned"):
        evaluate(floordiv, x, x)
