"""Repeated calls that look at their tensors by PyTorch's guards: the recording that was used twice in a row."""

import threading

import pytest
import torch
from recording_fakes import ByAddress
from recording_fakes import add
from recording_fakes import x
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym import backend
from tilegym.backend import dispatcher
from tilegym.backend import recording
from tilegym.backend import recording_source
from tilegym.backend import tensor_guards
from tilegym.backend.cutile import launch as launch_module
from tilegym.backend.recording_writer import Submission

Tensor = torch.Tensor
NAME = "latest_for_test"


class Op:
    """An op of ``x``, ``by`` and ``other`` that counts the calls that are not repeated."""

    def __init__(self) -> None:
        self.served, self.answer = 0, 1

        @backend.dispatch(NAME)
        def op(x: Tensor, by: float = 0.5, other: Tensor | None = None, *, flag: bool = False) -> Tensor:
            """x + by + 1, with ``other`` instead of x if it is given."""

        @backend.register_impl(NAME, "cutile")
        def _(x: Tensor, by: float = 0.5, other: Tensor | None = None, *, flag: bool = False) -> Tensor:
            self.served += 1
            recording.ask(lambda: self.answer)
            y = torch.empty_like(x if other is None else other)
            add(x if other is None else other, y, by)
            return y

        self._op = op
        (self.recordings,) = op.op.named_recordings.values()

    def __call__(self, *args, **kwargs) -> Tensor:
        given = args[2] if len(args) > 2 and args[2] is not None else args[0]
        result = self._op(*args, backend="cutile", **kwargs)
        assert torch.equal(result, given + (args[1] if len(args) > 1 else 0.5) + 1)
        return result

    def served_for(self, *args, times: int = 1, **kwargs) -> int:
        """How many of these calls are not repeated."""
        before = self.served
        for _ in range(times):
            self(*args, **kwargs)
        return self.served - before


@pytest.fixture
def op(monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    try:
        yield Op()
    finally:
        dispatcher._ops.pop(NAME)


@pytest.fixture
def latest(op):
    """The op, of which a recording for x() is the latest one."""
    assert op.served_for(x(), times=4) == 2
    assert list(op.recordings.latest) == [(0.5, False)]
    return op


@pytest.fixture
def no_kinds(latest, monkeypatch):
    """Only the latest recording is left to repeat a call."""
    latest.recordings.known.clear()
    return latest


def test_like_tensors_are_not_looked_at_otherwise(no_kinds):
    assert no_kinds.served_for(x(seed=3), times=3) == 0
    assert no_kinds.served_for(x(seed=3), 0.5, None, flag=False) == 0


@pytest.mark.parametrize(
    "args",
    [(x(16),), (x().double(),), (x(16)[::2],), (x()[None][0, :4],), (x(), 0.25), (x(), 0.5, x(seed=1))],
    ids=["shape", "dtype", "strides", "part", "number", "another tensor"],
)
def test_other_calls_are_served(no_kinds, args):
    assert no_kinds.served_for(*args) == 1


def test_keywords_and_flags(no_kinds):
    assert no_kinds.served_for(x(), flag=True) == 1


def test_classes_are_told_apart(no_kinds):
    with torch.no_grad():
        assert no_kinds.served_for(torch.nn.Parameter(x())) == 1


def test_tensors_that_want_gradients(op):
    weight = torch.nn.Parameter(x())
    with torch.no_grad():
        assert op.served_for(weight, times=5) == 2
    assert len(op.recordings.latest) == 1
    assert op.served_for(weight, times=3) == 3, "with gradients nothing is repeated"
    with torch.no_grad():
        assert op.served_for(weight, times=3) == 0
    assert op.served_for(x(), times=4) == 2, "of another class"


def test_gradients_wanted_of_what_needed_none(latest):
    assert latest.served_for(x().requires_grad_(), times=3) == 3


def test_a_tensor_that_is_left_out(op):
    assert op.served_for(x(), 0.5, x(seed=1), times=5) == 2
    assert op.served_for(x(), times=4) == 2
    assert op.served_for(x(), 0.5, x(seed=1), times=4) == 0
    same = x(seed=2)
    assert op.served_for(same, 0.5, same, times=2) == 0, "by their kind, as before"


def test_inference_mode_and_other_threads(latest):
    with torch.inference_mode():
        assert latest.served_for(x(), times=3) == 0
    failures = []

    def others():
        try:
            assert latest.served_for(x(), times=3) == 0
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=others)
    thread.start()
    thread.join()
    assert failures == []


def test_changed_answers(latest):
    latest.answer = 2
    assert latest.served_for(x(), times=5) == 2
    latest.answer = 1
    assert latest.served_for(x(), times=5) == 2


def test_forgotten_with_all_others(latest):
    recording.forget()
    assert not latest.recordings.latest
    assert latest.served_for(x(), times=4) == 2


def test_forgotten_while_a_call_is_looked_up(op):
    """Whoever forgets all recordings does so for good: none that was found before becomes the latest one."""
    op.served_for(x(), times=3)
    (kind,) = op.recordings.known

    class Latest(dict):
        def __setitem__(self, others, found):
            recording.forget()
            super().__setitem__(others, found)

    call = op.recordings.call
    call.__globals__["__latest__"] = kept = Latest()
    assert op.served_for(x()) == 0
    assert not kept and kind not in op.recordings.known


def test_calls_that_come_often_are_recorded_again(op, monkeypatch):
    """By addresses, in place of the latest recording."""
    fake = ByAddress()
    how = Submission(launch_module._INTERPRETER.submit, fake.prepare)
    monkeypatch.setattr(launch_module, "_INTERPRETER", how)
    monkeypatch.setattr(recording, "USES_BEFORE_ADDRESSES", 4)
    assert [op.served_for(x()) for _ in range(7)] == [1, 1, 0, 0, 0, 0, 1] and not fake.launches
    assert op.served_for(x(), times=4) == 0 and len(fake.launches) == 4


def test_kinds_in_turn_keep_none(op):
    for _ in range(4):
        op(x(), 0.5)
        op(x(16), 0.5)
    assert op.served == 4 and not op.recordings.latest


def test_lists_are_bounded(op, monkeypatch):
    monkeypatch.setattr(recording, "MAX_KINDS", 3)
    for n in range(12):
        op.served_for(x(), float(n), times=4)
        assert len(op.recordings.latest) <= 3


def test_without_guards(op, monkeypatch):
    monkeypatch.setattr(recording_source.tensor_guards, "guard", lambda tensors: None)
    assert op.served_for(x(), times=6) == 2
    assert not op.recordings.latest


def test_guards_are_used_with_versions_that_were_tried(monkeypatch):
    assert tensor_guards.guard([x()])(x(seed=1)) and not tensor_guards.guard([x()])(x(4))
    for version in ("2.8.0", "2.16.0+cpu", "3.0.0a0"):
        tensor_guards._works.cache_clear()
        monkeypatch.setattr(torch, "__version__", version)
        assert tensor_guards.guard([x()]) is None
    tensor_guards._works.cache_clear()


def test_modes_do_not_see_guards_being_tried(request):
    """A mode around the first call of an op sees what the op does, nothing else."""
    request.addfinalizer(tensor_guards._works.cache_clear)

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    for mode in (Dispatched(), Called(), FakeTensorMode()):
        tensor_guards._works.cache_clear()
        with mode:
            assert tensor_guards._works()
    assert not seen


def test_guards_that_do_not_tell_tensors_apart_are_not_used(monkeypatch):
    monkeypatch.setattr(tensor_guards, "_guard", lambda tensors: lambda *others: True)
    tensor_guards._works.cache_clear()
    assert tensor_guards.guard([x()]) is None
    tensor_guards._works.cache_clear()


def test_tensors_that_pytorch_dispatches_otherwise():
    """One whose sign is to be turned is none like others."""
    turned = torch.complex(x(), x()).conj().imag
    assert turned.is_neg()
    assert not tensor_guards.guard([torch.empty_strided(turned.shape, turned.stride())])(turned)
