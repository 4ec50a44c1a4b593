"""The machine's two ceilings, measured in the same run, and the time that they allow an op at best.

The roofline model (Williams, Waterman and Patterson 2009): an op that moves b bytes and computes f operations takes at
least ``max(b / bandwidth, f / rate)``; its share of the roofline is that time over the measured one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilegym.bench.spec import Work
from tilegym.bench.timing import CpuTimer
from tilegym.bench.timing import CudaTimer
from tilegym.bench.timing import Timing

MEMORY, COMPUTE = "memory", "compute"


@dataclass(frozen=True)
class Roofline:
    """``bandwidth``: bytes read plus written per second of a large copy; ``rate``: operations per second of a GEMM."""

    bandwidth: float
    rate: float
    copied_bytes: int
    gemm_size: int

    def bound(self, work: Work) -> str:
        """Which ceiling limits ``work``: "memory" or "compute"."""
        return MEMORY if work.bytes / self.bandwidth >= work.flops / self.rate else COMPUTE

    def seconds(self, work: Work) -> float:
        """The least time for ``work``."""
        return max(work.bytes / self.bandwidth, work.flops / self.rate)


def _median(timer: CudaTimer | CpuTimer, call: Callable, written: int) -> float:
    trial = timer.trial(lambda _: call(), lambda: None, written)
    for _ in range(timer.rounds):
        timer.round(trial)
    return Timing.of(trial.samples).median


def _bandwidth(timer: CudaTimer | CpuTimer, size: int) -> float:
    source = torch.randn(size // 4, device=timer.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median(timer, lambda: target.copy_(source), target.nbytes)


def _rate(timer: CudaTimer | CpuTimer, size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
    return 2 * size**3 / _median(timer, lambda: a @ b, a.nbytes)


def measure_roofline(timer: CudaTimer | CpuTimer, dtype: torch.dtype) -> Roofline:
    """Measures a copy that is far larger than any cache, and a square GEMM of ``dtype`` by the vendor's library."""
    copied, size = (1 << 30, 8192) if timer.device == "cuda" else (1 << 26, 512)
    return Roofline(_bandwidth(timer, copied), _rate(timer, size, dtype), copied, size)
