"""What the tutorials share: where to run, how to talk, how to check a result, how to measure."""

import collections
import contextlib
import functools
import sys
import textwrap
from collections.abc import Callable
from collections.abc import Iterator

import torch

from tilegym import interpreter
from tilegym.backend import observe_calls
from tilegym.backend.selector import default_backend

ON_GPU = default_backend()[0] == "cutile" and not interpreter.is_installed()
DEVICE = "cuda" if ON_GPU else "cpu"


def title(text: str) -> None:
    """Starts a tutorial."""
    where = torch.cuda.get_device_name() if ON_GPU else "the CPU, in TileGym's interpreter"
    print(f"{text}\n{'=' * len(text)}\nRunning on {where}.")


def step(name: str, text: str) -> None:
    """Starts a section: its name, and a paragraph wrapped to the width of a terminal."""
    print(f"\n{name}\n{'-' * len(name)}")
    explain(text)


def explain(text: str) -> None:
    """Prints a paragraph; lines that are indented in it stay as they are."""
    for block in textwrap.dedent(text).strip("\n").split("\n\n"):
        print(f"\n{block}\n" if block.startswith("    ") else textwrap.fill(" ".join(block.split()), 96))


def end(text: str) -> None:
    """Ends a tutorial."""
    print()
    explain(text)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal random numbers on the device, the same ones on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(what: str, got: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> None:
    """Compares a kernel's result with torch's; ends the script with an error if the kernel is worse.

    Nobody is exact in floating point. So both are held against ``exact``, the same formula in fp64: the kernel may be
    at most twice as far from it as torch is, plus one rounding of the result's dtype.
    """
    error = (got.double() - exact).abs().max().item()
    torchs_error = (torchs.double() - exact).abs().max().item()
    rounding = torch.finfo(got.dtype).eps * exact.abs().max().item()
    good = got.shape == exact.shape and error <= 2 * torchs_error + rounding  # NaN is not <= anything
    print(f"{'ok   ' if good else 'WRONG'} {what}: off the fp64 result by {error:.1e} (torch: {torchs_error:.1e})")
    if not good:
        sys.exit(f"{what} is wrong")


@contextlib.contextmanager
def counted_calls() -> Iterator[collections.Counter]:
    """Counts the calls of TileGym's ops within the block, by op and backend."""
    counts = collections.Counter()

    def observe(op: str, backend: str) -> contextlib.AbstractContextManager:
        counts[op, backend] += 1
        return contextlib.nullcontext()

    with observe_calls(observe):
        yield counts


def measure(unit: str, work: float, **calls: Callable[[], object]) -> None:
    """Prints the rate of each call: ``work`` (bytes, operations, tokens) a second. Only on a GPU.

    The calls take turns, so that all meet the same clocks. Before each one the L2 cache is emptied: the inputs of a
    real model's kernel come from memory, not from the previous repetition. The median is what counts.
    """
    if not ON_GPU:
        _say_why_not()
        return
    from tilegym.bench.timing import CudaTimer
    from tilegym.bench.timing import Timing

    timer = CudaTimer(budget=0.2)
    trials = {name: timer.trial(lambda _, call=call: call(), lambda: None, 0) for name, call in calls.items()}
    for _ in range(timer.rounds):
        for trial in trials.values():
            timer.round(trial)
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12, "tokens/s": 1.0}[unit]
    for name, trial in trials.items():
        time = Timing.of(trial.samples)
        print(f"{name.replace('_', ' '):24} {work / time.median / scale:8.1f} {unit}  ({time.median * 1e6:.1f} us)")


@functools.cache  # once is enough
def _say_why_not() -> None:
    print("(No speeds here: how long the interpreter takes says nothing about a GPU.)")
