"""Runs many cases: which ones, each for so long at most, in one process or in several that are replaced if they end."""

import argparse
import contextlib
import multiprocessing
import os
import queue
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import torch
import transformers

from fuzz.model_running import run_model
from fuzz.models import FAMILIES
from fuzz.running import Outcome
from fuzz.running import run_case

BAD = ("FAIL", "TIMEOUT", "ERROR", "RAISES")
GRACE = 60.0  # seconds after which a process that its alarm did not wake, or that does not end, is killed
LONGEST = 700  # characters of a traceback
SILENT = 3  # times that a worker is started again though it said nothing


class Message(NamedTuple):
    """What a worker says of a case: "BEGIN", with the ``seeds`` that are left after it, or how it ended."""

    worker: int
    name: str
    seed: int
    status: str
    text: str = ""
    seconds: float = 0.0
    seeds: tuple[int, ...] = ()


class Tally:
    """Counts outcomes by op, and prints failures as they come."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.seconds: Counter[str] = Counter()
        self.failures: list[str] = []

    def add(self, name: str, seed: int, outcome: Outcome, seconds: float) -> None:
        self.outcomes.setdefault(name, Counter())[outcome.status] += 1
        self.seconds[name] += seconds
        if outcome.status in BAD:
            self.failures.append(f"{name}:{seed}")
            print(f"{outcome.status} {name}:{seed} {outcome.text}", flush=True)

    def summary(self) -> str:
        lines = [f"{'':30} {'cases':>5} {'s':>6}  of which"]
        for name, counts in sorted(self.outcomes.items()):
            rest = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()) if status != "ok")
            lines.append(f"{name:30} {counts.total():5} {self.seconds[name]:6.0f}  {rest}".rstrip())
        cases = sum(counts.total() for counts in self.outcomes.values())
        return "\n".join([*lines, f"{cases} cases, {len(self.failures)} failures {' '.join(self.failures)}".rstrip()])


def plan(args: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Ops and seeds, some of one op in a row: with ``--reuse`` those of equal shapes.

    One process then compiles for them once, and repeats what it has recorded.
    """
    seeds = range(args.first, args.first + args.count)
    if args.reuse:
        groups = [seeds[i :: args.reuse] for i in range(min(args.reuse, args.count))]
    else:
        groups = [seeds[i : i + args.row] for i in range(0, args.count, args.row)]
    for group in groups:
        for name in args.ops:
            yield name, tuple(group)


def prepare(device: str) -> None:
    """Settings of a process that runs cases."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if device != "cpu":
        # PyTorch's own error is the measure: it is to compute in full.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _late(seconds: int) -> str:
    return f"took more than {seconds} s"


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer than ``seconds``."""

    def ring(*_: Any) -> None:
        raise TimeoutError(_late(seconds))

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_one(
    name: str, seed: int, args: argparse.Namespace, show: Callable[[str], None] | None = None
) -> tuple[Outcome, float, bool]:
    """Runs a case: how it ended, the seconds it took, and whether the device still works."""
    start, works = time.monotonic(), True
    try:
        with alarm(args.alarm):
            if name in FAMILIES:
                outcome = run_model(name, seed, args.device, show, args.over)
            else:
                outcome = run_case(name, seed, args.device, args.reuse, args.way, show)
    except TimeoutError as error:
        outcome = Outcome("TIMEOUT", str(error))
    except Exception:
        outcome = Outcome("ERROR", traceback.format_exc().replace("\n", " // ")[-LONGEST:])
    if outcome.status == "FAIL" and f"TimeoutError: {_late(args.alarm)}" in outcome.text:
        outcome = outcome._replace(status="TIMEOUT")  # torch.compile gives it another class
    if args.device != "cpu":
        try:
            torch.cuda.synchronize()
        except Exception as error:
            works, outcome = False, Outcome("FAIL", f"the device is lost: {str(error)[:150]} | {outcome.text}")
    return outcome, time.monotonic() - start, works


def run_here(args: argparse.Namespace, tally: Tally) -> None:
    """Runs all cases in this process; a lost device ends it."""
    prepare(args.device)
    for name, seeds in plan(args):
        for seed in seeds:
            if time.time() > args.deadline:
                return
            outcome, seconds, works = run_one(name, seed, args)
            tally.add(name, seed, outcome, seconds)
            if not works:
                return


def work(worker: int, tasks: Any, messages: Any, args: argparse.Namespace, left: tuple | None) -> None:
    """What a worker does: first what another ``left``, then tasks until there are none."""
    prepare(args.device)
    for name, seeds in _tasks(tasks, left):
        for i, seed in enumerate(seeds):
            if time.time() > args.deadline:
                break
            messages.put(Message(worker, name, seed, "BEGIN", seeds=seeds[i + 1 :]))
            outcome, seconds, works = run_one(name, seed, args)
            messages.put(Message(worker, name, seed, *outcome, seconds))
            if not works:
                messages.close()
                messages.join_thread()
                os._exit(3)  # Python's own way out would wait for the device
    messages.put(Message(worker, "", 0, "DONE"))


def _tasks(tasks: Any, left: tuple | None) -> Iterable[tuple[str, tuple[int, ...]]]:
    if left is not None:
        yield left
    yield from iter(tasks.get, None)


class Pool:
    """Worker processes, one of which is replaced when it ends or hangs."""

    def __init__(self, args: argparse.Namespace, tally: Tally) -> None:
        self.args, self.tally = args, tally
        self.context = multiprocessing.get_context("spawn")  # a fork would share what CUDA keeps
        self.tasks, self.messages = self.context.Queue(), self.context.Queue()
        self.processes: dict[int, Any] = {}
        self.running: dict[int, tuple[Message, float]] = {}  # since when
        self.left: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.last: dict[int, tuple[str, int]] = {}  # the case that a worker has run last
        self.silent: Counter[int] = Counter()  # how often a worker was started since it said anything

    def run(self) -> None:
        for task in plan(self.args):
            self.tasks.put(task)
        for worker in range(self.args.jobs):
            self.tasks.put(None)
            self._start(worker)
        while self.processes:
            try:
                self._take(self.messages.get(timeout=2))
            except queue.Empty:
                for worker in list(self.processes):
                    self._look_after(worker)
        self.tasks.cancel_join_thread()  # tasks may be left that nobody takes

    def _start(self, worker: int) -> None:
        self.silent[worker] += 1
        if self.silent[worker] > SILENT:
            raise RuntimeError(f"worker {worker} ends before it runs a case: {self.processes[worker].exitcode}")
        left = self.left.pop(worker, None)
        given = (worker, self.tasks, self.messages, self.args, left if left and left[1] else None)
        self.processes[worker] = self.context.Process(target=work, args=given, daemon=True)
        self.processes[worker].start()

    def _take(self, message: Message) -> None:
        worker = message.worker
        self.silent[worker] = 0
        if message.status == "DONE":
            self._end(worker)
        elif message.status == "BEGIN":
            self.running[worker], self.left[worker] = (message, time.time()), (message.name, message.seeds)
        else:
            self.running.pop(worker, None)
            self.last[worker] = message.name, message.seed
            self.tally.add(message.name, message.seed, Outcome(message.status, message.text), message.seconds)

    def _end(self, worker: int) -> None:
        """Waits for a worker that has nothing left to do."""
        process = self.processes.pop(worker)
        process.join(GRACE)
        if process.is_alive():
            process.kill()
            text = f"its process, which has run it last, did not end within {GRACE:.0f} s"
            self.tally.add(*self.last.get(worker, ("", 0)), Outcome("FAIL", text), 0.0)

    def _look_after(self, worker: int) -> None:
        process, longest = self.processes[worker], self.args.alarm + GRACE
        late = time.time() > self.args.deadline + longest
        if late or (worker in self.running and time.time() - self.running[worker][1] > longest):
            process.kill()
            process.join()
        if process.is_alive():
            return
        if worker in self.running:
            message, _ = self.running.pop(worker)
            text = f"the process ended with {process.exitcode}, or hung and was killed"
            self.tally.add(message.name, message.seed, Outcome("FAIL", text), 0.0)
        if late:
            del self.processes[worker]
        else:
            self._start(worker)
