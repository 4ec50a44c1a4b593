"""Repeated calls whose launches need no more of their tensors than the addresses."""

import ctypes

import pytest
import torch
from recording_fakes import add
from recording_fakes import served_op
from recording_fakes import x

from tilegym.backend.cutile import launch as launch_module
from tilegym.backend.recording_writer import Submission


class ByAddress:
    """Stands in for :func:`direct_launch.prepare`, on the CPU: what it prepares adds eight floats a launch.

    ``errors``: what the next launches return instead of launching. ``prepares``: whether it does.
    """

    def __init__(self) -> None:
        self.launches, self.errors, self.prepares = [], [], True

    def prepare(self, index, grid, kernel, args, overlap):
        if not self.prepares:
            return None
        count, plus = args[0].shape[0], args[3] + args[1]

        def submit(*addresses: int) -> int:
            if self.errors and (error := self.errors.pop(0)):
                return error
            self.launches.append(addresses)
            source, target = (ctypes.cast(a, ctypes.POINTER(ctypes.c_float)) for a in addresses)
            for i in range(count):
                target[i] = source[i] + plus
            return 0

        return submit, (0, 2)


@pytest.fixture
def by_address(monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    fake = ByAddress()
    how = Submission(launch_module._INTERPRETER.submit, fake.prepare)
    monkeypatch.setattr(launch_module, "_INTERPRETER", how)
    return fake


@pytest.fixture
def served():
    with served_op() as op:
        yield op


def test_repeated_calls_are_launched_by_address(by_address, served):
    assert served.calls_of((x(seed=1),), (x(seed=2),)) == [1, 2] and by_address.launches == []
    given = x(seed=3)
    result = served(given)
    assert torch.equal(result, given + 1.5) and served.calls == 2
    assert by_address.launches == [(given.data_ptr(), result.data_ptr())]


def test_views_are_addresses_ahead_and_are_not_made(by_address, served, monkeypatch):
    def serve(x, by, other, several):
        whole = torch.empty(2, x.shape[0])
        between = torch.empty_like(x)
        add(x[4:], between[:4], by)
        add(x[:4], between[4:], by)
        add(between, whole[1], by)
        return whole

    served.serve = serve
    for seed in range(2):
        served(x(seed=seed))
    made = []
    monkeypatch.setattr(torch.Tensor, "as_strided", lambda *args: made.append(args))
    given = x(seed=5)
    result = served(given)
    assert torch.equal(result[1], torch.cat((given[4:], given[:4])) + 3.0) and served.calls == 2 and not made
    first, second, third = by_address.launches
    assert first[0] == given.data_ptr() + 16 and second[0] == given.data_ptr()
    assert (third[0], second[1]) == (first[1], first[1] + 16) and third[1] == result.data_ptr() + 32


def test_other_alignment_takes_the_other_way(by_address, served):
    served.calls_of((x(seed=1),), (x(seed=2),))
    unaligned = x(9, seed=3)[1:]
    assert unaligned.data_ptr() % 16 == 4
    assert served.calls_of((unaligned,), (x(seed=4),)) == [2, 2] and len(by_address.launches) == 1


def test_calls_that_are_not_aligned_when_recorded_are_repeated_as_they_were(by_address, served):
    assert served.calls_of(*((x(9, seed=seed)[1:],) for seed in range(3)), (x(),)) == [1, 2, 2, 2]
    assert by_address.launches == []


def test_what_cannot_be_prepared_is_repeated_as_it_was(by_address, served):
    by_address.prepares = False
    assert served.calls_of(*((x(seed=seed),) for seed in range(4))) == [1, 2, 2, 2] and by_address.launches == []


def test_a_launch_that_the_driver_does_not_take(by_address, served):
    served.calls_of((x(seed=1),), (x(seed=2),))
    by_address.errors = [-1]
    assert served.calls_of((x(seed=3),), (x(seed=4),)) == [2, 2] and len(by_address.launches) == 1


def test_no_first_launch_is_made_twice(by_address, served):
    def serve(x, by, other, several):
        add(x, x, by)
        add(x, x, by)
        return x

    served.serve = serve
    for _ in range(2):
        served(x())
    given = x(seed=3)
    by_address.errors = [0, 700]
    with pytest.raises(RuntimeError, match="700"):
        served(given)
    assert torch.equal(given, x(seed=3) + 1.5)
