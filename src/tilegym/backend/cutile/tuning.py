"""Measuring the candidates of a search space: compile all, check each against the first, time those that agree.

Nothing here writes to the caller's tensors: kernels run on copies that have the same sizes, strides and alignment.
"""

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

import cuda.tile as ct
import torch

from tilegym.errors import BackendError

logger = logging.getLogger("tilegym.autotuner")

# A candidate's output may differ from the first one's by the order of its sums: a few roundings of the output's dtype,
# relative to the largest value written. fp32 allows for sums of many thousand terms, and for tf32 products.
_TOLERANCE = {
    torch.float64: 2.0**-40,
    torch.float32: 2.0**-11,
    torch.float16: 2.0**-8,
    torch.bfloat16: 2.0**-5,
    torch.float8_e4m3fn: 2.0**-2,
    torch.float8_e5m2: 2.0**-1,
}
_FIRST_SAMPLES = 5
_FINAL_SAMPLES = 25
_FINALISTS = 5
_FINALIST_RATIO = 1.25  # five samples tell apart what differs by more


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration with what it takes to launch it; ``make_args`` gives the arguments on the caller's tensors."""

    config: Any
    kernel: ct.kernel
    grid: Callable[[tuple], tuple[int, ...]]
    make_args: Callable[[], tuple]


class Bench(Protocol):
    """What tuning needs of a device; ``tuning_bench.GpuBench`` is the real one."""

    gpu: str  # the name that results are kept under
    arch: str  # "sm_90"

    def ready(self) -> bool:
        """Whether kernels may be measured now; not while a CUDA graph is captured or torch.compile traces."""

    def compile(self, candidates: Sequence[Candidate]) -> list[Exception | None]:
        """Compiles all candidates, in parallel and within ``env.tune_timeout()`` each; what went wrong with each."""

    def run(self, candidate: Candidate, args: tuple) -> None:
        """Launches a candidate and waits for it."""

    def time(self, candidate: Candidate, args: tuple, reset: Callable[[], None], samples: int) -> list[float]:
        """Microseconds of ``samples`` launches, each after ``reset()`` and with a cold L2 cache."""


def find_fastest(
    name: str,
    candidates: Sequence[Candidate],
    bench: Bench,
    outputs: Callable[[tuple], tuple] = tuple,
) -> tuple[Candidate, float]:
    """The fastest candidate and the microseconds of one launch.

    Args:
        name: of the kernel, for messages.
        candidates: at least one; the first that runs says what the results should be.
        bench: the device.
        outputs: picks from a launch's arguments those whose contents must agree; by default all. Buffers that
            ``make_args`` allocates anew for each candidate are never compared.

    Raises:
        BackendError: no candidate could be compiled and run.
        torch.OutOfMemoryError: there is no room for copies of the arguments.
    """
    logger.info("tuning %s: %d configurations", name, len(candidates))
    failures: list[tuple[Any, str]] = []
    agreeing: list[Candidate] = []
    workspace = _Workspace(candidates[0].make_args(), outputs)
    expected = None
    for candidate, error in zip(candidates, bench.compile(candidates), strict=True):
        if error is not None:
            failures.append((candidate.config, f"does not compile: {_first_line(error)}"))
            continue
        try:
            results = workspace.results_of(candidate, bench)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failures.append((candidate.config, f"does not run: {_first_line(error)}"))
            continue
        if expected is None:
            expected = results
        elif not workspace.agree(results, expected):
            failures.append((candidate.config, "gives another result than the first configuration"))
            continue
        agreeing.append(candidate)
    for config, reason in failures:
        logger.info("tuning %s: %s %s", name, config, reason)
    if not agreeing:
        reasons = "; ".join(f"{config} {reason}" for config, reason in failures)
        raise BackendError(f"kernel {name}: no configuration can be used on {bench.gpu}: {reasons}")
    winner, time_us = _race(agreeing, bench, workspace)
    logger.info("tuning %s: %s takes %.1f us", name, winner.config, time_us)
    return winner, time_us


def _race(candidates: Sequence[Candidate], bench: Bench, workspace: "_Workspace") -> tuple[Candidate, float]:
    """A few samples of each, then more of the best ones, in turns, so that a drifting clock meets all alike."""
    samples: list[list[float]] = [
        bench.time(candidate, workspace.copy_of(candidate.make_args()), workspace.reset, _FIRST_SAMPLES)
        for candidate in candidates
    ]
    ranked = sorted(range(len(candidates)), key=lambda i: _median(samples[i]))
    cutoff = _median(samples[ranked[0]]) * _FINALIST_RATIO
    finalists = [i for i in ranked[:_FINALISTS] if _median(samples[i]) <= cutoff]
    if len(finalists) > 1:
        for _ in range(_FINAL_SAMPLES // _FIRST_SAMPLES):
            for i in finalists:
                candidate = candidates[i]
                samples[i] += bench.time(
                    candidate, workspace.copy_of(candidate.make_args()), workspace.reset, _FIRST_SAMPLES
                )
    best = min(finalists, key=lambda i: _median(samples[i]))
    for i in ranked:
        logger.debug(
            "tuning: %s takes %.1f us, of %d samples", candidates[i].config, _median(samples[i]), len(samples[i])
        )
    return candidates[best], _median(samples[best])


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class _Workspace:
    """Copies of the caller's tensors, made once and reset between runs, and what candidates write into them.

    Tensors that ``make_args`` creates (buffers whose size depends on the configuration) are copied anew for each run.
    """

    def __init__(self, args: tuple, outputs: Callable[[tuple], tuple]) -> None:
        self._shared = {_identity(t): (t, _clone(t)) for t in _tensors(args)}
        self._compared = {_identity(t) for t in _tensors(outputs(args))}
        self._written: set[tuple] = set()

    def copy_of(self, args: tuple) -> tuple:
        """``args`` with every tensor replaced by a copy: the same copy for the same tensor."""
        own: dict[tuple, torch.Tensor] = {}

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            identity = _identity(tensor)
            if identity in self._shared:
                return self._shared[identity][1]
            if identity not in own:
                own[identity] = _clone(tensor)
            return own[identity]

        return _map_tensors(args, replace)

    def reset(self) -> None:
        """Gives every shared copy that some candidate has written to the caller's values again."""
        for identity in self._written:
            original, copy = self._shared[identity]
            _memory(copy).copy_(_memory(original))

    def results_of(self, candidate: Candidate, bench: Bench) -> dict[tuple, torch.Tensor]:
        """Runs a candidate on reset copies and returns the tensors to compare that it has written to."""
        self.reset()
        try:
            bench.run(candidate, self.copy_of(candidate.make_args()))
        finally:
            changed = {
                identity for identity, (original, copy) in self._shared.items() if not _same_bits(original, copy)
            }
            self._written |= changed
        return {identity: _clone(self._shared[identity][1]) for identity in changed & self._compared}

    def agree(self, got: dict[tuple, torch.Tensor], expected: dict[tuple, torch.Tensor]) -> bool:
        """Whether two candidates' results are the same but for rounding."""
        for identity in got.keys() | expected.keys():
            original = self._shared[identity][0]
            if not _close(got.get(identity, original), expected.get(identity, original), original):
                return False
        return True


def _close(got: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> bool:
    tolerance = _TOLERANCE.get(expected.dtype)
    if tolerance is None:
        return _same_bits(got, expected)
    wide = torch.float64 if expected.dtype == torch.float64 else torch.float32
    got, expected, before = got.to(wide), expected.to(wide), before.to(wide)
    # An output starts as whatever the memory held: only what was written tells how large its values are.
    written = expected[(expected != before) & expected.isfinite()]
    scale = written.abs().max() if written.numel() else 0.0
    unequal = (got != expected) & ~(got.isnan() & expected.isnan())
    # With an infinity or a NaN on one side the difference is no number below any bound.
    return not bool((unequal & ~((got - expected).abs() <= tolerance * scale)).any())


def _tensors(arg: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map_tensors(arg, lambda tensor: found.append(tensor) or tensor)
    return found


def _map_tensors(arg: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(arg, torch.Tensor):
        return function(arg)
    if isinstance(arg, tuple | list):
        return type(arg)(_map_tensors(item, function) for item in arg)
    if dataclasses.is_dataclass(arg) and not isinstance(arg, type):
        fields = {f.name: _map_tensors(getattr(arg, f.name), function) for f in dataclasses.fields(arg)}
        return dataclasses.replace(arg, **fields)
    return arg


def _identity(tensor: torch.Tensor) -> tuple:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _span(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from a tensor's first element to its last, with those that its strides skip."""
    return tensor.detach().as_strided((_span(tensor),), (1,)).view(torch.uint8)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same sizes, strides and alignment to 16 bytes: all that the compiler is told of a tensor."""
    lead = tensor.data_ptr() % 16 // tensor.dtype.itemsize
    room = torch.empty(lead + _span(tensor), dtype=tensor.dtype, device=tensor.device)
    copy = room.as_strided(tensor.shape, tensor.stride(), lead)
    _memory(copy).copy_(_memory(tensor))
    return copy


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_memory(a), _memory(b))
