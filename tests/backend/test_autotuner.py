"""The autotuner's choices, on the CPU: a bench with a clock of its own, kernels in the interpreter."""

import threading
import time
import timeit

import cuda.tile as ct
import pytest
import torch
from tuning_fakes import SPACE
from tuning_fakes import FakeBench
from tuning_fakes import add_kernel
from tuning_fakes import inputs
from tuning_fakes import make_add

from tilegym.backend.cutile import autotuner as autotuner_module
from tilegym.backend.cutile import tuning_cache
from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import SearchSpace
from tilegym.backend.cutile.autotuner import autotune
from tilegym.backend.cutile.tuning_cache import TuningCache


@pytest.fixture
def cache(tmp_path, monkeypatch) -> TuningCache:
    monkeypatch.delenv("TILEGYM_DISABLE_AUTOTUNE", raising=False)
    return TuningCache(tmp_path / "tuning.sqlite")


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


@pytest.mark.parametrize("key", [None, "sizes"])
@pytest.mark.parametrize("length", [100, 127, 128, 512, 724, 1000, 1448, 4096])
def test_one_token_more_does_not_tune_again(cache, length, key):
    """Nor does it in the next process; 724 and 1448 are the largest sizes that round to their powers of two."""
    bench, later = FakeBench(), FakeBench()
    options = {} if key is None else {"key": (length, torch.float32, -1)}
    make_add(cache, bench, **options)(*inputs(length))
    options = {} if key is None else {"key": (length + 1, torch.float32, -1)}
    for add in (make_add(cache, later, **options), make_add(cache, later, **options)):
        x, y, out = inputs(length + 1)
        assert add(x, y, out).TILE == 64 and torch.equal(out, x + 1)
    assert len(bench.compiled) == 1 and later.compiled == []


def test_lengths_that_grow_by_one_never_tune_again(cache):
    bench = FakeBench()
    add = make_add(cache, bench)
    for length in range(2, 200):
        add(*inputs(length))
    assert len(bench.compiled) == 1 and len(cache.all()) == 1
    add(*inputs(300))
    assert len(bench.compiled) == 2, "half as long again: another question"


def test_nearly_the_same_sizes_of_another_kind_are_measured(cache):
    bench = FakeBench()
    make_add(cache, bench)(*inputs(724))
    make_add(cache, bench)(*inputs(725, torch.float16))
    make_add(cache, bench, [*SPACE, Config(TILE=64)])(*inputs(725))
    assert len(bench.compiled) == 3


def test_configuration_of_a_neighbour_has_to_suit(cache):
    """The predicate forbids, one element further on, what was the fastest."""
    bench = FakeBench()
    add = make_add(cache, bench, SearchSpace(SPACE, predicate=lambda x, cfg: cfg.TILE != 64 or x.shape[0] < 725))
    assert add(*inputs(724)).TILE == 64
    assert add(*inputs(725)).TILE == 128
    assert len(bench.compiled) == 2


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
    assert bench.compiled == [] and not cache.all(), "nothing to choose, nothing to measure"
    assert seen[:3] == [(32, "sm_90"), (64, "sm_90"), (128, "sm_90")]
    # The same bucket, but more configurations fit: their winner is another question.
    assert make_add(cache, bench, space)(*inputs(128)).TILE == 64


@pytest.mark.parametrize("space", [[], lambda arch: []])
def test_no_configuration_at_all(cache, space):
    with pytest.raises(ValueError, match="no configuration for sm_90: give it one at least"):
        make_add(cache, FakeBench(), SearchSpace(space))(*inputs(100))


def test_no_configuration_that_suits(cache):
    with pytest.raises(ValueError, match="add_kernel: no configuration of its search space suits.*sm_90"):
        make_add(cache, FakeBench(), SearchSpace(SPACE, predicate=lambda cfg: False))(*inputs())


@pytest.mark.parametrize(
    "space, message",
    [
        (Config(TILE=32), r"a list of Config or a function that returns one, not Config\(TILE=32\)"),
        (None, "a list of Config or a function that returns one, not None"),
        ([{"TILE": 32}], r"holds \{'TILE': 32\}: write Config\(TILE=64\)"),
        (lambda arch: [32], r"holds 32: write Config"),
    ],
)
def test_search_space_of_something_else(cache, space, message):
    with pytest.raises(TypeError, match=message):
        make_add(cache, FakeBench(), space)(*inputs())


def test_launches_that_do_not_fit_the_kernel(cache):
    def launching(kernel=add_kernel, args_fn=lambda cfg: (*inputs(), 100, cfg.TILE), **options):
        @autotune(search_space=SPACE, bench=FakeBench(), cache=cache)
        def call(autotuner=None):
            autotuner(None, lambda args, cfg: (1,), kernel, args_fn, **options)

        return call

    with pytest.raises(TypeError, match="kernel is a function: give a function that @ct.kernel decorates"):
        launching(kernel=lambda x: None)()
    with pytest.raises(TypeError, match="add_kernel takes x, y, out, n, TILE; args_fn gives 3 arguments"):
        launching(args_fn=lambda cfg: inputs())()
    with pytest.raises(ValueError, match="add_kernel has no parameters result for outputs to name"):
        launching(outputs=("out", "result"))()


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
        for n, tile in ((30, 32), (128, 128)):
            x, y, out = inputs(n)
            assert add(x, y, out).TILE == tile
            assert torch.equal(out, x + 1), "launched with the arguments of another configuration"
    assert len(bench.compiled) == 2


def test_out_of_memory_while_tuning_takes_the_first(cache):
    class Full(FakeBench):
        def run(self, candidate, args):
            raise torch.OutOfMemoryError("no room")

    x, y, out = inputs()
    with pytest.warns(RuntimeWarning, match="add_kernel is not tuned: there is no room"):
        assert make_add(cache, Full())(x, y, out) == SPACE[0]
    assert torch.equal(out, x + 1) and cache.all() == []


def test_threads_measure_once(cache):
    class Slow(FakeBench):
        def compile(self, candidates):
            time.sleep(0.3)
            return super().compile(candidates)

    bench = Slow()
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
    with pytest.raises(TypeError, match=r"option TILE is \[64, 64\]: options are numbers, strings, or tuples"):
        Config(TILE=[64, 64])


def test_decorated_function_keeps_its_name_and_takes_another_autotuner(cache):
    add = make_add(cache, FakeBench())
    assert add.__name__ == "add"
    other = autotuner_module.Autotuner(SearchSpace([Config(TILE=128)]), FakeBench(), cache)
    assert add(*inputs(), autotuner=other).TILE == 128


def test_known_calls_are_cheap(cache, monkeypatch):
    """What the autotuner adds to a launch, with a key: a microsecond or two of CPU time."""
    monkeypatch.setattr(autotuner_module, "launch", lambda *_: None)
    add = make_add(cache, FakeBench(), key=("a", 1))
    args = inputs()
    add(*args)
    assert min(timeit.repeat(lambda: add(*args), timer=time.thread_time, number=200, repeat=30)) / 200 < 6e-6
