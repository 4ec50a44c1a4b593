"""Calls that PyTorch serves faster go there, and the file that says which is written from measurements."""

import dataclasses
import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch

from tilegym import ops
from tilegym.backend import observe_calls
from tilegym.backend import slower
from tilegym.backend import use_backend
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.spec import default_folder
from tilegym.bench.spec import load_benchmarks

GPU = "Test GPU 9000"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table for GPU, which the tensors of this test seem to be on; softmax has an entry."""
    path = slower.file_of(GPU, tmp_path)
    path.write_text(json.dumps({"gpu": GPU, "slower": {"softmax": ["float32[4,16]"]}}))
    monkeypatch.setattr(slower, "FOLDER", tmp_path)
    monkeypatch.setattr(slower, "_gpu_of", lambda values: GPU)
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.softmax.op, "is_slower", slower.lookup_of("softmax"))
    yield
    slower._entries.cache_clear()


def served(call):
    """The backends that serve the ops within ``call``, which must not warn."""
    seen = []

    class Note:
        def __init__(self, op, backend):
            seen.append(backend)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    with observe_calls(Note), use_backend("cutile"), warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    return seen


def test_listed_calls_go_to_pytorch(table):
    x = torch.randn(4, 16)
    assert served(lambda: ops.softmax(x)) == ["pytorch"]
    assert served(lambda: ops.softmax(x=x)) == ["pytorch"]
    assert served(lambda: ops.softmax(torch.randn(5, 15))) == ["pytorch"], "of the same powers of two"
    assert served(lambda: (ops.softmax(x), ops.softmax(x.half()), ops.softmax(x))) == ["pytorch", "cutile", "pytorch"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.softmax(x, backend="cutile"),
        lambda x: ops.softmax(x.repeat(2, 1)),
        lambda x: ops.softmax(x.half()),
        lambda x: ops.softmax(x.requires_grad_()),
        lambda x: ops.relu(x),
    ],
    ids=["backend", "size", "dtype", "gradients", "op"],
)
def test_others_do_not(table, call):
    assert served(lambda: call(torch.randn(4, 16))) == ["cutile"]


def test_gradients_count_only_where_they_are_enabled(table):
    x = torch.randn(4, 16).requires_grad_()
    with torch.no_grad():
        assert served(lambda: ops.softmax(x)) == ["pytorch"]
    assert served(lambda: ops.softmax(x)) == ["cutile"]


def test_compiled_code_stays_one_for_all_sizes(table):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ops.softmax, fullgraph=True, dynamic=True, backend="eager")
    with use_backend("cutile"):
        for rows in (4, 7):
            compiled(torch.randn(rows, 16))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_ops_without_an_entry_are_not_looked_up(table, monkeypatch):
    assert slower.lookup_of("relu") is None
    assert slower.lookup_of("softmax") is not None
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    assert slower.lookup_of("softmax") is None


def test_shipped_files_are_read():
    for path in slower.FOLDER.glob("*.json"):
        table = json.loads(path.read_text())
        assert path == slower.file_of(table["gpu"])
        assert set(table["slower"]) <= {name for name in dir(ops) if hasattr(getattr(ops, name), "op")}


def _script():
    path = default_folder() / "write_slower.py"
    spec = importlib.util.spec_from_file_location("write_slower", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(backend, rows, **machine):
    """rows: (op, dims, mode, microseconds)."""
    results = [
        Result(
            op=op, shape=str(dims), model="", dims=dims, mode=mode, provider="tilegym", status="ok", backend=backend,
            seconds=us, low=us * 0.99, high=us * 1.01,
        )
        for op, dims, mode, us in rows
    ]  # fmt: skip
    return Run({"gpu": GPU, "torch": "2.11"} | machine, {"dtype": "bf16"}, results=results)


def test_the_file_is_written_from_two_runs(tmp_path):
    script = _script()
    benchmarks = load_benchmarks(default_folder())
    one, two = {"tokens": 1, "hidden": 4096}, {"tokens": 512, "hidden": 4096}
    cutile = _run("cutile", [("rms_norm", one, "forward", 6.0), ("rms_norm", two, "forward", 6.0),
                             ("layer_norm", one, "forward", 6.0), ("layer_norm", one, "both", 20.0),
                             ("softmax", {"tokens": 8, "columns": 64}, "forward", 6.0)])  # fmt: skip
    pytorch = _run("pytorch", [("rms_norm", one, "forward", 5.0), ("rms_norm", two, "forward", 5.9),
                               ("layer_norm", one, "forward", 7.0), ("layer_norm", one, "both", 15.0)])  # fmt: skip
    assert script.slower_calls(cutile, pytorch, benchmarks) == {
        "layer_norm": ["gradients bfloat16[1,4096] bfloat16[4096] bfloat16[4096]"],
        "rms_norm": ["bfloat16[1,4096] bfloat16[4096]"],
    }
    for name, run in (("cutile", cutile), ("pytorch", pytorch)):
        run.write(tmp_path / name)
    script.write_slower(tmp_path / "cutile", tmp_path / "pytorch", tmp_path)
    table = json.loads(slower.file_of(GPU, tmp_path).read_text())
    assert table["gpu"] == GPU
    assert sorted(table["slower"]) == ["layer_norm", "rms_norm"]


def test_runs_of_different_machines_are_refused():
    script = _script()
    run = _run("cutile", [])
    with pytest.raises(script.BenchmarkError, match="gpu differs"):
        script.slower_calls(run, _run("pytorch", [], gpu="Another"), {})
    with pytest.raises(script.BenchmarkError, match="dtypes"):
        script.slower_calls(run, dataclasses.replace(_run("pytorch", []), settings={"dtype": "fp16"}), {})


def test_the_table_names_calls_as_users_make_them(table):
    """The benchmark's call and a model's are described alike: by their tensors and flags alone."""
    x, w = torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    described = _script().described_call(
        load_benchmarks(Path(default_folder()))["rms_norm"], {"tokens": 1, "hidden": 4096}, torch.bfloat16, False
    )
    assert described == slower.describe((x, (4096,), w, 1e-6), {})
