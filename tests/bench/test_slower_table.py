"""Which calls PyTorch serves faster is written into a file from measurements."""

import importlib.util
import json

import pytest
import torch

from tilegym.backend import slower
from tilegym.bench import slower_table
from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import BenchmarkError
from tilegym.bench.spec import default_folder
from tilegym.bench.spec import load_benchmarks

GPU = "Test GPU 9000"
BENCHMARKS = load_benchmarks(default_folder())
ONE, TWO = {"tokens": 1, "hidden": 4096}, {"tokens": 512, "hidden": 4096}


def _rows(op, dims, mode, kernels, pytorch, provider="tilegym", memory=(1000, 1000)):
    """The rows of one case; microseconds."""
    named = ((provider, "cutile", kernels, memory[0]), (PYTORCH, "pytorch", pytorch, memory[1]))
    return [
        Result(
            op=op, shape=str(dims), model="", dims=dims, mode=mode, provider=name, status="ok", backend=backend,
            seconds=us, low=us * 0.99, high=us * 1.01, peak_bytes=peak,
        )
        for name, backend, us, peak in named
    ]  # fmt: skip


def _run(*rows, host=(), **machine):
    known = {"gpu": GPU, "torch": "2.11", "date": "2026-01-01"} | machine
    return Run(known, {"dtype": "bf16"}, results=[row for case in rows for row in case], host=list(host))


def _listed(*rows, **options):
    return slower_table.slower_calls([_run(*rows, **options)], BENCHMARKS)


def test_the_table_has_what_pytorch_serves_faster_beyond_the_noise():
    assert _listed(
        _rows("rms_norm", ONE, "forward", 6.0, 5.0),
        _rows("rms_norm", TWO, "forward", 6.0, 5.8),
        _rows("layer_norm", ONE, "forward", 6.0, 7.0),
        _rows("layer_norm", ONE, "both", 20.0, 15.0),
        _rows("softmax", {"tokens": 8, "columns": 64}, "forward", 6.0, 8.0),
    ) == {
        "layer_norm": ["gradients bfloat16[4096] bfloat16[4096] bfloat16[4096]"],
        "rms_norm": ["bfloat16[4096] bfloat16[4096]"],
    }


def test_forward_and_backward_stand_for_both():
    passes = (_rows("rms_norm", ONE, "forward", 5.0, 6.0), _rows("rms_norm", ONE, "backward", 9.0, 5.0))
    assert _listed(*passes) == {"rms_norm": ["gradients bfloat16[4096] bfloat16[4096]"]}
    assert _listed(passes[1], _rows("relu", {"tokens": 1, "intermediate": 4}, "forward", 1.0, 2.0)) == {}


def test_shapes_of_the_same_powers_of_two_that_disagree_are_listed_exactly():
    near = {"tokens": 1, "hidden": 4000}
    better, worse = _rows("rms_norm", near, "forward", 6.0, 5.0), _rows("rms_norm", ONE, "forward", 6.0, 7.0)
    assert _listed(better, worse) == {"rms_norm": ["exactly bfloat16[4000] bfloat16[4000]"]}
    assert _listed(better, _rows("rms_norm", ONE, "forward", 6.0, 5.0)) == {
        "rms_norm": ["bfloat16[4096] bfloat16[4096]"]
    }
    # Rows are rounded in either case.
    more = [
        _rows("rms_norm", {"tokens": rows, "hidden": 4000}, "forward", 6.0, us) for rows, us in ((500, 5.0), (512, 7.0))
    ]
    assert _listed(*more) == {}


def test_time_of_the_host_counts():
    def host(kernels, pytorch):
        rows = (("tilegym", "cutile", kernels), (PYTORCH, "pytorch", pytorch))
        return [HostResult("rms_norm", {}, name, "ok", "", backend, us, us, us) for name, backend, us in rows]

    case = _rows("rms_norm", ONE, "forward", 6.0, 5.0)
    assert _listed(case, host=host(9.0, 20.0)) == {}
    assert "rms_norm" in _listed(case, host=host(9.0, 8.0))
    apart = [_run(case), _run(host=host(9.0, 20.0), date="2026-01-02")]
    assert slower_table.slower_calls(apart, BENCHMARKS) == {}


def test_more_memory_is_not_better():
    case = _rows("rms_norm", ONE, "forward", 6.0, 5.0, memory=(1000, 1 << 30))
    assert _listed(case) == {}


def test_what_the_present_table_passes_by_is_judged_again():
    """TileGym's own row is PyTorch's then; the kernels have a row of their own."""
    assert _listed(_rows("rms_norm", ONE, "forward", 6.0, 5.0, provider=slower_table.CUTILE))
    assert _listed(_rows("rms_norm", ONE, "forward", 5.0, 6.0, provider=slower_table.CUTILE)) == {}


def test_of_several_runs_the_latest_counts():
    older = _run(_rows("rms_norm", ONE, "forward", 6.0, 5.0), _rows("rms_norm", TWO, "forward", 6.0, 5.0))
    newer = _run(_rows("rms_norm", ONE, "forward", 4.0, 5.0), date="2026-01-02")
    for runs in ([older, newer], [newer, older]):
        assert slower_table.slower_calls(runs, BENCHMARKS) == {"rms_norm": ["bfloat16[512,4096] bfloat16[4096]"]}


def test_runs_that_do_not_tell_are_refused():
    run = _run(_rows("rms_norm", ONE, "forward", 6.0, 5.0))
    with pytest.raises(BenchmarkError, match="gpu differs"):
        slower_table.slower_calls([run, _run(gpu="Another")], BENCHMARKS)
    with pytest.raises(BenchmarkError, match="measured on both backends"):
        slower_table.slower_calls([_run()], BENCHMARKS)


def test_rows_from_which_on_pytorch_wins_at_every_size():
    def points(kind, *times):
        return [slower_table.Point("linear", kind, *numbers) for numbers in times]

    measured = (
        points("a", (1, 1.0, 2.0), (16, 3.0, 1.0), (64, 9.0, 1.0), (16, 3.0, 2.9), (64, 9.0, 3.0))
        + points("b", (1, 2.0, 1.0), (8, 2.0, 1.0))
        + points("c", (1, 2.0, 1.0), (8, 2.0, 1.96))
    )
    assert slower_table.from_rows(measured) == {"linear": {"a": 64, "b": 1}}


def tool(name):
    spec = importlib.util.spec_from_file_location(name, default_folder() / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_what_was_measured_of_linear_layers_replaces_what_was_known_of_them(monkeypatch):
    monkeypatch.syspath_prepend(default_folder())

    def call(n):
        return f"exactly gradients bfloat16[512,64] bfloat16[{n},64]"

    def point(n, kernels, pytorch):
        return slower_table.Point("linear", call(n), 512, kernels, pytorch)

    points = [point(1, 1.0, 0.9), point(2, 1.0, 0.97), point(3, 2.0, 3.0), point(4, 1.0, 2.0), point(4, 2.0, 1.0)]
    known = {"slower": {}, "from_rows": {"matmul": {"float32 float32": 1}, "linear": {"float32 float32": 2}}}
    known["exceptions"] = {"linear": [call(1), "exactly of another model"]}
    table = tool("sweep_linear").updated(known, points)
    assert table["exceptions"] == {"linear": [call(2), call(3), "exactly of another model"]}
    assert table["from_rows"]["matmul"] == {"float32 float32": 1} and table["slower"] == {}
    kinds = {"float32 float32", "gradients bfloat16 bfloat16", "gradients bfloat16 bfloat16 bfloat16"}
    assert set(table["from_rows"]["linear"]) == kinds


def test_the_file_is_written_and_read(tmp_path):
    script = tool("write_slower")
    _run(_rows("rms_norm", ONE, "forward", 6.0, 5.0)).write(tmp_path / "run")
    rows, kept = {"linear": {"float32 float32": 8}}, {"linear": ["exactly bfloat16[16,16] bfloat16[24,16]"]}
    before = {"gpu": GPU, "slower": {"relu": []}, "from_rows": rows, "exceptions": kept}
    slower.file_of(GPU, tmp_path).write_text(json.dumps(before))
    script.write_slower([tmp_path / "run"], tmp_path)
    table = json.loads(slower.file_of(GPU, tmp_path).read_text())
    assert table["gpu"] == GPU and table["slower"] == {"rms_norm": ["bfloat16[4096] bfloat16[4096]"]}
    assert table["from_rows"] == rows and table["exceptions"] == kept


@pytest.mark.parametrize("op", BENCHMARKS)
def test_every_benchmark_s_call_has_a_description(op):
    benchmark = BENCHMARKS[op]
    for shape in benchmark.small:
        described = slower_table.described_call(benchmark, shape.dims, torch.bfloat16, bool(benchmark.differentiable))
        assert "bfloat16[" in described and described.startswith("gradients") == bool(benchmark.differentiable)
