"""Measuring candidates: on copies, each checked against the first, and those that fail left out."""

import logging

import cuda.tile as ct
import pytest
import torch
from tuning_fakes import SPACE
from tuning_fakes import FakeBench
from tuning_fakes import add_kernel
from tuning_fakes import increment_kernel
from tuning_fakes import inputs
from tuning_fakes import make_add
from tuning_fakes import wrong_for_small_tiles_kernel

from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import autotune
from tilegym.backend.cutile.tuning_cache import TuningCache
from tilegym.errors import BackendError


@pytest.fixture
def cache(tmp_path, monkeypatch) -> TuningCache:
    monkeypatch.delenv("TILEGYM_DISABLE_AUTOTUNE", raising=False)
    return TuningCache(tmp_path / "tuning.sqlite")


def test_callers_tensors_are_not_tuned_on(cache):
    """An in-place kernel is applied once, although every candidate has run several times."""
    bench = FakeBench()

    @autotune(search_space=SPACE, bench=bench, cache=cache)
    def increment(x, autotuner=None):
        autotuner(
            None,
            grid_fn=lambda args, cfg: (ct.cdiv(x.shape[0], cfg.TILE),),
            kernel=increment_kernel,
            args_fn=lambda cfg: (x, cfg.TILE),
        )

    x = torch.arange(100.0)
    increment(x)
    assert torch.equal(x, torch.arange(100.0) + 1)
    assert set(bench.timed) == {32, 64, 128}, "each agreed with the first: each saw the same input"


def test_candidates_see_copies_with_the_callers_layout(cache):
    """Same strides and alignment as the caller's tensors, other memory."""
    seen = []

    class Looking(FakeBench):
        def run(self, candidate, args):
            seen.extend((t.shape, t.stride(), t.data_ptr() % 16, t.data_ptr()) for t in args[:3])
            super().run(candidate, args)

    base = torch.arange(403.0)
    x, y = base[1:401:4], torch.ones(1).expand(100)
    out = torch.zeros(100)
    assert make_add(cache, Looking())(x, y, out).TILE == 64
    assert torch.equal(out, x + 1)
    for i, tensor in enumerate((x, y, out) * 3):
        assert seen[i][:3] == (tensor.shape, tensor.stride(), tensor.data_ptr() % 16)
        assert seen[i][3] != tensor.data_ptr()


def test_candidates_that_fail_are_skipped(cache, caplog):
    class Failing(FakeBench):
        def run(self, candidate, args):
            if candidate.config.TILE == 32:
                raise RuntimeError("cannot launch")
            super().run(candidate, args)

    bench = Failing(errors={64: TimeoutError("compiler exceeded 60 s")})
    with caplog.at_level(logging.INFO, "tilegym.autotuner"):
        assert make_add(cache, bench)(*inputs()).TILE == 128
    assert bench.timed == [128]
    assert "Config(TILE=32) does not run: RuntimeError: cannot launch" in caplog.text
    assert "does not compile: TimeoutError: compiler exceeded 60 s" in caplog.text


def test_candidates_with_hints_beyond_their_range_are_skipped(cache, caplog):
    bench = FakeBench()
    with caplog.at_level(logging.INFO, "tilegym.autotuner"):
        assert make_add(cache, bench, [Config(TILE=32, occupancy=99), SPACE[2]])(*inputs()).TILE == 128
    assert bench.timed == [128]
    assert "occupancy=99) does not compile: occupancy should be" in caplog.text
    with pytest.raises(BackendError, match="add_kernel: no configuration can be used.*got 99.*got 98"):
        make_add(cache, bench, [Config(TILE=32, occupancy=99), Config(TILE=32, occupancy=98)])(*inputs(1000))


def test_no_candidate_that_works_is_an_error_with_the_reasons(cache):
    bench = FakeBench(errors={t: RuntimeError(f"no room for {t}") for t in (32, 64, 128)})
    with pytest.raises(BackendError, match="add_kernel: no configuration.*Fake GPU.*no room for 32.*no room for 128"):
        make_add(cache, bench)(*inputs())
    assert cache.all() == []


def test_candidate_with_another_result_is_skipped(cache, caplog):
    bench = FakeBench(times={32: 1.0, 64: 10.0, 128: 20.0})

    @autotune(search_space=[SPACE[2], SPACE[1], SPACE[0]], bench=bench, cache=cache)
    def run(x, out, autotuner=None):
        return autotuner(
            None,
            grid_fn=lambda args, cfg: (ct.cdiv(x.shape[0], cfg.TILE),),
            kernel=wrong_for_small_tiles_kernel,
            args_fn=lambda cfg: (x, out, cfg.TILE),
        )

    x, _, out = inputs()
    with caplog.at_level(logging.INFO, "tilegym.autotuner"):
        assert run(x, out).TILE == 64
    assert 32 not in bench.timed
    assert "Config(TILE=32) gives another result than the first configuration" in caplog.text


@pytest.mark.parametrize("dtype, ulps, kept", [(torch.bfloat16, 2, True), (torch.bfloat16, 16, False)])
@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan")])
def test_results_may_differ_by_rounding_only(cache, dtype, ulps, kept, garbage):
    """Relative to what was written; what the output held before, and holds where nothing is written, is no matter."""

    class Rounding(FakeBench):
        def run(self, candidate, args):
            args[2][:50] = 1 + (candidate.config.TILE == 64) * ulps * torch.finfo(dtype).eps

    bench = Rounding()
    x, y, out = inputs(100, dtype)
    out[:] = garbage
    make_add(cache, bench)(x, y, out)
    assert (64 in bench.timed) is kept


def test_results_of_integers_are_exact(cache):
    class OffByOne(FakeBench):
        def run(self, candidate, args):
            args[2][:] = 10**6 + (candidate.config.TILE == 64)

    bench = OffByOne()
    make_add(cache, bench)(*inputs(100, torch.int32))
    assert 64 not in bench.timed


def test_only_the_named_outputs_are_compared(cache):
    """A buffer whose content depends on the configuration, as partial sums do."""

    class Partial(FakeBench):
        def run(self, candidate, args):
            args[1][:] = candidate.config.TILE
            args[2][:] = 7

    assert make_add(cache, Partial())(*inputs()).TILE == 32, "the others disagree with the first"
    cache.clear()
    bench = Partial()
    assert make_add(cache, bench, outputs=("out",))(*inputs()).TILE == 64
    assert set(bench.timed) == {32, 64, 128}


def test_buffers_of_the_configurations_own_size(cache):
    bench, made = FakeBench(), []

    @autotune(search_space=SPACE, bench=bench, cache=cache)
    def add(x, out, autotuner=None):
        def args_fn(cfg):
            made.append(torch.ones(x.shape[0] * cfg.TILE))
            return x, made[-1], out, x.shape[0], cfg.TILE

        return autotuner(None, lambda args, cfg: (ct.cdiv(args["x"].shape[0], cfg.TILE),), add_kernel, args_fn)

    x, _, out = inputs()
    assert add(x, out).TILE == 64
    assert torch.equal(out, x + 1)
    assert all(torch.equal(buffer, torch.ones_like(buffer)) for buffer in made)


def test_finalists_are_measured_again_in_turns(cache):
    """One slow sample at first does not cost the fastest its place."""

    class Noisy(FakeBench):
        def time(self, candidate, args, reset, samples):
            first = candidate.config.TILE not in self.timed
            super().time(candidate, args, reset, samples)
            value = {32: 11.0, 64: 11.5 if first else 10.0, 128: 40.0}[candidate.config.TILE]
            return [value] * samples

    bench = Noisy()
    assert make_add(cache, bench)(*inputs()).TILE == 64
    assert bench.timed.count(128) == 1 < bench.timed.count(32) == bench.timed.count(64)
