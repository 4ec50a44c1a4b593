"""Before and after: throughput, time to first token, coverage, peak memory, where the time goes; each flag alone."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tilegym.bench import generate
from tilegym.bench.coverage import Coverage
from tilegym.bench.coverage import measure_coverage
from tilegym.bench.prompts import Batch

_SHOWN = 8


def measure(model: nn.Module, batches: list[Batch], length: int, runs: int, observe: bool = True) -> dict[str, Any]:
    """Generates ``length`` tokens ``runs`` times after a warm-up; plain data, with ``observe`` also where time goes."""
    measured = generate.measure(model, batches, length, runs, 1)
    found = measured.summary()
    found["tokens"] = measured.tokens[0][0].tolist()
    if observe:
        run = _once(model, batches, length)
        coverage = measure_coverage(run, model.device)
        found["coverage_percent"] = coverage.percent
        found["coverage_measure"] = coverage.explanation
        found["own"] = [[e.name, e.calls, e.seconds] for e in coverage.entries if e.own]
        found["time"] = where_time_goes(run, coverage)
    return found


def _once(model: nn.Module, batches: list[Batch], length: int) -> Callable[[], Any]:
    return lambda: generate.run_once(model, batches, length)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps what torch's profiler writes of its own start and end, past Python, off the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def where_time_goes(run: Callable[[], Any], coverage: Coverage) -> list[list[Any]]:
    """[name, share of the time] of a GPU's kernels, else of torch's functions, that take longest; then of the rest."""
    if coverage.device_type == "cuda":
        spent = Counter()
        for entry in coverage.entries:
            spent[short_name(entry.name)] += entry.seconds
    else:
        spent = _time_of_functions(run)
    total = sum(spent.values()) or 1.0
    found = [[name, value / total] for name, value in spent.most_common(_SHOWN)]
    return [*found, ["everything else", max(0.0, 1.0 - sum(share for _, share in found))]]


def _time_of_functions(run: Callable[[], Any]) -> Counter[str]:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with _silent(), torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
        run()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        spent[event.key.removeprefix("aten::")] += event.self_cpu_time_total
    return spent


def short_name(symbol: str) -> str:
    """A kernel's symbol without namespaces, template arguments and parameters."""
    name, depth, text = "", 0, symbol.removeprefix("void ").replace("(anonymous namespace)", "")
    for character in text:
        if character == "(" and depth == 0:
            break
        depth += (character == "<") - (character == ">")
        name += character if depth == 0 and character != ">" else ""
    return name.rpartition("::")[2].strip() or symbol
