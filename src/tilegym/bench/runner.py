"""Measures benchmarks: at each shape every provider is checked against the oracle first, and timed only if it is right.

The providers of one shape are timed in alternating rounds on the same inputs, so that they meet the same clocks.
"""

import contextlib
import os
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilegym.backend import observe_calls
from tilegym.backend import selector
from tilegym.bench import check
from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.roofline import MEMORY
from tilegym.bench.roofline import Roofline
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import OURS
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Shape
from tilegym.bench.timing import CpuTimer
from tilegym.bench.timing import CudaTimer
from tilegym.bench.timing import Timing
from tilegym.bench.timing import Trial
from tilegym.errors import UnsupportedError

COPY = "copy of as many bytes"


@dataclass(frozen=True)
class Session:
    """What holds for all measurements of a run. ``only``: the providers wanted, empty for all."""

    timer: CudaTimer | CpuTimer
    roofline: Roofline
    dtype: torch.dtype
    backend: str
    only: tuple[str, ...] = ()
    seed: int = 0

    @property
    def device(self) -> str:
        return self.timer.device

    def wants(self, name: str) -> bool:
        if not self.timer.compares and name != OURS:
            return False
        return not self.only or name in self.only


class Inputs:
    """A benchmark's inputs at one shape, and copies of them for providers that overwrite theirs."""

    def __init__(self, benchmark: Benchmark, shape: Shape, device: str, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)

        def make(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

        self.benchmark, self._make = benchmark, make
        self.values = benchmark.inputs(make, **shape.dims)
        self.upstream: tuple[torch.Tensor, ...] = ()

    def oracle(self, gradients: bool) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The outputs and the gradients of the oracle in fp64; draws the upstream gradients."""
        exact = {k: v.double() if _floating(v) else v for k, v in self.values.items()}
        leaves = _leaves(exact, self.benchmark.differentiable) if gradients else exact
        outputs = check.tensors(self.benchmark.oracle(**leaves))
        if not gradients:
            return outputs, ()
        self.upstream = tuple(self._make(*output.shape) for output in outputs)
        grads = torch.autograd.grad(
            outputs, [leaves[k] for k in self.benchmark.differentiable], [g.double() for g in self.upstream]
        )
        return tuple(output.detach() for output in outputs), grads

    def copy(self) -> "Inputs":
        """The same values in memory of their own, strides kept."""
        twin = object.__new__(Inputs)
        twin.benchmark, twin._make = self.benchmark, self._make
        twin.values = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.values.items()}
        twin.upstream = tuple(g.clone() for g in self.upstream)
        return twin

    def _all(self) -> list[torch.Tensor]:
        return [v for v in self.values.values() if isinstance(v, torch.Tensor)] + list(self.upstream)

    def equals(self, other: "Inputs") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self._all(), other._all(), strict=True))

    def restore(self, pristine: "Inputs") -> None:
        for own, value in zip(self._all(), pristine._all(), strict=True):
            own.copy_(value)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _leaves(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {k: v.detach().requires_grad_() if k in names else v for k, v in values.items()}


def _steps(function: Callable, inputs: Inputs, mode: str, pristine: Inputs | None) -> tuple[Callable, Callable]:
    """(setup, call) of a pass in ``mode``: what happens before the clock starts, and what is timed."""
    names = inputs.benchmark.differentiable

    def fresh(gradients: bool) -> dict[str, Any]:
        if pristine is not None:
            inputs.restore(pristine)
        return _leaves(inputs.values, names) if gradients else inputs.values

    def run_forward(leaves: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        return check.tensors(function(**leaves)), leaves

    def run_backward(state: tuple[tuple[torch.Tensor, ...], dict[str, Any]]) -> tuple[torch.Tensor, ...]:
        outputs, leaves = state
        return torch.autograd.grad(outputs, [leaves[name] for name in names], inputs.upstream)

    if mode == FORWARD:
        return lambda: fresh(False), lambda values: function(**values)
    if mode == BACKWARD:
        return lambda: run_forward(fresh(True)), run_backward
    return lambda: fresh(True), lambda leaves: run_backward(run_forward(leaves))


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


def compiled(provider: Provider) -> Callable:
    """What is called: torch.compile's product where the provider asks for it."""
    if not provider.compile:
        return provider.call
    # A new start: past a few recompilations of one function torch.compile silently stops compiling it.
    torch.compiler.reset()
    return torch.compile(provider.call, dynamic=False, fullgraph=True)


def run_once(provider: Provider, inputs: Inputs, gradients: bool) -> None:
    """Runs forward, and under autograd forward and backward if asked, so that all of it is compiled."""
    function = compiled(provider)
    outputs = check.tensors(function(**inputs.values))
    if gradients:
        inputs.upstream = tuple(torch.ones_like(output) for output in outputs)
        setup, call = _steps(function, inputs, BOTH, None)
        call(setup())


class Candidate:
    """A provider at one shape: checked once, then measured in each mode."""

    def __init__(self, name: str, provider: Provider, inputs: Inputs, session: Session) -> None:
        self.name, self.provider, self.session = name, provider, session
        self.pristine, self.inputs = inputs, inputs
        self.overwrites = False
        self._handed_over: dict[str, str] = {}  # mode to the reason why the backend did not serve it
        self.function = compiled(provider)

    def _find_server(self, mode: str) -> None:
        """Finds out whether the chosen backend serves ``mode`` itself, or hands it to ``pytorch``."""
        setup, call = _steps(self.function, self.pristine.copy(), mode, None)
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
            self._handed_over[mode] = "measured to be the faster one here"

    def remarks(self, mode: str) -> dict[str, str]:
        """The backend that serves ``mode``, where the provider is ours, and what there is to know about it."""
        reason = self._handed_over.get(FORWARD if mode == FORWARD else BOTH)
        notes = [f"served by pytorch: {reason}"] if reason else []
        notes += ["overwrites its inputs"] if self.overwrites else []
        backend = ("pytorch" if reason else self.session.backend) if self.name == OURS else ""
        return {"backend": backend, "note": "; ".join(notes)}

    def results(self, gradients: bool) -> tuple[torch.Tensor, ...]:
        """Outputs; if asked, also the outputs under autograd and the gradients. On copies of the inputs."""
        if self.name == OURS:
            for mode in (FORWARD, BOTH) if gradients else (FORWARD,):
                self._find_server(mode)
        trial = self.pristine.copy()
        found = tuple(output.clone() for output in check.tensors(self.function(**trial.values)))
        if gradients:
            # With gradients an op may take another path than without: its outputs count once more.
            trial.restore(self.pristine)
            leaves = _leaves(trial.values, trial.benchmark.differentiable)
            outputs = check.tensors(self.function(**leaves))
            found += tuple(output.detach().clone() for output in outputs)
            found += torch.autograd.grad(outputs, [leaves[k] for k in trial.benchmark.differentiable], trial.upstream)
        if not trial.equals(self.pristine):
            self.overwrites = True
            self.inputs = self.pristine.copy()
        return found

    def trial(self, mode: str, written: int) -> tuple[Trial, int | None]:
        """Ready to be timed in ``mode``; and the peak memory."""
        setup, call = _steps(self.function, self.inputs, mode, self.pristine if self.overwrites else None)
        trial = self.session.timer.trial(call, setup, written)
        return trial, self.session.timer.peak_memory(call, setup)


def _judge(benchmark: Benchmark, inputs: Inputs, session: Session, gradients: bool) -> check.Judge:
    outputs, grads = inputs.oracle(gradients)
    oracle = outputs + outputs + grads if gradients else outputs
    baseline = Candidate(benchmark.baseline, benchmark.peers[benchmark.baseline], inputs, session)
    with baseline.provider.context():
        return check.Judge.of(oracle, baseline.results(gradients), session.dtype)


def _checked(
    benchmark: Benchmark, inputs: Inputs, session: Session, gradients: bool
) -> Iterator[tuple[Candidate | None, dict[str, Any]]]:
    """Every provider that is wanted and present, with its verdict; the candidate is None where it is not right."""
    judge = _judge(benchmark, inputs, session, gradients)
    for name, provider in benchmark.providers.items():
        if not session.wants(name):
            continue
        if provider.missing():
            yield None, {"provider": name, "status": "missing", "note": provider.missing()}
            continue
        try:
            candidate = Candidate(name, provider, inputs, session)
            with provider.context():
                results = candidate.results(gradients)
            own, wrong = judge.check(results)
            del results
        except Exception as error:  # whatever a foreign provider raises is a row of the report
            yield None, {"provider": name, "status": "failed", "note": _why(error)}
            continue
        verdict = {"provider": name, "error": own.rms, "largest_error": own.largest}
        if wrong:
            yield None, verdict | {"status": "WRONG", "note": wrong}
        else:
            yield candidate, verdict | {"status": "ok"}


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
            inputs = Inputs(benchmark, shape, session.device, session.dtype, session.seed)
            verdicts = list(_checked(benchmark, inputs, session, gradients))
        except Exception as error:  # out of memory, say: the other shapes are still measured
            note = f"nothing to check against: {_why(error)}"
            for mode in modes:
                yield Result(**common, mode=mode, provider=OURS, status="failed", note=note)
            return
        order = {name: position for position, name in enumerate((*benchmark.providers, COPY))}
        for mode in modes:
            try:
                found = list(_measure_mode(benchmark, shape, mode, verdicts, common, session))
            except Exception as error:
                yield Result(**common, mode=mode, provider=OURS, status="failed", note=_why(error))
                continue
            yield from sorted(found, key=lambda result: order[result.provider])


def _measure_mode(
    benchmark: Benchmark, shape: Shape, mode: str, verdicts: list, common: dict[str, Any], session: Session
) -> Iterator[Result]:
    work = benchmark.work(mode, session.dtype.itemsize, shape.dims)
    bound = session.roofline.bound(work)
    timed: list[tuple[dict[str, Any], Trial, int | None, Provider, int]] = []
    for candidate, verdict in verdicts:
        row = common | {"mode": mode} | verdict
        if candidate is None:
            yield Result(**row)
            continue
        row |= candidate.remarks(mode)
        try:
            with candidate.provider.context():
                trial, memory = candidate.trial(mode, work.written)
        except Exception as error:
            yield Result(**row | {"status": "failed", "note": _why(error)})
            continue
        timed.append((row, trial, memory, candidate.provider, work.bytes))
    if bound == MEMORY and session.wants(COPY) and timed:
        trial, copied = _copy_candidate(work.bytes, session)
        row = common | {"mode": mode, "provider": COPY, "status": "ok"}
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


def measure_host(benchmark: Benchmark, session: Session) -> Iterator[HostResult]:
    """The host's time for one call of every provider, on tensors so small that the GPU keeps up."""
    if not session.timer.compares:
        return
    shape = Shape("host", benchmark.host)
    with selector.use_backend(session.backend):
        inputs = Inputs(benchmark, shape, session.device, session.dtype, session.seed)
        for candidate, verdict in _checked(benchmark, inputs, session, gradients=False):
            common = {"op": benchmark.op, "dims": benchmark.host}
            if candidate is None:
                yield HostResult(**common | {k: verdict[k] for k in ("provider", "status", "note")})
                continue
            function, values = candidate.function, candidate.inputs.values
            with candidate.provider.context():
                timing = session.timer.host_time(lambda f=function, v=values: f(**v))
            yield HostResult(
                **common,
                **candidate.remarks(FORWARD),
                provider=verdict["provider"],
                status="ok",
                seconds=timing.median,
                low=timing.low,
                high=timing.high,
            )
