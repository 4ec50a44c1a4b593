"""Loads, stores, gathers, views and atomics in the interpreter against torch indexing, at any shape."""

import hypothesis
import pytest
import torch
from common import some
from hypothesis import strategies as st

from interpreter import functions as F
from interpreter import kernels as K
from interpreter.cases import FLOAT8
from interpreter.cases import matrix
from interpreter.cases import numbers
from tilegym.interpreter import UndeterminedValueError
from tilegym.interpreter import launch

settings = hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
DTYPES = (torch.bool, *F.INTEGER_DTYPES, *F.FLOAT_DTYPES, *FLOAT8)
ONE_OF_EACH_SIZE = (torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn)
PADDING = (0.0, -0.0, torch.nan, torch.inf, -torch.inf)
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(RAW[x.element_size()])


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(raw(x), raw(y))


def cdiv(n: int, m: int) -> int:
    return -(-n // m)


@pytest.mark.parametrize("dtype", some(DTYPES, *ONE_OF_EACH_SIZE), ids=str)
@settings
@hypothesis.given(data=st.data())
def test_tiles_of_a_ragged_matrix(dtype, data):
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    tile = data.draw(st.sampled_from([1, 2, 8, 16])), data.draw(st.sampled_from([1, 4, 16]))
    x = matrix(dtype, rows, columns)
    if data.draw(st.booleans()):
        x = matrix(dtype, 2 * rows, columns + 3)[::2, 1 : columns + 1]
    grid = cdiv(rows, tile[0]), cdiv(columns, tile[1]), 1
    order = data.draw(st.sampled_from(["sequential", "shuffled", "threads"]))
    y = torch.zeros(rows, columns, dtype=dtype)
    launch(grid, K.copy_padded, (x, y, 0, *tile), sanitize=order != "threads", order=order)
    assert equal(x, y)
    transposed = torch.zeros(columns, rows, dtype=dtype)
    launch(grid, K.store_column_major, (x, transposed, 0 or tile[0], tile[1]), sanitize=True)
    assert equal(x.t(), transposed)


@pytest.mark.parametrize("mode", range(5))
@pytest.mark.parametrize("dtype", F.FLOAT_DTYPES, ids=str)
def test_padding(dtype, mode):
    x = matrix(dtype, 13, 21)
    y = torch.zeros(16, 32, dtype=dtype)
    launch((2, 2), K.copy_padded, (x, y, mode, 8, 16), sanitize=True)
    want = torch.full((16, 32), PADDING[mode], dtype=dtype)
    want[:13, :21] = x
    assert equal(y, want) or torch.equal(y.isnan(), want.isnan()) and mode == 2


def test_transposed_load():
    x, y = matrix(torch.int64, 13, 21), torch.zeros(21, 13, dtype=torch.int64)
    launch((2, 2), K.copy_transposed, (x, y, 8, 16), sanitize=True)
    assert torch.equal(y, x.t())


@pytest.mark.parametrize("dtype", (torch.float32, torch.int16, torch.uint64), ids=str)
@settings
@hypothesis.given(data=st.data())
def test_gather_and_scatter(dtype, data):
    n = data.draw(st.integers(1, 40))
    positions = data.draw(st.lists(st.integers(-3, n + 5), min_size=16, max_size=16, unique=n > 20) if n > 20 else
                          st.permutations(range(-3, 13)))  # fmt: skip
    index = torch.tensor(positions, dtype=torch.int32)
    x, y = numbers(dtype, n), torch.zeros(64, dtype=dtype)
    launch((1,), K.gather_scatter, (x, index, y, 16), sanitize=True)
    inside = (index >= 0) & (index < n)
    safe = torch.where(inside, index, 0).long()
    want = torch.zeros(64, dtype=dtype)
    raw(want)[:16] = torch.where(inside, raw(x)[safe], 0)
    padded = torch.where(inside & (index > 2), raw(x)[safe], raw(torch.tensor([7], dtype=dtype))[0])
    target = index.long() + 16
    stored = (index < 16) & (target >= 0) & (target < 64)
    raw(want)[target[stored]] = padded[stored]
    assert equal(y, want)


def test_gather_of_rows_pads_with_zero():
    x, y = matrix(torch.bfloat16, 9, 12), torch.ones(4, 16, dtype=torch.bfloat16)
    launch((1,), K.gather_rows, (x, torch.tensor([8, 0, 9, 3], dtype=torch.int32), y, 4, 16), sanitize=True)
    want = torch.zeros(4, 16, dtype=torch.bfloat16)
    want[[0, 1, 3], :12] = x[[8, 0, 3]]
    assert equal(y, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_gather_of_single_numbers_pads_with_zero(dtype):
    """Numbers, not tiles: negative ones, such as a target that is ignored, lie outside."""
    x, y = matrix(torch.float32, 4, 12), torch.ones(4)
    launch((4,), K.gather_one_of_each_row, (x, torch.tensor([-100, 11, -1, 12], dtype=dtype), y), sanitize=True)
    assert torch.equal(y, torch.stack((torch.tensor(0.0), x[1, 11], torch.tensor(0.0), torch.tensor(0.0))))


def test_rows_by_advanced_indexing():
    x, y = matrix(torch.float32, 9, 12), torch.zeros(9, 12)
    launch((1,), K.rows_at, (x, torch.tensor([8, 0, 9, 3], dtype=torch.int32), y, 6, 4, 8), sanitize=True)
    want = torch.zeros(9, 12)
    want[[8, 0, 3], 6:] = x[[8, 0, 3], 6:]
    assert torch.equal(y, want)
    with pytest.raises(UndeterminedValueError):
        launch((1,), K.undetermined_rows, (x[:5, :4], torch.zeros(4, 4)), sanitize=True)


@pytest.mark.parametrize("step", [2, 4, 6])
def test_tiled_view_with_steps(step):
    x = numbers(torch.float32, 20)
    count = cdiv(20, step)
    y = torch.zeros(count, 4)
    launch((1,), K.overlapping_tiles, (x, y, 4, step), sanitize=True)
    padded = torch.cat((x, torch.zeros(8)))
    assert torch.equal(y, torch.stack([padded[i * step : i * step + 4] for i in range(count)]))


@settings
@hypothesis.given(start=st.integers(0, 30), length=st.integers(0, 30))
def test_slice(start, length):
    x, y = numbers(torch.float32, 64), torch.zeros(32)
    launch((1,), K.sliced, (x, y, start, start + length, 8), sanitize=True)
    want = torch.zeros(32)
    want[:length] = x[start : start + length]
    assert torch.equal(y, want)


def test_list_of_arrays():
    arrays = [numbers(torch.float32, n, n) for n in (20, 24, 17)]
    y = torch.zeros(24)
    launch((3,), K.sum_of_list, (arrays, y, 8), sanitize=True)
    want = torch.zeros(24)
    for array in arrays:
        want[: len(array)] += array
    torch.testing.assert_close(y, want)


def test_raw_memory():
    x, y = numbers(torch.float32, 16), torch.zeros(16)
    launch((1,), K.raw_offsets, (x, y, 16), sanitize=True)
    assert torch.equal(y, torch.cat((x[::2], torch.full((8,), -1.0))).flip(0))


def test_scalar_arguments_and_rank_0_tiles():
    x, y = numbers(torch.float32, 4), torch.zeros(4)
    launch((4,), K.scalars, (x, y, 3, 0.5, True, 2**40), sanitize=True)
    torch.testing.assert_close(y, x + 1.5 + 2**7)
    launch((4,), K.scalars, (x, y, 3, 0.5, False, 2**40), sanitize=True)
    assert torch.equal(y, x)


# Atomics


@pytest.mark.parametrize("dtype", (torch.int32, torch.uint32, torch.int64, torch.uint64), ids=str)
def test_atomic_integers(dtype):
    name = str(dtype).removeprefix("torch.")
    updates = numbers(dtype, 128)
    table = updates.numpy().reshape(16, 8)
    info = torch.iinfo(dtype)
    full = lambda value: torch.from_numpy(table[0] * 0 + table.dtype.type(value))  # noqa: E731
    total, low, high = full(0), full(info.max), full(info.min)
    launch((4,), K.atomic_arithmetic, (total, low, high, updates, 32), sanitize=True)
    assert total.numpy().tolist() == table.sum(0, dtype=name).tolist()
    assert low.numpy().tolist() == table.min(0).tolist() and high.numpy().tolist() == table.max(0).tolist()
    ones, zeros, parity = (numbers(dtype, 8, seed) for seed in "abc")
    start = [array.numpy().copy() for array in (ones, zeros, parity)]
    launch((4,), K.atomic_bits, (ones, zeros, parity, updates, 32), sanitize=True)
    for row in table:
        start = [start[0] | row, start[1] & row, start[2] ^ row]
    assert [array.numpy().tolist() for array in (ones, zeros, parity)] == [array.tolist() for array in start]


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("order", ["sequential", "shuffled", "threads"])
def test_atomic_floats(dtype, order):
    updates = numbers(torch.int8, 128).to(torch.float32).remainder(4).to(dtype)
    total, view = torch.zeros(8, dtype=dtype), torch.zeros(32, dtype=dtype)
    launch((4,), K.atomic_float_add, (total, updates, 32), order=order)
    launch((4,), K.atomic_view, (view, updates, 32), order=order)
    assert torch.equal(total, updates.reshape(16, 8).sum(0)) and torch.equal(view, updates.reshape(4, 32).sum(0))


def test_atomic_swaps():
    x = torch.tensor([3, 4] * 16, dtype=torch.int32)
    old = torch.zeros(2, 16, dtype=torch.int32)
    launch((1,), K.atomic_swap, (x, old, 16), sanitize=True)
    assert old.tolist() == [[3, 4] * 8, [3, 4] * 8]
    assert x.tolist() == [100, 4] * 8 + list(range(16))
