"""``tilegym bench``: measures ops against other implementations and the machine's roofline.

The benchmarks themselves are the files ``tests/benchmark/bench_*.py`` of a checkout; each of them can be run as well.
"""

import dataclasses
import gc
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import typer

from tilegym.errors import TileGymError

SHAPE_SECONDS = 60.0  # for one shape where the whole run has limited time
INTERRUPTED, TIME_IS_OVER = "interrupted, what was measured is kept", "the time is over"


def bench(
    ops: list[str] = typer.Argument(None, help="Ops to measure; all of them if none is named."),
    quick: bool = typer.Option(False, help="Only the headline shapes of each op."),
    minutes: float = typer.Option(None, help="Stop after so long, compiling included; what matters most comes first."),
    mode: list[str] = typer.Option(
        None,
        help="forward, backward or both; may be repeated. Default: all; the telling ones if quick.",
    ),
    dtype: str = typer.Option(None, help="bf16, fp16 or fp32. Default: bf16 on a GPU, fp32 without one."),
    model: list[str] = typer.Option(None, help="Only shapes of models whose name contains this; may be repeated."),
    tokens: list[int] = typer.Option(None, help="Only shapes with so many tokens; may be repeated."),
    only: list[str] = typer.Option(None, help="Only this provider (tilegym, torch, liger, ...); may be repeated."),
    providers: list[Path] = typer.Option(None, help="A Python file with PROVIDERS = {op: {name: callable}}."),
    skip: list[Path] = typer.Option(None, help="Leave out what this earlier --output has; may be repeated."),
    host: bool = typer.Option(True, help="Measure the host's time for one call as well, first."),
    host_only: bool = typer.Option(False, help="Measure nothing but the host's time, untuned: under a minute."),
    compile_sweep: bool = typer.Option(False, help="torch.compile at every shape, not only at the headline shapes."),
    backend: str = typer.Option(None, help="The backend of our ops. Default: the one that is chosen here anyway."),
    budget: float = typer.Option(None, help="Milliseconds for each provider, shape and pass."),
    output: Path = typer.Option(Path("out/bench"), help="Folder for results.json, the CSV files and the pictures."),
    plots: bool = typer.Option(None, help="Draw the pictures (needs matplotlib). Default: unless --minutes is given."),
    warm_processes: int = typer.Option(
        None, min=0, help="Processes that compile ahead of the measurement; 0 for none."
    ),
    write_docs: bool = typer.Option(False, help="Then write docs/benchmarks.md from the results."),
    list_only: bool = typer.Option(False, "--list", help="List ops, shapes and providers, and measure nothing."),
    folder: Path = typer.Option(None, help="Where the bench_*.py files are. Default: the checkout's tests/benchmark."),
    warm: Path = typer.Option(None, hidden=True),
) -> None:
    """Measure ops against torch, torch.compile, Liger, cuBLAS, cuDNN and the machine's own limits.

    Every provider is checked against an fp64 oracle first; one that is wrong gets no figure, and if it is ours or one
    of --providers, the exit status is 1, as where one of these fails in every pass. Results are written after every
    shape: Ctrl-C and SIGTERM keep what is done.
    """
    # One compiling thread in this process: a pool of them would disturb what is measured.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from tilegym.bench.schedule import Clock

    for option, value in (("--minutes", minutes), ("--budget", budget)):
        if value is not None and not value > 0:
            raise TileGymError(f"{option} {value:g}: it has to be more than 0")
    clock = Clock(minutes)
    import torch

    from tilegym.backend import get_current_backend
    from tilegym.bench import spec
    from tilegym.bench.schedule import in_rounds
    from tilegym.bench.schedule import terminate_like_ctrl_c
    from tilegym.bench.warm import HOST

    if host_only:
        from tilegym.bench.runner import tune_nothing

        tune_nothing()
    gpu = torch.cuda.is_available()
    benchmarks = _chosen(ops, folder or spec.default_folder(), providers or [])
    dtype = dtype or ("bf16" if gpu else "fp32")
    if dtype not in spec.DTYPES:
        raise spec.BenchmarkError(f"--dtype {dtype}: there are {', '.join(spec.DTYPES)}")
    host = host or host_only
    tasks = [] if host_only else _tasks(benchmarks, quick, gpu, mode or [], model or [], tokens or [], bool(minutes))
    hosted = [(benchmark, spec.Shape(HOST, benchmark.host), (spec.FORWARD,)) for benchmark in benchmarks if host]
    _check_only(only or [], benchmarks, gpu)
    if skip:
        if output.resolve() in [path.resolve() for path in skip]:
            raise spec.BenchmarkError(f"--skip {output}: its results would be overwritten, give another --output")
        tasks, hosted = _without(tasks, hosted, skip, dtype)
        if not tasks and not (gpu and hosted):
            raise spec.BenchmarkError("nothing to measure: --skip names runs that have all of it")
    tasks = in_rounds(tasks)
    if backend is None:
        chosen = get_current_backend()  # also where it is not taken: a wrong TILEGYM_BACKEND is refused
        backend = chosen if gpu else "pytorch"
    if list_only:
        _print_list(tasks, gpu, backend)
        return
    if not gpu:
        if backend != "pytorch":
            raise spec.BenchmarkError(f"--backend {backend}: without a GPU only the pytorch backend is measured")
        if write_docs:
            raise spec.BenchmarkError("--write-docs: docs/benchmarks.md is about a GPU, and none is visible")
        added = " and what --providers adds" if providers else ""
        print(
            f"No NVIDIA GPU is visible: only the pytorch backend{added} is measured, on the CPU and at small sizes. "
            "These figures say nothing about the kernels; small tensors stay in the cache, so that they can pass the "
            "roofline of a large copy."
        )
    only = tuple(only or ())
    if warm is not None:
        from tilegym.bench.warm import jobs_of
        from tilegym.bench.warm import run_jobs

        run_jobs(jobs_of([*hosted, *tasks], only, compile_sweep, backend), spec.DTYPES[dtype], backend, warm)
        return
    flags = {"--quick": quick, "--host-only": host_only, "--compile-sweep": compile_sweep}
    command = [*(ops or ()), *(flag for flag, given in flags.items() if given), "--dtype", dtype, "--backend", backend]
    for option, values in (("--mode", mode), ("--model", model), ("--tokens", tokens), ("--only", only)):
        command += [part for value in values or () for part in (option, str(value))]
    command += ["--minutes", str(minutes)] if minutes else []
    settings = {
        "command": shlex.join(["tilegym", "bench", *command]),
        "quick": quick,
        "dtype": dtype,
        "backend": backend,
        "budget_ms": budget or (60.0 if minutes else 100.0 if quick else 300.0),
    }
    _check_writable(output)
    with terminate_like_ctrl_c():
        if gpu:
            files = [str(part) for path in providers or () for part in ("--providers", path)]
            files += [str(part) for path in skip or () for part in ("--skip", path)]
            files += ["--folder", str(folder)] if folder is not None else []
            _warm([*command, *files, "--host" if host else "--no-host"], warm_processes, host_only, minutes)
        session = {"dtype": spec.DTYPES[dtype], "backend": backend, "only": only, "compile_sweep": compile_sweep}
        run, ended = _measure(tasks, [task[0] for task in hosted], settings, session, clock, output)
    _finish(run, output, minutes is None if plots is None else plots, write_docs)
    if ended:
        print(f"{ended}: the rest with --skip {output} and another --output", flush=True)
    if ended == INTERRUPTED:
        raise typer.Exit(130)
    if run.wrong({name for benchmark in benchmarks for name in benchmark.extra}):
        raise typer.Exit(1)


def _check_writable(output: Path) -> None:
    """Raises BenchmarkError now, not after minutes of work, if nothing can be written to ``output``."""
    from tilegym.bench import spec

    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise spec.BenchmarkError(f"--output {output} is a file: name a folder") from error
    except OSError as error:
        raise spec.BenchmarkError(
            f"--output {output} cannot be written: {error.strerror}; name another folder"
        ) from error
    if not os.access(output, os.W_OK):
        raise spec.BenchmarkError(f"--output {output} cannot be written: no permission; name another folder")


def _chosen(names: list[str] | None, folder: Path, providers: list[Path]) -> list:
    from tilegym.bench import spec
    from tilegym.bench.schedule import by_importance

    found = spec.load_benchmarks(folder)
    for path in providers:
        spec.add_providers(found, path)
    for name in names or ():
        if name not in found:
            raise spec.BenchmarkError(f"no benchmark of an op {name!r}; there are {', '.join(sorted(found))}")
    chosen = [found[name] for name in dict.fromkeys(names or by_importance(list(found)))]
    if providers and not any(benchmark.extra for benchmark in chosen):
        added = ", ".join(sorted(name for name, benchmark in found.items() if benchmark.extra)) or "none"
        raise spec.BenchmarkError(f"--providers adds nothing to the ops named; those it has providers for: {added}")
    return chosen


def _tasks(
    benchmarks: list, quick: bool, gpu: bool, mode: list[str], model: list[str], tokens: list[int], short: bool
) -> list:
    """(benchmark, shape, modes) of everything that is to be measured."""
    from tilegym.bench import spec

    for name in mode:
        if name not in spec.MODES:
            raise spec.BenchmarkError(f"--mode {name}: there are {', '.join(spec.MODES)}")
    tasks = []
    for benchmark in benchmarks:
        shapes = benchmark.small if not gpu else benchmark.quick if quick else benchmark.every_shape
        wanted = mode or (benchmark.quick_modes if quick or short else spec.MODES)
        modes = tuple(name for name in spec.MODES if name in wanted and name in benchmark.modes)
        for shape in shapes:
            if model and not any(part.lower() in shape.model.lower() for part in model):
                continue
            if tokens and shape.tokens not in tokens:
                continue
            if modes:
                tasks.append((benchmark, shape, modes))
    if not tasks:
        shapes = [shape for b in benchmarks for shape in (b.every_shape if gpu else b.small)]
        there = {
            "mode": [name for name in spec.MODES if any(name in b.modes for b in benchmarks)],
            "model": sorted({shape.model for shape in shapes if shape.model}),
            "tokens": sorted({shape.tokens for shape in shapes if shape.tokens is not None}),
        }
        listed = "; ".join(f"--{option} {', '.join(map(str, known))}" for option, known in there.items() if known)
        small = "" if gpu else " (small ones, without a GPU)"
        if model and not there["model"]:
            small += "; these are of no model, leave out --model"
        raise spec.BenchmarkError(
            f"nothing to measure: no shape fits all that was asked for{small}; there are {listed}"
        )
    return tasks


def _check_only(only: list[str], benchmarks: list, gpu: bool) -> None:
    """Raises BenchmarkError if ``--only`` names a provider that would not be measured."""
    from tilegym.bench import runner
    from tilegym.bench import spec

    of_ops = {name for benchmark in benchmarks for name in (benchmark.providers if gpu else benchmark.extra)}
    known = [spec.OURS, *sorted(of_ops - {spec.OURS}), *(runner.LATER if gpu else ())]
    for name in only:
        if name not in known:
            where = "" if gpu else "without a GPU "
            raise spec.BenchmarkError(f"--only {name}: {where}these ops are measured with {', '.join(known)}")


def _without(tasks: list, hosted: list, folders: list[Path], dtype: str) -> tuple[list, list]:
    """``tasks`` and ``hosted`` without what earlier runs of the same dtype have measured."""
    from tilegym.bench import report
    from tilegym.bench.spec import OURS

    runs = [run for run in map(report.Run.read, folders) if run.settings["dtype"] == dtype]
    done = {
        (r.op, r.shape, r.mode) for run in runs for r in run.results if r.provider == OURS and r.status == report.OK
    }
    timed = {r.op for run in runs for r in run.host if r.provider == OURS and r.status == report.OK}
    left = [(b, s, tuple(mode for mode in modes if (b.op, s.label, mode) not in done)) for b, s, modes in tasks]
    return [task for task in left if task[2]], [task for task in hosted if task[0].op not in timed]


def _print_list(tasks: list, gpu: bool, backend: str) -> None:
    from tilegym.bench.spec import FORWARD
    from tilegym.bench.spec import OURS

    width = max((len(benchmark.op) for benchmark, _, _ in tasks), default=0)
    for benchmark, shape, modes in tasks:
        measured = benchmark.providers if gpu else {OURS, *benchmark.extra}
        names = [name for name, provider in benchmark.providers.items() if name in measured and not provider.missing()]
        names += benchmark.in_training(backend) if gpu and modes != (FORWARD,) else ()
        print(f"{benchmark.op:{width}} {shape.label:40} {', '.join(modes)}; {', '.join(names)}")


def _warm(arguments: list[str], count: int | None, host_only: bool, minutes: float | None) -> None:
    from tilegym.bench import warm

    count = warm.default_processes() if count is None else count
    timeout = 40.0 if host_only else warm.TIMEOUT if minutes is None else min(warm.TIMEOUT, 0.3 * 60 * minutes)
    if count > 0:
        print(f"compiling ahead in {count} processes, {timeout:.0f} s at most ...", flush=True)
        print(f"compiled ahead in {warm.run_processes(arguments, count, timeout):.0f} s", flush=True)


def _measure(tasks: list, hosted: list, settings: dict, options: dict, clock, output: Path) -> tuple:
    """Measures everything; writes after every shape, so that an end at any moment leaves what was done.

    Returns:
        The run, and why it ended before everything was measured, or "".
    """
    import torch

    from tilegym.bench import machine
    from tilegym.bench import report
    from tilegym.bench import runner
    from tilegym.bench.roofline import measure_roofline
    from tilegym.bench.schedule import OutOfTime
    from tilegym.bench.spec import BenchmarkError
    from tilegym.bench.timing import CpuTimer
    from tilegym.bench.timing import CudaTimer

    timer = (CudaTimer if torch.cuda.is_available() else CpuTimer)(settings["budget_ms"] * 1e-3)
    run, ended = report.Run(machine.describe(), settings), ""
    if not timer.compares:
        if hosted and not tasks:
            raise BenchmarkError("nothing to measure: the host's time is that of launching on a GPU")
        hosted = []
    session = runner.Session(timer, None, **options)
    limit = SHAPE_SECONDS if clock.limited else float("inf")

    def collect(found: list, results: Iterator) -> bool:
        """Whether ``results`` were all there within the limit; appends those that were to ``found``."""
        try:
            with clock.at_most(limit):
                for result in results:
                    found.append(result)
        except OutOfTime:
            if clock.remaining <= 0:
                raise
            return False
        return True

    try:
        with _Steps(len(hosted) + (1 + len(tasks) if tasks else 0)) as steps:
            for benchmark in hosted:
                steps.begin(f"{benchmark.op}, host time")
                collect(run.host, runner.measure_host(benchmark, session))
                run.write(output)
            if tasks:
                steps.begin("roofline")
                roofline = measure_roofline(timer, options["dtype"])
                run.roofline = dict(vars(roofline))
                session = dataclasses.replace(session, roofline=roofline)
            for benchmark, shape, modes in tasks:
                steps.begin(f"{benchmark.op} {shape.label}")
                session.spent.clear()
                if not collect(run.results, runner.measure_shape(benchmark, shape, modes, session)):
                    run.results += runner.given_up(benchmark, shape, modes, run.results, limit)
                steps.spent(session.spent)
                run.add_spent(benchmark.op, session.spent)
                run.write(output)
                gc.collect()  # while samples are taken it is off
                if timer.device == "cuda":
                    torch.cuda.empty_cache()
        run.complete = True
    except KeyboardInterrupt:
        ended = INTERRUPTED
    except OutOfTime:
        ended = TIME_IS_OVER
    run.write(output)
    return run, ended


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

    def spent(self, seconds: dict[str, float]) -> None:
        """Says what the step took its time for, where that is a second or more."""
        told = [f"{what} {taken:.1f}" for what, taken in seconds.items() if taken >= 1]
        if told and not self.progress.console.is_terminal:
            print(f"{'':19}seconds: {', '.join(told)}", flush=True)


def _finish(run, output: Path, plots: bool, write_docs: bool) -> None:
    from tilegym.bench import report
    from tilegym.bench import slower_table

    if plots and run.results:
        try:
            from tilegym.bench.plots import plot

            plot(run, output)
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":
                raise
            print("no pictures: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
    print(f"\n{report.table(run)}", flush=True)
    sent = [case for case in slower_table.cases(run) if case.goes_to_pytorch]
    if sent:
        print("\nPyTorch is the better one for (write_slower.py makes dispatch choose it):")
    for case in sent:
        passes = "forward and backward" if case.gradients else "forward"
        print(f"{case.op:16} {passes:20} {case.shape:26} {case.kernels * 1e6:.1f} us, PyTorch {case.pytorch * 1e6:.1f}")
    print(f"\nresults in {output}", flush=True)
    if write_docs:
        from tilegym.bench.docs import write

        print(f"written: {write([output])}")


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
