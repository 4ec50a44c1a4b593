"""Shapes, selection, reductions, scans, matrix products and control flow in the interpreter against torch."""

import cuda.tile as ct
import numpy as np
import pytest
import torch

from interpreter import functions as F
from interpreter import kernels as K
from interpreter import programs
from interpreter.cases import FLOAT8
from interpreter.cases import matrix
from interpreter.cases import numbers
from interpreter.test_memory import equal
from interpreter.test_memory import raw
from tilegym.interpreter import launch


@pytest.mark.parametrize("dtype", (torch.bool, *F.INTEGER_DTYPES, *F.FLOAT_DTYPES, *FLOAT8), ids=str)
def test_shapes(dtype):
    x, y = matrix(dtype, 4, 8), torch.zeros(16, 8, dtype=dtype)
    launch((1,), K.shapes, (x, y, 4, 8), sanitize=True)
    tile = raw(x)
    joined = torch.cat((tile.t(), tile.reshape(8, 4)), 1)
    corner = joined[4:8, 4:8].clone()
    joined[:4, :4] = corner
    assert torch.equal(raw(y)[:8], joined)
    assert torch.equal(raw(y)[8:], tile[3].reshape(8, 1).expand(8, 8))


@pytest.mark.parametrize("dtype", (*F.INTEGER_DTYPES, *F.FLOAT_DTYPES), ids=str)
def test_select(dtype):
    x, y, z = numbers(dtype, 64, "x"), numbers(dtype, 64, "y"), torch.zeros(64, dtype=dtype)
    launch((1,), K.select, (x, y, z, 64), sanitize=True)
    a, b = (t.to(torch.float64).numpy() if dtype.is_floating_point else t.numpy() for t in (x, y))
    chosen = torch.from_numpy((np.arange(64) % 3 == 0) | (a < b))
    assert equal(z, torch.where(chosen, raw(x), raw(y)).view(dtype))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", programs.ARITHMETIC, ids=str)
def test_reductions(dtype, axis):
    x = programs.small_integers(dtype, 8, 16)
    size = (16, 8)[axis]
    y = torch.zeros(8, size, dtype=dtype)
    launch((1,), K.reductions, (x, y, axis, 8, 16), sanitize=True)
    values = x.to(torch.float64)
    largest = torch.where(values.amax(axis) >= -values.amin(axis), values.amax(axis), values.amin(axis))
    assert torch.equal(y[0], values.sum(axis).to(torch.int64).to(dtype))
    assert torch.equal(y[1], values.prod(axis).to(dtype))
    assert torch.equal(y[2], values.amax(axis).to(dtype)) and torch.equal(y[3], values.amin(axis).to(dtype))
    assert torch.equal(y[4].abs(), largest.to(dtype).abs())


@pytest.mark.parametrize("dtype", programs.ARITHMETIC, ids=str)
def test_arg_reductions_take_the_first(dtype):
    x, y = programs.small_integers(dtype, 8, 8), torch.zeros(4, 8, dtype=torch.int32)
    launch((1,), K.arg_reductions, (x, y, 1, 8, 8), sanitize=True)
    values = x.to(torch.float64).numpy()
    assert y[0].tolist() == values.argmax(1).tolist() and y[1].tolist() == values.argmin(1).tolist()
    assert y[2].tolist() == values.argmax(1).tolist()


@pytest.mark.parametrize("dtype", F.FLOAT_DTYPES, ids=str)
def test_extremes_ignore_nan_unless_asked(dtype):
    x = numbers(dtype, 128).reshape(8, 16)
    x[3, 5] = x[6, 0] = torch.nan
    y = torch.zeros(4, 8, dtype=dtype)
    launch((1,), K.nan_reductions, (x, y, 8, 16), sanitize=True)
    assert torch.equal(y[0], x.nan_to_num(nan=-99).amax(1)) and torch.equal(y[1], x.nan_to_num(nan=99).amin(1))
    assert y[2].isnan().nonzero().reshape(-1).tolist() == [3, 6]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", programs.ARITHMETIC, ids=str)
def test_scans(dtype, axis):
    x = programs.small_integers(dtype, 8, 4, low=-1, high=3)
    y = torch.zeros(32, 4, dtype=dtype)
    launch((1,), K.scans, (x, y, axis, 8, 4), sanitize=True)
    values = x.to(torch.float64)
    assert torch.equal(y[:8], values.cumsum(axis).to(torch.int64).to(dtype))
    assert torch.equal(y[8:16], values.flip(axis).cumsum(axis).flip(axis).to(torch.int64).to(dtype))
    assert torch.equal(y[16:24], values.cumprod(axis).to(torch.int64).to(dtype))
    running = x.clone()
    for i in range(1, x.shape[axis]):
        before, here = running.select(axis, i - 1), running.select(axis, i)
        here.copy_(torch.where(before.to(torch.float64).abs() >= here.to(torch.float64).abs(), before, here))
    assert torch.equal(y[24:], running)


@pytest.mark.parametrize("case", programs.products(), ids=str)
def test_products(case):
    args = case.make_args()
    x, y, z = (tensor.to(torch.float64, copy=True) for tensor in args[:3])
    launch(case.grid, case.kernel, args, sanitize=True)
    want = torch.matmul(x, y) + z
    if case.ulps:
        precision = 2.0**-9 if "tfloat32" in case.name else torch.finfo(args[2].dtype).eps * 64
        torch.testing.assert_close(args[2].to(torch.float64), want, rtol=precision, atol=0)
    else:
        assert torch.equal(args[2].to(torch.float64), want)


@pytest.mark.parametrize("case", programs.scaled_products(), ids=str)
def test_scaled_products(case):
    x, x_scale, y, y_scale, z, *sizes = case.make_args()
    launch(case.grid, case.kernel, (x, x_scale, y, y_scale, z, *sizes), sanitize=True)
    left = x.double() * x_scale.float().double().repeat_interleave(32, 1)
    right = y.double() * y_scale.float().double().repeat_interleave(32, 0)
    assert torch.equal(z.to(torch.float64), left @ right)


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn], ids=str)
def test_scaled_products_of_four_bit_floats(scale_dtype):
    rng = torch.Generator().manual_seed(0)
    packed = [torch.randint(256, (16, 32), generator=rng, dtype=torch.uint8) for _ in "xy"]
    numbers_of = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat((numbers_of, -numbers_of))
    x, y = (table[torch.stack((p & 15, p >> 4), -1).reshape(16, 64).long()] for p in packed)
    scales = torch.tensor([0.5, 1.0, 2.0, 4.0])[torch.randint(4, (2, 16, 4), generator=rng)]
    z = torch.zeros(16, 16)
    arguments = (
        packed[0].view(torch.float4_e2m1fn_x2),
        scales[0].to(scale_dtype),
        packed[1].view(torch.float4_e2m1fn_x2),
        scales[1].t().contiguous().to(scale_dtype),
        z,
    )
    launch((1,), K.multiply_float4, (*arguments, 16, 16, 64, 4), sanitize=True)
    want = (x * scales[0].repeat_interleave(16, 1)) @ (y * scales[1].repeat_interleave(16, 1)).t()
    assert torch.equal(z, want)


def test_float16_products_round_to_their_accumulator():
    x, y = torch.full((16, 16), 1.0, dtype=torch.float16), torch.full((16, 16), 2.0**-9, dtype=torch.float16)
    z = torch.full((16, 16), 2048.0, dtype=torch.float16)
    launch((1,), K.multiply, (x, y, z, 16, 16, 16), sanitize=True)
    assert torch.equal(z, torch.full_like(z, 2048.0))  # 2048 + 1/32 is not a float16


def reference_control_flow(x: torch.Tensor, block: int, limit: int) -> torch.Tensor:
    total, steps = torch.zeros_like(x), 0
    for i in range(0, limit, 2):
        if i == 3 * block:
            continue
        if i > 8:
            break
        total = total + x * i
        steps += 1
    while steps < 20:
        steps += 3
        if steps == 11:
            total = -total
    return total if block == 2 else total + steps


@pytest.mark.parametrize("limit", [0, 1, 5, 12])
def test_control_flow(limit):
    x, y = numbers(torch.float32, 32), torch.zeros(32)
    launch((4,), K.control_flow, (x, y, limit, 8), sanitize=True)
    want = torch.cat([reference_control_flow(x[8 * block :][:8], block, limit) for block in range(4)])
    torch.testing.assert_close(y, want)


def test_jumps_out_of_nested_loops():
    x, y = torch.zeros(4, 6), torch.full((4,), 99, dtype=torch.int32)
    x[0, 3], x[1, 2], x[3, 5] = 1, 7, 4
    launch((4,), K.nested_jumps, (x, y, 6), sanitize=True)
    assert y.tolist() == [31, 21, -1, 51]


def test_what_the_compiler_rejects_is_rejected_with_its_line():
    @ct.kernel
    def adds_halves(x, y, z):
        tile = ct.load(x, (0,), (8,))
        ct.store(z, (0,), tile + ct.load(y, (0,), (8,)))

    half, brain = torch.zeros(8, dtype=torch.float16), torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(ct.TileTypeError, match=r"(?s)float16.*bfloat16.*test_tiles.py.*tile \+ ct.load"):
        launch((1,), adds_halves, (half, brain, half))


def test_a_reduction_pairs_elements_as_a_gpu_did():
    rows = torch.tensor(
        [
            [2, -3, 3, -3, -3, -3, -2, 1, -3, 2, 1, 2, -2, -3, 1, 3],
            [0, 2, 3, 0, -2, 1, -1, -3, -3, -1, 3, -2, -1, 2, 0, 3],
        ]
    ).float()
    y = torch.zeros(8, 2)
    launch((1,), K.reductions, (rows, y, 1, 2, 16))
    assert y[4].tolist() == [3, 3]  # of elements as large as each other, as measured on an H200
