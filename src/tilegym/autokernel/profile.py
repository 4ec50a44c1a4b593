"""What a model's regions are called with, how long they take, and their draft Definitions."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from tilegym.autokernel.protocol import Sample
from tilegym.autokernel.protocol import TensorInfo
from tilegym.autokernel.regions import Region
from tilegym.autokernel.regions import find_regions
from tilegym.autokernel.regions import install
from tilegym.errors import InventoryError
from tilegym.inventory import AxisConst
from tilegym.inventory import AxisVar
from tilegym.inventory import Definition
from tilegym.inventory import TensorSpec
from tilegym.inventory import reference

MAX_SAMPLES = 6  # calls of one region whose tensors are kept
_OBSERVED_TOKENS = 4
_RUNS = 3  # on a CPU; the quickest counts, the others met something else


@dataclass
class Recording:
    """The calls of one region: how many of each signature, and the inputs and outputs of the first of each."""

    calls: Counter = field(default_factory=Counter)
    inputs: dict[tuple, tuple] = field(default_factory=dict)
    outputs: dict[tuple, tuple] = field(default_factory=dict)
    unusable: str = ""
    trains: bool = False


@dataclass(frozen=True)
class Profiled:
    """Seconds of one run: of each region by key, of all of it, and of (a larger region, a region inside it) there."""

    seconds: dict[str, float]
    total: float
    inside: dict[tuple[str, str], float] = field(default_factory=dict)


def _signature(value: Any) -> tuple:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return ("number", value)


def record(model: Any, runs: list[Callable[[], Any]]) -> dict[str, Recording]:
    """Lets ``runs`` run, and records what the regions of ``model`` are called with, by the region's key.

    Twice if there are larger regions: these are in the place of those inside them.
    """
    found: dict[str, Recording] = {}
    weights: dict[torch.nn.Parameter, torch.Tensor] = {}

    def kept(value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):  # one copy of it for all calls
            return weights[value] if value in weights else weights.setdefault(value, _kept(value))
        return _kept(value)

    def recorder(region: Region) -> Callable:
        run, recording = reference.load(region.source, region.key), found.setdefault(region.key, Recording())

        def call(*inputs):
            outputs = run(*inputs)
            results = outputs if isinstance(outputs, tuple) else (outputs,)
            bad = [v for v in inputs if not isinstance(v, (torch.Tensor, bool, int, float))]
            bad += [v for v in results if type(v) is not torch.Tensor]
            if bad:
                recording.unusable = f"a {type(bad[0]).__name__} goes in or out"
                return outputs
            signature = tuple(map(_signature, inputs))
            recording.calls[signature] += 1
            recording.trains |= torch.is_grad_enabled() and any(t.requires_grad for t in results)
            if signature not in recording.inputs and len(recording.inputs) < MAX_SAMPLES:
                recording.inputs[signature] = tuple(kept(v) for v in inputs)
                recording.outputs[signature] = tuple(_kept(v) for v in results)
            return outputs

        return call

    regions = find_regions(model)
    for grouped in sorted({r.grouped for r in regions}):
        with install(model, {r.key: recorder(r) for r in regions if r.grouped == grouped}):
            for run in runs:
                run()
    return found


def _kept(value: Any) -> Any:
    """A copy with the same strides, on the CPU."""
    if not isinstance(value, torch.Tensor):
        return value
    kept = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return kept.copy_(value.detach()) if 0 not in value.stride() else value.detach().cpu()


def profile(model: Any, run: Callable[[int], Any], tokens: int, device: torch.device) -> Profiled:
    """The time of each region in ``run(tokens)``: of the GPU's kernels, or on a CPU of the wall clock.

    ``run`` generates that many tokens. On a GPU it is observed for a few, and the steps that follow are taken to be
    like those: a trace has a million events else.
    """
    regions, clock = find_regions(model), _Clock()
    on_gpu = device.type == "cuda"

    def around(key: str) -> Callable[[], Any]:
        return lambda: torch.profiler.record_function(key) if on_gpu else clock.around(key)

    def timed(region: Region) -> Callable:
        function, within = reference.load(region.source, region.key), around(region.key)

        def call(*inputs):
            with within():
                return function(*inputs)

        return call

    parts = {r.key: timed(r) for r in regions if not r.grouped}
    groups = {r.key: around(r.key) for r in regions if r.grouped}
    with install(model, parts, groups):
        few = min(tokens, _OBSERVED_TOKENS)
        run(few if on_gpu else tokens)  # what the first calls cost is not the model's
        if not on_gpu:
            return min((clock.of(lambda: run(tokens), set(groups)) for _ in range(_RUNS)), key=lambda p: p.total)
        prompt = _traced(lambda: run(1), set(parts), set(groups), device)
        return extrapolated(prompt, _traced(lambda: run(few), set(parts), set(groups), device), few, tokens)


def extrapolated(prompt: Profiled, some: Profiled, few: int, tokens: int) -> Profiled:
    """A run of ``tokens`` tokens, from those of one and of a ``few``."""
    more = (tokens - few) / (few - 1) if few > 1 else 0.0

    def scaled(first: float, value: float) -> float:
        return value + more * max(value - first, 0.0)

    def all_scaled(first: dict, values: dict) -> dict:
        return {key: scaled(first.get(key, 0.0), value) for key, value in values.items()}

    inside = all_scaled(prompt.inside, some.inside)
    return Profiled(all_scaled(prompt.seconds, some.seconds), scaled(prompt.total, some.total), inside)


def _traced(run: Callable[[], Any], parts: set[str], groups: set[str], device: torch.device) -> Profiled:
    """The time of the GPU's kernels in ``run``, by the annotation in which they were launched."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize(device)
    return attributed(profiler.events(), parts, groups)


def attributed(events: Any, parts: set[str], groups: set[str]) -> Profiled:
    """Adds up a profiler's events: all of the GPU, and those that belong to an annotation of this name."""
    seconds: Counter = Counter()
    inside: Counter = Counter()
    total = 0.0
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if not event.is_user_annotation:
                total += event.time_range.elapsed_us() / 1e6
        elif event.name in parts or event.name in groups:
            taken = event.device_time_total / 1e6
            seconds[event.name] += taken
            parent = event.cpu_parent
            while parent is not None and parent.name not in groups:
                parent = parent.cpu_parent
            if parent is not None:
                inside[parent.name, event.name] += taken
    return Profiled(dict(seconds), total, dict(inside))


class _Clock:
    """The wall clock's seconds of regions, and of those inside others."""

    def __init__(self) -> None:
        self.seconds: Counter = Counter()
        self.inside: Counter = Counter()
        self.open: list[str] = []

    @contextlib.contextmanager
    def around(self, key: str) -> Iterator[None]:
        """Adds the block's time to that of ``key``."""
        self.open.append(key)
        begin = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - begin
            self.open.pop()
            self.seconds[key] += taken
            if self.open:
                self.inside[self.open[-1], key] += taken

    def of(self, run: Callable[[], Any], groups: set[str]) -> Profiled:
        """One run."""
        self.seconds.clear()
        self.inside.clear()
        begin = time.perf_counter()
        run()
        inside = {pair: value for pair, value in self.inside.items() if pair[0] in groups}
        return Profiled(dict(self.seconds), time.perf_counter() - begin, inside)


def draft(region: Region, recording: Recording, family: str) -> Definition:
    """The Definition of a region, its axes found out from the recorded calls.

    A size that is the same in all calls is a constant axis; sizes that vary together are one variable axis.

    Raises:
        InventoryError: it cannot have one; says why.
    """
    if recording.unusable or not recording.inputs:
        raise InventoryError(f"{region.key}: {recording.unusable or 'it is never called'}")
    table = _columns(region.inputs, list(recording.inputs.values()))
    results = [name if name != "_result" else "y" for name in _outputs(region)]
    table |= _columns(results, list(recording.outputs.values()))
    axes: dict[tuple[int, ...], str] = {}
    specs: dict[str, TensorSpec] = {}
    for name, (dtype, columns) in table.items():
        if columns is None:
            specs[name] = TensorSpec(shape=None, dtype=dtype)
            continue
        shape = [axes.setdefault(c, f"N{c[0]}" if len(set(c)) == 1 else f"D{len(axes)}") for c in columns]
        specs[name] = TensorSpec(shape=shape, dtype=dtype)
    inputs = {name: specs[name] for name in region.inputs}
    if not any(s.shape for s in inputs.values()):
        raise InventoryError(f"{region.key}: no tensor goes in")
    sizes = {a: AxisConst(value=c[0]) if len(set(c)) == 1 else AxisVar() for c, a in axes.items()}
    if len({*sizes, *specs}) != len(sizes) + len(specs):
        raise InventoryError(f"{region.key}: an axis and a tensor have one name")
    url = region.url if region.url else "unknown"
    return Definition(
        name=_name(region, family),
        op_type="region",
        axes=sizes,
        inputs=inputs,
        outputs={name: specs[name] for name in results},
        reference=f"# Source: {url}\n{region.source}",
        tags=[f"model:{family}", *([] if reference.is_permalink(url) else ["source:not-a-commit"])],
        description=f"{region.key} of {family}, in {len(region.modules)} modules.",
    )


def _outputs(region: Region) -> list[str]:
    """The names that ``run`` returns."""
    names = reference.returns(reference.run_functions(region.source)[0])[0]
    return names or []


def _name(region: Region, family: str) -> str:
    place = region.key.rpartition(".")[2] if region.index is None else region.key.rpartition(":")[0].rpartition(".")[2]
    place = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", place)
    suffix = re.sub(r"\W+", "_", region.key.rpartition(":")[2] if region.index is not None else "")
    return re.sub(r"[^a-z0-9]+", "_", f"{family}_{place}_{suffix}".lower()).strip("_")


def _columns(names: Any, calls: list[tuple]) -> dict[str, tuple[str, list[tuple[int, ...]] | None]]:
    """For every name its dtype, and for each of its dimensions the size in every call; None for a number."""
    found = {}
    for index, name in enumerate(names):
        values = [call[index] for call in calls]
        if len({(v.ndim, v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in values}) > 1:
            raise InventoryError(f"{name} has another rank or dtype in some calls")
        if isinstance(values[0], torch.Tensor):
            dtype = str(values[0].dtype).removeprefix("torch.")
            found[name] = dtype, list(zip(*(tuple(v.shape) for v in values), strict=True))
        else:
            kind = "bool" if isinstance(values[0], bool) else "int64" if isinstance(values[0], int) else "float32"
            found[name] = kind, None
    return found


def samples(definition: Definition, recording: Recording) -> tuple[Sample, ...]:
    """The recorded calls, those with most elements times calls first."""
    found = []
    for signature, values in recording.inputs.items():
        inputs, axes = {}, {}
        for (name, spec), value in zip(definition.inputs.items(), values, strict=True):
            if isinstance(value, torch.Tensor):
                axes |= dict(zip(spec.shape, value.shape, strict=True))
                dtype = str(value.dtype).removeprefix("torch.")
                inputs[name] = TensorInfo(tuple(value.shape), tuple(value.stride()), dtype)
            else:
                inputs[name] = value
        found.append((sum(v.numel() for v in values if isinstance(v, torch.Tensor)), axes, inputs, signature))
    found.sort(key=lambda f: -f[0] * recording.calls[f[3]])
    return tuple(Sample(axes, inputs, recording.calls[signature]) for _, axes, inputs, signature in found)


@dataclass(frozen=True)
class Work:
    """Bytes that a call has to read and write at least, and its operations."""

    bytes: int
    flops: int


def work(definition: Definition, recording: Recording) -> Work:
    """The least work of all recorded calls together: each tensor once, and the operations of products of matrices."""
    run = reference.load(definition.reference, definition.name)
    moved = operations = 0
    for signature, inputs in recording.inputs.items():
        tensors = [v for v in (*inputs, *recording.outputs[signature]) if isinstance(v, torch.Tensor)]
        moved += recording.calls[signature] * sum(t.numel() * t.itemsize for t in tensors)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run(*(v.to("meta") if isinstance(v, torch.Tensor) else v for v in inputs))
        operations += recording.calls[signature] * counter.get_total_flops()
    return Work(moved, operations)


def check_draft(definition: Definition, recording: Recording, device: torch.device) -> None:
    """Raises InventoryError unless the reference gives the recorded outputs again on ``device``, within rounding."""
    run = reference.load(definition.reference, definition.name)
    for signature, inputs in recording.inputs.items():
        with torch.no_grad():
            got = run(*(v.to(device) if isinstance(v, torch.Tensor) else v for v in inputs))
        got = got if isinstance(got, tuple) else (got,)
        for name, value, expected in zip(definition.outputs, got, recording.outputs[signature], strict=True):
            if value.dtype != expected.dtype or not torch.allclose(value.cpu(), expected, rtol=0.02, atol=0.02):
                raise InventoryError(f"{definition.name}: the draft does not give {name!r} of the model again")
