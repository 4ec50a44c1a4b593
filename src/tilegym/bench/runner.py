"""Measures benchmarks: at each shape every provider is checked against the oracle first, and timed only if it is right.

The providers of one shape are timed in alternating rounds on the same inputs, so that they meet the same clocks.
"""

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch

from tilegym import ops
from tilegym.backend import observe_calls
from tilegym.backend import selector
from tilegym.backend import slower
from tilegym.bench import check
from tilegym.bench.passes import Inputs
from tilegym.bench.passes import compiled
from tilegym.bench.passes import leaves_of
from tilegym.bench.passes import steps
from tilegym.bench.passes import wanted_gradients
from tilegym.bench.report import INEXACT
from tilegym.bench.report import OK
from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.roofline import MEMORY
from tilegym.bench.roofline import Roofline
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import IN_PLACE
from tilegym.bench.spec import OURS
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Shape
from tilegym.bench.timing import CpuTimer
from tilegym.bench.timing import CudaTimer
from tilegym.bench.timing import Timing
from tilegym.bench.timing import Trial
from tilegym.errors import UnsupportedError

COPY = "copy of as many bytes"
CUTILE = "cutile backend"  # the kernels where the table of slower calls passes them by
LATER = (CUTILE, IN_PLACE, PYTORCH, COPY)  # in this order behind a benchmark's providers
OF_OURS = (OURS, CUTILE, IN_PLACE)  # they have to be right, and are nobody's rivals
LISTED = "measured to be the faster one here"
OVERWRITES = "overwrites its inputs"


@dataclass(frozen=True)
class Session:
    """What holds for all measurements of a run.

    Attributes:
        roofline: not needed for host times.
        only: the providers wanted, empty for all.
        compile_sweep: whether providers that compile for seconds are measured in sweeps too.
        spent: seconds by what they were spent on, of all that was measured so far.
    """

    timer: CudaTimer | CpuTimer
    roofline: Roofline | None
    dtype: torch.dtype
    backend: str
    only: tuple[str, ...] = ()
    seed: int = 0
    compile_sweep: bool = False
    spent: Counter = field(default_factory=Counter)

    @property
    def device(self) -> str:
        return self.timer.device

    def wants(self, name: str) -> bool:
        if not self.timer.compares and name != OURS:
            return False
        return not self.only or name in self.only

    def providers(self, benchmark: Benchmark, sweep: bool, gradients: bool = False) -> dict[str, Provider]:
        """Those to measure, at a shape of a ``sweep`` or at a headline shape; with ``gradients``, or forward alone."""
        found = benchmark.providers | (benchmark.in_training(self.backend) if gradients else {})
        if self.backend == "cutile" and hasattr(ops, benchmark.op):
            found.setdefault(PYTORCH, _on_pytorch(benchmark))
        if sweep and not self.compile_sweep:
            found = {name: p for name, p in found.items() if not (p.compile or p.headline_only)}
        plugged = () if self.timer.compares else [n for n in benchmark.extra if not self.only or n in self.only]
        return {name: provider for name, provider in found.items() if self.wants(name) or name in plugged}

    @contextlib.contextmanager
    def spending(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] += time.monotonic() - begin


def _on_pytorch(benchmark: Benchmark) -> Provider:
    return Provider(benchmark.ours, context=lambda: selector.use_backend("pytorch"))


@contextlib.contextmanager
def _no_fallback() -> Iterator[None]:
    before = os.environ.get("DISABLE_FALLBACK")
    os.environ["DISABLE_FALLBACK"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_FALLBACK"]
        else:
            os.environ["DISABLE_FALLBACK"] = before


def _why(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:200]}"


class Candidate:
    """A provider at one shape: checked once, then measured in each mode."""

    def __init__(self, name: str, provider: Provider, inputs: Inputs, session: Session) -> None:
        self.name, self.provider, self.session = name, provider, session
        self.pristine, self.inputs = inputs, inputs
        self.overwrites = False
        self.without_gradients: dict[str, Any] | None = None  # of its row where only its forward pass is right
        self._handed_over: dict[str, str] = {}  # mode to the reason why the backend did not serve it
        self.activations = inputs.benchmark.activations if provider.on_activations else ()
        self.function = compiled(provider)

    def _find_server(self, mode: str) -> None:
        """Finds out whether the chosen backend serves ``mode`` itself, or hands it to ``pytorch``."""
        setup, call = steps(self.function, self.pristine.copy(), mode, None, self.activations)
        served: set[tuple[str, str]] = set()

        def observe(op: str, backend: str) -> contextlib.AbstractContextManager:
            served.add((op, backend))
            return contextlib.nullcontext()

        try:
            with _no_fallback(), observe_calls(observe):
                call(setup())
        except UnsupportedError as reason:
            self._handed_over[mode] = str(reason)
        if self.session.backend != "pytorch" and (self.pristine.benchmark.op, "pytorch") in served:
            self._handed_over[mode] = LISTED

    def remarks(self, mode: str) -> dict[str, str]:
        """The backend that serves ``mode``, where the provider is ours, and what there is to know about it."""
        reason = self._handed_over.get(FORWARD if mode == FORWARD else BOTH)
        notes = [f"served by pytorch: {reason}"] if reason else []
        notes += [OVERWRITES] if self.overwrites else []
        backend = ("pytorch" if reason else self.session.backend) if self.name in OF_OURS else ""
        return {"backend": "pytorch" if self.name == PYTORCH else backend, "note": "; ".join(notes)}

    @property
    def is_listed(self) -> bool:
        """Whether the table of slower calls sends some pass of it to PyTorch."""
        return LISTED in self._handed_over.values()

    def results(self, gradients: bool) -> tuple[torch.Tensor, ...]:
        """Outputs; if asked, also the outputs under autograd and the gradients. On copies of the inputs."""
        if self.name in OF_OURS:
            for mode in (FORWARD, BOTH) if gradients else (FORWARD,):
                self._find_server(mode)
        trial = self.pristine.copy()
        found = tuple(output.clone() for output in check.tensors(self.function(**trial.values)))
        if gradients:
            # With gradients an op may take another path than without: its outputs count once more.
            trial.restore(self.pristine)
            leaves = leaves_of(trial.values, trial.benchmark.differentiable, self.activations)
            wanted = wanted_gradients(leaves, trial.benchmark.differentiable)
            outputs = check.tensors(self.function(**leaves))
            found += tuple(output.detach().clone() for output in outputs)
            found += torch.autograd.grad(outputs, wanted, trial.upstream)
        if not trial.equals(self.pristine):
            self.overwrites = True
            self.inputs = self.pristine.copy()
        return found

    def trial(self, mode: str, written: int) -> tuple[Trial, int | None]:
        """Ready to be timed in ``mode``; and the peak memory."""
        pristine = self.pristine if self.overwrites else None
        setup, call = steps(self.function, self.inputs, mode, pristine, self.activations)
        trial = self.session.timer.trial(call, setup, written)
        return trial, self.session.timer.peak_memory(call, setup)


def _judge(benchmark: Benchmark, inputs: Inputs, session: Session, gradients: bool) -> check.Judge:
    """By what the baseline allows, or else another peer that only calls PyTorch, or the op's own formula."""
    with session.spending("oracle"):
        outputs, grads = inputs.oracle(gradients)
        oracle = outputs + outputs + grads if gradients else outputs
        plain = {name: p for name, p in benchmark.peers.items() if not (p.compile or p.jit or p.missing())}
        if hasattr(ops, benchmark.op):
            plain.setdefault(PYTORCH, _on_pytorch(benchmark))
        reasons = []
        for name, provider in ({benchmark.baseline: benchmark.peers[benchmark.baseline]} | plain).items():
            try:
                with provider.context():
                    baseline = Candidate(name, provider, inputs, session)
                    names = _names(benchmark, len(outputs), gradients)
                    return check.Judge.of(oracle, baseline.results(gradients), session.dtype, names)
            except Exception as error:
                # Its frames hold the tensors of the call, which may be most of the GPU's memory.
                reasons.append(error.with_traceback(None))
        raise reasons[0]


def _names(benchmark: Benchmark, outputs: int, gradients: bool) -> tuple[str, ...]:
    """What :meth:`Candidate.results` are."""
    names = tuple(f"output {i}" for i in range(outputs)) if outputs > 1 else ("output",)
    if not gradients:
        return names
    trained = tuple(f"{name} of a training step" for name in names)
    return names + trained + tuple(f"gradient of {name}" for name in benchmark.differentiable)


def _judged(
    judge: check.Judge,
    name: str,
    provider: Provider,
    inputs: Inputs,
    session: Session,
    gradients: bool,
    first: int | None = None,
) -> tuple[Candidate, check.Verdict]:
    with session.spending(f"check of {name}"), provider.context():
        candidate = Candidate(name, provider, inputs, session)
        return candidate, judge.check(candidate.results(gradients), first)


def _checked(
    benchmark: Benchmark, providers: dict[str, Provider], inputs: Inputs, session: Session, gradients: bool
) -> Iterator[tuple[Candidate | None, dict[str, Any]]]:
    """Every provider that is wanted and present, with its verdict; the candidate is None where it is not right."""
    judge = _judge(benchmark, inputs, session, gradients)
    queue = list(providers.items())
    for name, provider in queue:
        if provider.missing():
            yield None, {"provider": name, "status": "missing", "note": provider.missing()}
            continue
        failure = None
        try:
            candidate, verdict = _judged(judge, name, provider, inputs, session, gradients)
        except Exception as error:  # whatever a foreign provider raises is a row of the report
            failure = _why(error)
        if failure is not None and gradients and name not in OF_OURS:
            gc.collect()
            with contextlib.suppress(Exception):
                candidate, verdict = _judged(judge, name, provider, inputs, session, False, len(inputs.upstream))
                candidate.without_gradients, failure = {"status": "failed", "note": failure}, None
        if failure is not None:
            gc.collect()  # the failed call's tensors may be most of the GPU's memory
            yield None, {"provider": name, "status": "failed", "note": failure}
            continue
        if name == OURS and candidate.is_listed and session.wants(CUTILE):
            queue.append((CUTILE, Provider(benchmark.ours, jit=True, context=slower.ignored)))
        row = {"provider": name, "error": verdict.worst.rms, "largest_error": verdict.worst.largest}
        if verdict.wrong and not verdict.near and gradients and name not in OF_OURS and not candidate.without_gradients:
            wrong = row | {"status": "WRONG", "note": verdict.wrong}
            with contextlib.suppress(Exception):
                alone, of_forward = _judged(judge, name, provider, inputs, session, False, len(inputs.upstream))
                if not of_forward.wrong:
                    alone.without_gradients, candidate, verdict = wrong, alone, of_forward
                    row |= {"error": verdict.worst.rms, "largest_error": verdict.worst.largest}
        if not verdict.wrong:
            yield candidate, row | {"status": OK}
        elif verdict.near and name not in OF_OURS:
            yield candidate, row | {"status": INEXACT, "note": verdict.wrong}
        else:
            yield None, row | {"status": "WRONG", "note": verdict.wrong}


def _copy_candidate(work_bytes: int, session: Session) -> tuple[Trial, int]:
    source = torch.randn(max(work_bytes // 8, 1), device=session.device)
    target = torch.empty_like(source)
    return session.timer.trial(lambda _: target.copy_(source), lambda: None, target.nbytes), 2 * source.nbytes


def measure_shape(benchmark: Benchmark, shape: Shape, modes: tuple[str, ...], session: Session) -> Iterator[Result]:
    """Checks and times every provider of ``benchmark`` at ``shape``, in each of ``modes`` that it has."""
    modes = tuple(mode for mode in modes if mode in benchmark.modes)
    gradients = any(mode != FORWARD for mode in modes)
    common = {"op": benchmark.op, "shape": shape.label, "model": shape.model, "dims": shape.dims}
    with selector.use_backend(session.backend):
        try:
            with session.spending("inputs"):
                inputs = Inputs(benchmark, shape, session.device, session.dtype, session.seed)
            providers = session.providers(benchmark, not benchmark.is_headline(shape), gradients)
            verdicts = list(_checked(benchmark, providers, inputs, session, gradients))
        except Exception as error:  # out of memory, say: the other shapes are still measured
            note = f"nothing to check against: {_why(error)}"
            for mode in modes:
                yield Result(**common, mode=mode, provider=OURS, status="failed", note=note)
            return
        order = {name: position for position, name in enumerate([*benchmark.providers, *LATER])}
        for mode in modes:
            try:
                with session.spending("timing"):
                    found = list(_measure_mode(benchmark, shape, mode, verdicts, common, session))
            except Exception as error:
                yield Result(**common, mode=mode, provider=OURS, status="failed", note=_why(error))
                continue
            yield from sorted(found, key=lambda result: order[result.provider])


def given_up(
    benchmark: Benchmark, shape: Shape, modes: tuple[str, ...], results: list[Result], seconds: float
) -> Iterator[Result]:
    """Rows for those ``modes`` of a shape that ``results`` lack because it took longer than ``seconds``."""
    done = {row.mode for row in results if (row.op, row.shape) == (benchmark.op, shape.label)}
    for mode in modes:
        if mode in benchmark.modes and mode not in done:
            note = f"given up after {seconds:.0f} s"
            common = {"op": benchmark.op, "shape": shape.label, "model": shape.model, "dims": shape.dims}
            yield Result(**common, mode=mode, provider=OURS, status="failed", note=note)


def _measure_mode(
    benchmark: Benchmark, shape: Shape, mode: str, verdicts: list, common: dict[str, Any], session: Session
) -> Iterator[Result]:
    work = benchmark.work(mode, session.dtype.itemsize, shape.dims)
    bound = session.roofline.bound(work)
    timed: list[tuple[dict[str, Any], Trial, int | None, Provider, int]] = []
    for candidate, verdict in verdicts:
        if mode == FORWARD and verdict["provider"] == IN_PLACE:
            continue
        row = common | {"mode": mode} | verdict
        if candidate is None:
            yield Result(**row)
            continue
        if mode != FORWARD and candidate.without_gradients:
            yield Result(**common | {"mode": mode, "provider": candidate.name} | candidate.without_gradients)
            continue
        row |= _joined(row, candidate.remarks(mode))
        try:
            with candidate.provider.context():
                trial, memory = candidate.trial(mode, work.written)
        except Exception as error:
            yield Result(**row | {"status": "failed", "note": _why(error)})
            continue
        timed.append((row, trial, memory, candidate.provider, work.bytes))
    if bound == MEMORY and session.wants(COPY) and timed:
        trial, copied = _copy_candidate(work.bytes, session)
        row = common | {"mode": mode, "provider": COPY, "status": OK}
        timed.append((row, trial, None, Provider(lambda: None), copied))
    for _ in range(session.timer.rounds):
        for _, trial, _, provider, _ in timed:
            with provider.context():
                session.timer.round(trial)
    for row, trial, memory, _, moved in timed:
        timing = Timing.of(trial.samples)
        yield Result(
            **row,
            seconds=timing.median,
            low=timing.low,
            high=timing.high,
            samples=timing.samples,
            bytes_per_second=moved / timing.median,
            flops_per_second=work.flops / timing.median if row["provider"] != COPY else 0.0,
            bound=bound,
            roofline_share=session.roofline.seconds(work) / timing.median,
            peak_bytes=memory,
        )


def _joined(verdict: dict[str, Any], remarks: dict[str, str]) -> dict[str, str]:
    """``remarks`` with the verdict's note in front of theirs."""
    return remarks | {"note": "; ".join(note for note in (verdict.get("note", ""), remarks["note"]) if note)}


def tune_nothing() -> None:
    """In this process and its children, for host times alone: all configurations cost the host the same."""
    os.environ.setdefault("TILEGYM_DISABLE_AUTOTUNE", "1")


def measure_host(benchmark: Benchmark, session: Session) -> Iterator[HostResult]:
    """The host's time for one call of every provider, on tensors so small that the GPU keeps up.

    torch.compile's products are left out: what they take of the host is mostly its guards.
    """
    if not session.timer.compares:
        return
    shape = Shape("host", benchmark.host)
    common = {"op": benchmark.op, "dims": benchmark.host}
    with _default_backend(session.backend):
        try:
            inputs = Inputs(benchmark, shape, session.device, session.dtype, session.seed)
            found = list(_checked(benchmark, session.providers(benchmark, sweep=True), inputs, session, False))
        except Exception as error:
            yield HostResult(**common, provider=OURS, status="failed", note=_why(error))
            return
        for candidate, verdict in found:
            if candidate is None:
                yield HostResult(**common | {k: verdict[k] for k in ("provider", "status", "note")})
                continue
            function, values = candidate.function, candidate.inputs.values
            with candidate.provider.context():
                timing = session.timer.host_time(lambda f=function, v=values: f(**v))
            yield HostResult(
                **common,
                **_joined(verdict, candidate.remarks(FORWARD)),
                provider=verdict["provider"],
                status=verdict["status"],
                seconds=timing.median,
                low=timing.low,
                high=timing.high,
            )


def _default_backend(name: str) -> contextlib.AbstractContextManager:
    """``use_backend``, but for the backend that is chosen anyway: users' calls do not pay for the block either."""
    return contextlib.nullcontext() if selector.get_current_backend() == name else selector.use_backend(name)
