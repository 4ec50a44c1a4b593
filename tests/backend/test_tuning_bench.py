"""Compiling candidates in parallel, on any machine with tileiras; and tuning for real, on a GPU."""

import threading
import time

import common
import cuda.tile as ct
import pytest
import torch
from cuda.tile import _compile as front_end

from tilegym.backend.cutile import tuning_bench
from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import autotune
from tilegym.backend.cutile.tuning import Candidate
from tilegym.backend.cutile.tuning_cache import TuningCache
from tilegym.interpreter.signature import kernel_signature


@ct.kernel
def matmul_kernel(a, b, c, M: ct.Constant[int], N: ct.Constant[int], K: ct.Constant[int]):
    i, j = ct.bid(0), ct.bid(1)
    zero = ct.PaddingMode.ZERO
    total = ct.full((M, N), 0.0, ct.float32)
    for k in range(ct.cdiv(a.shape[1], K)):
        left = ct.load(a, (i, k), (M, K), padding_mode=zero)
        total = ct.mma(left, ct.load(b, (k, j), (K, N), padding_mode=zero), total)
    ct.store(c, (i, j), total.astype(c.dtype))


def _job(m: int, n: int, **hints):
    x = torch.zeros(256, 256, dtype=torch.float16)
    kernel = matmul_kernel.replace_hints(**hints) if hints else matmul_kernel
    return kernel, kernel_signature(kernel, (x, x.clone(), x.clone(), m, n, 32))


@pytest.fixture
def no_disk_cache(monkeypatch):
    from cuda.tile._cext import default_tile_context

    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)


def test_compile_all_tells_what_fails(no_disk_cache):
    errors = tuning_bench.compile_all([_job(32, 32), _job(48, 32), _job(32, 64, occupancy=2)], "sm_90", 60)
    assert errors[0] is None and errors[2] is None
    assert "power of two" in str(errors[1]).lower() or "power of 2" in str(errors[1]).lower()


def test_compile_all_within_the_time_limit(no_disk_cache):
    (error,) = tuning_bench.compile_all([_job(128, 128)], "sm_90", 0.001)
    assert isinstance(error, ct.TileCompilerTimeoutError)
    assert tuning_bench.compile_all([_job(128, 128)], "sm_90", 60) == [None], "the limit is lifted again"


def test_compilers_run_side_by_side(no_disk_cache, monkeypatch):
    """Two compilers meet while they run, which one after the other they could not."""
    meeting = threading.Barrier(2)
    real = front_end.compile_cubin

    def compile_cubin(*args, **kwargs):
        meeting.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(front_end, "compile_cubin", compile_cubin)
    monkeypatch.setattr(tuning_bench, "compiler_threads", lambda: 2)
    assert tuning_bench.compile_all([_job(32, 32), _job(64, 32)], "sm_90", 60) == [None, None]
    assert front_end.compile_cubin is compile_cubin, "cuTile is as it was"
    assert front_end._compiler_lock.acquire(blocking=False), "and its lock is free"
    front_end._compiler_lock.release()


def test_a_job_without_signature_is_passed_over():
    assert tuning_bench.compile_all([(matmul_kernel, None)], "sm_90", 60) == [None]


SPACE = [
    Config(M=64, N=64, K=32),
    Config(M=128, N=128, K=64, num_worker_warps=8),
    Config(M=128, N=64, K=64, occupancy=2),
    Config(M=48, N=64, K=64),  # no power of two: does not compile
]


def make_matmul(cache):
    @autotune(search_space=SPACE, cache=cache)
    def matmul(a, b, c, autotuner=None):
        return autotuner(
            torch.cuda.current_stream(),
            grid_fn=lambda args, cfg: (ct.cdiv(args.a.shape[0], cfg.M), ct.cdiv(args.b.shape[1], cfg.N), 1),
            kernel=matmul_kernel,
            args_fn=lambda cfg: (a, b, c, cfg.M, cfg.N, cfg.K),
        )

    return matmul


def operands(m: int = 1000):
    a, b = common.randn(m, 768, dtype=torch.float16), common.randn(768, 512, dtype=torch.float16)
    return a, b, torch.empty(m, 512, dtype=torch.float16, device=common.device())


@pytest.fixture
def cache(tmp_path, monkeypatch) -> TuningCache:
    monkeypatch.delenv("TILEGYM_DISABLE_AUTOTUNE", raising=False)
    return TuningCache(tmp_path / "tuning.sqlite")


def _counted(monkeypatch) -> list:
    """Collects every run of the compiler proper."""
    runs, real = [], front_end.compile_cubin
    monkeypatch.setattr(front_end, "compile_cubin", lambda *a, **k: runs.append(a) or real(*a, **k))
    return runs


@common.gpu
def test_tuning_on_the_gpu(cache, monkeypatch):
    a, b, c = operands()
    matmul = make_matmul(cache)
    config = matmul(a, b, c)
    assert config in SPACE[:3]
    torch.testing.assert_close(c, a @ b, rtol=1e-2, atol=0.1)
    (result,) = cache.all()
    assert result.config == config.options and 1 < result.time_us < 1e5
    assert result.key.gpu == torch.cuda.get_device_name()
    runs = _counted(monkeypatch)
    began = time.perf_counter()
    assert make_matmul(cache)(a, b, c) == matmul(a, b, c) == config
    torch.cuda.synchronize()
    assert runs == [] and time.perf_counter() - began < 1
    assert matmul(*operands(1001)) == config and len(cache.all()) == 1


@common.gpu
def test_launches_take_what_was_compiled_ahead(cache, monkeypatch):
    """The signature and the hints that candidates are compiled for are those of the launch."""
    args = (*operands(), 64, 64, 64)
    bench = tuning_bench.gpu_bench(torch.cuda.current_device())
    kernel = matmul_kernel.replace_hints(occupancy=3)
    candidate = Candidate(Config(), kernel, lambda args: (16, 8, 1), lambda: args)
    assert bench.compile([candidate]) == [None]
    runs = _counted(monkeypatch)
    bench.run(candidate, args)
    assert runs == []


@common.gpu
def test_times_grow_with_the_work():
    bench = tuning_bench.gpu_bench(torch.cuda.current_device())

    def microseconds(size):
        a = common.randn(size, size, dtype=torch.float16)
        args = (a, a.clone(), torch.empty_like(a), 64, 64, 32)
        candidate = Candidate(Config(), matmul_kernel, lambda args: (size // 64, size // 64, 1), lambda: args)
        bench.run(candidate, args)
        return min(bench.time(candidate, args, lambda: None, 5))

    small, large = microseconds(256), microseconds(4096)
    assert 1 < small < 1000 and large > 5 * small


@common.gpu
def test_nothing_is_measured_under_graph_capture(cache):
    a, b, c = operands()
    matmul = make_matmul(cache)
    matmul_kernel_ready = SPACE[0]
    # The first configuration compiled before: loading a module is not allowed during capture.
    ct.launch(torch.cuda.current_stream(), (16, 8, 1), matmul_kernel, (a, b, c, 64, 64, 32))
    torch.cuda.synchronize()
    c.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert matmul(a, b, c) == matmul_kernel_ready
    assert cache.all() == []
    graph.replay()
    torch.testing.assert_close(c, a @ b, rtol=1e-2, atol=0.1)
    matmul(a, b, c)
    assert len(cache.all()) == 1
