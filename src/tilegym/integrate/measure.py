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
from tilegym.bench.coverage import measure_coverage
from tilegym.bench.prompts import Batch

_SHOWN = 8


def measure(model: nn.Module, batches: list[Batch], length: int, runs: int, observe: bool = True) -> dict[str, Any]:
    """Generates ``length`` tokens ``runs`` times after a warm-up; plain data, with ``observe`` also where time goes."""
    found = generate.measure(model, batches, length, runs, 1).summary()
    if observe:
        run = _once(model, batches, length)
        coverage = measure_coverage(run, model.device)
        found["coverage_percent"] = coverage.percent
        found["coverage_measure"] = coverage.explanation
        found["own"] = [[e.name, e.calls, e.seconds] for e in coverage.entries if e.own]
        found["time"] = where_time_goes(run, model.device)
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


def where_time_goes(run: Callable[[], Any], device: torch.device) -> list[list[Any]]:
    """[name, share of the time] of torch's functions, or on a GPU the kernels, that take longest; then of the rest."""
    gpu = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * gpu
    with _silent(), torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
        run()
        if gpu:
            torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu == gpu:
            spent[event.key] += event.self_device_time_total if gpu else event.self_cpu_time_total
    total = sum(spent.values()) or 1.0
    found = [[name.removeprefix("aten::"), value / total] for name, value in spent.most_common(_SHOWN)]
    return [*found, ["everything else", max(0.0, 1.0 - sum(share for _, share in found))]]
