"""Memory that launches on one stream share."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilegym.backend.cutile.compile_ahead import collect
from tilegym.ops.cutile import workspace as module
from tilegym.ops.cutile.workspace import COUNTERS
from tilegym.ops.cutile.workspace import SPACING
from tilegym.ops.cutile.workspace import TURNS
from tilegym.ops.cutile.workspace import forget_states
from tilegym.ops.cutile.workspace import shared_states
from tilegym.ops.cutile.workspace import workspace


class OnGPU:
    """A tensor on GPU 0, as far as the workspace looks."""

    def get_device(self) -> int:
        return 0


@pytest.fixture
def gpu_0(monkeypatch):
    """A GPU whose memory is the CPU's; its current stream, and whether that captures."""
    state = {"stream": 7, "capturing": False}
    monkeypatch.setattr(module, "_workspaces", {})
    monkeypatch.setattr(module, "_turns", {})
    monkeypatch.setattr(module, "_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(module, "_raw_stream", lambda index: state["stream"])
    monkeypatch.setattr(module, "_capturing", lambda: state["capturing"])
    return state


def test_launches_on_a_stream_share_it(gpu_0):
    parts, counters = workspace(OnGPU(), (2, 3, 4))
    assert parts.shape == (2, 3, 4) and parts.dtype == torch.float32
    assert counters.shape == (COUNTERS,) and counters.dtype == torch.int32 and not counters.any()
    assert workspace(OnGPU(), (2, 3, 4))[0] is parts
    fewer = workspace(OnGPU(), (5, 2))
    assert fewer[0].shape == (5, 2) and fewer[0].data_ptr() == parts.data_ptr() and fewer[1] is counters
    gpu_0["stream"] = 0
    others = workspace(OnGPU(), (2, 3, 4))
    assert others[0].data_ptr() != parts.data_ptr() and others[1].data_ptr() != counters.data_ptr()


def test_it_grows(gpu_0, monkeypatch):
    small, _ = workspace(OnGPU(), (4,))
    large, counters = workspace(OnGPU(), (9, 9))
    assert large.data_ptr() != small.data_ptr() and not counters.any()
    assert workspace(OnGPU(), (4,))[0].data_ptr() == large.data_ptr()
    monkeypatch.setattr(module, "MAX_SHAPES", 2)
    for n in range(1, 9):
        workspace(OnGPU(), (n,))
    assert len(module._workspaces[0, 7].of_shape) <= 2
    monkeypatch.setattr(module, "MAX_PARTS", 81)
    assert workspace(OnGPU(), (82,)) is None


def test_graphs_that_are_captured_have_their_own_memory(gpu_0):
    gpu_0["capturing"] = True
    assert workspace(OnGPU(), (4,)) is None
    gpu_0["stream"] = 0  # the default stream, on which nothing is captured
    assert workspace(OnGPU(), (4,)) is not None


def test_launches_in_the_interpreter_share_nothing(monkeypatch):
    monkeypatch.setattr(module, "_workspaces", {})
    x = torch.empty(1)
    (first, zeros), (second, others) = workspace(x, (4,)), workspace(x, (4,))
    assert first.data_ptr() != second.data_ptr() and zeros.data_ptr() != others.data_ptr()
    assert not module._workspaces


def test_memory_is_real_where_a_mode_only_follows_shapes(gpu_0):
    with FakeTensorMode():
        parts, counters = workspace(OnGPU(), (4,))
    assert type(parts) is type(counters) is torch.Tensor


@pytest.mark.parametrize("number", [4, 6, 1000])
def test_launches_on_a_stream_use_states_in_turn(gpu_0, number):
    given = [states for _ in range(2 * TURNS) for states in shared_states(OnGPU(), number)]
    assert all(states.data_ptr() == given[0].data_ptr() and states.dtype == torch.int64 for states in given)
    assert not any(states.any() or len(states) % SPACING or len(states) < TURNS * number for states in given)
    assert [(len(states) - TURNS * number) // SPACING for states in given] == list(range(TURNS)) * 2
    assert shared_states(OnGPU(), 7)[0].data_ptr() != given[0].data_ptr()
    gpu_0["stream"] = 0
    assert shared_states(OnGPU(), number)[0].data_ptr() != given[0].data_ptr()


def test_states_are_bounded(gpu_0, monkeypatch):
    monkeypatch.setattr(module, "MAX_NUMBERS", 3)
    monkeypatch.setattr(module, "MAX_STATES", 10)
    assert all(shared_states(OnGPU(), number) is not None for number in range(1, 11))
    assert shared_states(OnGPU(), 11) is None
    assert len(module._turns[0, 7]) <= 3


def test_states_that_are_not_shared(gpu_0):
    assert shared_states(torch.empty(1), 6) is None
    gpu_0["capturing"] = True
    assert shared_states(OnGPU(), 6) is None


def test_what_is_collected_takes_no_turn(gpu_0):
    """Nothing is launched, which would have cleared the states of the others' turns."""
    (before,), collected = shared_states(OnGPU(), 6), []
    collect(lambda: collected.extend(shared_states(OnGPU(), 6) for _ in range(TURNS - 1)))
    (after,) = shared_states(OnGPU(), 6)
    assert len(after) - len(before) == SPACING and after.data_ptr() == before.data_ptr()
    assert len(collected) == TURNS - 1 and all(len(s) == len(before) and not s.any() for (s,) in collected)
    assert all(states.data_ptr() != before.data_ptr() for (states,) in collected)


def test_states_are_given_anew_when_forgotten(gpu_0):
    (memory,) = shared_states(OnGPU(), 6)
    forget_states()
    assert shared_states(OnGPU(), 6)[0].data_ptr() != memory.data_ptr()
