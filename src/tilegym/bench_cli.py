"""``tilegym bench``: measures ops against other implementations and the machine's roofline.

The benchmarks themselves are the files ``tests/benchmark/bench_*.py`` of a checkout; each of them can be run as well.
"""

import gc
import os
import shlex
import sys
import time
from pathlib import Path

import typer

from tilegym.errors import TileGymError


def bench(
    ops: list[str] = typer.Argument(None, help="Ops to measure; all of them if none is named."),
    quick: bool = typer.Option(False, help="A few shapes of each op, about two minutes in all."),
    mode: list[str] = typer.Option(None, help="forward, backward or both; may be repeated. Default: all."),
    dtype: str = typer.Option(None, help="bf16, fp16 or fp32. Default: bf16 on a GPU, fp32 without one."),
    model: list[str] = typer.Option(None, help="Only shapes of models whose name contains this; may be repeated."),
    tokens: list[int] = typer.Option(None, help="Only shapes with so many tokens; may be repeated."),
    only: list[str] = typer.Option(None, help="Only this provider (tilegym, torch, liger, ...); may be repeated."),
    providers: list[Path] = typer.Option(None, help="A Python file with PROVIDERS = {op: {name: callable}}."),
    host: bool = typer.Option(True, help="Measure the host's time for one call as well."),
    backend: str = typer.Option(None, help="The backend of our ops. Default: the one that is chosen here anyway."),
    budget: float = typer.Option(None, help="Milliseconds for each provider, shape and pass."),
    output: Path = typer.Option(Path("out/bench"), help="Folder for results.json, the CSV files and the pictures."),
    plots: bool = typer.Option(True, help="Draw the pictures (needs matplotlib)."),
    warm_processes: int = typer.Option(None, help="Processes that compile ahead of the measurement; 0 for none."),
    write_docs: bool = typer.Option(False, help="Then write docs/benchmarks.md from the results."),
    list_only: bool = typer.Option(False, "--list", help="List ops, shapes and providers, and measure nothing."),
    folder: Path = typer.Option(None, help="Where the bench_*.py files are. Default: the checkout's tests/benchmark."),
    warm: str = typer.Option(None, hidden=True),
) -> None:
    """Measure ops against torch, torch.compile, Liger, cuBLAS, cuDNN and the machine's own limits.

    Every provider is checked against an fp64 oracle first; one that is wrong gets no figure. Ctrl-C keeps what is done.
    """
    # One compiling thread in this process: a pool of them would disturb what is measured.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch

    from tilegym.backend import get_current_backend
    from tilegym.bench import spec

    gpu = torch.cuda.is_available()
    benchmarks = _chosen(ops, folder or spec.default_folder(), providers or [])
    dtype = dtype or ("bf16" if gpu else "fp32")
    if dtype not in spec.DTYPES:
        raise spec.BenchmarkError(f"--dtype {dtype}: there are {', '.join(spec.DTYPES)}")
    tasks = _tasks(benchmarks, quick, gpu, mode or [], model or [], tokens or [])
    if list_only:
        _print_list(tasks, gpu)
        return
    if not gpu:
        if backend not in (None, "pytorch"):
            raise spec.BenchmarkError(f"--backend {backend}: without a GPU only the pytorch backend is measured")
        print(
            "No NVIDIA GPU is visible: only the pytorch backend is measured, on the CPU and at small sizes. "
            "These figures say nothing about the kernels; small tensors stay in the cache, so that they can pass the "
            "roofline of a large copy."
        )
    backend = backend or (get_current_backend() if gpu else "pytorch")
    only = tuple(only or ())
    if warm is not None:
        from tilegym.bench.warm import run_share

        if host:
            tasks += [(benchmark, spec.Shape("host", benchmark.host), (spec.FORWARD,)) for benchmark in benchmarks]
        run_share(tasks, only, spec.DTYPES[dtype], backend, warm)
        return
    command = [*(ops or ()), *(["--quick"] if quick else ()), "--dtype", dtype, "--backend", backend]
    for option, values in (("--mode", mode), ("--model", model), ("--tokens", tokens), ("--only", only)):
        command += [part for value in values or () for part in (option, str(value))]
    if gpu:
        files = [part for path in providers or () for part in ("--providers", str(path))]
        files += ["--folder", str(folder)] if folder is not None else []
        _warm([*command, *files, "--host" if host else "--no-host"], warm_processes)
    settings = {
        "command": shlex.join(["tilegym", "bench", *command]),
        "quick": quick,
        "dtype": dtype,
        "backend": backend,
        "budget_ms": budget or (100.0 if quick else 300.0),
    }
    run, interrupted = _measure(tasks, benchmarks, settings, spec.DTYPES[dtype], backend, only, host, output)
    _finish(run, output, plots, write_docs)
    if interrupted:
        raise typer.Exit(130)
    if run.wrong:
        raise typer.Exit(1)


def _chosen(names: list[str] | None, folder: Path, providers: list[Path]) -> list:
    from tilegym.bench import spec

    found = spec.load_benchmarks(folder)
    for path in providers:
        spec.add_providers(found, path)
    for name in names or ():
        if name not in found:
            raise spec.BenchmarkError(f"no benchmark of an op {name!r}; there are {', '.join(sorted(found))}")
    return [found[name] for name in dict.fromkeys(names or found)]


def _tasks(benchmarks: list, quick: bool, gpu: bool, mode: list[str], model: list[str], tokens: list[int]) -> list:
    """(benchmark, shape, modes) of everything that is to be measured."""
    from tilegym.bench import spec

    for name in mode:
        if name not in spec.MODES:
            raise spec.BenchmarkError(f"--mode {name}: there are {', '.join(spec.MODES)}")
    tasks = []
    for benchmark in benchmarks:
        shapes = benchmark.small if not gpu else benchmark.quick if quick else benchmark.shapes
        wanted = mode or (benchmark.quick_modes if quick else spec.MODES)
        modes = tuple(name for name in spec.MODES if name in wanted and name in benchmark.modes)
        for shape in shapes:
            if model and not any(part.lower() in shape.model.lower() for part in model):
                continue
            if tokens and shape.tokens not in tokens:
                continue
            if modes:
                tasks.append((benchmark, shape, modes))
    if not tasks:
        raise spec.BenchmarkError("nothing to measure: no shape fits --mode, --model and --tokens")
    return tasks


def _print_list(tasks: list, gpu: bool) -> None:
    from tilegym.bench.spec import OURS

    for benchmark, shape, modes in tasks:
        names = [name for name, p in benchmark.providers.items() if not p.missing() and (gpu or name == OURS)]
        print(f"{benchmark.op:16} {shape.label:40} {', '.join(modes)}; {', '.join(names)}")


def _warm(arguments: list[str], count: int | None) -> None:
    from tilegym.bench import warm

    count = warm.default_processes() if count is None else count
    if count > 0:
        print(f"compiling ahead in {count} processes ...", flush=True)
        print(f"compiled ahead in {warm.run_processes(arguments, count):.0f} s", flush=True)


def _measure(tasks, benchmarks, settings, dtype, backend, only, host, output):
    """Measures everything; writes after every shape, so that an end at any moment leaves what was done."""
    import torch

    from tilegym.bench import machine
    from tilegym.bench import report
    from tilegym.bench import runner
    from tilegym.bench.roofline import measure_roofline
    from tilegym.bench.timing import CpuTimer
    from tilegym.bench.timing import CudaTimer

    timer = (CudaTimer if torch.cuda.is_available() else CpuTimer)(settings["budget_ms"] * 1e-3)
    run = report.Run(machine.describe(), settings)
    host = host and timer.compares
    try:
        with _Steps(1 + len(tasks) + (len(benchmarks) if host else 0)) as steps:
            steps.begin("roofline")
            roofline = measure_roofline(timer, dtype)
            run.roofline = dict(vars(roofline))
            session = runner.Session(timer, roofline, dtype, backend, only)
            for benchmark, shape, modes in tasks:
                steps.begin(f"{benchmark.op} {shape.label}")
                run.results += runner.measure_shape(benchmark, shape, modes, session)
                run.write(output)
                gc.collect()  # while samples are taken it is off
                if timer.device == "cuda":
                    torch.cuda.empty_cache()
            for benchmark in benchmarks if host else ():
                steps.begin(f"{benchmark.op}, host time")
                run.host += runner.measure_host(benchmark, session)
                run.write(output)
        run.complete = True
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured is kept", file=sys.stderr)
    run.write(output)
    return run, not run.complete


class _Steps:
    """A progress bar on a terminal, a line a step elsewhere."""

    def __init__(self, total: int) -> None:
        from rich.progress import Progress
        from rich.progress import TimeElapsedColumn

        self.total, self.done, self.start = total, -1, time.monotonic()
        self.progress = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True)
        self.task = self.progress.add_task("", total=total)

    def __enter__(self) -> "_Steps":
        if self.progress.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self.progress.stop()

    def begin(self, what: str) -> None:
        """Ends the step before and begins ``what``."""
        self.done += 1
        if self.progress.console.is_terminal:
            self.progress.update(self.task, completed=self.done, description=what)
        else:
            print(f"[{self.done + 1:3}/{self.total}] {time.monotonic() - self.start:6.1f} s  {what}", flush=True)


def _finish(run, output: Path, plots: bool, write_docs: bool) -> None:
    from tilegym.bench import report

    if plots and run.results:
        try:
            from tilegym.bench.plots import plot

            plot(run, output)
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            print("no pictures: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    print(f"\n{report.table(run)}\n\nresults in {output}", flush=True)
    if write_docs:
        from tilegym.bench.docs import default_target
        from tilegym.bench.docs import write

        print(f"written: {write(output, default_target())}")


def main(benchmarks: list) -> None:
    """Runs the file ``bench_<op>.py`` that calls this, with the options of ``tilegym bench``."""
    script = Path(sys.argv[0]).resolve()
    sys.argv[1:1] = [*(benchmark.op for benchmark in benchmarks), "--folder", str(script.parent)]
    run_command()


def run_command() -> None:
    """``bench`` as a program of its own: TileGym's errors become one line and exit status 1."""
    try:
        typer.run(bench)
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_command()
