"""Conversion between dtypes in the interpreter against torch, numpy and brute force over all numbers of a format."""

import cuda.tile as ct
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from interpreter import functions as F
from interpreter import kernels as K
from interpreter.cases import FLOAT8
from interpreter.comparison import describe_difference
from interpreter.test_elementwise import SIZE
from interpreter.test_elementwise import bit_patterns
from interpreter.test_elementwise import moderate
from tilegym.interpreter import launch
from tilegym.interpreter import values

settings = hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
ALL = (torch.bool, *F.INTEGER_DTYPES, *F.FLOAT_DTYPES, *FLOAT8)


def convert(x: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    out = torch.zeros(x.numel(), dtype=target)
    launch((1,), K.convert, (x, (out,), x.numel()), sanitize=True)
    return out


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    problems = describe_difference("conversion", got, want, 0)
    assert not problems, problems[0]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("target", F.INTEGER_DTYPES, ids=str)
@pytest.mark.parametrize("source", F.INTEGER_DTYPES, ids=str)
def test_integer_to_integer_wraps(source, target):
    info = np.iinfo(name_of(source))
    x = np.array([info.min, info.max, 0, 1, 2, 100, info.max // 2, info.max // 3] * 8, name_of(source))
    same(convert(torch.from_numpy(x), target), torch.from_numpy(x.astype(name_of(target))))


@pytest.mark.parametrize("target", F.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("source", (torch.bool, *F.INTEGER_DTYPES), ids=str)
@settings
@hypothesis.given(data=st.data())
def test_integer_to_float_rounds_to_nearest_even(source, target, data):
    x = data.draw(bit_patterns(source)) if source != torch.bool else data.draw(bit_patterns(torch.int8)) > 0
    got = convert(x, target)
    for number, result in zip(x.tolist(), got, strict=True):
        if not torch.isfinite(result):
            assert abs(int(number)) > torch.finfo(target).max
            continue
        error = abs(int(result.item()) - int(number))
        for direction in (torch.inf, -torch.inf):
            neighbour = torch.nextafter(result, torch.full_like(result, direction)).item()
            if np.isfinite(neighbour) and neighbour == int(neighbour):
                assert error <= abs(int(neighbour) - int(number))


@pytest.mark.parametrize("target", F.INTEGER_DTYPES, ids=str)
@pytest.mark.parametrize("source", (*F.FLOAT_DTYPES, *FLOAT8), ids=str)
@settings
@hypothesis.given(data=st.data())
def test_float_to_integer_truncates(source, target, data):
    low, high = max(-120, np.iinfo(name_of(target)).min), 120
    x = data.draw(moderate(torch.float64, low, high)).to(source)
    want = np.trunc(x.to(torch.float64).numpy()).astype(name_of(target))
    same(convert(x, target), torch.from_numpy(want))


def test_float_to_integer_saturates_and_nan_is_zero():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 300.0, -300.0, -1.0])
    assert convert(x, torch.int8).tolist() == [127, -128, 0, 127, -128, 127, -128, -1]
    assert convert(x, torch.uint8).tolist() == [255, 0, 0, 255, 0, 255, 0, 0]
    assert convert(x, torch.int64).tolist()[:2] == [2**63 - 1, -(2**63)]


@pytest.mark.parametrize("target", F.FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("source", F.FLOAT_DTYPES, ids=str)
@settings
@hypothesis.given(data=st.data())
def test_float_to_float(source, target, data):
    x = data.draw(bit_patterns(source))
    want = x.to(target)
    if source == torch.float64 and target == torch.float16:  # torch rounds twice
        with np.errstate(over="ignore"):
            want = torch.from_numpy(x.numpy().astype(np.float16))
    elif source == torch.float64 and target == torch.bfloat16:
        return  # no library rounds once; test_narrow_formats compares with all numbers
    same(convert(x, target), want)


def finite_numbers(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of an 8- or 16-bit format, sorted, each once."""
    raw = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    raw = raw.to(torch.uint8) if dtype.itemsize == 1 else raw.to(torch.int16)
    numbers = raw.view(dtype).to(torch.float32).to(torch.float64)
    return numbers[numbers.isfinite()].unique()


def nearest(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The distance from each element to the nearest number."""
    position = torch.searchsorted(numbers, x).clamp(1, len(numbers) - 1)
    return torch.minimum((x - numbers[position - 1]).abs(), (numbers[position] - x).abs())


@pytest.mark.parametrize("target", (torch.float16, torch.bfloat16, *FLOAT8), ids=str)
@settings
@hypothesis.given(data=st.data())
def test_narrow_formats_take_the_nearest_number(target, data):
    x = data.draw(moderate(torch.float64, -500, 500))
    x = torch.where(torch.arange(SIZE) % 2 == 0, x * 1e-5, x)
    # Midpoints, and numbers next to them that a first rounding to float32 would move there.
    numbers = finite_numbers(target)
    place = torch.randint(len(numbers) - 1, (SIZE // 4,), generator=torch.Generator().manual_seed(1))
    middle = (numbers[place] + numbers[place + 1]) / 2
    x[: SIZE // 4] = middle
    x[SIZE // 4 : SIZE // 2] = torch.nextafter(middle, torch.full_like(middle, torch.inf))
    x = x.clamp(numbers[0], numbers[-1])
    got = convert(x, target)
    error = (got.to(torch.float32).to(torch.float64) - x).abs()
    assert torch.equal(error, nearest(x, numbers))
    raw = got.view(torch.uint8 if target.itemsize == 1 else torch.int16)
    ties = torch.isin(x, (numbers[:-1] + numbers[1:]) / 2) & (error > 0)
    assert bool(ties[: SIZE // 4].any())
    assert bool((raw[ties] & 1 == 0).all())


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_saturates(dtype):
    x = torch.tensor([1e6, -1e6, torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0])
    got = convert(x, dtype).to(torch.float32)
    largest = torch.finfo(dtype).max
    assert got[:4].tolist() == [largest, -largest, largest, -largest]
    assert bool(got[4].isnan()) and not bool(torch.signbit(got[5])) and bool(torch.signbit(got[6]))


def test_tfloat32_keeps_ten_mantissa_bits():
    x = torch.tensor(
        [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-23, -1 - 2.0**-11, torch.inf, torch.nan, 3, 0]
    )
    y = torch.zeros(8)
    launch((1,), K.round_to_tf32, (x, y, 8))
    want = torch.tensor([1.0, 1 + 2.0**-9, 1 + 2.0**-10, -1.0, torch.inf, torch.nan, 3, 0])
    same(y, want)


def test_rounding_modes_of_a_conversion():
    x = torch.tensor([1 + 2.0**-30, -1 - 2.0**-30, 1.0, 2.0], dtype=torch.float64)
    single, half, tf32 = torch.zeros(3, 4), torch.zeros(4, dtype=torch.float16), torch.zeros(4)
    launch((1,), K.round_modes, (x, single, half, tf32, 4))
    up = 1 + 2.0**-23
    assert single.tolist() == [[1, -1, 1, 2], [1, -up, 1, 2], [up, -1, 1, 2]]
    assert half.tolist() == [1, -1, 1, 2]


def test_four_bit_floats():
    values_of = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0])  # midpoints go to even codes
    code = values.cast(x, ct.float32, ct.float4_e2m1fn)
    assert values.decode(code, ct.float4_e2m1fn).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    both = torch.cat((values_of, -values_of))
    assert torch.equal(values.cast(both, ct.float32, ct.float4_e2m1fn), torch.arange(16, dtype=torch.uint8))


def test_arrays_of_four_bit_floats():
    x = torch.tensor([0.0, 0.6, -1.0, 1.4, 2.1, -3.0, 4.4, 9.0] * 4)
    y = torch.zeros(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    z = torch.zeros(16, dtype=torch.uint8)
    launch((1,), K.round_to_float4, (x, y, z, 32), sanitize=True)
    assert torch.equal(y.view(torch.uint8), z)
    assert z[:4].tolist() == [0x10, 0x3A, 0xD4, 0x76]  # the first of two in the low half


def test_unsigned_floats_of_five_exponent_bits():
    codes = torch.arange(255, dtype=torch.uint8)
    numbers_of = values.decode(codes, ct.float8_e5m3fnu)
    assert bool((numbers_of[1:] > numbers_of[:-1]).all()) and numbers_of[120] == 1 and numbers_of[254] == 114688
    assert torch.equal(values.encode(numbers_of, ct.float8_e5m3fnu), codes)
    special = values.encode(torch.tensor([torch.nan, 1e9, -1.0, 1 + 2.0**-4]), ct.float8_e5m3fnu)
    assert special.tolist() == [255, 254, 0, 120]


@pytest.mark.parametrize("mode, want", [(ct.RoundingMode.RZ, [1, 2, 2, 4]), (ct.RoundingMode.RP, [1, 4, 4, 4])])
def test_powers_of_two(mode, want):
    x = torch.tensor([1.0, 2.5, 3.5, 4.0])
    code = values.cast(x, ct.float32, ct.float8_e8m0fnu, mode)
    assert values.decode(code, ct.float8_e8m0fnu).tolist() == want


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_to_bool(dtype):
    x = (torch.arange(8) % 3).to(torch.float32).to(dtype)
    assert convert(x, torch.bool).tolist() == [bool(n % 3) for n in range(8)]


@pytest.mark.parametrize("source, target", [(torch.float32, torch.uint32), (torch.bfloat16, torch.int16)])
def test_bit_patterns(source, target):
    x = torch.randn(16).to(source)
    y, z = torch.zeros(16, dtype=target), torch.zeros(16 * x.itemsize, dtype=torch.uint8)
    launch((1,), K.bit_patterns, (x, y, z, 16))
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8)) and torch.equal(z, x.view(torch.uint8))
    back = torch.zeros(16, dtype=source)
    launch((1,), K.unpack, (z, back, len(z)))
    assert torch.equal(back, x)
