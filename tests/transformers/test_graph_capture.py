"""What a CUDA graph can hold of what transformers does, and what a capture that fails leaves behind."""

import contextlib
import types

import pytest
import torch
from common import HAS_GPU
from common import device
from common import gpu
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym.transformers import graph_capture
from tilegym.transformers import several_gpus
from tilegym.transformers.graph_capture import _NumbersAreFilledIn
from tilegym.transformers.graph_capture import capture
from tilegym.transformers.several_gpus import OtherGPUs


def eager_mask(mask, dtype):
    """As transformers makes the mask of its eager attention."""
    lowest = torch.finfo(dtype).min
    return torch.where(mask, torch.tensor(0.0, device=mask.device, dtype=dtype), lowest)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_filled_in(dtype):
    mask = torch.tensor([[True, False], [True, True]], device=device())
    expected = eager_mask(mask, dtype)
    with Names() as names, _NumbersAreFilledIn():
        found = eager_mask(mask, dtype)
        kept = found.where(mask, 2.0)
    assert found.dtype == dtype and torch.equal(found, expected)
    assert torch.equal(kept, expected.where(mask, 2.0))
    assert sorted(names.called) == ["full", "new_full", "new_full", "where", "where"]


def test_what_has_a_dtype_of_its_own_keeps_it():
    plain = [torch.tensor(3), torch.tensor(True), torch.tensor(0.5), torch.tensor([1.0, 2.0])]
    with _NumbersAreFilledIn():
        filled = [torch.tensor(3), torch.tensor(True), torch.tensor(0.5), torch.tensor([1.0, 2.0])]
        assert torch.where(torch.tensor([True]), 1, 2).dtype == torch.int64
    assert [t.dtype for t in filled] == [t.dtype for t in plain]
    assert all(torch.equal(f, p) for f, p in zip(filled, plain, strict=True))


def test_a_number_that_is_moved_is_filled_in():
    """As a layer of a cache moves its window; another tensor of the CPU may hold something else the next time."""
    kept = torch.tensor(5)
    with Names() as names, _NumbersAreFilledIn():
        moved, other = torch.tensor(7, dtype=torch.int32).to("meta"), kept.to("meta")
        number = torch.tensor(7.0)
        assert number.to(torch.float64).item() == 7.0 and number.to("cpu") is number
        if HAS_GPU:
            assert number.mul_(2).to("cuda").item() == 14.0
    assert moved.device.type == other.device.type == "meta" and moved.dtype == torch.int32
    assert names.called[:4] == ["full", "_local_scalar_dense", "full", "_to_copy"]


@gpu
def test_a_graph_holds_the_mask_of_eager_attention():
    mask = torch.tensor([[True, False], [True, True]], device="cuda")
    graph, found = capture(lambda: eager_mask(mask, torch.bfloat16), [], torch.device("cuda"))
    mask.logical_not_()
    graph.replay()
    assert torch.equal(found, eager_mask(mask, torch.bfloat16))


@gpu
def test_after_a_capture_that_fails_there_are_random_numbers():
    x = torch.ones(4, device="cuda")

    def run():
        torch.nn.functional.dropout(x)
        return x.sum().item()  # waits

    torch.manual_seed(3)
    before = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    with pytest.raises(RuntimeError):
        capture(run, [], torch.device("cuda"))
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="cuda"), before)
    graph, drawn = capture(lambda: torch.rand(4, device="cuda"), [], torch.device("cuda"))
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(drawn, first)


class FakeCuda:
    """Stands in for what a capture asks of torch.cuda; notes what happens."""

    def __init__(self, monkeypatch) -> None:
        self.events: list[str] = []
        graph = types.SimpleNamespace(
            capture_begin=lambda pool, capture_error_mode: self.events.append("begin"),
            capture_end=lambda: self.events.append("end"),
            replay=lambda: self.events.append("replay"),
        )
        waits = {"synchronize": lambda: self.events.append("wait")}
        stream = types.SimpleNamespace(name="0", **waits)
        stream.wait_stream = lambda other: other is stream or self.events.append(f"0 behind {other.name}")
        self.others = {index: self._stream(str(index)) for index in (1, 2)}
        for name, fake in {
            "CUDAGraph": lambda: graph,
            "Stream": lambda device: stream,
            "current_stream": lambda device=None: stream if device is None else self.others[device.index],
            "current_device": lambda: 0,
            "stream": lambda stream: contextlib.nullcontext(),
            **waits,
            "empty_cache": lambda: None,
            "device": lambda device: contextlib.nullcontext(),
            "MemPool": lambda: "pool",
            "use_mem_pool": self._memory,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(graph_capture, "capture_stream", lambda index: stream)
        monkeypatch.setattr(several_gpus, "capture_stream", lambda index: self.others[index])

    @contextlib.contextmanager
    def _memory(self, pool, device):
        self.events.append(f"{pool} of {device.index}")
        try:
            yield
        finally:
            self.events.append(f"no {pool} of {device.index}")

    def _stream(self, name: str) -> types.SimpleNamespace:
        note = lambda other: self.events.append(f"{name} behind {other.name}")  # noqa: E731
        return types.SimpleNamespace(name=name, wait_stream=note)


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["RuntimeError", "Ctrl-C"])
@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_every_capture_ends(monkeypatch, error, fails_at):
    """Two runs, one that is captured, and the state as before. What is captured when somebody interrupts it ends as
    well: the stream that all captures share would be in it for ever."""
    cuda, state = FakeCuda(monkeypatch), torch.zeros(2)

    def run():
        state.add_(1)
        cuda.events.append("run")
        if cuda.events.count("run") == fails_at:
            raise error
        return 7

    with pytest.raises(type(error)) if fails_at else contextlib.nullcontext():
        assert capture(run, [state], torch.device("cpu"))[1] == 7
    expected = ["run", "run", "wait", "begin", "run", "end"]
    assert cuda.events == (["run", "wait"] if fails_at == 1 else [*expected, "wait"] if fails_at else expected)
    assert not state.any()


def test_a_graph_over_several_gpus(monkeypatch):
    """What the others launch belongs to the capture, and to the replay: nobody overtakes either."""
    cuda = FakeCuda(monkeypatch)
    others = OtherGPUs((torch.device("cuda", 1), torch.device("cuda", 2)))
    graph, result = capture(lambda: cuda.events.append("run") or 7, [], torch.device("cpu"), None, others)
    forked = ["1 behind 0", "pool of 1", "2 behind 0", "pool of 2"]
    joined = ["0 behind 1", "0 behind 2", "no pool of 2", "no pool of 1"]
    assert result == 7
    assert cuda.events == ["run", "run", "wait", "begin", *forked, "run", *joined, "end"]
    cuda.events.clear()
    graph.replay()
    assert cuda.events == ["0 behind 1", "0 behind 2", "replay", "1 behind 0", "2 behind 0"]


def test_a_capture_that_fails_gives_memory_of_other_gpus_back(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def run():
        cuda.events.append("run")
        if cuda.events.count("run") == 3:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        capture(run, [], torch.device("cpu"), None, OtherGPUs((torch.device("cuda", 1),)))
    assert cuda.events[-3:] == ["no pool of 1", "end", "wait"]
