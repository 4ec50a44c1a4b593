"""Runs a case: calls both backends, compares what they gave, and calls again as recorded calls are served."""

import contextlib
import os
import traceback
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from fuzz.arguments import described
from fuzz.arguments import fresh
from fuzz.arguments import widened
from fuzz.breaking import break_argument
from fuzz.calling import Backward
from fuzz.calling import Called
from fuzz.calling import call
from fuzz.comparing import Failure
from fuzz.comparing import check_memory
from fuzz.comparing import check_unchanged
from fuzz.comparing import compare
from fuzz.comparing import memory_of
from fuzz.drawing import FUNCTIONS
from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.generators import GENERATORS
from fuzz.ways import AUTOCAST
from fuzz.ways import Captured
from fuzz.ways import compiled
from fuzz.ways import drawn
from fuzz.ways import in_threads
from fuzz.ways import late_data
from tilegym import interpreter
from tilegym import ops
from tilegym import set_gradients_in_place
from tilegym.backend import recording
from tilegym.errors import UnsupportedError

AGAIN = {"cpu": (0.15, 2), "cuda": (0.7, 5)}  # the share of cases that are called again, and how often
CPU_AUTOCAST = "autocast::prioritize"  # part of what PyTorch's autocast raises for fp16 on a CPU
LONGEST = 600  # characters of a traceback


class Outcome(NamedTuple):
    """How a case ended: "ok", "unsupported" (PyTorch served it), "raises" (both backends, for a broken argument),
    "RAISES" (both, for one that is not broken: then the generator is wrong) or "FAIL"."""

    status: str
    text: str


def run_case(
    name: str,
    seed: int,
    device: str = "cpu",
    reuse: int = 0,
    way: str | None = None,
    show: Callable[[str], None] | None = None,
) -> Outcome:
    """Runs the case ``seed`` of op ``name``; ``show`` gets its text before it runs, ``way`` replaces the way drawn."""
    draw = Draw(name, seed, device, reuse)
    case = GENERATORS[name](draw)
    break_argument(draw, case)
    trial = Trial(draw, case, way)
    if show is not None:
        show(trial.text)
    # Recorded calls are launched by addresses after many uses; here the few repetitions of a case are to meet that.
    uses, recording.USES_BEFORE_ADDRESSES = recording.USES_BEFORE_ADDRESSES, 2
    try:
        return trial.run()
    except Failure as failure:
        return Outcome("FAIL", f"{failure} | {trial.text}")
    finally:
        recording.USES_BEFORE_ADDRESSES = uses


class Trial:
    """A case and the ways in which it is called."""

    def __init__(self, draw: Draw, case: Case, way: str | None = None) -> None:
        self.draw, self.case, self.device = draw, case, draw.device
        self.op = FUNCTIONS.get(draw.op) or getattr(ops, draw.op)
        self.backward = Backward(draw, case)
        self.way = way or drawn(draw)
        if self.way in AUTOCAST and draw.op in FUNCTIONS:  # interfaces compute in autocast's dtype, also for fp32
            case.eps = torch.finfo(AUTOCAST[self.way]).eps
        notes = [*draw.notes, *([self.way] if self.way else [])]
        self.text = "; ".join([described(case.args), str(self.backward), *([", ".join(notes)] if notes else [])])

    def tested(self, args: dict[str, Any], fallback: bool, grad_mode: bool = True) -> Called:
        """What the kernels give, or PyTorch if ``fallback`` and they do not support the call."""
        sanitized = interpreter.sanitize() if self.device == "cpu" else contextlib.nullcontext()
        allowed = contextlib.nullcontext() if fallback else no_fallback()
        with allowed, sanitized:
            called = self._called(args, grad_mode)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return called

    def _called(self, args: dict[str, Any], grad_mode: bool = True, op: Callable | None = None) -> Called:
        with set_gradients_in_place(True if self.backward.in_place else None), self._autocast():
            return call(op or self.op, args, self.case, self.backward, "cutile", grad_mode)

    def reference(self, args: dict[str, Any]) -> Called:
        """What PyTorch gives for ``args``, in their dtype."""
        with self._autocast():
            return call(self.op, args, self.case, self.backward, "pytorch")

    def _autocast(self) -> contextlib.AbstractContextManager:
        dtype = AUTOCAST.get(self.way)
        return torch.autocast(self.device, dtype) if dtype is not None else contextlib.nullcontext()

    def run(self) -> Outcome:
        case = self.case
        given = fresh(case.args)
        before = memory_of(given)
        called, error = attempt(lambda: self.tested(given, fallback=False))
        fallback = isinstance(error, UnsupportedError)
        if fallback:
            given = fresh(case.args)
            called, error = attempt(lambda: self.tested(given, fallback=True))
        reference = fresh(case.args)
        with self._plain_sdpa():
            expected, expected_error = attempt(lambda: self.reference(reference))
        if CPU_AUTOCAST in str(expected_error):
            return Outcome("unsupported", self.text)
        if error is not None or expected_error is not None:
            _check_errors(error, expected_error)
            check_unchanged(case, given, before, failed=not isinstance(error, RuntimeError))
            return Outcome("raises" if case.broken else "RAISES", f"{_of(error)} | {self.text}")
        check_unchanged(case, given, before)
        check_memory(called.outputs, given, expected.outputs, reference)
        # An autograd.Function's outputs all ask for gradients, also those that depend on nothing that wants one.
        if not expected.through <= called.through:
            raise Failure(f"outputs {expected.through} require a gradient in pytorch, here {called.through}")
        # From copies: what is fp64 already is its own widened form, and ops may write to it.
        oracle, refused = attempt(lambda: self.reference(widened(fresh(case.args)) | case.oracle))
        exact = expected.results if refused is not None else oracle.results
        compare(case, called.results, expected.results, exact)
        self._repeat(before, expected.results, exact, fallback)
        if not (fallback and self.way in ("compiled", "graph")):  # what PyTorch does may depend on numbers, as lengths
            self._by_way(before, expected.results, exact)
        return Outcome("unsupported" if fallback else "ok", self.text)

    def _repeat(self, before: dict, expected: dict, exact: dict, fallback: bool) -> None:
        """Calls without gradients, as often as makes the dispatcher record the call and repeat what it recorded."""
        share, times = AGAIN["cpu" if self.device == "cpu" else "cuda"]
        if self.draw.data.random() >= share:
            return
        for _ in range(times):
            given = fresh(self.case.args)
            again = self.tested(given, fallback, grad_mode=False).results
            self._compare("called again without gradients", given, again, before, expected, exact)

    def _by_way(self, before: dict, expected: dict, exact: dict) -> None:
        """Calls in the case's way."""
        args = self.case.args

        def check(given: dict[str, Any], results: dict) -> None:
            if self.device != "cpu":
                torch.cuda.synchronize()
            self._compare(self.way, given, results, before, expected, exact)

        if self.way == "compiled":
            given = fresh(args)
            with compiled(self.op) as op:
                check(given, self._called(given, op=op).results)
        elif self.way == "inference-mode":
            with torch.inference_mode():
                for _ in range(3):
                    given = fresh(args)
                    check(given, self._called(given, grad_mode=False).results)
        elif self.way == "threads":

            def call_copies() -> tuple[dict[str, Any], Called]:
                copies = fresh(args)
                return copies, self._called(copies)

            for given, called in in_threads(call_copies):
                check(given, called.results)
        elif self.way == "stream":
            for grad_mode in (True, False, False):
                with late_data(args) as given:
                    results = self._called(given, grad_mode).results
                check(given, results)
        elif self.way == "graph":
            # What arrives at outputs comes from the host, unless it is one number; "kept" looks at results there.
            grad_mode = self.backward.layout == "expanded" and self.backward.graph != "kept"
            graph = Captured(lambda given: self._called(given, grad_mode).results, args)
            for _ in range(3):
                check(graph.static, graph.replay())

    def _compare(
        self, way: str, given: dict[str, Any], results: dict, before: dict, expected: dict, exact: dict
    ) -> None:
        try:
            check_unchanged(self.case, given, before)
            compare(self.case, results, *({k: r[k] for k in results if k in r} for r in (expected, exact)))
        except Failure as failure:
            raise Failure(f"{way}: {failure}") from None

    def _plain_sdpa(self) -> contextlib.AbstractContextManager:
        """SDPA's unfused kernel for fp32 on a GPU, where another makes NaN of infinite masks."""
        if self.device == "cpu" or self.draw.dtype != torch.float32:
            return contextlib.nullcontext()
        return sdpa_kernel(SDPBackend.MATH)


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """Within the block a call that the kernels do not support is an error."""
    before = os.environ.get("DISABLE_FALLBACK")
    os.environ["DISABLE_FALLBACK"] = "1"
    try:
        yield
    finally:
        del os.environ["DISABLE_FALLBACK"]
        if before is not None:
            os.environ["DISABLE_FALLBACK"] = before


def attempt(function: Callable[[], Called]) -> tuple[Called | None, Exception | None]:
    """What ``function`` gives, or the error that it raises."""
    try:
        return function(), None
    except (Failure, TimeoutError):
        raise
    except Exception as error:
        return None, error


def _check_errors(error: Exception | None, expected: Exception | None) -> None:
    if type(error) is type(expected):
        return
    trace = ""
    if error is not None and expected is None:
        trace = " // " + "".join(traceback.format_exception(error)[-3:]).replace("\n", " // ")[-LONGEST:]
    raise Failure(f"cutile {_of(error)}; pytorch {_of(expected)}{trace}")


def _of(error: Exception | None) -> str:
    return "gives a result" if error is None else f"raises {type(error).__name__}: {str(error)[:200]!r}"
