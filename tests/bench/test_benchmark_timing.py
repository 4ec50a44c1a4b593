"""Timers and the roofline."""

import time

import pytest
import torch
from common import gpu

from tilegym.backend.recording import USES_BEFORE_ADDRESSES
from tilegym.bench import roofline
from tilegym.bench import timing
from tilegym.bench.roofline import Roofline
from tilegym.bench.spec import Work
from tilegym.bench.timing import HOST_BATCHES
from tilegym.bench.timing import HOST_CALLS
from tilegym.bench.timing import LONG
from tilegym.bench.timing import LONG_SAMPLES
from tilegym.bench.timing import MAX_SAMPLES
from tilegym.bench.timing import MIN_SAMPLES
from tilegym.bench.timing import PAGE
from tilegym.bench.timing import WARMUP_CALLS
from tilegym.bench.timing import CpuTimer
from tilegym.bench.timing import CudaTimer
from tilegym.bench.timing import Timing
from tilegym.bench.timing import Trial
from tilegym.bench.timing import _byte


def test_median_and_spread():
    found = Timing.of([5.0, 1.0, 2.0, 3.0, 100.0, 4.0])
    assert (found.median, found.low, found.high, found.samples) == (3.5, 2.0, 5.0, 6)
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


class FakeEvent:
    def __init__(self, enable_timing):
        self.time = None

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)


@pytest.fixture
def cuda_timer(monkeypatch):
    """A CudaTimer on a machine without a GPU: events take the host's time, and there is nothing to wait for."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    timer = object.__new__(CudaTimer)
    timer.budget, timer.rounds = 0.1, 3
    timer._buffer, timer._cache_bytes, timer._clock_hz = torch.ones(256), 128, 1e9
    return timer


def test_long_calls_are_repeated_less_often(cuda_timer):
    calls = []
    trial = cuda_timer.trial(lambda state: calls.append(state) or time.sleep(1.2 * LONG), lambda: 7, written=0)
    for _ in range(cuda_timer.rounds):
        cuda_timer.round(trial)
    assert LONG_SAMPLES <= len(trial.samples) <= 6 and len(calls) <= 3 + len(trial.samples)
    assert min(trial.samples) >= 1.2 * LONG and set(calls) == {7}
    cuda_timer.budget = 1e-3
    trial = cuda_timer.trial(lambda state: time.sleep(1.2 * LONG), lambda: None, written=0)
    assert trial.repetitions * cuda_timer.rounds == LONG_SAMPLES


def test_short_calls_are_warmed_up_and_sampled_often(cuda_timer):
    calls = []
    trial = cuda_timer.trial(lambda state: calls.append(state), lambda: None, written=64)
    assert len(calls) == WARMUP_CALLS + 2 * MIN_SAMPLES and not trial.samples
    for _ in range(cuda_timer.rounds):
        cuda_timer.round(trial)
    assert MAX_SAMPLES <= len(trial.samples) <= MAX_SAMPLES + cuda_timer.rounds


def test_pages_are_read_before_a_call(cuda_timer, monkeypatch):
    """Not the buffer's, nor another device's, and no more than count; smaller pieces of memory first."""
    begin = cuda_timer._buffer.data_ptr()
    pieces = [(10 * PAGE, 3 * PAGE, -1), (begin, PAGE, -1), (70 * PAGE, PAGE, 0), (2 * PAGE, PAGE, -1)]
    pieces = [{"address": a, "total_size": size, "device": device} for a, size, device in pieces]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pieces)
    monkeypatch.setattr(timing, "_byte", lambda address: torch.tensor([address]))
    assert [int(page) for page in cuda_timer._pages()] == [2 * PAGE, 10 * PAGE, 11 * PAGE, 12 * PAGE]
    monkeypatch.setattr(timing, "MOST_PAGES", 2)
    assert [int(page) for page in cuda_timer._pages()] == [2 * PAGE, 10 * PAGE]
    done = []
    monkeypatch.setattr(cuda_timer, "_empty_cache", lambda written: done.append("empty"))
    monkeypatch.setattr(cuda_timer, "_translate", lambda pages: done.append(len(pages)))
    cuda_timer.round(Trial(lambda state: done.append("call"), lambda: None, 0, repetitions=2))
    assert done == ["empty", 2, "call"] * 2


@gpu
def test_gpu_bytes_of_pages():
    x = torch.arange(5, dtype=torch.uint8, device="cuda")
    assert _byte(x.data_ptr() + 3).item() == 3
    timer = CudaTimer(budget=0.05)
    pages = timer._pages()
    assert x.data_ptr() // PAGE in [page.data_ptr() // PAGE for page in pages]
    timer._translate(pages)


def test_host_time_is_that_of_one_call(cuda_timer):
    waited = []
    torch.cuda.synchronize = lambda: waited.append(time.sleep(1e-3))  # undone by the fixture's monkeypatch
    calls = []
    timing = cuda_timer.host_time(lambda: calls.append(time.sleep(2e-4)))
    assert 2e-4 <= timing.median < 5e-3
    assert MIN_SAMPLES <= timing.samples <= HOST_BATCHES
    assert len(waited) * HOST_CALLS == 2 * len(calls), "the GPU is waited for around every batch, outside the time"
    assert len(calls) > timing.samples * HOST_CALLS + USES_BEFORE_ADDRESSES


@gpu
def test_gpu_timer_agrees_with_a_long_run():
    timer = CudaTimer(budget=0.1)
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    trial = timer.trial(lambda _: target.copy_(source), lambda: None, target.nbytes)
    timer.round(trial)
    torch.cuda.synchronize()
    runs = []
    for _ in range(100):  # others may use the GPU meanwhile, but not in one of so many short runs
        begin = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        torch.cuda.synchronize()
        runs.append((time.perf_counter() - begin) / 4)
    assert Timing.of(trial.samples).median == pytest.approx(min(runs), rel=0.1)


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
