import inspect
import threading
import time
from importlib import import_module

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import ArrayConstraint
from cuda.tile.compilation import CallingConvention
from cuda.tile.compilation import ConstantConstraint
from cuda.tile.compilation import KernelSignature
from cuda.tile.compilation import ScalarConstraint
from cuda.tile.compilation import mangle_kernel_name

from tilegym import ops
from tilegym.backend import dispatcher
from tilegym.bench import coverage
from tilegym.bench.coverage import Coverage
from tilegym.bench.coverage import Entry

CPU = torch.device("cpu")


def symbol(name: str, num_arrays: int = 2) -> str:
    """What the compiler calls a kernel function ``name`` of some arrays, a scalar and a constant."""
    array = ArrayConstraint(
        ct.float32,
        2,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(None, 1),
        base_addr_divisible_by=16,
    )
    parameters = [array] * num_arrays + [ScalarConstraint(ct.float32), ConstantConstraint(128)]
    return mangle_kernel_name(name, KernelSignature(parameters, CallingConvention.cutile_python_v1()))


def test_own_symbols_count():
    kernels = {"norm_kernel": {4, 6}}
    assert coverage.own_kernel_name(symbol("norm_kernel"), kernels) == "norm_kernel"
    assert coverage.own_kernel_name(symbol("norm_kernel", num_arrays=4), kernels) == "norm_kernel"


@pytest.mark.parametrize(
    "other",
    [
        symbol("my_norm_kernel"),  # ours is a part of its name
        symbol("norm_kernel_K2"),
        symbol("norm_kernel", num_arrays=3),  # its name, another's parameters
        "norm_kernel",
        "norm_kernel_K",
        "void norm_kernel<float>(float*, int)",
        "nvjet_tst_128x64_64x8_2x1_v_bz_TNT",
        "Memcpy HtoD (Pageable -> Device)",
    ],
)
def test_other_symbols_do_not_count(other):
    assert coverage.own_kernel_name(other, {"norm_kernel": {4}}) is None


@pytest.mark.parametrize(
    "module",
    [
        "ops.cutile.rms_norm",
        "transformers.llama.kernels.llama_rope_query_key",
        "transformers.qwen3_5.kernels.qwen3_5_delta_rule_gates",
    ],
)
def test_every_kernel_of_the_package_is_known(module):
    kernels = coverage.own_kernels()
    found = [value for value in vars(import_module(f"tilegym.{module}")).values() if isinstance(value, ct.kernel)]
    assert found
    for kernel in found:
        assert len(inspect.signature(kernel._pyfunc).parameters) in kernels[kernel._pyfunc.__name__]


def test_cpu_time_in_dispatched_ops():
    x, weight = torch.randn(64, 512), torch.ones(512)

    def run():
        for _ in range(3):
            ops.rms_norm(x, (512,), weight, 1e-5, backend="pytorch")
        time.sleep(0.05)

    result = coverage.measure_coverage(run, CPU)
    entries = {entry.name: entry for entry in result.entries}
    assert entries["rms_norm (pytorch)"].calls == 3
    assert entries["everything else"].seconds >= 0.05
    assert sum(entry.seconds for entry in result.entries) == pytest.approx(result.total_seconds)
    assert 0 < result.percent < 100
    assert result.headline.startswith(">>> Dispatched Op Coverage (CPU Time): ")
    assert "no GPU" in result.explanation
    assert result.summary()["measure"] == "cpu_time_in_dispatched_ops"


def test_an_op_within_an_op_counts_once():
    x, weight = torch.randn(64, 512), torch.ones(512)

    def run():
        with dispatcher._observer("outer", "pytorch"):
            ops.rms_norm(x, (512,), weight, 1e-5, backend="pytorch")

    result = coverage.measure_coverage(run, CPU)
    assert [entry.name for entry in result.entries] == ["outer (pytorch)", "everything else"]
    assert result.own_seconds <= result.total_seconds


def test_threads_do_not_hide_each_others_ops():
    x, weight = torch.randn(64, 512), torch.ones(512)

    def call():
        ops.rms_norm(x, (512,), weight, 1e-5, backend="pytorch")

    def run():
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    result = coverage.measure_coverage(run, CPU)
    assert result.entries[0].calls == 4


def test_gpu_headline_and_share():
    entries = [Entry("gemm", 2, 0.006, False), Entry("rms_norm_kernel", 4, 0.002, True)]
    result = Coverage("cuda", 0.008, entries)
    assert result.headline == ">>> cuTile Kernel Coverage (GPU Time): 25.0% <<<"
    assert result.summary()["entries"][1]["percent"] == pytest.approx(25.0)


def test_nothing_ran():
    assert Coverage("cuda", 0.0, []).percent == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_time_in_own_kernels():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def run():
        ops.rms_norm(x, (4096,), weight, 1e-5, backend="cutile")
        x @ x

    run()
    result = coverage.measure_coverage(run, x.device)
    own = [entry for entry in result.entries if entry.own]
    assert [entry.calls for entry in own] == [1]
    assert 0 < result.percent < 100
    assert result.headline.startswith(">>> cuTile Kernel Coverage (GPU Time): ")
