"""Writes which calls are slower in cuTile than in PyTorch, and go there therefore, from two runs of the benchmarks.

    DISABLE_FALLBACK=1 tilegym bench --backend cutile --only tilegym --output out/cutile
    tilegym bench --backend pytorch --only tilegym --output out/pytorch
    python tests/benchmark/write_slower.py out/cutile out/pytorch

With DISABLE_FALLBACK=1 the first run measures the kernels where PyTorch would serve the calls by now. A call is listed
if the pytorch backend, checked and timed like the other, takes at most 95% of the time, spread included. The file
replaces the one for the same GPU in ``src/tilegym/backend/cutile/slower/``.
"""

import json
import sys
from pathlib import Path

import torch
import typer

from tilegym import ops
from tilegym.backend import slower
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import DTYPES
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import OURS
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import BenchmarkError
from tilegym.bench.spec import default_folder
from tilegym.bench.spec import load_benchmarks
from tilegym.errors import TileGymError

MARGIN = 0.95


class _Seen(Exception):
    """Carries the arguments of a call that does not have to be computed."""


def described_call(benchmark: Benchmark, dims: dict, dtype: torch.dtype, gradients: bool) -> str:
    """How ``slower.describe`` names the op's call that the benchmark makes at these sizes."""

    def make(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype)

    values = benchmark.inputs(make, **dims)
    for name in benchmark.differentiable if gradients else ():
        values[name] = values[name].detach().requires_grad_()

    def catch(*args, **kwargs):
        raise _Seen(slower.describe(args, kwargs))

    impls = getattr(ops, benchmark.op).op.impls
    kept = dict(impls)
    impls.update(dict.fromkeys(impls, catch))
    try:
        benchmark.ours(**values)
    except _Seen as seen:
        return seen.args[0]
    finally:
        impls.update(kept)
    raise BenchmarkError(f"the benchmark of {benchmark.op!r} does not call the op")


def by_call(run: Run, backend: str) -> dict[tuple[str, str, bool], tuple[Result, float, float]]:
    """By op, shape and whether with gradients: a result, and the least and the most seconds that such a call takes."""
    times: dict[tuple[str, str], dict[str, Result]] = {}
    for row in run.results:
        if row.provider == OURS and row.status == "ok" and row.backend == backend:
            times.setdefault((row.op, row.shape), {})[row.mode] = row
    found = {}
    for (op, shape), modes in times.items():
        if FORWARD in modes:
            row = modes[FORWARD]
            found[op, shape, False] = row, row.low, row.high
        training = [modes[BOTH]] if BOTH in modes else [modes[m] for m in (FORWARD, BACKWARD) if m in modes]
        if BOTH in modes or len(training) == 2:
            found[op, shape, True] = training[0], sum(r.low for r in training), sum(r.high for r in training)
    return found


def slower_calls(cutile: Run, pytorch: Run, benchmarks: dict[str, Benchmark]) -> dict[str, list[str]]:
    """By op, the calls that PyTorch serves faster."""
    for name in ("gpu", "torch"):
        if cutile.machine.get(name) is None or cutile.machine[name] != pytorch.machine.get(name):
            raise BenchmarkError(f"the two runs have to be of one GPU and one torch; {name} differs or is missing")
    if cutile.settings["dtype"] != pytorch.settings["dtype"]:
        raise BenchmarkError("the two runs have different dtypes")
    dtype, found = DTYPES[cutile.settings["dtype"]], {}
    theirs = by_call(pytorch, "pytorch")
    for (op, shape, gradients), (row, least, _) in by_call(cutile, "cutile").items():
        _, _, most = theirs.get((op, shape, gradients), (None, 0.0, float("inf")))
        if most <= MARGIN * least:
            found.setdefault(op, set()).add(described_call(benchmarks[op], row.dims, dtype, gradients))
    return {op: sorted(calls) for op, calls in sorted(found.items())}


def write_slower(
    cutile: Path = typer.Argument(..., help="The --output of tilegym bench --backend cutile."),
    pytorch: Path = typer.Argument(..., help="The --output of tilegym bench --backend pytorch."),
    target: Path = typer.Option(slower.FOLDER, help="The folder to write to."),
) -> None:
    """List the calls that go to PyTorch because it is faster."""
    try:
        run = Run.read(cutile)
        calls = slower_calls(run, Run.read(pytorch), load_benchmarks(default_folder()))
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    table = {key: run.machine.get(key) for key in ("gpu", "date", "torch", "cuda_tile")} | {"slower": calls}
    path = slower.file_of(table["gpu"], target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}, {sum(map(len, calls.values()))} calls of {len(calls)} ops")


if __name__ == "__main__":
    typer.run(write_slower)
