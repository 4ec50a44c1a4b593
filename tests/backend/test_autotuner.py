"""The autotuner's choices, on the CPU: a bench with a clock of its own, kernels in the interpreter."""

import logging
import threading

import cuda.tile as ct
import pytest
import torch

from tilegym.backend.cutile import autotuner as autotuner_module
from tilegym.backend.cutile import tuning_cache
from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import SearchSpace
from tilegym.backend.cutile.autotuner import autotune
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.tuning_cache import TuningCache
from tilegym.errors import BackendError


@ct.kernel
def add_kernel(x, y, out, n, TILE: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(out, (i,), ct.load(x, (i,), (TILE,)) + ct.load(y, (i,), (TILE,)))


@ct.kernel
def increment_kernel(x, TILE: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(x, (i,), ct.load(x, (i,), (TILE,)) + 1)


@ct.kernel
def wrong_for_small_tiles_kernel(x, out, TILE: ct.Constant[int]):
    i = ct.bid(0)
    value = ct.load(x, (i,), (TILE,))
    ct.store(out, (i,), value + 1 if TILE >= 64 else value)


class FakeBench:
    """Runs in the interpreter; says that a launch takes what ``times`` says, by tile."""

    gpu, arch = "Fake GPU", "sm_90"

    def __init__(self, times=None, errors=None, is_ready=True):
        self.times = times or {32: 30.0, 64: 10.0, 128: 20.0}
        self.errors = errors or {}
        self.is_ready = is_ready
        self.compiled, self.run_tiles, self.timed, self.kernels = [], [], [], {}

    def ready(self):
        return self.is_ready

    def compile(self, candidates):
        self.compiled.append([c.config for c in candidates])
        return [self.errors.get(c.config.TILE) for c in candidates]

    def run(self, candidate, args):
        self.run_tiles.append(candidate.config.TILE)
        launch(args[0], candidate.grid(args), candidate.kernel, args)

    def time(self, candidate, args, reset, samples):
        self.timed.append(candidate.config.TILE)
        self.kernels[candidate.config] = candidate.kernel
        for _ in range(2):
            reset()
            launch(args[0], candidate.grid(args), candidate.kernel, args)
        return [self.times[candidate.config.TILE]] * samples


SPACE = [Config(TILE=32), Config(TILE=64, occupancy=2), Config(TILE=128, num_worker_warps=8)]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> TuningCache:
    monkeypatch.delenv("TILEGYM_DISABLE_AUTOTUNE", raising=False)
    return TuningCache(tmp_path / "tuning.sqlite")


def make_add(cache, bench, space=SPACE, **options):
    """An autotuned ``out = x + y``, as a kernel's author would write it."""

    @autotune(search_space=space, bench=bench, cache=cache)
    def add(x, y, out, autotuner=None):
        return autotuner(
            None,
            grid_fn=lambda args, cfg: (ct.cdiv(args.x.shape[0], cfg.TILE), 1, 1),
            kernel=add_kernel,
            args_fn=lambda cfg: (x, y, out, x.shape[0], cfg.TILE),
            **options,
        )

    return add


def inputs(n=100, dtype=torch.float32):
    return torch.arange(n, dtype=dtype), torch.ones(n, dtype=dtype), torch.zeros(n, dtype=dtype)


def test_fastest_configuration_is_measured_once_and_launched(cache):
    bench = FakeBench()
    add = make_add(cache, bench)
    x, y, out = inputs()
    assert add(x, y, out) == Config(TILE=64, occupancy=2)
    assert torch.equal(out, x + 1)
    assert bench.compiled == [SPACE]
    assert set(bench.timed) == {32, 64, 128}
    for n in (100, 101, 127, 128, 100):
        x, y, out = inputs(n)
        assert add(x, y, out) == Config(TILE=64, occupancy=2)
        assert torch.equal(out, x + 1)
    assert len(bench.compiled) == 1


@pytest.mark.parametrize("length", [100, 127, 128, 512, 1000, 4096])
def test_one_token_more_does_not_tune_again(cache, length):
    bench = FakeBench()
    add = make_add(cache, bench)
    add(*inputs(length))
    add(*inputs(length + 1))
    assert len(bench.compiled) == 1


def test_other_dtype_or_bucket_is_measured_anew(cache):
    bench = FakeBench()
    add = make_add(cache, bench)
    add(*inputs(100))
    add(*inputs(400))
    add(*inputs(100, torch.float16))
    assert len(bench.compiled) == 3
    assert len(cache.all()) == 3


def test_winner_is_kept_for_the_next_process(cache):
    make_add(cache, FakeBench())(*inputs())
    (result,) = cache.all()
    assert result.config == {"TILE": 64, "occupancy": 2} and result.time_us == 10.0
    assert result.key.gpu == "Fake GPU" and result.key.kernel.endswith(".add_kernel")
    assert result.key.shape.startswith("x=float32[128] y=float32[128] out=float32[128] n=128")
    later = FakeBench()
    x, y, out = inputs()
    assert make_add(cache, later)(x, y, out) == Config(TILE=64, occupancy=2)
    assert later.compiled == [] and torch.equal(out, x + 1)


def test_stored_configuration_that_is_no_longer_allowed_is_not_used(cache):
    make_add(cache, FakeBench())(*inputs())
    bench = FakeBench()
    assert make_add(cache, bench, [Config(TILE=128), Config(TILE=32)])(*inputs()) == Config(TILE=128)
    assert len(bench.compiled) == 1


def test_shipped_results_come_before_measuring_and_after_own(cache, monkeypatch):
    make_add(cache, FakeBench())(*inputs())
    (own,) = cache.all()
    shipped = own._replace(config={"TILE": 128, "num_worker_warps": 8})
    monkeypatch.setattr(tuning_cache, "shipped_results", lambda gpu: {shipped.key: shipped})
    bench = FakeBench()
    assert make_add(cache, bench)(*inputs()).TILE == 64
    cache.clear()
    assert make_add(cache, bench)(*inputs()).TILE == 128
    assert bench.compiled == [] and cache.all() == []


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


def test_disable_autotune_takes_the_first(cache, monkeypatch):
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")
    bench = FakeBench()
    x, y, out = inputs()
    assert make_add(cache, bench)(x, y, out) == SPACE[0]
    assert bench.compiled == [] and cache.all() == [] and torch.equal(out, x + 1)


def test_interpreter_takes_the_first(cache):
    x, y, out = inputs()
    assert make_add(cache, None)(x, y, out) == SPACE[0]
    assert cache.all() == [] and torch.equal(out, x + 1)


def test_nothing_is_measured_while_a_graph_is_captured(cache):
    bench = FakeBench(is_ready=False)
    add = make_add(cache, bench)
    x, y, out = inputs()
    assert add(x, y, out) == SPACE[0] and torch.equal(out, x + 1)
    assert bench.compiled == []
    bench.is_ready = True
    assert add(x, y, out).TILE == 64, "measured once that is possible"
    bench.is_ready = False
    assert add(*inputs(101)).TILE == 64, "and known from then on"


def test_hints_are_built_in_once_and_are_those_that_were_measured(cache, monkeypatch):
    launched, built = [], []
    monkeypatch.setattr(autotuner_module, "launch", lambda like, grid, kernel, args: launched.append(kernel))
    real = ct.kernel.replace_hints

    def replace_hints(self, **hints):
        built.append(hints)
        return real(self, **hints)

    monkeypatch.setattr(ct.kernel, "replace_hints", replace_hints)
    monkeypatch.setattr(autotuner_module, "_hinted_kernels", {})
    bench = FakeBench()
    add = make_add(cache, bench)
    for _ in range(3):
        add(*inputs())
    assert built == [{"occupancy": 2}, {"num_worker_warps": 8}]
    winner = Config(TILE=64, occupancy=2)
    assert launched == [bench.kernels[winner]] * 3
    assert launched[0]._compiler_options.occupancy == 2
    assert bench.kernels[SPACE[0]] is add_kernel, "no hints, no other kernel"


def test_hints_fn(cache):
    bench = FakeBench(times={32: 1.0, 64: 2.0, 128: 3.0})
    make_add(cache, bench, hints_fn=lambda cfg: {"occupancy": cfg.TILE // 32})(*inputs())
    assert [kernel._compiler_options.occupancy for kernel in bench.kernels.values()] == [1, 2, 4]
    assert bench.kernels[SPACE[2]]._compiler_options.num_worker_warps is None


def test_space_that_depends_on_the_architecture(cache):
    def configs(arch):
        return [Config(TILE=32)] if arch == "cpu" else [Config(TILE=128), Config(TILE=64)]

    bench = FakeBench()
    assert make_add(cache, bench, configs)(*inputs()).TILE == 64
    assert bench.compiled == [[Config(TILE=128), Config(TILE=64)]]
    assert make_add(cache, None, SearchSpace(configs))(*inputs()).TILE == 32


def test_predicate_by_names(cache):
    bench = FakeBench()
    seen = []

    def fits(x, TILE, cfg, arch):
        seen.append((TILE, arch))
        return cfg.TILE <= x.shape[0] // 2

    space = SearchSpace(SPACE, predicate=fits)
    assert make_add(cache, bench, space)(*inputs(100)).TILE == 32
    assert bench.compiled == [[SPACE[0]]]
    assert seen[:3] == [(32, "sm_90"), (64, "sm_90"), (128, "sm_90")]
    # The same bucket, but more configurations fit: their winner is another question.
    assert make_add(cache, bench, space)(*inputs(128)).TILE == 64


def test_no_configuration_that_suits(cache):
    with pytest.raises(ValueError, match="add_kernel: no configuration of its search space suits.*sm_90"):
        make_add(cache, FakeBench(), SearchSpace(SPACE, predicate=lambda cfg: False))(*inputs())


def test_key_of_the_callers(cache):
    """With ``key`` the arguments are built once a call, for the configuration that is launched."""
    bench, built = FakeBench(), []

    @autotune(search_space=SPACE, bench=bench, cache=cache)
    def add(x, y, out, autotuner=None):
        def args_fn(cfg):
            built.append(cfg.TILE)
            return x, y, out, x.shape[0], cfg.TILE

        grid_fn = lambda args, cfg: (ct.cdiv(x.shape[0], cfg.TILE),)  # noqa: E731
        return autotuner(None, grid_fn, add_kernel, args_fn, key=(x.shape, x.dtype))

    add(*inputs())
    built.clear()
    for _ in range(3):
        x, y, out = inputs()
        assert add(x, y, out).TILE == 64 and torch.equal(out, x + 1)
    assert built == [64, 64, 64]


def test_two_shapes_in_turns_keep_their_own_winners(cache):
    class BySize(FakeBench):
        def time(self, candidate, args, reset, samples):
            return [float(abs(candidate.config.TILE - args[3]))] * samples

    bench = BySize()
    add = make_add(cache, bench)
    for _ in range(3):
        assert add(*inputs(30)).TILE == 32
        assert add(*inputs(128)).TILE == 128
    assert len(bench.compiled) == 2


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


def test_out_of_memory_while_tuning_takes_the_first(cache):
    class Full(FakeBench):
        def run(self, candidate, args):
            raise torch.OutOfMemoryError("no room")

    x, y, out = inputs()
    with pytest.warns(RuntimeWarning, match="add_kernel is not tuned: there is no room"):
        assert make_add(cache, Full())(x, y, out) == SPACE[0]
    assert torch.equal(out, x + 1) and cache.all() == []


def test_threads_measure_once(cache):
    bench = FakeBench()
    add = make_add(cache, bench)
    chosen = []
    threads = [threading.Thread(target=lambda: chosen.append(add(*inputs()).TILE)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == [64] * 4 and len(bench.compiled) == 1


def test_config():
    config = Config(TILE=64, occupancy=2, opt_level=None, mode="fast")
    assert config.TILE == 64 and config.occupancy == 2 and config.mode == "fast"
    assert config.hints == {"occupancy": 2}
    assert config == Config(mode="fast", occupancy=2, opt_level=None, TILE=64) != Config(TILE=64)
    assert len({config, Config(mode="fast", occupancy=2, opt_level=None, TILE=64)}) == 1
    assert repr(config) == "Config(TILE=64, mode='fast', occupancy=2, opt_level=None)"
    with pytest.raises(AttributeError, match="TILE=64.*no option 'TILE_M'"):
        config.TILE_M  # noqa: B018
    with pytest.raises(ValueError, match="cannot be called hints"):
        Config(hints=3)


def test_decorated_function_keeps_its_name_and_takes_another_autotuner(cache):
    add = make_add(cache, FakeBench())
    assert add.__name__ == "add"
    other = autotuner_module.Autotuner(SearchSpace([Config(TILE=128)]), FakeBench(), cache)
    assert add(*inputs(), autotuner=other).TILE == 128


def test_known_calls_are_cheap(cache, monkeypatch):
    """What the autotuner adds to a launch, with a key: two microseconds; a wide margin for busy machines."""
    import timeit

    monkeypatch.setattr(autotuner_module, "launch", lambda *_: None)
    add = make_add(cache, FakeBench(), key=("a", 1))
    args = inputs()
    add(*args)
    assert min(timeit.repeat(lambda: add(*args), number=1000, repeat=10)) / 1000 < 8e-6
