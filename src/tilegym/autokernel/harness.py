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

import cuda.tile as ct
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
_PLAIN = (torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None))
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
        if name not in ALLOWED and not (name == "copy_" and self._clones(*args[:2])):
            self.forbidden[name] = self.forbidden.get(name, 0) + 1
        return result

    def _clones(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether a copy is what ``clone`` may be, but for where rows begin: into new memory, of the same dtype."""
        place = target.untyped_storage().data_ptr()
        is_new = any(flat.untyped_storage().data_ptr() == place for flat, _ in self.allocated)
        return is_new and target.dtype == source.dtype and target.shape == source.shape

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
            seen = _launches(lambda kernel, args: launched.append(kernel))
            with torch.no_grad(), sanitized, seen, _past_operators(observer.forbidden), observer:
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

    def check(self, files: list[str], described: str, fresh: list[str], output: str) -> dict[str, Any]:
        """One more call like those that were timed: at the same addresses, with the contents of ``fresh``."""
        flats, others = self.files.load(files), self.files.load(fresh)
        inputs = list(tensors.unpack(flats, json.loads(described)).values())
        former = {name: flat.clone() for name, flat in flats.items() if others[name] is not flat}
        for name in former:
            flats[name].view(torch.uint8).copy_(others[name].view(torch.uint8))
        with torch.no_grad():
            result = self.function(*inputs)
        self._synchronize()
        results = result if isinstance(result, tuple | list) else (result,)
        kept = {f"out0.{i}": v.detach().clone() for i, v in enumerate(results) if isinstance(v, torch.Tensor)}
        tensors.write(Path(output), kept)
        for name, flat in former.items():
            flats[name].view(torch.uint8).copy_(flat.view(torch.uint8))
        return {}

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


# Methods that read a tensor's memory, or its elements in Python, and of which no dispatch mode is told.
_PAST_OPERATORS = "__array__ __dlpack__ __repr__ apply_ map_ map2_ numpy tolist".split()
_launching = threading.local()  # whether a launch is under way: the interpreter reads memory as it likes


@contextlib.contextmanager
def _past_operators(forbidden: dict[str, int]) -> Iterator[None]:
    """Within the block ``forbidden`` counts what is done to tensors past PyTorch's operators, too."""
    own = {name: vars(torch.Tensor).get(name) for name in _PAST_OPERATORS}

    def noting(name: str) -> Callable:
        method = getattr(torch.Tensor, name)

        def noted(self, *args, **options):
            if not getattr(_launching, "now", False):
                forbidden[name] = forbidden.get(name, 0) + 1
            return method(self, *args, **options)

        return noted

    for name in own:
        setattr(torch.Tensor, name, noting(name))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _check_plain(grid: Any, kernel: Any, args: Any) -> None:
    """Raises TypeError unless a launch is of a kernel with plain arguments: others may run code while nobody looks."""
    if type(kernel) is not ct.kernel or type(args) is not tuple:
        raise TypeError("a launch takes a kernel and a tuple of arguments")
    values = [grid, *args]
    while values:
        value = values.pop()
        if type(value) in (tuple, list):
            values += value
        elif type(value) not in _PLAIN and not isinstance(value, ct.DType):
            raise TypeError(f"a launch takes plain tensors and numbers, not a {type(value).__qualname__}")


@contextlib.contextmanager
def _launches(see: Callable[[Any, tuple], None], run: bool = True) -> Iterator[None]:
    """Within the block ``see(kernel, args)`` is told of every launch; ``run``: whether it is launched as well."""
    interpreted, real = interpreter.launch, ct.launch

    def on_cpu(grid, kernel, args, **options):
        _check_plain(grid, kernel, args)
        see(kernel, args)
        if run:
            _launching.now = True
            try:
                with _disable_current_modes():
                    interpreted(grid, kernel, args, **options)
            finally:
                _launching.now = False

    def on_gpu(stream, grid, kernel, args, **options):
        _check_plain(grid, kernel, args)
        see(kernel, args)
        if run:
            with _disable_current_modes():
                real(stream, grid, kernel, args, **options)

    interpreter.launch, ct.launch = on_cpu, on_gpu
    try:
        yield
    finally:
        interpreter.launch, ct.launch = interpreted, real
