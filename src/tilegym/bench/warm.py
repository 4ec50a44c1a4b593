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
from tilegym.bench.passes import Inputs
from tilegym.bench.passes import run_once
from tilegym.bench.schedule import Task
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Shape

TIMEOUT = 150.0  # seconds; what is not compiled by then is compiled when it is measured
HOST = "host"  # the label of the shapes at which host time is measured
Job = tuple[Benchmark, Shape, Provider, tuple[str, ...]]


def default_processes() -> int:
    """Two cores stay free, and more than 14 processes crowd the GPU's memory."""
    return max(0, min(14, (os.cpu_count() or 1) - 2))


def jobs_of(tasks: list[Task], only: tuple[str, ...], compile_sweep: bool, backend: str = "cutile") -> list[Job]:
    """Everything that compiles, in the order of the tasks; what takes longest first among those of one round."""
    jobs = []
    for benchmark, shape, modes in tasks:
        host = shape.label == HOST
        headline = not host and benchmark.is_headline(shape)
        trained = benchmark.in_training(backend) if modes != (FORWARD,) else {}
        for name, provider in (benchmark.providers | trained).items():
            slow = provider.compile or provider.headline_only
            wanted = (not only or name in only) and (not slow or headline or (compile_sweep and not host))
            if (provider.jit or provider.compile) and wanted and not provider.missing():
                jobs.append((not (headline or host), not slow, benchmark, shape, provider, modes))
    jobs.sort(key=lambda job: job[:2])
    return [job[2:] for job in jobs]


def run_jobs(jobs: list[Job], dtype: torch.dtype, backend: str, claims: Path) -> None:
    """Runs the jobs that no other process has claimed, each once. What fails here fails again later."""
    with use_backend(backend):
        for number, (benchmark, shape, provider, modes) in enumerate(jobs):
            if not _claim(claims / str(number)):
                continue
            try:
                inputs = Inputs(benchmark, shape, "cuda", dtype, seed=0)
                with provider.context():
                    run_once(provider, inputs, gradients=any(mode != FORWARD for mode in modes))
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{benchmark.op} {shape.label}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            inputs = None
            torch.cuda.empty_cache()  # the others need the memory


def _claim(path: Path) -> bool:
    """Whether this process is the first to ask for ``path``."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run_processes(arguments: list[str], count: int, timeout: float = TIMEOUT) -> float:
    """Starts ``count`` processes of ``tilegym bench`` with ``arguments`` and ``--warm``; returns the seconds taken.

    They tune into a copy of the tuning cache that is then thrown away: times taken side by side would be wrong.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        cache, claims = Path(scratch) / "tilegym", Path(scratch) / "claims"
        claims.mkdir()
        if env.cache_dir().is_dir():
            shutil.copytree(env.cache_dir(), cache)
        environment = os.environ | {
            "TILEGYM_CACHE_DIR": str(cache),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        command = [sys.executable, "-m", "tilegym.bench_cli", *arguments, "--warm", str(claims)]
        workers = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(count)]
        try:
            for worker in workers:
                worker.wait(timeout=max(1.0, timeout - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            print(f"warming stopped after {timeout:.0f} s", file=sys.stderr)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.terminate()
            for worker in workers:
                worker.wait()
    return time.monotonic() - begin
