"""Times calls: on a GPU with events around each one, after the L2 cache was emptied; on a CPU with the clock."""

import contextlib
import gc
import itertools
import statistics
import time
import types
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch

from tilegym.backend.recording import USES_BEFORE_ADDRESSES

Setup = Callable[[], Any]
Call = Callable[[Any], Any]

WARMUP_CALLS = 3
MIN_SAMPLES = 5
MAX_SAMPLES = 100
LONG = 0.02  # seconds; calls that take longer vary little, and are warmed up and repeated less often
LONG_SAMPLES = 3
# Seconds ahead of the GPU, beside three times what the call takes the host, that the host is when a timed call begins:
# where other programs keep it busy it stops for as long now and then.
LEAD = 2e-4
PAGE = 2**21  # bytes of a GPU's memory whose addresses are translated alike
MOST_PAGES = 128  # of the smallest tensors: where there are more, a call takes too long for translations to show
PAUSE = 1e-5  # seconds before a timed call, for what has read the pages to end
HOST_BATCHES = 30
HOST_CALLS = 20  # a batch; even of calls with tens of launches far fewer than the driver queues before the host waits
HOST_SECONDS = 0.2  # for all batches


@dataclass(frozen=True)
class Timing:
    """Seconds: the median, and the spread as the 20th and 80th percentile."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0], 1)
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), fifths[0], fifths[3], len(samples))


@dataclass
class Trial:
    """One call being measured: ``call(setup())``, of which only ``call`` is timed."""

    call: Call
    setup: Setup
    written: int
    repetitions: int = 0
    lead: float = 0.0
    samples: list[float] = field(default_factory=list)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _byte(address: int) -> torch.Tensor:
    """The byte of a GPU's memory at this address, [1]."""
    interface = {"shape": (1,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=interface), device="cuda")


def _repetitions(budget: float, rounds: int, seconds: float) -> int:
    least = LONG_SAMPLES if seconds > LONG else MIN_SAMPLES
    total = min(max(int(budget / max(seconds, 1e-7)), least), MAX_SAMPLES)
    return -(-total // rounds)


def _batches(first: float) -> tuple[int, int]:
    """How many batches of how many calls measure the host, if the first batch of HOST_CALLS took so many seconds."""
    calls = HOST_CALLS if first < HOST_SECONDS / 5 else max(1, int(HOST_CALLS * HOST_SECONDS / 5 / first))
    return max(MIN_SAMPLES, min(HOST_BATCHES, int(HOST_SECONDS / max(first * calls / HOST_CALLS, 1e-7)))), calls


class CudaTimer:
    """Times GPU work.

    Before every timed call the L2 cache is emptied by reading a buffer several times its size; then as many bytes are
    written as the call itself writes, up to the cache's size. So a call has to write back as many bytes of its
    predecessor as it leaves in the cache for its successor, and its time is that of all its traffic.

    That leaves the GPU without the translations of the call's addresses, or with some of them, as it happens: on an
    H200 silu_and_mul of 1x1536 takes from 3.9 to 4.9 us, by the pages of 2 MiB in which input and output lie. So a byte
    of each page is read before the call, as a program would have done that has just used them: 4.2 us, wherever it is.

    Args:
        budget: seconds of GPU time for one trial, over all rounds.
        rounds: into how many rounds a trial is split; those of a comparison alternate, so that all of them meet the
            same clocks.
    """

    device = "cuda"
    compares = True

    def __init__(self, budget: float, rounds: int = 3) -> None:
        self.budget, self.rounds = budget, rounds
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._cache_bytes = properties.L2_cache_size
        self._buffer = torch.ones(max(4 * self._cache_bytes, 1 << 28) // 4, dtype=torch.float32, device="cuda")
        self._clock_hz = 1e3 * getattr(properties, "clock_rate", 2_000_000)

    def _empty_cache(self, written: int) -> None:
        self._buffer.sum()
        dirty = min(written, self._cache_bytes) // 4
        if dirty:
            self._buffer[:dirty].fill_(1.0)

    def _pages(self) -> list[torch.Tensor]:
        """A byte of each page of the allocator's memory besides the buffer, smaller pieces of it first."""
        if torch.cuda.get_allocator_backend() != "native":
            return []  # it does not tell where its memory is
        buffer = range(self._buffer.data_ptr(), self._buffer.data_ptr() + self._buffer.nbytes)
        pieces = sorted(
            (segment["total_size"], segment["address"])
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self._buffer.get_device() and segment["address"] not in buffer
        )
        addresses = (address for size, begin in pieces for address in range(begin, begin + size, PAGE))
        return [_byte(address) for address in itertools.islice(addresses, MOST_PAGES)]

    def _translate(self, pages: list[torch.Tensor]) -> None:
        if pages:
            torch.cat(pages)
            torch.cuda._sleep(int(PAUSE * self._clock_hz))

    def trial(self, call: Call, setup: Setup, written: int) -> Trial:
        """Warms a call up and settles how often it is repeated. ``written``: bytes that it writes."""
        call(setup())
        enqueue, seconds = self._enqueue(call, setup)
        probes = 1
        if seconds <= LONG:
            for _ in range(WARMUP_CALLS - 2):
                call(setup())
            probes = MIN_SAMPLES
            enqueue = statistics.median(self._enqueue(call, setup)[0] for _ in range(probes))
        trial = Trial(call, setup, written, repetitions=probes)
        self.round(trial)
        # The GPU must not wait for the host between the two events: it idles this long before the first one.
        trial.lead = LEAD + 3 * enqueue
        overhead = self._buffer.nbytes / 3e12 + trial.lead
        trial.repetitions = _repetitions(self.budget, self.rounds, statistics.median(trial.samples) + overhead)
        trial.samples.clear()
        return trial

    @staticmethod
    def _enqueue(call: Call, setup: Setup) -> tuple[float, float]:
        """Seconds until one call returns, and until its work is done."""
        state = setup()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = call(state)
        enqueued = time.perf_counter() - begin
        torch.cuda.synchronize()
        del result
        return enqueued, time.perf_counter() - begin

    def round(self, trial: Trial) -> None:
        """Adds one round of samples to ``trial``."""
        events, pages = [], self._pages()
        with _no_garbage_collection():
            for _ in range(trial.repetitions):
                state = trial.setup()
                if trial.lead:
                    torch.cuda._sleep(int(trial.lead * self._clock_hz))
                self._empty_cache(trial.written)
                self._translate(pages)
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                trial.call(state)
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
        trial.samples += [begin.elapsed_time(end) * 1e-3 for begin, end in events]

    def peak_memory(self, call: Call, setup: Setup) -> int:
        """Bytes allocated at the worst moment of a call beyond those that were there before it."""
        state = setup()
        torch.cuda.synchronize()
        time.sleep(1e-3)  # autograd's thread may still hold what the call before has returned
        with _no_garbage_collection():  # which would free what was there before
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call(state)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before

    def host_time(self, call: Callable[[], Any]) -> Timing:
        """Seconds of the host for one call; give it tiny tensors.

        Batches of calls are enqueued without waiting, and the GPU is waited for between batches: neither the GPU nor
        the length of its queue holds the host up.
        """
        for _ in range(USES_BEFORE_ADDRESSES // HOST_CALLS + 2):  # calls that come often are launched in another way
            if self._batch(call, HOST_CALLS) > HOST_SECONDS / 10:
                break
        batches, calls = _batches(self._batch(call, HOST_CALLS))
        return Timing.of([self._batch(call, calls) / calls for _ in range(batches)])

    @staticmethod
    def _batch(call: Callable[[], Any], calls: int) -> float:
        torch.cuda.synchronize()
        with _no_garbage_collection():
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        return seconds


class CpuTimer:
    """Times CPU work. There is no host time on its own here, and no memory statistics.

    ``compares``: whether the other providers are measured; here that would be PyTorch against itself.
    """

    device = "cpu"
    compares = False

    def __init__(self, budget: float, rounds: int = 3) -> None:
        self.budget, self.rounds = budget, rounds

    def trial(self, call: Call, setup: Setup, written: int) -> Trial:
        """Warms a call up and settles how often it is repeated."""
        call(setup())
        trial = Trial(call, setup, written, repetitions=1)
        self.round(trial)
        trial.repetitions = _repetitions(self.budget, self.rounds, trial.samples[0])
        trial.samples.clear()
        return trial

    def round(self, trial: Trial) -> None:
        """Adds one round of samples to ``trial``."""
        with _no_garbage_collection():
            for _ in range(trial.repetitions):
                state = trial.setup()
                begin = time.perf_counter()
                trial.call(state)
                trial.samples.append(time.perf_counter() - begin)

    def peak_memory(self, call: Call, setup: Setup) -> None:
        return None

    def host_time(self, call: Callable[[], Any]) -> None:
        return None
