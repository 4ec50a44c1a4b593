"""What the front end lets pass and tileiras refuses is refused by the interpreter too, with its line."""

import cuda.tile as ct
import pytest
import torch

from tilegym import interpreter

RM, INF = ct.RoundingMode.RM, ct.PaddingMode.POS_INF


def absolute(x):
    return ct.abs(ct.astype(x, ct.float8_e5m2))


def exponential(x):
    return ct.exp(ct.astype(x, ct.tfloat32))


def negative(x):
    return -ct.astype(x, ct.float4_e2m1fn)


def comparison(x):
    return ct.astype(x, ct.float8_e4m3fn) == 0


def choice(x):
    return ct.where(x > 3, ct.astype(x, ct.float4_e2m1fn), ct.astype(x, ct.float4_e2m1fn))


def first(x):
    return ct.reduce(ct.astype(x, ct.float8_e4m3fn), 0, lambda a, b: ct.where(True, a, b), 0)


def scale(x):
    return ct.astype(ct.astype(x, ct.int32), ct.float8_e8m0fnu)


def rounded_down(x):
    return ct.astype(ct.astype(x, ct.bfloat16), ct.float16, rounding_mode=RM)


def bits(x):
    return ct.bitcast(ct.astype(x, ct.tfloat32), ct.int32)


def quotient(x):
    return ct.astype(x, ct.uint32) // ct.astype(x, ct.uint32)


def applying(function):
    @ct.kernel
    def kernel(x, y):
        ct.store(y, (0,), ct.sum(ct.astype(function(ct.load(x, (0,), (16,))), ct.float32)))

    return kernel


FUNCTIONS = (
    absolute, exponential, negative, comparison, choice, first, scale, rounded_down, bits, quotient
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_operations(function):
    args = torch.arange(1.0, 17.0), torch.zeros(1)
    with pytest.raises(ct.TileUnsupportedFeatureError, match=function.__name__):
        interpreter.launch((1,), applying(function), args)
    with pytest.raises(ct.TileError):  # the real compiler, of the newest architecture
        interpreter.compile_kernel(applying(function), args, "sm_100")


def padded(mode):
    @ct.kernel
    def kernel(x, y):
        ct.store(y, (0,), ct.sum(ct.astype(ct.load(x, (0,), (32,), padding_mode=mode), ct.float32)))

    return kernel


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (ct.PaddingMode.NAN, torch.bool),
        (ct.PaddingMode.NEG_ZERO, torch.int32),
        (ct.PaddingMode.NEG_ZERO, torch.uint8),
        (ct.PaddingMode.POS_INF, torch.float8_e4m3fn),
        (ct.PaddingMode.NEG_INF, torch.float8_e4m3fn),
    ],
)
def test_padding(mode, dtype):
    args = torch.ones(16).to(dtype), torch.zeros(1)
    with pytest.raises(ct.TileUnsupportedFeatureError, match=mode.name):
        interpreter.launch((1,), padded(mode), args)
    with pytest.raises(ct.TileError):
        interpreter.compile_kernel(padded(mode), args, "sm_100")
