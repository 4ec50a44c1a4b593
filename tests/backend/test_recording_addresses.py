"""Repeated calls whose launches need no more of their tensors than the addresses."""

import pytest
import torch
from recording_fakes import ByAddress
from recording_fakes import add
from recording_fakes import served_op
from recording_fakes import x

from tilegym.backend import recording
from tilegym.backend import recording_source
from tilegym.backend.cutile import launch as launch_module
from tilegym.backend.recording_writer import Submission
from tilegym.ops.cutile import workspace


@pytest.fixture
def by_address(monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    fake = ByAddress()
    how = Submission(launch_module._INTERPRETER.submit, fake.prepare)
    monkeypatch.setattr(launch_module, "_INTERPRETER", how)
    monkeypatch.setattr(recording, "USES_BEFORE_ADDRESSES", 1)
    return fake


@pytest.fixture
def served():
    with served_op() as op:
        yield op


def ready(served) -> None:
    """Lets it be recorded, repeated as often as it takes, and recorded by addresses."""
    for seed in range(4):
        served(x(seed=seed))
    assert served.calls == 3


def test_calls_that_come_often_are_launched_by_address(by_address, served):
    assert served.calls_of(*((x(seed=seed),) for seed in range(4))) == [1, 2, 2, 3] and by_address.launches == []
    for seed in (4, 5):
        given = x(seed=seed)
        result = served(given)
        assert torch.equal(result, given + 1.5) and served.calls == 3
        assert by_address.launches.pop() == (given.data_ptr(), result.data_ptr())


def test_calls_that_do_not_are_not_recorded_again(by_address, served, monkeypatch):
    monkeypatch.setattr(recording, "USES_BEFORE_ADDRESSES", 3)
    assert served.calls_of(*((x(seed=seed),) for seed in range(6))) == [1, 2, 2, 2, 2, 3]
    recording.forget()
    assert served.calls_of(*((x(seed=seed),) for seed in range(4))) == [4, 5, 5, 5] and by_address.launches == []


def test_one_tensor_for_two_parameters_is_repeated_meanwhile(by_address, served):
    """Such a call cannot be recorded itself."""

    def serve(x, by, other, several):
        y = torch.empty_like(x)
        add(x, y, by)
        return y

    served.serve = serve
    for seed in range(3):
        served(x(seed=seed), 0.5, x())
    given = x(seed=3)
    assert torch.equal(served(given, 0.5, given), given + 1.5) and served.calls == 2
    served(x(), 0.5, x(seed=4))
    assert served.calls == 3 and by_address.launches == []
    assert torch.equal(served(given, 0.5, given), given + 1.5) and served.calls == 3 and len(by_address.launches) == 1


def test_nothing_is_counted_where_there_are_no_addresses(served, monkeypatch):
    monkeypatch.setattr(recording, "USES_BEFORE_ADDRESSES", 1)
    assert served.calls_of(*((x(seed=seed),) for seed in range(6))) == [1, 2, 2, 2, 2, 2]


def test_views_are_addresses_ahead_and_are_not_made(by_address, served, monkeypatch):
    def serve(x, by, other, several):
        whole = torch.empty(2, x.shape[0])
        between = torch.empty_like(x)
        add(x[4:], between[:4], by)
        add(x[:4], between[4:], by)
        add(between, whole[1], by)
        return whole

    served.serve = serve
    ready(served)
    made = []
    monkeypatch.setattr(torch.Tensor, "as_strided", lambda *args: made.append(args))
    given = x(seed=5)
    result = served(given)
    assert torch.equal(result[1], torch.cat((given[4:], given[:4])) + 3.0) and served.calls == 3 and not made
    first, second, third = by_address.launches
    assert first[0] == given.data_ptr() + 16 and second[0] == given.data_ptr()
    assert (third[0], second[1]) == (first[1], first[1] + 16) and third[1] == result.data_ptr() + 32


@pytest.mark.parametrize("varies", [False, True])
def test_memory_whose_shape_tells_something_is_more_than_an_address(by_address, served, varies):
    memory = torch.zeros(64)

    def serve(x, by, other, several):
        (kept,) = recording.lent(lambda: (memory,), varies=varies)
        y = torch.empty_like(x)
        add(x, kept[:8], by)
        add(kept[:8], y, by)
        return y

    served.serve = serve
    for seed in range(8):
        torch.testing.assert_close(served(x(seed=seed)), x(seed=seed) + 3.0)
    assert bool(by_address.launches) is not varies and served.calls == (2 if varies else 3)


def test_states_that_launches_share_in_turns_are_more_than_an_address(by_address, served, monkeypatch):
    """Their shape says whose turn it is."""
    monkeypatch.setattr(workspace, "_turns", {})
    monkeypatch.setattr(workspace, "_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(workspace, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)

    def serve(x, by, other, several):
        (states,) = workspace.shared_states(x, 2)
        sizes.append(len(states))
        y = torch.empty_like(x)
        add(x, y, by)
        return y

    sizes, served.serve = [], serve
    for seed in range(8):
        torch.testing.assert_close(served(x(seed=seed)), x(seed=seed) + 1.5)
    assert len(set(sizes)) == len(sizes) == 2 and not by_address.launches


def test_views_elsewhere_share_their_code(by_address, served):
    """What is written out is kept for ever."""

    def serve(x, by, other, several):
        whole = torch.empty(2, x.shape[0])
        add(x, whole[1], by)
        return whole

    served.serve = serve
    sizes = []
    for size in (16, 32, 48, 64):
        for _ in range(5):
            served(x(size))
        sizes.append(recording_source._bound.cache_info().currsize)
    assert len(by_address.launches) == 4 and len(set(sizes)) == 1


def test_other_alignment_takes_the_other_way(by_address, served):
    ready(served)
    unaligned = x(9, seed=3)[1:]
    assert unaligned.data_ptr() % 16 == 4
    assert served.calls_of((unaligned,), (x(seed=4),)) == [3, 3] and len(by_address.launches) == 1


def test_calls_that_are_not_aligned_when_recorded_are_repeated_as_they_were(by_address, served):
    unaligned = [(x(9, seed=seed)[1:],) for seed in range(5)]
    assert served.calls_of(*unaligned, (x(),)) == [1, 2, 2, 3, 3, 3] and by_address.launches == []


@pytest.mark.parametrize("raises", [False, True])
def test_what_cannot_be_prepared_is_repeated_as_it_was(by_address, served, monkeypatch, raises):
    by_address.prepares = False
    if raises:
        how = Submission(launch_module._INTERPRETER.submit, lambda *args: 1 / 0)
        monkeypatch.setattr(launch_module, "_INTERPRETER", how)
    assert served.calls_of(*((x(seed=seed),) for seed in range(6))) == [1, 2, 2, 3, 3, 3]
    assert by_address.launches == []


def test_a_launch_that_the_driver_does_not_take(by_address, served):
    ready(served)
    by_address.errors = [-1]
    assert served.calls_of((x(seed=3),), (x(seed=4),)) == [3, 3] and len(by_address.launches) == 1


def test_no_first_launch_is_made_twice(by_address, served):
    def serve(x, by, other, several):
        add(x, x, by)
        add(x, x, by)
        return x

    served.serve = serve
    ready(served)
    given = x(seed=3)
    by_address.errors = [0, 700]
    with pytest.raises(RuntimeError, match="700"):
        served(given)
    assert torch.equal(given, x(seed=3) + 1.5)
