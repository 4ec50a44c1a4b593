"""Which calls PyTorch serves faster than the kernels do, from runs that measured both backends side by side.

A kind of calls, of whatever sizes, goes to PyTorch from a number of rows on (:func:`from_rows`). A single call is
listed only where PyTorch wins beyond the noise, costs the host no more time, and needs hardly more memory (MEMORY_RATIO
and MEMORY_SLACK). If that holds at every measured shape of the same powers of two, these are listed, else those of its
exact sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from typing import NamedTuple

import torch

from tilegym import ops
from tilegym.backend import slower
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.runner import CUTILE
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import DTYPES
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import OURS
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import BenchmarkError

MARGIN = 0.95  # of the kernels' time at the fast end of its spread; PyTorch's slow end must not take longer
MEMORY_RATIO, MEMORY_SLACK = 1.25, 16 << 20


@dataclass(frozen=True)
class Case:
    """One call measured on both backends. Seconds; ``kernels`` and ``pytorch`` are medians."""

    op: str
    shape: str
    dims: dict[str, Any]
    gradients: bool
    kernels: float
    pytorch: float
    goes_to_pytorch: bool


class Point(NamedTuple):
    """A kind of calls of an op, as ``slower.kind_of`` names it, with so many rows; medians in seconds."""

    op: str
    kind: str
    rows: int
    kernels: float
    pytorch: float


def from_rows(points: list[Point]) -> dict[str, dict[str, int]]:
    """By op and kind, the least measured number of rows from which on PyTorch wins beyond the noise at every point."""
    kinds: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        kinds.setdefault((point.op, point.kind), []).append(point)
    found: dict[str, dict[str, int]] = {}
    for (op, kind), measured in sorted(kinds.items()):
        lost = max((p.rows for p in measured if p.pytorch > MARGIN * p.kernels), default=0)
        won = [p.rows for p in measured if p.rows > lost]
        if won:
            found.setdefault(op, {})[kind] = min(won)
    return found


def exceptions(points: list[Point]) -> list[str]:
    """The kinds of calls that PyTorch wins at none of the points beyond the noise."""
    lost = {p.kind for p in points if p.pytorch <= MARGIN * p.kernels}
    return sorted({p.kind for p in points} - lost)


class _Seen(Exception):
    """Carries the arguments of a call that does not have to be computed."""


def described_call(
    benchmark: Benchmark, dims: dict[str, Any], dtype: torch.dtype, gradients: bool, exactly: bool = False
) -> str:
    """How ``slower.describe`` names the op's call that the benchmark makes at these sizes."""

    def make(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    values = benchmark.inputs(make, **dims)
    for name in benchmark.differentiable if gradients else ():
        values[name] = values[name].detach().requires_grad_()
    op = getattr(ops, benchmark.op).op

    def catch(*args, **kwargs):
        raise _Seen(slower.describe(op.signature, args, kwargs, exactly))

    kept = dict(op.impls)
    op.impls.update(dict.fromkeys(kept, catch))
    try:
        with slower.ignored():
            benchmark.ours(**values)
    except _Seen as seen:
        return seen.args[0]
    finally:
        op.impls.update(kept)
    raise BenchmarkError(f"the benchmark of {benchmark.op!r} does not call the op")


def _passes(modes: dict[str, dict[str, Result]], provider: Callable, gradients: bool) -> list[Result]:
    """The results that together are a call with or without gradients; none where one was not measured."""
    names = (FORWARD,) if not gradients else (BOTH,) if BOTH in modes else (FORWARD, BACKWARD)
    found = [provider(modes[name]) for name in names if name in modes]
    return found if len(found) == len(names) and None not in found else []


def _kernels(row: dict[str, Result]) -> Result | None:
    for name in (CUTILE, OURS):
        if name in row and row[name].measured and row[name].backend == "cutile":
            return row[name]
    return None


def _pytorch(row: dict[str, Result]) -> Result | None:
    return row[PYTORCH] if PYTORCH in row and row[PYTORCH].measured else None


def _host_seconds(runs: list[Run], op: str) -> tuple[float, float]:
    """The host's for a call of the kernels, and of PyTorch, from the first run that has both; zeros if none has."""
    for run in runs:
        rows = {row.provider: row for row in run.host if row.op == op and row.measured}
        kernels = next((rows[n] for n in (CUTILE, OURS) if n in rows and rows[n].backend == "cutile"), None)
        if kernels and PYTORCH in rows:
            return kernels.seconds, rows[PYTORCH].seconds
    return 0.0, 0.0


def _is_better(kernels: list[Result], pytorch: list[Result], host: tuple[float, float]) -> bool:
    """Whether PyTorch serves a call better, given the results of its passes."""
    least, most = sum(row.low for row in kernels), sum(row.high for row in pytorch)
    if most > MARGIN * least or max(most, host[1]) > max(least, host[0]):
        return False
    sizes = [(k.peak_bytes, p.peak_bytes) for k, p in zip(kernels, pytorch, strict=True)]
    return all(None in pair or pair[1] <= MEMORY_RATIO * pair[0] + MEMORY_SLACK for pair in sizes)


def cases(run: Run, hosts: list[Run] | None = None) -> list[Case]:
    """Every call that ``run`` measured on both backends; times of the host from ``hosts``, by default from itself."""
    shapes: dict[tuple[str, str], dict[str, dict[str, Result]]] = {}
    for row in run.results:
        shapes.setdefault((row.op, row.shape), {}).setdefault(row.mode, {})[row.provider] = row
    found = []
    for (op, shape), modes in shapes.items():
        dims = next(iter(next(iter(modes.values())).values())).dims
        for gradients in (False, True):
            kernels, pytorch = (_passes(modes, provider, gradients) for provider in (_kernels, _pytorch))
            if kernels and pytorch:
                host = (0.0, 0.0) if gradients else _host_seconds(hosts or [run], op)
                seconds = (sum(row.seconds for row in rows) for rows in (kernels, pytorch))
                found.append(Case(op, shape, dims, gradients, *seconds, _is_better(kernels, pytorch, host)))
    return found


def slower_calls(runs: list[Run], benchmarks: dict[str, Benchmark]) -> dict[str, list[str]]:
    """By op, the calls that PyTorch serves better. Of a case that several runs measured the latest counts.

    Raises:
        BenchmarkError: the runs are not of one GPU and one torch, or none of them measured both backends.
    """
    for name in ("gpu", "torch"):
        if len({run.machine.get(name) for run in runs}) != 1 or runs[0].machine.get(name) is None:
            raise BenchmarkError(f"the runs have to be of one GPU and one torch; {name} differs or is missing")
    latest = {}
    newest_first = sorted(runs, key=lambda run: run.machine["date"], reverse=True)
    for run in reversed(newest_first):
        dtype = run.settings["dtype"]
        latest |= {(case.op, case.shape, case.gradients, dtype): case for case in cases(run, newest_first)}
    if not latest:
        raise BenchmarkError(f"nothing was measured on both backends: run on a GPU, with the provider {PYTORCH!r}")
    verdicts: dict[str, dict[str, dict[str, bool]]] = {}  # by op, call, and call of exact sizes
    for (op, _, gradients, dtype), case in latest.items():
        benchmark, dtype = benchmarks[op], DTYPES[dtype]
        call, exact = (described_call(benchmark, case.dims, dtype, gradients, exactly) for exactly in (False, True))
        of_call = verdicts.setdefault(op, {}).setdefault(call, {})
        of_call[exact] = of_call.get(exact, True) and case.goes_to_pytorch
    found: dict[str, list[str]] = {}
    for op, calls in sorted(verdicts.items()):
        for call, exact in calls.items():
            found.setdefault(op, []).extend([call] if all(exact.values()) else [e for e in exact if exact[e]])
    found = {op: sorted(calls) for op, calls in found.items() if calls}
    return found
