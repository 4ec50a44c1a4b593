"""``tilegym bench``, on the CPU."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest
import torch
import typer
from bench.benchmark_fakes import ROOFLINE
from bench.benchmark_fakes import FakeGpuTimer
from typer.testing import CliRunner

from tilegym import bench_cli
from tilegym.backend import selector
from tilegym.bench import spec
from tilegym.bench import warm
from tilegym.bench.report import Run
from tilegym.errors import TileGymError

SMALL = """
from tilegym import ops
from tilegym.bench.spec import Benchmark, Provider, Work, shape
import torch.nn.functional as F

def inputs(make, rows, columns):
    return {"a": make(rows, columns), "b": make(rows, columns)}

def formula(a, b):
    return F.silu(a) * b

BENCHMARKS = [
    Benchmark(
        op="swiglu", inputs=inputs, ours=ops.swiglu, oracle=formula, peers={"torch": Provider(formula)},
        forward=lambda itemsize, rows, columns: Work(2 * itemsize * rows * columns, itemsize * rows * columns),
        host={"rows": 1, "columns": 4}, shapes=(), quick=(),
        small=(
            shape(rows=4, columns=8), shape("second", "Llama", rows=8, columns=8), shape("third", rows=2, columns=4),
        ),
    )
]
"""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the command without a GPU")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("tilegym.bench.roofline.measure_roofline", lambda timer, dtype: ROOFLINE)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "bench_small.py").write_text(SMALL)
    app = typer.Typer()
    app.command()(bench_cli.bench)

    def invoke(*arguments):
        fixed = ["--no-plots"] if "--plots" not in arguments else []
        fixed += ["--folder", str(tmp_path / "files"), "--output", str(tmp_path / "out"), "--budget", "2"]
        return CliRunner().invoke(app, [*fixed, *arguments])

    return invoke


def results(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_without_a_gpu_it_says_so_and_measures_only_the_pytorch_backend(run, tmp_path):
    done = run("--plots")
    assert done.exit_code == 0, done.output
    assert "No NVIDIA GPU is visible: only the pytorch backend is measured" in done.output
    stored = results(tmp_path)
    assert {row["provider"] for row in stored["results"]} == {spec.OURS}
    assert {row["backend"] for row in stored["results"]} == {"pytorch"}
    assert stored["complete"] and stored["machine"]["gpu"] is None and stored["host"] == []
    assert stored["settings"]["dtype"] == "fp32"
    assert (tmp_path / "out" / "swiglu_forward.png").exists()
    assert "swiglu forward  4x8 " in done.output


def test_plug_ins_are_measured_without_a_gpu_too(run, tmp_path):
    plug_in = tmp_path / "mine.py"
    plug_in.write_text(
        "import torch\n"
        "PROVIDERS = {'swiglu': {'mine': lambda a, b: torch.nn.functional.silu(a) * b, 'off': lambda a, b: a}}\n"
    )
    done = run("--providers", str(plug_in), "--mode", "forward", "--model", "llama")
    assert "only the pytorch backend and what --providers adds is measured" in done.output
    assert done.exit_code == 1, "off is wrong"
    rows = {row["provider"]: row["status"] for row in results(tmp_path)["results"]}
    assert rows == {spec.OURS: "ok", "mine": "ok", "off": "WRONG"}
    assert "mine" in run("--providers", str(plug_in), "--list").output
    assert run("--providers", str(plug_in), "--mode", "forward", "--only", "mine").exit_code == 0
    assert {row["provider"] for row in results(tmp_path)["results"]} == {"mine"}


def test_plug_ins_that_never_work_fail_the_run(run, tmp_path):
    plug_in = tmp_path / "mine.py"
    plug_in.write_text("PROVIDERS = {'swiglu': {'never': lambda a, b: 1 / 0, 'nothing': lambda a, b: print()}}\n")
    done = run("--providers", str(plug_in), "--model", "llama")
    assert done.exit_code == 1 and "ZeroDivisionError" in done.output
    assert "it returned NoneType: return a tensor, or several" in done.output
    plug_in.write_text("PROVIDERS = {}\n")
    done = run("--providers", str(plug_in), "--model", "llama")
    assert done.exit_code == 1 and "--providers adds nothing to the ops named" in str(done.exception)


def test_a_file_is_no_folder_for_the_results(run, tmp_path):
    (tmp_path / "there").write_text("")
    done = run("--output", str(tmp_path / "there"))
    assert done.exit_code == 1 and "is a file: name a folder" in str(done.exception)


def test_columns_are_as_wide_as_the_longest_name(run, tmp_path):
    path = tmp_path / "files" / "bench_small.py"
    path.write_text(path.read_text() + "import dataclasses\n")
    long = "dataclasses.replace(BENCHMARKS[0], op='swiglu_of_a_longer_name')"
    path.write_text(path.read_text() + f"BENCHMARKS.append({long})\n")
    for output in (run("--mode", "forward", "--model", "llama").output, run("--list", "--model", "llama").output):
        lines = [line for line in output.splitlines() if line.startswith("swiglu")]
        assert len(lines) == 2 and len({line.index("second") for line in lines}) == 1, output


def test_with_a_comparing_timer_everything_is_measured(run, tmp_path, monkeypatch):
    """What happens on a GPU, with a timer that makes its figures up."""
    monkeypatch.setattr("tilegym.bench.timing.CpuTimer", FakeGpuTimer)
    done = run("--dtype", "bf16")
    assert done.exit_code == 0, done.output
    stored = results(tmp_path)
    assert {row["provider"] for row in stored["results"]} == {spec.OURS, "torch", "copy of as many bytes"}
    assert [row["provider"] for row in stored["host"]] == [spec.OURS, "torch"]
    assert "host time of one call, us" in done.output


def test_selecting(run, tmp_path):
    assert run("swiglu", "--model", "llama").exit_code == 0
    assert [row["shape"] for row in results(tmp_path)["results"]] == ["second"]
    listed = run("--list")
    assert "second" in listed.output and listed.output.count("swiglu") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("no_such_op",), "no benchmark of an op 'no_such_op'; there are swiglu"),
        (("--dtype", "fp7"), "--dtype fp7"),
        (("--mode", "sideways"), "--mode sideways"),
        (("--mode", "backward"), "(small ones, without a GPU); there are --mode forward; --model Llama"),
        (("--model", "gpt"), "there are --mode forward; --model Llama"),
        (("--tokens", "5"), "there are --mode forward; --model Llama"),
        (("--only", "liger"), "--only liger: without a GPU these ops are measured with tilegym"),
        (("--minutes", "0"), "--minutes 0: it has to be more than 0"),
        (("--budget=-1",), "--budget -1: it has to be more than 0"),
        (("--backend", "cutile"), "without a GPU only the pytorch backend"),
        (("--providers", "nowhere.py"), "nowhere.py is not a Python file"),
        (("--write-docs",), "docs/benchmarks.md is about a GPU, and none is visible"),
        (("--host-only",), "nothing to measure: the host's time is that of launching on a GPU"),
    ),
)
def test_bad_input_is_one_clear_error(run, arguments, message):
    error = run(*arguments).exception
    assert isinstance(error, TileGymError) and message in str(error)


def test_a_backend_of_the_environment_that_is_none_is_refused_where_it_would_not_be_taken(run, monkeypatch):
    monkeypatch.setenv("TILEGYM_BACKEND", "no_backend")
    monkeypatch.setattr(selector, "_environment_or_default", selector._environment_or_default.__wrapped__)
    assert "no backend is called 'no_backend'; there are" in str(run("--list").exception)


def test_sizes_that_there_are_not_are_an_error_that_names_those_there_are():
    benchmarks = bench_cli._chosen(["rms_norm"], spec.default_folder(), [])
    with pytest.raises(spec.BenchmarkError, match=r"there are --mode forward, backward, both; --tokens 7, 64$"):
        bench_cli._tasks(benchmarks, False, False, [], [], [1], False)


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(spec.BenchmarkError, match=r"--output .*file/out cannot be written: Not a directory"):
        bench_cli._check_writable(tmp_path / "file" / "out")
    bench_cli._check_writable(tmp_path / "new" / "out")


def test_ctrl_c_keeps_what_is_done(run, tmp_path, monkeypatch):
    from tilegym.bench import runner

    real = runner.measure_shape

    def measure(benchmark, shape, *rest):
        if shape.label == "third":
            raise KeyboardInterrupt
        return real(benchmark, shape, *rest)

    monkeypatch.setattr(runner, "measure_shape", measure)
    done = run()
    assert done.exit_code == 130
    stored = results(tmp_path)
    assert not stored["complete"]
    assert [row["shape"] for row in stored["results"]] == ["4x8", "second"]
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2


def test_a_wrong_op_makes_the_exit_status_1(run, tmp_path):
    path = tmp_path / "files" / "bench_small.py"
    path.write_text(path.read_text().replace("ours=ops.swiglu", "ours=lambda a, b: a"))
    done = run()
    assert done.exit_code == 1
    assert "swiglu 4x8, tilegym WRONG: output: error" in done.output
    assert all(row["seconds"] is None for row in results(tmp_path)["results"])


def test_plug_in_providers(tmp_path):
    (tmp_path / "bench_small.py").write_text(SMALL)
    plug_in = tmp_path / "mine.py"
    plug_in.write_text("PROVIDERS = {'swiglu': {'mine': lambda a, b: a}}\n")
    benchmarks = spec.load_benchmarks(tmp_path)
    spec.add_providers(benchmarks, plug_in)
    assert list(benchmarks["swiglu"].providers) == [spec.OURS, "torch", "mine"]
    for content, message in (
        ("PROVIDERS = {'swiglu': {'mine': print}}", "already"),
        ("PROVIDERS = {'swish': {}}", "no benchmark of 'swish'"),
        ("PROVIDERS = []", "no dictionary PROVIDERS"),
        ("PROVIDERS = {'swiglu': print}", r"PROVIDERS\['swiglu'\] is no dictionary"),
        ("PROVIDERS = {'swiglu': {'seven': 7}}", "'seven' is neither callable nor a Provider"),
        ("x = 1\nPROVIDERS = ", r"mine.py cannot be imported: SyntaxError: .*line 2"),
        ("x = 1\nPROVIDERS = y", r"mine.py, line 2 cannot be imported: NameError: name 'y' is not defined"),
    ):
        plug_in.write_text(content)
        with pytest.raises(spec.BenchmarkError, match=message):
            spec.add_providers(benchmarks, plug_in)


def test_two_files_for_one_op_are_refused(tmp_path):
    for name in ("bench_a.py", "bench_b.py"):
        (tmp_path / name).write_text(SMALL)
    with pytest.raises(spec.BenchmarkError, match="a benchmark of 'swiglu' already"):
        spec.load_benchmarks(tmp_path)
    with pytest.raises(spec.BenchmarkError, match="--folder"):
        spec.load_benchmarks(tmp_path / "empty")


def _small(tmp_path):
    (tmp_path / "bench_small.py").write_text(SMALL)
    return spec.load_benchmarks(tmp_path)["swiglu"]


def test_warming_runs_what_compiles_and_nothing_else(tmp_path):
    benchmark = _small(tmp_path)
    benchmark.peers["compiled"] = spec.Provider(benchmark.oracle, compile=True)
    benchmark = dataclasses.replace(benchmark, quick=benchmark.small[2:])
    tasks = [(benchmark, shape, (spec.FORWARD,)) for shape in benchmark.small]
    host = (benchmark, spec.Shape(warm.HOST, benchmark.host), (spec.FORWARD,))

    def jobs(*arguments):
        return [(shape.label, provider.compile) for _, shape, provider, _ in warm.jobs_of([host, *tasks], *arguments)]

    assert jobs((), False) == [("third", True), ("host", False), ("third", False), ("4x8", False), ("second", False)]
    assert len(jobs((), True)) == 4 + 3
    assert jobs(("compiled",), False) == [("third", True)]
    assert jobs(("torch",), False) == []


def test_warming_processes_share_the_jobs(tmp_path, monkeypatch):
    benchmark = _small(tmp_path)
    claims = tmp_path / "claims"
    claims.mkdir()
    monkeypatch.setattr(warm, "Inputs", lambda benchmark, shape, *_, **__: shape.label)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    done = []

    def run_once(provider, inputs, gradients):
        done.append(inputs)
        if inputs == "second":
            raise RuntimeError("does not compile")

    monkeypatch.setattr(warm, "run_once", run_once)
    jobs = warm.jobs_of([(benchmark, shape, (spec.FORWARD,)) for shape in benchmark.small], (), False)
    (claims / "0").touch()  # another process was first
    for _ in range(2):
        warm.run_jobs(jobs, torch.float32, "pytorch", claims)
    assert done == ["second", "third"]


def test_warming_processes_run_the_command_with_a_cache_of_their_own(tmp_path, monkeypatch):
    home = tmp_path / "cache"
    home.mkdir()
    (home / "tuning.sqlite").write_bytes(b"kept")
    monkeypatch.setenv("TILEGYM_CACHE_DIR", str(home))
    started = []

    class Process:
        def __init__(self, command, env, stdout):
            cache = env["TILEGYM_CACHE_DIR"]
            started.append((command, cache))
            with open(f"{cache}/tuning.sqlite", "rb+") as file:
                assert file.read() == b"kept"
                file.write(b" and spoilt")

        def wait(self, timeout=None):
            return 0

        def poll(self):
            return 0

    monkeypatch.setattr(warm.subprocess, "Popen", Process)
    warm.run_processes(["swiglu", "--quick"], 1)
    ((command, cache),) = started
    assert command[1:-1] == ["-m", "tilegym.bench_cli", "swiglu", "--quick", "--warm"]
    assert cache != str(home) and (home / "tuning.sqlite").read_bytes() == b"kept"


def second_shape_sleeps(patch):
    """A minute passes before the second shape is measured."""
    from tilegym.bench import runner

    real = runner.measure_shape

    def measure(benchmark, shape, *rest):
        if shape.label == "second":
            time.sleep(60)
        yield from real(benchmark, shape, *rest)

    patch.setattr(runner, "measure_shape", measure)


def test_a_limited_run_stops_and_another_one_does_the_rest(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        second_shape_sleeps(patch)
        begin = time.monotonic()
        done = run("--minutes", "0.05")
    assert done.exit_code == 0, done.output
    assert time.monotonic() - begin < 20
    assert "the time is over: the rest with --skip" in done.output
    assert [row["shape"] for row in results(tmp_path)["results"]] == ["4x8"]
    assert not results(tmp_path)["complete"]
    (tmp_path / "out").rename(tmp_path / "earlier")
    assert run("--skip", str(tmp_path / "earlier")).exit_code == 0
    assert [row["shape"] for row in results(tmp_path)["results"]] == ["second", "third"]
    assert results(tmp_path)["complete"]
    assert "overwritten" in str(run("--skip", str(tmp_path / "out")).exception)
    (tmp_path / "out").rename(tmp_path / "rest")
    nothing_left = run("--skip", str(tmp_path / "earlier"), "--skip", str(tmp_path / "rest"))
    assert "--skip names runs that have all of it" in str(nothing_left.exception)


def test_a_shape_that_takes_too_long_is_given_up(run, tmp_path, monkeypatch):
    second_shape_sleeps(monkeypatch)
    monkeypatch.setattr(bench_cli, "SHAPE_SECONDS", 0.5)
    done = run("--minutes", "5")
    assert done.exit_code == 1
    rows = {row["shape"]: row for row in results(tmp_path)["results"]}
    assert list(rows) == ["4x8", "second", "third"]
    assert (rows["second"]["status"], rows["second"]["note"]) == ("failed", "given up after 0 s")
    assert rows["third"]["status"] == "ok"


def test_sigterm_keeps_what_is_done(tmp_path):
    (tmp_path / "bench_small.py").write_text(
        SMALL.replace(
            "BENCHMARKS = [",
            """
def slow(make, rows, columns):
    if rows == 2:
        import time
        print("now", flush=True)
        for _ in range(600):  # a signal just before a sleep begins does not shorten it
            time.sleep(0.1)
    return inputs(make, rows, columns)

BENCHMARKS = [""",
        ).replace("inputs=inputs", "inputs=slow")
    )
    command = [sys.executable, "-m", "tilegym.bench_cli", "--folder", str(tmp_path), "--output", str(tmp_path / "out")]
    with subprocess.Popen([*command, "--no-plots", "--budget", "2"], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("now"):
                process.terminate()
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "interrupted, what was measured is kept" in rest
    assert [row["shape"] for row in results(tmp_path)["results"]] == ["4x8", "second"]


def test_host_times_alone(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tilegym.bench.timing.CpuTimer", FakeGpuTimer)
    monkeypatch.delenv("TILEGYM_DISABLE_AUTOTUNE", raising=False)
    assert run("--host-only").exit_code == 0
    assert os.environ.pop("TILEGYM_DISABLE_AUTOTUNE") == "1"
    stored = results(tmp_path)
    assert [row["provider"] for row in stored["host"]] == [spec.OURS, "torch"]
    assert stored["results"] == [] and stored["complete"]


def test_host_times_are_written_first(run, tmp_path, monkeypatch):
    from tilegym.bench import runner

    def stop(*_):
        assert len(results(tmp_path)["host"]) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr("tilegym.bench.timing.CpuTimer", FakeGpuTimer)
    monkeypatch.setattr(runner, "measure_shape", stop)
    assert run().exit_code == 130
    assert len(results(tmp_path)["host"]) == 2


def test_on_a_gpu_the_same_command_compiles_ahead(run, tmp_path, monkeypatch):
    path = tmp_path / "files" / "bench_small.py"
    path.write_text(path.read_text().replace("quick=()", "quick=(shape(rows=64, columns=8),)"))
    seen = []

    def measure(tasks, hosted, settings, session, clock, output):
        seen.append(([shape.label for _, shape, _ in tasks], [benchmark.op for benchmark in hosted], clock.limited))
        return Run({"device_name": "GPU"}, settings, complete=True), ""

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_cli, "_measure", measure)
    monkeypatch.setattr(warm, "run_processes", lambda *arguments: seen.append(arguments) or 1.0)
    done = run("swiglu", "--quick", "--minutes", "3", "--backend", "pytorch", "--warm-processes", "4", "--no-host")
    assert done.exit_code == 0, done.output
    assert run("--host-only", "--backend", "pytorch", "--warm-processes", "4").exit_code == 0
    os.environ.pop("TILEGYM_DISABLE_AUTOTUNE", None)
    (command, count, timeout), limited, (host_command, _, host_timeout), alone = seen
    expected = ["swiglu", "--quick", "--dtype", "bf16", "--backend", "pytorch", "--minutes", "3.0"]
    assert command == [*expected, "--folder", str(tmp_path / "files"), "--no-host"]
    assert (count, timeout) == (4, pytest.approx(0.3 * 180))
    assert limited == (["64x8"], [], True)
    assert host_command[0] == "--host-only" and host_command[-1] == "--host" and host_timeout <= 40
    assert alone == ([], ["swiglu"], False)
