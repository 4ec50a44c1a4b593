"""Every benchmark of tests/benchmark: what it declares is true, and its providers compute its op."""

import subprocess
import sys

import pytest
import torch
from bench.benchmark_fakes import FakeTimer
from bench.benchmark_fakes import session
from common import some

from tilegym import ops
from tilegym.backend import get_registry_info
from tilegym.bench import runner
from tilegym.bench import spec
from tilegym.bench.check import tensors

BENCHMARKS = spec.load_benchmarks(spec.default_folder())
PARTS_OF_OTHERS = {"mla_decoding_split_kv", "moe_align_block_size", "splitk_reduce"}  # measured with what calls them
each = pytest.mark.parametrize("declared", BENCHMARKS.values(), ids=BENCHMARKS)


def test_every_op_has_a_benchmark():
    missing = set(get_registry_info()) - PARTS_OF_OTHERS - set(BENCHMARKS)
    assert not missing, f"tests/benchmark has no benchmark of {', '.join(sorted(missing))}"


def meta(*sizes, dtype=torch.bfloat16):
    return torch.empty(sizes, dtype=dtype, device="meta")


@each
def test_work_is_the_bytes_of_inputs_and_outputs(declared):
    assert hasattr(ops, declared.op)
    host = spec.Shape("host", declared.host)
    labels = [shape.label for shape in declared.shapes]
    assert len(set(labels)) == len(labels), "two shapes of one label would hide each other in the tables"
    for shape in (*declared.shapes, *declared.quick, *declared.small, host):
        inputs = declared.inputs(meta, **shape.dims)
        outputs = tensors(declared.peers[declared.baseline].call(**inputs))
        work = declared.work(spec.FORWARD, 2, shape.dims)
        given = sum(v.nbytes for v in inputs.values() if isinstance(v, torch.Tensor))
        assert work.read == given if declared.reads_all else work.read <= given, shape
        assert work.written == sum(output.nbytes for output in outputs), shape
        if declared.differentiable:
            backward = declared.work(spec.BACKWARD, 2, shape.dims)
            assert backward.written == sum(inputs[name].nbytes for name in declared.differentiable), shape
            both = declared.work(spec.BOTH, 2, shape.dims)
            if declared.both is None:
                assert both == work + backward
            else:
                assert (both.read, both.written) == (given, backward.written)


def test_attention_counts_half_the_operations_where_it_is_causal():
    dims = {"batch": 4, "tokens": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128}
    full = BENCHMARKS["fmha"].forward(2, **dims, causal=False)
    assert full.flops == 4 * 4 * 32 * 4096 * 4096 * 128
    assert BENCHMARKS["fmha"].forward(2, **dims, causal=True).flops * 2 == full.flops


@each
def test_providers_are_right_and_measured(declared):
    only = (spec.OURS, declared.baseline, runner.COPY)
    for shape in declared.small:
        results = list(runner.measure_shape(declared, shape, spec.MODES, session(FakeTimer(), only=only)))
        assert {(r.provider, r.mode) for r in results} >= {(p, m) for p in only[:2] for m in declared.modes}
        for result in results:
            assert result.status == "ok", result
            assert result.seconds > 0 and result.roofline_share > 0


@each
def test_liger_is_called_the_way_it_is_installed(declared):
    if "liger" not in declared.peers:
        pytest.skip("Liger has no such op")
    pytest.importorskip("triton")
    if declared.peers["liger"].missing() or not torch.cuda.is_available():
        pytest.skip("needs liger-kernel and a GPU")
    for shape in declared.small:
        results = runner.measure_shape(declared, shape, spec.MODES, session(FakeTimer("cuda"), only=("liger",)))
        assert [result.status for result in results] == ["ok"] * len(declared.modes)


def test_a_file_runs_by_itself(tmp_path):
    script = spec.default_folder() / "bench_rmsnorm.py"
    done = subprocess.run(
        [sys.executable, str(script), "--list"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rms_norm") and "softmax" not in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what they say without a GPU")
@pytest.mark.parametrize("tool", some(("bench_generated.py", "sweep_float32.py", "sweep_linear.py"), "sweep_linear.py"))
def test_tools_say_what_they_do_and_that_they_need_a_gpu(tool):
    command = [sys.executable, str(spec.default_folder() / tool)]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0 and tool in helped.stdout, helped.stderr
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and "no NVIDIA GPU is visible" in refused.stderr
