"""What the tests of the autotuner share: kernels, and a bench with a clock of its own."""

import cuda.tile as ct
import torch

from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import autotune
from tilegym.backend.cutile.launch import launch


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
