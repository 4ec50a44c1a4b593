"""Runs a candidate in its worker: observes what it asks of torch, poisons what it allocates, compiles what it launches.

This code shares the candidate's process, so that nothing that it says is the last word: the judge compares contents
and measures time itself.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from tilegym import interpreter
from tilegym.autokernel import tensors
from tilegym.bench.timing import CudaTimer
from tilegym.inventory import Solution
from tilegym.inventory import load_solution

# What a candidate may ask of torch: memory, and other views of it. Anything else is PyTorch doing the kernel's work.
_ALLOCATIONS = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
ALLOWED = _ALLOCATIONS | frozenset(
    "zeros zeros_like new_zeros zero_ fill_ full view _unsafe_view reshape _reshape_alias permute "
    "transpose t unsqueeze squeeze expand slice select split split_with_sizes chunk unbind as_strided detach alias "
    "clone contiguous narrow unflatten movedim sym_size sym_stride lift_fresh".split()
)
_FILES_KEPT = 8
POISONS = {"nan": (float("nan"), -77), "finite": (-1.5, 111)}


class Observer(TorchDispatchMode):
    """Notes the operators that go beyond :data:`ALLOWED`; fills new memory with poison between guards."""

    def __init__(self, poison: str) -> None:
        super().__init__()
        self.poison = POISONS[poison]
        self.forbidden: dict[str, int] = {}
        self.allocated: list[tuple[torch.Tensor, tensors.Layout]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in _ALLOCATIONS and isinstance(result, torch.Tensor):
            return self._poisoned(result)
        if name not in ALLOWED:
            self.forbidden[name] = self.forbidden.get(name, 0) + 1
        return result

    def _poisoned(self, like: torch.Tensor) -> torch.Tensor:
        flat, layout = tensors.guarded(tuple(like.shape), like.stride(), like.dtype, like.device)
        value = layout.view(flat)
        floating, whole = self.poison
        if like.dtype != torch.bool and value.numel():
            value.fill_(floating if like.is_floating_point() else whole % (1 << 7))
        self.allocated.append((flat, layout))
        return value


class Files:
    """Tensors that the judge has written, on ``device``. Those of the files that were used last stay there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._loaded: dict[str, dict[str, torch.Tensor]] = {}

    def load(self, files: list[str]) -> dict[str, torch.Tensor]:
        """What is in ``files``, together, by name."""
        for file in files:
            known = self._loaded.pop(file, None)
            self._loaded[file] = known or {n: flat.to(self.device) for n, flat in tensors.read(Path(file)).items()}
        found = {name: flat for file in files for name, flat in self._loaded[file].items()}
        while len(self._loaded) > _FILES_KEPT:
            del self._loaded[next(iter(self._loaded))]
        return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors without gaps hold the same bytes: so NaN equals itself."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Candidate:
    """A candidate's function, and what is done with it.

    Args:
        root: the folder below which the sources' paths begin.
        solution: the Solution's JSON.
        device: "cpu" or "cuda".
    """

    def __init__(self, root: str, solution: str, device: str) -> None:
        self.function = load_solution(Solution.from_json(solution), Path(root))
        self.files = Files(torch.device(device))
        self.device = self.files.device

    def compile(self, files: list[str], described: str, architectures: list[str]) -> dict[str, Any]:
        """Compiles for each architecture what one call launches, without running it."""
        described = json.loads(described)
        flats = self.files.load(files)
        launches: list[tuple[Any, tuple]] = []
        with _launches(lambda kernel, args: launches.append((kernel, args)), run=False), torch.no_grad():
            self.function(*tensors.unpack(flats, described).values())
        errors = {}
        for arch in architectures:
            for kernel, args in launches:
                try:
                    interpreter.compile_kernel(kernel, args, arch)
                except Exception as error:  # the compiler has many kinds
                    errors[arch] = f"{type(error).__name__}: {str(error)[:2000]}"
                    break
        return {"launches": len(launches), "errors": errors}

    def run(self, calls: list[list[str]], described: str, output: str, poison: str, sanitize: bool) -> dict[str, Any]:
        """Calls the candidate with the contents of each call's files, all in the same memory.

        Outputs are written to ``output`` after the last call, so that one which a later call has overwritten is seen.
        """
        described = json.loads(described)
        contents = [self.files.load(files) for files in calls]
        memory = {name: torch.empty_like(flat) for name, flat in contents[0].items()}
        threads = threading.active_count()
        launched, results, kept, changed, guards = [], [], {}, set(), True
        observer = Observer(poison)
        for values in contents:
            for name, flat in memory.items():
                flat.view(torch.uint8).copy_(values[name].view(torch.uint8))
            inputs = tensors.unpack(memory, described)
            sanitized = interpreter.sanitize() if sanitize and self.device.type == "cpu" else contextlib.nullcontext()
            with torch.no_grad(), sanitized, _launches(lambda kernel, args: launched.append(kernel)), observer:
                result = self.function(*inputs.values())
            self._synchronize()
            results.append(result if isinstance(result, tuple | list) else (result,))
            changed |= {name for name, flat in memory.items() if not _same_bits(flat, values[name])}
        for call, values in enumerate(results):
            for index, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    kept[f"out{call}.{index}"] = value.detach()
        guards = all(tensors.guards_hold(flat, layout) for flat, layout in observer.allocated)
        tensors.write(Path(output), {n: t.clone() for n, t in kept.items()})
        return {
            "changed": sorted(changed),
            "types": [[f"{type(v).__module__}.{type(v).__qualname__}" for v in values] for values in results],
            "forbidden": observer.forbidden,
            "guards": guards,
            "launches": len(launched),
            "threads": threading.active_count() - threads,
        }

    def gradients(
        self, files: list[str], described: str, upstream: str, wanted: list[str], output: str
    ) -> dict[str, Any]:
        """Calls the candidate with inputs of which ``wanted`` require grad, and goes back from ``upstream``.

        The gradients go to ``output``, by the inputs' names; ``outputs`` are those that have any.
        """
        inputs = tensors.unpack(self.files.load(files), json.loads(described))
        leaves = {name: inputs[name].detach().requires_grad_() for name in wanted}
        with torch.enable_grad():
            result = self.function(*(inputs | leaves).values())
        results = result if isinstance(result, tuple | list) else (result,)
        chosen = [i for i, v in enumerate(results) if isinstance(v, torch.Tensor) and v.requires_grad]
        if not chosen:
            return {"outputs": []}
        given = tensors.read(Path(upstream))
        backward = [given[str(i)].to(self.device) for i in chosen]
        found = torch.autograd.grad([results[i] for i in chosen], leaves.values(), backward, allow_unused=True)
        tensors.write(Path(output), {n: g.clone() for n, g in zip(leaves, found, strict=True) if g is not None})
        return {"outputs": chosen}

    def time(self, files: list[str], described: str, calls: int, cold: bool) -> dict[str, Any]:
        """Seconds of ``calls`` calls, as :func:`timed` gives them."""
        inputs = tensors.unpack(self.files.load(files), json.loads(described))
        return timed(self.function, list(inputs.values()), calls, cold, self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def timed(function: Callable, inputs: list[Any], calls: int, cold: bool, device: torch.device) -> dict[str, Any]:
    """Times ``calls`` calls, after one that does not count.

    Args:
        function: what is called.
        inputs: its arguments.
        calls: how often.
        cold: each call by a GPU's events, the cache emptied before ("events"); else all together ("wall").
        device: where the inputs are.
    """
    with torch.no_grad():
        function(*inputs)
        if cold:
            timer = CudaTimer(budget=1.0, rounds=1)
            written = sum(v.nbytes for v in inputs if isinstance(v, torch.Tensor))
            trial = timer.trial(lambda _: function(*inputs), lambda: None, written)
            trial.repetitions = calls
            trial.samples.clear()
            timer.round(trial)
            return {"events": trial.samples}
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function(*inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return {"wall": time.perf_counter() - begin}


@contextlib.contextmanager
def _launches(see: Callable[[Any, tuple], None], run: bool = True) -> Iterator[None]:
    """Within the block ``see(kernel, args)`` is told of every launch; ``run``: whether it is launched as well."""
    import cuda.tile as ct

    interpreted, real = interpreter.launch, ct.launch

    def on_cpu(grid, kernel, args, **options):
        see(kernel, args)
        if run:
            with _disable_current_modes():
                interpreted(grid, kernel, args, **options)

    def on_gpu(stream, grid, kernel, args, **options):
        see(kernel, args)
        if run:
            with _disable_current_modes():
                real(stream, grid, kernel, args, **options)

    interpreter.launch, ct.launch = on_cpu, on_gpu
    try:
        yield
    finally:
        interpreter.launch, ct.launch = interpreted, real
