"""Every benchmark of tests/benchmark: what it declares is true, and its providers compute its op."""

import subprocess
import sys

import pytest
import torch
from bench.benchmark_fakes import FakeTimer
from bench.benchmark_fakes import session

from tilegym import ops
from tilegym.bench import runner
from tilegym.bench import spec
from tilegym.bench.check import tensors

BENCHMARKS = spec.load_benchmarks(spec.default_folder())
OPS = (
    "rms_norm",
    "silu_and_mul",
    "swiglu",
    "apply_rope_base",
    "softmax",
    "matmul",
    "linear",
    "fmha",
    "fmha_decode",
)
each = pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=BENCHMARKS)


def test_every_op_has_a_benchmark():
    assert set(OPS) <= set(BENCHMARKS)


def meta(*sizes, dtype=torch.bfloat16):
    return torch.empty(sizes, dtype=dtype, device="meta")


@each
def test_work_is_the_bytes_of_inputs_and_outputs(benchmark):
    assert hasattr(ops, benchmark.op)
    host = spec.Shape("host", benchmark.host)
    labels = [shape.label for shape in benchmark.shapes]
    assert len(set(labels)) == len(labels), "two shapes of one label would hide each other in the tables"
    for shape in (*benchmark.shapes, *benchmark.quick, *benchmark.small, host):
        inputs = benchmark.inputs(meta, **shape.dims)
        outputs = tensors(benchmark.peers[benchmark.baseline].call(**inputs))
        work = benchmark.work(spec.FORWARD, 2, shape.dims)
        assert work.read == sum(v.nbytes for v in inputs.values() if isinstance(v, torch.Tensor)), shape
        assert work.written == sum(output.nbytes for output in outputs), shape
        if benchmark.differentiable:
            backward = benchmark.work(spec.BACKWARD, 2, shape.dims)
            assert backward.written == sum(inputs[name].nbytes for name in benchmark.differentiable), shape
            assert benchmark.work(spec.BOTH, 2, shape.dims) == work + backward


def test_attention_counts_half_the_operations_where_it_is_causal():
    dims = {"batch": 4, "tokens": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
    full = BENCHMARKS["fmha"].forward(2, **dims, causal=False)
    assert full.flops == 4 * 4 * 32 * 4096 * 4096 * 128
    assert BENCHMARKS["fmha"].forward(2, **dims, causal=True).flops * 2 == full.flops


@each
def test_providers_are_right_and_measured(benchmark):
    only = (spec.OURS, benchmark.baseline, runner.COPY)
    for shape in benchmark.small:
        results = list(runner.measure_shape(benchmark, shape, spec.MODES, session(FakeTimer(), only=only)))
        assert {(r.provider, r.mode) for r in results} >= {(p, m) for p in only[:2] for m in benchmark.modes}
        for result in results:
            assert result.status == "ok", result
            assert result.seconds > 0 and result.roofline_share > 0


@each
def test_liger_is_called_the_way_it_is_installed(benchmark):
    if "liger" not in benchmark.peers:
        pytest.skip("Liger has no such op")
    pytest.importorskip("triton")
    if benchmark.peers["liger"].missing() or not torch.cuda.is_available():
        pytest.skip("needs liger-kernel and a GPU")
    for shape in benchmark.small:
        results = runner.measure_shape(benchmark, shape, spec.MODES, session(FakeTimer("cuda"), only=("liger",)))
        assert [result.status for result in results] == ["ok"] * len(benchmark.modes)


def test_a_file_runs_by_itself(tmp_path):
    script = spec.default_folder() / "bench_rmsnorm.py"
    done = subprocess.run(
        [sys.executable, str(script), "--list"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rms_norm") and "softmax" not in done.stdout
