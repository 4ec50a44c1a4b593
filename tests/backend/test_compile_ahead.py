"""What code would launch, collected without launching it, and compiled ahead on any machine with tileiras."""

import threading

import common
import cuda.tile as ct
import pytest
import torch
from cuda.tile import _compile as front_end

from tilegym.backend import recording
from tilegym.backend.cutile import compile_ahead
from tilegym.backend.cutile.launch import launch
from tilegym.ops import rms_norm
from tilegym.ops import silu_and_mul


@ct.kernel
def double_kernel(x, out, TILE: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(out, (i,), ct.load(x, (i,), (TILE,)) * 2)


def double(x: torch.Tensor, tile: int = 16) -> torch.Tensor:
    out = torch.empty_like(x)
    launch(x, (x.numel() // tile,), double_kernel, (x, out, tile))
    return out


def test_collected_kernels_do_not_run_and_what_they_would_write_is_zero():
    x, results = common.randn(64), []
    jobs = compile_ahead.collect(lambda: results.append(double(x)))
    assert [kernel for kernel, _ in jobs] == [double_kernel]
    assert torch.equal(results[0], torch.zeros_like(x))
    assert torch.equal(double(x), 2 * x), "as ever behind it"


def test_each_kernel_and_signature_is_collected_once():
    x = common.randn(64)
    jobs = compile_ahead.collect(lambda: [double(x), double(x + 1), double(x, 32)])
    assert len(jobs) == 2


def test_ops_are_collected_and_not_recorded_meanwhile():
    """Their calls are recorded from the second one on: what a collected one does must not be repeated later."""
    x, w = common.randn(4, 64), common.randn(64)

    def run():
        for _ in range(4):
            silu_and_mul(rms_norm(x, (64,), w, 1e-6, backend="cutile"), backend="cutile")

    jobs = compile_ahead.collect(run)
    assert len({kernel for kernel, _ in jobs}) == 2
    y = rms_norm(x, (64,), w, 1e-6, backend="cutile")
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), w, 1e-6))
    assert not recording.is_replaced()


def test_other_threads_launch_meanwhile():
    x, results = common.randn(64), []

    def run():
        thread = threading.Thread(target=lambda: results.append(double(x)))
        thread.start()
        thread.join()

    assert compile_ahead.collect(run) == []
    assert torch.equal(results[0], 2 * x)


def test_what_fails_is_left_to_fail_where_it_counts():
    x = common.randn(64)

    def run():
        double(x)
        raise ValueError("of the run")

    assert len(compile_ahead.collect(run)) == 1, "what came before"
    assert torch.equal(double(x), 2 * x), "nothing is left of it"
    assert not recording.is_replaced()


@pytest.fixture
def compiler_runs(tmp_path, monkeypatch) -> list:
    """Every run of the compiler proper, with an empty cache on disk."""
    from cuda.tile._cext import default_tile_context

    monkeypatch.setattr(default_tile_context.config, "cache_dir", str(tmp_path))
    runs, real = [], front_end.compile_cubin
    monkeypatch.setattr(front_end, "compile_cubin", lambda *a, **k: runs.append(a) or real(*a, **k))
    return runs


def test_collected_kernels_are_compiled_into_the_cache_on_disk(compiler_runs):
    x = common.randn(64)
    jobs = compile_ahead.collect(lambda: [double(x, tile) for tile in (8, 16, 32)])
    assert compile_ahead.compile_jobs(jobs, "sm_90") == len(compiler_runs) == 3
    assert compile_ahead.compile_jobs(jobs, "sm_90") == 0
    assert len(compiler_runs) == 3
    more = compile_ahead.collect(lambda: double(x, 64))
    assert compile_ahead.compile_jobs([jobs[0], *more, *jobs], "sm_90") == 0, "the others are taken to be known"
    assert compile_ahead.compile_jobs([*jobs, *more], "sm_90") == 1


def test_nothing_is_compiled_ahead_where_kernels_are_interpreted():
    assert compile_ahead.compile_ahead(lambda: pytest.fail("was run"), torch.device("cpu")) == 0


@common.gpu
def test_launches_find_what_was_compiled_ahead(compiler_runs):
    """The very binary: cuTile looks for it by the bytecode that it makes for a launch."""
    x = common.randn(96)
    assert compile_ahead.compile_ahead(lambda: [double(x, 4), double(x, 2)], x.device) == 2
    assert torch.equal(double(x, 4), 2 * x) and torch.equal(double(x, 2), 2 * x)
    assert len(compiler_runs) == 2


@common.gpu
def test_nothing_is_compiled_ahead_without_a_cache_on_disk(monkeypatch):
    from cuda.tile._cext import default_tile_context

    monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    assert compile_ahead.compile_ahead(lambda: pytest.fail("was run"), torch.device("cuda")) == 0
