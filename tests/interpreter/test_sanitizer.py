"""Each check of the sanitizer finds the mistake it is for, names its place, and lets the right kernel pass."""

import cuda.tile as ct
import pytest
import torch

from tilegym import interpreter
from tilegym.interpreter import DivisibilityError
from tilegym.interpreter import KernelAssertionError
from tilegym.interpreter import OutOfBoundsError
from tilegym.interpreter import UndeterminedValueError
from tilegym.interpreter import WriteConflictError
from tilegym.interpreter import launch

ConstInt = ct.Constant[int]


def line_of(kernel, text: str) -> str:
    """``file:line`` of the first line of a kernel with ``text`` in it."""
    import inspect

    lines, start = inspect.getsourcelines(kernel._annotated_function.pyfunc)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def check(error, kernel, text, block, array=None, index=None):
    assert error.kernel == kernel._annotated_function.pyfunc.__name__
    assert error.location == line_of(kernel, text)
    assert (error.block, error.array, error.index) == (block, array, index)
    for part in (error.kernel, error.location, error.block, array, index):
        assert part is None or str(part) in str(error)


@ct.kernel
def row_sums(x, y, columns, masked: ct.Constant[bool], width: ConstInt):
    row = ct.bid(0)
    tile = ct.load(x, (row, 0), (1, width))
    if masked:
        tile = ct.where(ct.arange(width, dtype=ct.int32)[None, :] < columns, tile, 0)
    ct.store(y, (row,), ct.sum(tile, axis=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.float64], ids=str)
def test_undetermined_padding(dtype):
    x, y = torch.ones(3, 5, dtype=dtype), torch.zeros(3, dtype=dtype)
    launch((3,), row_sums, (x, y, 5, False, 8))  # zeros happen to be there
    assert y.tolist() == [5, 5, 5]
    with pytest.raises(UndeterminedValueError, match="padding of array 'x', loaded at") as caught:
        launch((3,), row_sums, (x, y, 5, False, 8), sanitize=True)
    check(caught.value, row_sums, "ct.store", (0, 0, 0), "y", (0,))
    assert line_of(row_sums, "ct.load") in str(caught.value)
    launch((3,), row_sums, (x, y, 5, True, 8), sanitize=True)
    assert y.tolist() == [5, 5, 5]
    launch((3,), row_sums, (torch.ones(3, 8, dtype=dtype), y, 8, False, 8), sanitize=True)
    assert y.tolist() == [8, 8, 8]


@ct.kernel
def maximum_of_row(x, y, width: ConstInt):
    ct.store(y, (ct.bid(0),), ct.max(ct.load(x, (ct.bid(0), 0), (1, width)), axis=1))


def test_undetermined_padding_that_nan_would_not_show():
    x, y = torch.ones(1, 5), torch.zeros(1)  # max ignores NaN
    with pytest.raises(UndeterminedValueError):
        launch((1,), maximum_of_row, (x, y, 8), sanitize=True)


@ct.kernel
def minimum_of_row(x, y, width: ConstInt):
    ct.store(y, (ct.bid(0),), ct.min(ct.load(x, (ct.bid(0), 0), (1, width)), axis=1))


@ct.kernel
def number_of_nonzeros(x, y, width: ConstInt):
    ct.store(y, (ct.bid(0),), ct.sum(ct.where(ct.load(x, (ct.bid(0), 0), (1, width)) != 0, 1, 0), axis=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("kernel", [minimum_of_row, maximum_of_row, number_of_nonzeros])
def test_undetermined_padding_that_some_contents_hide(kernel, dtype):
    # Least values hide large padding, greatest ones small padding, and a count of what is not zero hides both.
    x = torch.full((1, 5), 100, dtype=dtype)
    y = torch.zeros(1, dtype=torch.int32 if kernel is number_of_nonzeros else dtype)
    with pytest.raises(UndeterminedValueError):
        launch((1,), kernel, (x, y, 8), sanitize=True)
    launch((1,), kernel, (torch.full((1, 8), 100, dtype=dtype), y, 8), sanitize=True)


@ct.kernel
def gathers_checked(x, index, y):
    ct.store(y, (0,), ct.gather(x, ct.load(index, (0,), (4,))))


def test_undetermined_index():
    x, index, y = torch.ones(5), torch.arange(3, dtype=torch.int32), torch.zeros(4)
    with pytest.raises(UndeterminedValueError, match="padding of array 'index'"):  # whether it is in bounds is chance
        launch((1,), gathers_checked, (x, index, y), sanitize=True)
    launch((1,), gathers_checked, (x, index, y[:3]), sanitize=True)


@ct.kernel
def branch_on_padding(x, y):
    tile = ct.load(x, (0,), (4,))
    if ct.sum(tile) > 1000:
        ct.store(y, (0,), tile)


def test_undetermined_control_flow():
    with pytest.raises(UndeterminedValueError, match="whether a store happens"):
        launch((1,), branch_on_padding, (torch.ones(3), torch.zeros(4)), sanitize=True)


@ct.kernel
def accumulate_in_place(x, total):
    tile = ct.load(x, (ct.bid(0),), (4,))
    ct.store(x, (ct.bid(0),), tile + 1)
    ct.atomic_add(total, 0, 1)


def test_a_block_that_runs_twice_leaves_the_effects_of_one():
    x, total = torch.zeros(6), torch.zeros(1, dtype=torch.int32)
    launch((2,), accumulate_in_place, (x, total), sanitize=True)
    assert x.tolist() == [1.0] * 6 and total.item() == 2


@ct.kernel
def overlapping_stores(y, shift: ConstInt):
    ct.store(y, (ct.bid(0) // shift,), ct.full((4,), 1.0, ct.float32))


@ct.kernel
def scatters(index, y, atomic: ct.Constant[bool]):
    where = ct.load(index, (ct.bid(0),), (4,))
    if atomic:
        ct.atomic_add(y, where, ct.arange(4, dtype=ct.int32))
    else:
        ct.scatter(y, where, ct.arange(4, dtype=ct.int32))


@ct.kernel
def stores_after_atomic(y):
    ct.atomic_add(y, 0, 1)
    if ct.bid(0) == 1:
        ct.scatter(y, 0, 5)


def test_write_conflicts_between_blocks():
    y = torch.zeros(16)
    with pytest.raises(WriteConflictError, match=r"block \(0, 0, 0\) wrote") as caught:
        launch((4,), overlapping_stores, (y, 2), sanitize=True)
    check(caught.value, overlapping_stores, "ct.store", (1, 0, 0), "y", (0,))
    launch((4,), overlapping_stores, (y, 1), sanitize=True)
    index = torch.tensor([0, 1, 2, 3, 7, 6, 5, 3], dtype=torch.int32)
    counts = torch.zeros(2, 4, dtype=torch.int32).reshape(8)
    with pytest.raises(WriteConflictError) as caught:
        launch((2,), scatters, (index, counts, False), sanitize=True)
    check(caught.value, scatters, "ct.scatter", (1, 0, 0), "y", (3,))
    counts.zero_()
    launch((2,), scatters, (index, counts, True), sanitize=True)
    assert counts.tolist() == [0, 1, 2, 6, 0, 2, 1, 0]
    with pytest.raises(WriteConflictError, match="several blocks"):
        launch((2,), stores_after_atomic, (counts,), sanitize=True)


def test_write_conflict_within_a_scatter():
    index, y = torch.tensor([0, 1, 1, 2], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(WriteConflictError, match="lanes of one scatter") as caught:
        launch((1,), scatters, (index, y, False), sanitize=True)
    check(caught.value, scatters, "ct.scatter", (0, 0, 0), "y", (1,))


@ct.kernel
def gathers_unchecked(x, index, y):
    where = ct.load(index, (ct.bid(0),), (4,))
    ct.store(y, (ct.bid(0),), ct.gather(x, where, check_bounds=False))


def test_gather_beyond_the_array():
    whole = torch.arange(16.0)
    index, y = torch.tensor([0, 1, 2, 3, 4, 9, 5, 6], dtype=torch.int32), torch.zeros(8)
    launch((2,), gathers_unchecked, (whole[:8], index, y))  # within the storage: as on a GPU, nothing notices
    with pytest.raises(OutOfBoundsError) as caught:
        launch((2,), gathers_unchecked, (whole[:8], index, y), sanitize=True)
    check(caught.value, gathers_unchecked, "ct.gather", (1, 0, 0), "x", (9,))
    index[5] = 100
    with pytest.raises(OutOfBoundsError):  # beyond the storage, always
        launch((2,), gathers_unchecked, (whole[:8], index, y))


@ct.kernel
def gathers_masked(x, index, wanted, y):
    where, mask = ct.load(index, (0,), (4,)), ct.load(wanted, (0,), (4,)) > 0
    ct.store(y, (0,), ct.gather(x, where, mask=mask, padding_value=-1.0, check_bounds=False))


@pytest.mark.parametrize("sanitize", [False, True])
def test_masked_lanes_may_lie_anywhere(sanitize):
    x, y, index = torch.arange(8.0), torch.zeros(4), torch.tensor([-900, 7, 900, 0], dtype=torch.int32)
    wanted = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    launch((1,), gathers_masked, (x, index, wanted, y), sanitize=sanitize)
    assert y.tolist() == [-1, 7, -1, 0]
    launch((1,), gathers_masked, (x[:0], index, 0 * wanted, y), sanitize=sanitize)  # of nothing, nothing is wanted
    launch((1,), gathers_masked, (torch.zeros(0), index, 0 * wanted, y), sanitize=sanitize)
    assert y.tolist() == [-1] * 4
    index[3] = 800
    with pytest.raises(OutOfBoundsError) as caught:
        launch((1,), gathers_masked, (x, index, wanted, y), sanitize=sanitize)
    check(caught.value, gathers_masked, "ct.gather", (0, 0, 0), "x", (800,))
    if sanitize:
        with pytest.raises(OutOfBoundsError):
            launch((1,), gathers_masked, (x[:0], index, wanted, y), sanitize=True)


@ct.kernel
def copies_tile(x, y, tile: ConstInt, checked: ct.Constant[bool]):
    if checked:
        ct.store(y, (0,), ct.load(x, (tile,), (4,), padding_mode=ct.PaddingMode.ZERO))
    else:
        ct.store(y, (0,), ct.load(x, (tile,), (4,), check_bounds=False))


def test_tiles_outside_the_array():
    x, y = torch.ones(6), torch.zeros(4)
    launch((1,), copies_tile, (x, y, 1, True), sanitize=True)
    assert y.tolist() == [1, 1, 0, 0]
    with pytest.raises(OutOfBoundsError, match="entirely outside") as caught:
        launch((1,), copies_tile, (x, y, 2, True), sanitize=True)
    check(caught.value, copies_tile, "ZERO", (0, 0, 0), "x", (8,))
    with pytest.raises(OutOfBoundsError, match="check_bounds=False"):
        launch((1,), copies_tile, (x, y, 1, False))


@ct.kernel
def copies_slice(x, y, start, stop):
    ct.store(y, (0,), ct.load(x.slice(0, start, stop), (0,), (4,), padding_mode=ct.PaddingMode.ZERO))


def test_slices_beyond_the_array():
    x, y = torch.arange(16.0)[:8], torch.zeros(4)
    launch((1,), copies_slice, (x, y, 5, 8), sanitize=True)
    assert y.tolist() == [5, 6, 7, 0]
    launch((1,), copies_slice, (x, y, 7, 10))
    with pytest.raises(OutOfBoundsError, match="reaches outside") as caught:
        launch((1,), copies_slice, (x, y, 7, 10), sanitize=True)
    check(caught.value, copies_slice, "x.slice", (0, 0, 0), "x", (9,))
    with pytest.raises(DivisibilityError, match="value -2 is not within 0") as caught:
        launch((1,), copies_slice, (x, y, 7, 5))
    check(caught.value, copies_slice, "x.slice", (0, 0, 0))


@ct.kernel
def claims_divisibility(x, y, offset):
    start = ct.assume_divisible_by(offset, 8)
    ct.store(y, (0,), ct.load(x, (start // 4,), (4,)))


def test_wrong_divisibility():
    x, y = torch.arange(16.0), torch.zeros(4)
    launch((1,), claims_divisibility, (x, y, 8))
    assert y.tolist() == [8, 9, 10, 11]
    with pytest.raises(DivisibilityError, match="value 12 is not divisible by 8") as caught:
        launch((1,), claims_divisibility, (x, y, 12))
    check(caught.value, claims_divisibility, "assume_divisible_by", (0, 0, 0))


@ct.kernel
def picks(arrays, x, y, which, part):
    ct.store(y, (0,), ct.load(arrays[which], (0,), (2,)) + ct.extract(ct.load(x, (0,), (4,)), (part,), (2,)))


def test_indices_of_lists_and_sub_tiles():
    arrays, x, y = [torch.ones(2), torch.full((2,), 2.0)], torch.arange(4.0), torch.zeros(2)
    launch((1,), picks, (arrays, x, y, 1, 1))
    assert y.tolist() == [4, 5]
    with pytest.raises(OutOfBoundsError, match="list index 2") as caught:
        launch((1,), picks, (arrays, x, y, 2, 0))
    check(caught.value, picks, "arrays[which]", (0, 0, 0), "arrays", (2,))
    with pytest.raises(OutOfBoundsError, match="sub-tiles") as caught:
        launch((1,), picks, (arrays, x, y, 0, 2))
    check(caught.value, picks, "ct.extract", (0, 0, 0), None, (2,))


@ct.kernel
def asserts(x):
    ct.assert_(ct.load(x, (ct.bid(0),), (4,)) > 0, "all must be positive")


def test_assertions():
    launch((2,), asserts, (torch.ones(8),))
    with pytest.raises(KernelAssertionError, match="all must be positive") as caught:
        launch((2,), asserts, (torch.tensor([1.0] * 5 + [-1.0] * 3),))
    check(caught.value, asserts, "ct.assert_", (1, 0, 0))


def helper(x, y):
    ct.store(y, (0,), ct.load(x, (3,), (4,), padding_mode=ct.PaddingMode.ZERO))


@ct.kernel
def calls_helper(x, y):
    helper(x, y)


def test_location_in_a_helper_names_its_caller():
    with interpreter.sanitize(), pytest.raises(OutOfBoundsError) as caught:
        launch((1,), calls_helper, (torch.ones(4), torch.zeros(4)))
    assert caught.value.location.endswith(f"called from {line_of(calls_helper, '    helper(x, y)')}")
    launch((1,), calls_helper, (torch.ones(4), torch.zeros(4)))  # the context manager has ended
    with interpreter.sanitize(), interpreter.sanitize(False):
        launch((1,), calls_helper, (torch.ones(4), torch.zeros(4)))
