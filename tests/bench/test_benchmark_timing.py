"""Timers and the roofline."""

import time

import pytest
import torch
from common import gpu

from tilegym.bench import roofline
from tilegym.bench.roofline import Roofline
from tilegym.bench.spec import Work
from tilegym.bench.timing import MAX_SAMPLES
from tilegym.bench.timing import MIN_SAMPLES
from tilegym.bench.timing import CpuTimer
from tilegym.bench.timing import CudaTimer
from tilegym.bench.timing import Timing


def test_median_and_spread():
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 100.0, 4.0])
    assert (timing.median, timing.low, timing.high, timing.samples) == (3.5, 2.0, 5.0, 6)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_only_the_call_is_timed():
    timer = CpuTimer(budget=0.02, rounds=2)
    trial = timer.trial(lambda state: time.sleep(0.001 * state), lambda: time.sleep(0.01) or 2, written=0)
    assert not trial.samples
    for _ in range(timer.rounds):
        timer.round(trial)
    assert 0.002 <= Timing.of(trial.samples).median < 0.008
    assert MIN_SAMPLES <= len(trial.samples) <= MAX_SAMPLES


def test_number_of_samples_is_bounded():
    timer = CpuTimer(budget=1.0, rounds=1)
    assert timer.trial(lambda _: None, lambda: None, 0).repetitions == MAX_SAMPLES
    assert CpuTimer(budget=1e-9, rounds=1).trial(lambda _: None, lambda: None, 0).repetitions == MIN_SAMPLES


def test_roofline():
    it = Roofline(bandwidth=4e12, rate=8e14, copied_bytes=0, gemm_size=0)
    copy = Work(read=4 << 30, written=4 << 30)
    assert it.bound(copy) == "memory" and it.seconds(copy) == (8 << 30) / 4e12
    gemm = Work(read=1 << 20, written=1 << 20, flops=10**12)
    assert it.bound(gemm) == "compute" and it.seconds(gemm) == 10**12 / 8e14


def test_roofline_of_this_machine():
    measured = roofline.measure_roofline(CpuTimer(budget=0.01), torch.float32)
    assert 1e8 < measured.bandwidth < 1e13
    assert 1e8 < measured.rate < 1e15


@gpu
def test_gpu_timer_agrees_with_a_long_run():
    timer = CudaTimer(budget=0.1)
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    trial = timer.trial(lambda _: target.copy_(source), lambda: None, target.nbytes)
    timer.round(trial)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        target.copy_(source)
    torch.cuda.synchronize()
    assert Timing.of(trial.samples).median == pytest.approx((time.perf_counter() - begin) / 20, rel=0.1)


@gpu
def test_gpu_timer_leaves_the_host_out():
    """A call that keeps the host busy far longer than the GPU takes the GPU's time."""
    timer = CudaTimer(budget=0.05)
    x = torch.randn(1 << 20, device="cuda")

    def slow(_):
        time.sleep(1e-3)
        x.add_(1.0)

    trial = timer.trial(slow, lambda: None, x.nbytes)
    timer.round(trial)
    assert Timing.of(trial.samples).median < 2e-4
    assert timer.host_time(lambda: time.sleep(1e-4)).median >= 1e-4


@gpu
def test_gpu_peak_memory():
    timer = CudaTimer(budget=0.05)
    x = torch.randn(1 << 20, device="cuda")
    assert timer.peak_memory(lambda _: x + 1, lambda: None) == x.nbytes
