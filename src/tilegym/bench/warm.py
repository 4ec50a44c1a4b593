"""Compiles ahead what a run will measure, in many processes: compiling is work for the CPU, and caches keep it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tilegym import env
from tilegym.backend import use_backend
from tilegym.bench.runner import Inputs
from tilegym.bench.runner import run_once
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Shape

TIMEOUT = 150.0  # seconds; what is not compiled by then is compiled when it is measured
Task = tuple[Benchmark, Shape, tuple[str, ...]]


def default_processes() -> int:
    """Two cores stay free, and more than 14 processes crowd the GPU's memory."""
    return max(0, min(14, (os.cpu_count() or 1) - 2))


def _jobs(tasks: list[Task], only: tuple[str, ...]) -> list[tuple[Benchmark, Shape, Provider, tuple[str, ...]]]:
    jobs = []
    for benchmark, shape, modes in tasks:
        for name, provider in benchmark.providers.items():
            if (not only or name in only) and not provider.missing():
                jobs.append((name, benchmark, shape, provider, modes))
    # Those of one provider take about as long: one after the other they are dealt out evenly.
    jobs.sort(key=lambda job: job[0])
    return [job[1:] for job in jobs]


def run_share(tasks: list[Task], only: tuple[str, ...], dtype: torch.dtype, backend: str, share: str) -> None:
    """Runs each provider once for its part of ``tasks``; ``share`` is "i/n". What fails here fails again later."""
    index, count = (int(part) for part in share.split("/"))
    with use_backend(backend):
        for benchmark, shape, provider, modes in _jobs(tasks, only)[index::count]:
            try:
                inputs = Inputs(benchmark, shape, "cuda", dtype, seed=0)
                with provider.context():
                    run_once(provider, inputs, gradients=any(mode != FORWARD for mode in modes))
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{benchmark.op} {shape.label}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)


def run_processes(arguments: list[str], count: int) -> float:
    """Starts ``count`` processes of ``tilegym bench`` with ``arguments`` and ``--warm i/n``; returns the seconds taken.

    They tune into a copy of the tuning cache that is then thrown away: times taken side by side would be wrong.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "tilegym"
        if env.cache_dir().is_dir():
            shutil.copytree(env.cache_dir(), cache)
        environment = os.environ | {
            "TILEGYM_CACHE_DIR": str(cache),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        command = [sys.executable, "-m", "tilegym.bench_cli", *arguments]
        workers = [
            subprocess.Popen([*command, "--warm", f"{i}/{count}"], env=environment, stdout=subprocess.DEVNULL)
            for i in range(count)
        ]
        try:
            for worker in workers:
                worker.wait(timeout=max(1.0, TIMEOUT - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            print(f"warming stopped after {TIMEOUT:.0f} s", file=sys.stderr)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.terminate()
                    worker.wait()
    return time.monotonic() - begin
