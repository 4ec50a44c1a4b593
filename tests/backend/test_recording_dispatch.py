"""Recordings of calls beside all else that decides how a call is served: backends, errors, tuning, threads."""

import contextlib
import threading

import pytest
import torch
from recording_fakes import add_kernel
from recording_fakes import served_op
from recording_fakes import x
from torch._subclasses.fake_tensor import FakeTensorMode

from tilegym import backend
from tilegym.backend import recording
from tilegym.backend import slower
from tilegym.backend.cutile.autotuner import Autotuner
from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import SearchSpace
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError


@pytest.fixture
def served(monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    with served_op() as op:
        yield op


def test_refused_calls_fall_back_and_say_so(served):
    def serve(x, by, other, several):
        raise UnsupportedError("not today")

    served.serve = serve
    for n in range(1, 4):
        if n == 1:
            with pytest.warns(FallbackWarning, match="not today") as caught:
                served.op(x(), backend="cutile")
            assert caught[0].filename == __file__
        assert torch.equal(served(x()), x() + 0.5 + 1)
    assert served.calls == 4


def test_an_error_leaves_nothing_behind(served):
    def serve(x, by, other, several):
        raise ZeroDivisionError

    served.serve = serve
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            served(x())
    assert recording.active is None
    served.serve = served.plain
    assert served.calls_of((x(),), (x(),)) == [4, 4]


def test_ops_within_ops(served):
    """The outer one's recording has what the inner one launches, whether that one is recorded or not."""

    def serve(x, by, other, several):
        return served.plain(x, by, other, several) if by else served(x, 0.25)

    served.serve = serve
    for n in range(6):
        assert torch.equal(served(x(seed=n), 0.0), x(seed=n) + 0.25 + 1)
    assert served.calls == 4


def test_observers_see_every_call(served):
    seen = []
    with backend.observe_calls(lambda *call: seen.append(call) or contextlib.nullcontext()):
        served.calls_of(*[(x(),)] * 4)
    assert seen == [("recorded_for_test", "cutile")] * 4


def test_another_implementation_another_recording(served, monkeypatch):
    served.calls_of(*[(x(),)] * 3)
    monkeypatch.setitem(served.op.op.impls, "cutile", lambda *args, **kwargs: 5)
    assert served(x()) == 5


def test_the_chosen_backend_serves(served):
    with backend.use_backend("cutile"):
        for _ in range(3):
            served(x(), backend=None)
    assert served.calls == 2
    with backend.use_backend("pytorch"):
        served(x(), backend=None)
    served(x(), backend="pytorch")
    assert served.calls == 2


def test_calls_listed_as_slower_go_to_pytorch(served, monkeypatch):
    """Whatever calls that named the backend, or measured it, have left behind."""
    monkeypatch.setattr(slower, "_ignored", False)  # as outside of tests
    monkeypatch.setattr(served.op.op, "is_slower", lambda *_: not slower._ignored)
    with backend.use_backend("cutile"):
        served.calls_of(*[(x(),)] * 3)
        for _ in range(3):
            served(x(), backend=None)
        assert served.calls == 2
        with slower.ignored():
            for _ in range(3):
                served(x(), backend=None)
        assert served.calls == 4
        served(x(), backend=None)
        assert served.calls == 4


def test_results_of_tuning_that_are_forgotten(served):
    tuner = Autotuner(SearchSpace([Config(TILE=4)]))

    def serve(x, by, other, several):
        y = torch.empty_like(x)
        tuner(None, lambda args, cfg: (2,), add_kernel, lambda cfg: (x, 1, y, by, cfg.TILE))
        return y

    served.serve = serve
    assert served.calls_of(*[(x(),)] * 4) == [1, 2, 2, 2]
    tuner.forget()
    assert served.calls_of(*[(x(),)] * 2) == [3, 4]
    # Looked for anew in the call that would have been recorded; the next one is, and those behind it repeat it.
    tuner._calls.clear()
    recording.forget()
    served(x())
    tuner._calls.clear()
    assert served.calls_of(*[(x(),)] * 4) == [6, 7, 8, 8]


def test_threads(served):
    """While one records others are served, and do not get into the recording."""
    inside, leave, results = threading.Event(), threading.Event(), []

    def serve(x, by, other, several):
        if threading.current_thread() is recorder and served.calls == 2:
            inside.set()
            assert leave.wait(10)
        return served.plain(x, by, other, several)

    recorder = threading.Thread(target=lambda: results.append(served(x(seed=1))))
    served.serve = serve
    served(x())
    recorder.start()
    assert inside.wait(10)
    for n in range(3):
        results.append(served(x(seed=2)))
        assert served.calls == 3 + n
    leave.set()
    recorder.join()
    assert served.calls_of((x(seed=3),)) == [5]
    expected = [x(seed=2) + 0.5 + 1] * 3 + [x(seed=1) + 0.5 + 1]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_other_devices_are_another_kind(served):
    served.calls_of(*[(x(),)] * 3)
    with pytest.warns(FallbackWarning, match="meta"):
        assert served(x().to("meta")).device.type == "meta"


def test_compiled_code_sees_none_of_it(served):
    served.serve = lambda x, by, other, several: x * 3
    compiled = torch.compile(lambda x: served.op(x, backend="cutile") * 2, fullgraph=True, backend="eager")
    for n in range(3):
        assert torch.equal(compiled(x(seed=n)), x(seed=n) * 6)
    (recordings,) = served.op.op.named_recordings.values()
    assert not recordings.known
    torch.compiler.reset()


def test_tensors_without_memory(served):
    """Of a mode that only follows shapes: PyTorch serves them, as it does what is not recorded."""

    def serve(x, by, other, several):
        x.view(2, -1)
        raise UnsupportedError("not today")

    served.serve = serve
    with pytest.warns(FallbackWarning, match="not today") as caught, FakeTensorMode() as mode:
        fake = mode.from_tensor(x())
        for _ in range(3):
            assert served(fake).shape == (8,)
    assert len(caught) == 1, "a look at memory would be warned of"
