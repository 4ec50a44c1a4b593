"""CUDA graphs of models whose layers lie on several GPUs, as ``device_map="auto"`` spreads them.

One graph holds what is launched on all of them: it is captured on the stream of one GPU, from which a stream of each
other one forks, and whose end waits for those.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch import nn
from torch.overrides import TorchFunctionMode

from tilegym.transformers.forwards import only_moves_inputs

SMALL = 1 << 17  # elements: a decoded token's hidden states, angles and counters, and no prompt's


def devices_of(model: nn.Module) -> tuple[torch.device, ...]:
    """Where its parameters are, the model's own device first."""
    return tuple(dict.fromkeys([model.device, *(parameter.device for parameter in model.parameters())]))


def misplaced(model: nn.Module) -> str:
    """Why no graph can hold what a model launches on several devices; empty if nothing is known to stand against it."""
    devices = devices_of(model)
    if len(devices) == 1:
        return ""
    if any(device.type != "cuda" for device in devices):
        return "it is spread over other devices than GPUs"
    if not all(map(only_moves_inputs, model.modules())):
        return "its weights are moved from call to call"
    return ""


@functools.cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """The stream of a GPU on which all of its graphs are captured: libraries keep memory for each that they see."""
    return torch.cuda.Stream(index)


class OtherGPUs:
    """The GPUs that graphs use besides the one that they are captured on, with the memory that they share there.

    What a graph leaves there another one of them may overwrite.
    """

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._pools: dict[torch.device, torch.cuda.MemPool] = {}
        for device in devices:
            with torch.cuda.device(device):
                self._pools[device] = torch.cuda.MemPool()

    def __bool__(self) -> bool:
        return bool(self._pools)

    @contextlib.contextmanager
    def on_streams(self) -> Iterator[None]:
        """Within it each of them has as its current stream the one that is captured."""
        with contextlib.ExitStack() as stack:
            for device in self._pools:
                stack.enter_context(torch.cuda.stream(capture_stream(device.index)))
            yield

    @contextlib.contextmanager
    def forked(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Within it what they launch is captured with what ``stream`` does."""
        with contextlib.ExitStack() as stack:
            for device, pool in self._pools.items():
                torch.cuda.current_stream(device).wait_stream(stream)
                stack.enter_context(torch.cuda.use_mem_pool(pool, device))
            yield
            for device in self._pools:
                stream.wait_stream(torch.cuda.current_stream(device))

    def graph(self, captured: torch.cuda.CUDAGraph) -> "torch.cuda.CUDAGraph | GraphOfSeveral":
        return GraphOfSeveral(captured, self) if self._pools else captured

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """To the GPUs' other work a replay is a launch of the one alone that it was captured on."""
        stream = torch.cuda.current_stream()
        for device in self._pools:
            stream.wait_stream(torch.cuda.current_stream(device))
        graph.replay()
        for device in self._pools:
            torch.cuda.current_stream(device).wait_stream(stream)


class GraphOfSeveral:
    """A captured graph with its memory on the other GPUs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, others: OtherGPUs) -> None:
        self._graph, self._others = graph, others

    def replay(self) -> None:
        self._others.replay(self._graph)


class MovedOnce(TorchFunctionMode):
    """Within it a small tensor that is asked for on another GPU again and again goes there once, until it is changed.

    accelerate's hooks ask so before each layer, for its mask, angles and positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self._moved: dict[tuple, tuple[Tensor, int, Tensor, int]] = {}  # what was moved is held: an id comes again

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not Tensor.to or len(args) != 2 or kwargs.keys() - {"non_blocking"}:
            return function(*args, **kwargs)
        tensor, where = args
        if not isinstance(where, (int, str, torch.device)) or tensor.is_inference() or tensor.numel() > SMALL:
            return function(*args, **kwargs)
        device = torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
        if device.type != tensor.device.type or device.index in (None, tensor.device.index):
            return function(*args, **kwargs)
        kept = self._moved.get((id(tensor), device))
        if kept is None or (tensor._version, kept[2]._version) != (kept[1], kept[3]):
            moved = function(*args, **kwargs)
            self._moved[id(tensor), device] = kept = tensor, tensor._version, moved, moved._version
        return kept[2]


class IndicesFollow(TorchFunctionMode):
    """Within it indices on another GPU than what is indexed go there, as those on a CPU do in PyTorch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.__getitem__ and args[0].device.type == "cuda":
            device = args[0].device
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(i.to(device) if isinstance(i, Tensor) and i.device.type == "cuda" else i for i in index)
            args = args[0], index if isinstance(args[1], tuple) else index[0]
        return function(*args, **(kwargs or {}))
