"""How much of a model's work TileGym's own kernels do.

On a GPU, torch's profiler names every kernel by its symbol. cuTile mangles the kernel function's name and the compiled
signature into that symbol; a kernel counts if its symbol demangles to the name and the number of parameters of a
``@ct.kernel`` of this package. On a CPU there are no such symbols: the wall time inside dispatched ops counts instead.
"""

import importlib
import inspect
import pkgutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym.backend import observe_calls


@dataclass(frozen=True)
class Entry:
    """A kernel, or on a CPU an op, and the time it took in all."""

    name: str
    calls: int
    seconds: float
    own: bool


@dataclass(frozen=True)
class Coverage:
    """Which share of ``total_seconds`` was spent in entries that are ``own``."""

    device_type: str
    total_seconds: float
    entries: list[Entry]

    @property
    def own_seconds(self) -> float:
        return sum(entry.seconds for entry in self.entries if entry.own)

    @property
    def percent(self) -> float:
        return 100 * self.own_seconds / self.total_seconds if self.total_seconds else 0.0

    @property
    def headline(self) -> str:
        if self.device_type == "cuda":
            return f">>> cuTile Kernel Coverage (GPU Time): {self.percent:.1f}% <<<"
        return f">>> Dispatched Op Coverage (CPU Time): {self.percent:.1f}% <<<"

    @property
    def explanation(self) -> str:
        if self.device_type == "cuda":
            return "share of the GPU's busy time in kernels whose symbols are those of TileGym's own @ct.kernels"
        return "no GPU, so no GPU kernels to count: share of the wall time spent inside TileGym's dispatched ops"

    def summary(self) -> dict[str, Any]:
        return {
            "percent": self.percent,
            "measure": "gpu_time_in_own_kernels" if self.device_type == "cuda" else "cpu_time_in_dispatched_ops",
            "own_seconds": self.own_seconds,
            "total_seconds": self.total_seconds,
            "entries": [
                {"name": e.name, "calls": e.calls, "seconds": e.seconds, "own": e.own, "percent": self._share(e)}
                for e in self.entries
            ],
        }

    def _share(self, entry: Entry) -> float:
        return 100 * entry.seconds / self.total_seconds if self.total_seconds else 0.0


def own_kernels() -> dict[str, set[int]]:
    """The function name of every ``@ct.kernel`` of this package, with the number of parameters it can have."""
    import cuda.tile as ct

    import tilegym.ops.cutile as package
    from tilegym import transformers

    names = [info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    for path in sorted(Path(transformers.__path__[0]).glob("*/kernels/*.py")):  # a family's own
        names.append(f"{transformers.__name__}.{path.parts[-3]}.kernels.{path.stem}")
    kernels: dict[str, set[int]] = {}
    for name in names:
        module = importlib.import_module(name)
        for value in vars(module).values():
            if isinstance(value, ct.kernel) and value._pyfunc.__module__.startswith("tilegym."):
                parameters = inspect.signature(value._pyfunc).parameters
                kernels.setdefault(value._pyfunc.__name__, set()).add(len(parameters))
    return kernels


def own_kernel_name(symbol: str, kernels: dict[str, set[int]]) -> str | None:
    """The kernel function that ``symbol`` was compiled from, if it is one of ``kernels``."""
    from cuda.tile.compilation import demangle_kernel_name

    try:
        name, signature = demangle_kernel_name(symbol)
    except (ValueError, KeyError):
        return None
    return name if len(signature.parameters) in kernels.get(name, ()) else None


def measure_coverage(run: Callable[[], Any], device: torch.device) -> Coverage:
    """Calls ``run`` once under observation; its time does not compare with that of an unobserved run."""
    return _gpu_coverage(run) if device.type == "cuda" else _cpu_coverage(run)


def _gpu_coverage(run: Callable[[], Any]) -> Coverage:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    kernels = own_kernels()
    names: dict[str, str | None] = {}
    seconds: Counter[tuple[str, bool]] = Counter()
    calls: Counter[tuple[str, bool]] = Counter()
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        if event.name not in names:
            names[event.name] = own_kernel_name(event.name, kernels)
        own = names[event.name]
        key = (own or event.name, own is not None)
        seconds[key] += event.time_range.elapsed_us() / 1e6
        calls[key] += 1
    entries = [Entry(name, calls[name, own], spent, own) for (name, own), spent in seconds.most_common()]
    return Coverage("cuda", sum(seconds.values()), entries)


def _cpu_coverage(run: Callable[[], Any]) -> Coverage:
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    depth = threading.local()

    @contextmanager
    def observer(op: str, backend: str) -> Iterator[None]:
        if getattr(depth, "value", 0):  # an op called by an op: its time is in the outer one's
            yield
            return
        depth.value = 1
        start = time.perf_counter()
        try:
            yield
        finally:
            depth.value = 0
            key = f"{op} ({backend})"
            seconds[key] += time.perf_counter() - start
            calls[key] += 1

    with observe_calls(observer):
        start = time.perf_counter()
        run()
        total = time.perf_counter() - start
    entries = [Entry(name, calls[name], spent, True) for name, spent in seconds.most_common()]
    entries.append(Entry("everything else", 1, max(0.0, total - sum(seconds.values())), False))
    return Coverage("cpu", total, entries)


def profile_run(run: Callable[[], Any], device: torch.device, trace_file: Path) -> str:
    """Profiles ``run``, writes a Chrome trace, and returns a table of the entries that took longest."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    trace_file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(trace_file))
    sort_by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=sort_by, row_limit=15, max_name_column_width=48)
