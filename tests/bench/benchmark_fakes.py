"""A timer that measures nothing, for the tests of the benchmarks: it runs every call and gives times of its own."""

import torch

from tilegym.bench.roofline import Roofline
from tilegym.bench.runner import Session
from tilegym.bench.timing import Timing
from tilegym.bench.timing import Trial

ROOFLINE = Roofline(bandwidth=4e12, rate=7e14, copied_bytes=1 << 30, gemm_size=8192)


class FakeTimer:
    """Like CudaTimer: it compares providers, and knows host time and peak memory. ``log`` is the order of rounds."""

    compares = True
    rounds = 2

    def __init__(self, device="cpu"):
        self.device = device
        self.trials: list[Trial] = []
        self.log: list[int] = []

    def trial(self, call, setup, written):
        call(setup())
        trial = Trial(call, setup, written, repetitions=3)
        self.trials.append(trial)
        return trial

    def round(self, trial):
        self.log.append(self.trials.index(trial))
        for i in range(trial.repetitions):
            trial.call(trial.setup())
            trial.samples.append(1e-5 * (1 + 0.01 * i))

    def peak_memory(self, call, setup):
        return 1_000_000

    def host_time(self, call):
        call()
        return Timing.of([4e-6, 5e-6, 6e-6])


class FakeGpuTimer(FakeTimer):
    """Takes the place of CpuTimer in the command line."""

    def __init__(self, budget):
        super().__init__()


def session(timer, dtype=torch.float32, backend="pytorch", only=()):
    return Session(timer, ROOFLINE, dtype, backend, only)
