"""Gate 7: how fast a kernel is, by the judge's own clock, and whether that can be true."""

import functools
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym.autokernel import tensors
from tilegym.autokernel.judging_inputs import Call
from tilegym.autokernel.workers import Worker
from tilegym.autokernel.workers import WorkerFailed

ROUNDS = {"cpu": 3, "cuda": 5}
# Seconds that a batch takes about, and how many calls it has at most.
_BATCH_SECONDS, _MAX_CALLS = 0.03, 1000
_COLD_CALLS = 20
_TOO_FAST = 10.0


@dataclass(frozen=True)
class Rules:
    """What gate 7 asks for.

    Attributes:
        slowdown: how many times as long as PyTorch a kernel may take. 1 on a GPU; in the interpreter kernels are slow,
            and the rule only keeps out what is slow even there.
        bound_margin: by how much a measurement may be faster than bytes and operations allow.
    """

    slowdown: float = 1.0
    bound_margin: float = 0.9


@dataclass(frozen=True)
class Measured:
    """Seconds over all recorded calls, as often as the model makes them.

    Attributes:
        kernel, reference: of the candidate and of PyTorch: on a GPU by events with a cold cache, else as the next two.
        kernel_clock, reference_clock: by the judge's clock, the cache as it is.
        claimed: what the worker's own wall clock says of the same batches.
    """

    kernel: float
    reference: float
    kernel_clock: float
    reference_clock: float
    claimed: float

    def summary(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)


@dataclass
class _Series:
    clock: list[float]
    events: list[float]
    claimed: list[float]

    def seconds(self) -> tuple[float, float, float]:
        """(best estimate, by the judge's clock, claimed) of one call."""
        clock = max(statistics.median(self.clock), 0.0)
        return (statistics.median(self.events) if self.events else clock), clock, statistics.median(self.claimed)


def measure(
    kernel: Worker,
    plain: Worker,
    recorded: list[tuple[Call, int]],
    kind: str,
    check: Callable[[int, tuple[list[str], str], tensors.Outbox], None] = lambda *given: None,
) -> Measured:
    """Times candidate and reference in turn, each in its own process, on the recorded calls.

    Args:
        kernel, plain: the two workers.
        recorded: the calls, and how often each is made.
        kind: "cpu" or "cuda".
        check: is called with the number of a recorded call, its files and layout, and what wrote them, once in every
            round, behind a batch that the candidate cannot foresee; to ask it for a result.

    Raises:
        WorkerFailed: a worker died or took too long.
    """
    totals = [0.0] * 5
    outboxes = {worker.pid: tensors.Outbox(worker.folder) for worker in (kernel, plain)}
    for index, (call, count) in enumerate(recorded):
        series = {worker.pid: _Series([], [], []) for worker in (kernel, plain)}
        prepared = {pid: outbox.write(call.inputs) for pid, outbox in outboxes.items()}
        batches = {worker.pid: _calls(worker, prepared[worker.pid]) for worker in (kernel, plain)}
        for _ in range(ROUNDS[kind]):
            for worker in (kernel, plain):
                given = index, prepared[worker.pid], outboxes[worker.pid]
                asked = functools.partial(check, *given) if worker is kernel else lambda: None
                _round(worker, prepared[worker.pid], batches[worker.pid], series[worker.pid], asked)
        ours, clock, claimed = series[kernel.pid].seconds()
        theirs, their_clock, _ = series[plain.pid].seconds()
        for index, value in enumerate((ours, theirs, clock, their_clock, claimed)):
            totals[index] += count * value
    return Measured(*totals)


def _calls(worker: Worker, prepared: tuple[list[str], str]) -> int:
    """How many calls a batch has; what the worker says of its time decides nothing but this."""
    seconds = max(float(_time(worker, prepared, 1, cold=False)["wall"]), 1e-6)
    return min(max(int(_BATCH_SECONDS / seconds), 2), _MAX_CALLS)


def _round(
    worker: Worker, prepared: tuple[list[str], str], calls: int, series: _Series, check: Callable[[], None]
) -> None:
    """Times two batches, of 1 and of ``calls`` more: what both have in common (messages, files) drops out."""
    batches = (1, calls + 1)
    elapsed, answer = [], {}
    checked = secrets.choice((*batches, _COLD_CALLS) if worker.host.device != "cpu" else batches)
    for count in batches:
        begin = time.perf_counter()
        answer = _time(worker, prepared, count, cold=False)
        elapsed.append(time.perf_counter() - begin)
        if count == checked:
            check()
    series.claimed.append(answer["wall"] / batches[1])
    series.clock.append((elapsed[1] - elapsed[0]) / calls)
    if worker.host.device != "cpu":
        series.events += _time(worker, prepared, _COLD_CALLS, cold=True)["events"]
        if checked == _COLD_CALLS:
            check()


def _time(worker: Worker, prepared: tuple[list[str], str], calls: int, cold: bool) -> dict[str, Any]:
    answer = worker.ask("time", files=prepared[0], described=prepared[1], calls=calls, cold=cold)
    if "error" in answer:
        raise WorkerFailed("crash", answer["error"])
    return answer


def judge(measured: Measured, bound: float, ops: int, rules: Rules) -> tuple[str, str] | None:
    """(status, why) if the measurement is not good enough or too good to be true; None if it is fine.

    Args:
        measured: what was measured.
        bound: seconds that bytes and operations allow at best; 0 if unknown.
        ops: how many operators of PyTorch the reference is; fusing all saves no more than their launches and traffic.
        rules: what is asked for.
    """
    if bound and measured.kernel < rules.bound_margin * bound:
        return "suspect", f"{measured.kernel:.3g} s is faster than the roofline, {bound:.3g} s"
    expected = measured.reference / max(ops, 1)
    if measured.kernel < expected / _TOO_FAST:
        return (
            "suspect",
            f"{measured.kernel:.3g} s is over {_TOO_FAST:g} times as fast as expected, {expected:.3g} s",
        )
    if measured.claimed < 0.4 * measured.kernel_clock and measured.kernel_clock > 1e-4:
        return "suspect", f"by its own clock {measured.claimed:.3g} s, by the judge's {measured.kernel_clock:.3g} s"
    if measured.kernel > rules.slowdown * measured.reference:
        factor = measured.kernel / max(measured.reference, 1e-12)
        return "discard", f"too slow: {factor:.2f} times PyTorch's time, allowed is {rules.slowdown:g}"
    return None


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        views = {"view", "transpose", "unsqueeze", "expand", "slice", "t", "permute", "select", "detach", "split"}
        self.count += func.overloadpacket.__name__ not in views
        return result


def count_ops(run: Callable, inputs: dict[str, Any]) -> int:
    """How many operators a call of a reference is, views not counted."""
    with torch.no_grad(), _Count() as counter:
        run(*inputs.values())
    return counter.count
