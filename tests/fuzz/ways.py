"""Ways in which programs call an op besides plainly: compiled, under autocast, from a CUDA graph or another stream."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch

from fuzz.arguments import fresh
from fuzz.arguments import memory_bytes
from fuzz.arguments import named_tensors
from fuzz.arguments import tensors_in
from fuzz.comparing import Failure
from fuzz.comparing import Results
from fuzz.drawing import Draw

AUTOCAST = {"autocast-bfloat16": torch.bfloat16, "autocast-float16": torch.float16}
GPU_WAYS = ("graph", "stream")
# Of 100 cases so many.
WAYS = {"compiled": 4, "inference-mode": 2, "threads": 2, **dict.fromkeys(AUTOCAST, 2), "graph": 8, "stream": 6}
CYCLES = 20_000_000  # that a stream waits, some 10 ms


def drawn(draw: Draw) -> str | None:
    """One of the ways, mostly none."""
    ways = WAYS if draw.gpu else {way: share for way, share in WAYS.items() if way not in GPU_WAYS}
    return draw.data.choices([None, *ways], [100 - sum(ways.values()), *ways.values()])[0]


@contextlib.contextmanager
def compiled(op: Callable) -> Iterator[Callable]:
    """``op`` as torch.compile makes it, in one graph, without writing kernels for what is PyTorch's.

    What TileGym's operators give has to have the sizes, strides and dtypes that the trace was told.
    """
    backend = aot_autograd(fw_compiler=lambda graph, _: _Checked(graph).boxed(), keep_inference_input_mutations=True)
    torch._dynamo.reset()
    try:
        with functorch.patch(donated_buffer=False):  # which would forbid a second backward pass
            yield torch.compile(lambda **args: op(**args), backend=backend, fullgraph=True, dynamic=False)
    finally:
        torch._dynamo.reset()


class _Checked(torch.fx.Interpreter):
    """Runs a traced graph, and compares what operators give with what was expected of them."""

    def boxed(self) -> Callable[[list], Any]:
        def run(args: list) -> Any:
            given, args[:] = list(args), ()
            return torch.fx.Interpreter.run(self, *given)

        run._boxed_call = True
        return run

    def run_node(self, node: torch.fx.Node) -> Any:
        result = super().run_node(node)
        if str(node.target).startswith("tilegym."):
            pairs = zip(tensors_in(result), tensors_in(node.meta["val"]), strict=True)
            for i, (real, fake) in enumerate(pairs):
                got, said = ((t.dtype, tuple(t.shape), _strides(t)) for t in (real, fake))
                if got != said:
                    raise Failure(f"output {i} of {node.target} is {got}, its trace was told {said}")
        return result


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that are walked."""
    return tuple(s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1) if t.numel() else ()


def in_threads(function: Callable[[], Any], count: int = 3) -> list[Any]:
    """What ``function`` gives in each of several threads at once."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = function()
        except Exception as error:  # whose it is, is said where all have ended
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@contextlib.contextmanager
def late_data(args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A stream of its own for the block, in which the tensors of the copies of ``args`` get their numbers late."""
    late = fresh(args)
    _blank(late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        _refill(late, args)
        yield late
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


class Captured:
    """``function`` of copies of ``args`` as a CUDA graph, captured while they hold other numbers."""

    def __init__(self, function: Callable[[dict[str, Any]], Results], args: dict[str, Any]) -> None:
        self.args, self.static = args, fresh(args)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, and makes what lasts
            function(self.static)
        torch.cuda.current_stream().wait_stream(stream)
        _blank(self.static)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = function(self.static)

    def replay(self) -> Results:
        _refill(self.static, self.args)
        self.graph.replay()
        return self.outputs


def _blank(args: dict[str, Any]) -> None:
    """Puts zeros where floating numbers are. Integers stay: they may say where memory is read."""
    for _, t in named_tensors(args):
        if t.is_floating_point() and t.element_size() > 1:
            memory_bytes(t).zero_()


def _refill(args: dict[str, Any], source: dict[str, Any]) -> None:
    given = dict(named_tensors(source))
    for name, t in named_tensors(args):
        if t.numel():
            memory_bytes(t).copy_(memory_bytes(given[name]))
