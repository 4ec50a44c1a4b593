"""Judges a kernel by itself: gates 0 to 7, the cheapest first. The first that fails ends it.

The judge runs no line of a candidate. It writes inputs to files, asks a confined worker for outputs, and compares them
with references that it computes itself; what the worker says of itself is only used against it.
"""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from tilegym.autokernel import static_checks
from tilegym.autokernel import tensors
from tilegym.autokernel import timing
from tilegym.autokernel.judging_inputs import Call
from tilegym.autokernel.judging_inputs import extreme
from tilegym.autokernel.judging_inputs import other_dtypes
from tilegym.autokernel.judging_inputs import recorded
from tilegym.autokernel.judging_inputs import small
from tilegym.autokernel.judging_inputs import strided
from tilegym.autokernel.judging_inputs import sweep
from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task
from tilegym.autokernel.workers import Worker
from tilegym.autokernel.workers import WorkerFailed
from tilegym.autokernel.workers import WorkerHost
from tilegym.inventory import reference
from tilegym.inventory.verify import difference

GATES = {
    "G0": "schema and allowlists",
    "G1": "compiles for every architecture",
    "G2": "smoke",
    "G3": "recorded calls and a sweep of sizes and strides",
    "G4": "extreme values",
    "G5": "three equal runs",
    "G6": "honesty: inputs, outputs, memory, time",
    "G7": "speed",
    "G8": "the whole model",
}
# A Definition with this tag may differ from run to run, within rounding.
NONDETERMINISTIC = "nondeterministic"


class Failed(Exception):
    """A gate was not passed. ``status``: incorrect, crash, timeout, suspect or discard."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


@dataclass(frozen=True)
class GateRecord:
    """What one gate found."""

    gate: str
    passed: bool
    detail: str
    seconds: float


@dataclass
class Verdict:
    """What became of a proposal: ``status`` is "passed", or how it failed at ``gate``.

    ``timing``: of gate 7: seconds of the kernel and of the reference over the recorded calls, and the bound.
    ``seed`` is written down only now, when the candidate is gone.
    """

    status: str = "passed"
    gate: str = ""
    log: str = ""
    gates: list[GateRecord] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)
    confined: dict[str, bool] = field(default_factory=dict)
    max_error: float = 0.0
    seed: int = 0

    def to_json(self) -> str:
        """JSON text, from which :meth:`from_json` makes an equal object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Verdict":
        """Reads what :meth:`to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "gates": [GateRecord(**g) for g in data["gates"]]})

    def step(self, gate: str, check: Callable[[], str]) -> bool:
        """Lets a gate decide: ``check`` returns what it found, or raises :class:`Failed`; whether it passed."""
        begin = time.monotonic()
        try:
            detail, passed = check(), True
        except Failed as failed:
            detail, passed, self.status, self.gate, self.log = failed.detail, False, failed.status, gate, failed.detail
        except WorkerFailed as failed:
            detail, passed, self.status, self.gate, self.log = failed.log, False, failed.status, gate, failed.log
        self.gates.append(GateRecord(gate, passed, detail, time.monotonic() - begin))
        return passed


class KernelJudge:
    """Judges one proposal.

    Args:
        host: makes the workers; its device is the one that is judged on.
        rules: what gate 7 asks for.
    """

    def __init__(self, host: WorkerHost, rules: timing.Rules) -> None:
        self.host, self.rules = host, rules
        self.kind = "cpu" if host.device == "cpu" else "cuda"
        self.device = torch.device(self.kind)

    def judge(self, task: Task, proposal: Proposal, root: Path, recording: Path, seed: int | None = None) -> Verdict:
        """Gates 0 to 7.

        Args:
            task: what was asked for.
            proposal: what came; its files lie below ``root``.
            root: the experiment's worktree.
            recording: the file of the region's recorded calls.
            seed: of all made-up inputs; by default one that nobody else knows.
        """
        verdict = Verdict(seed=secrets.randbits(48) if seed is None else seed)
        if not verdict.step("G0", lambda: self._static(task, proposal, root)):
            return verdict
        with self.host.working() as worker:
            verdict.confined = worker.confined
            trial = _Trial(self, task, proposal, root, recording, worker, verdict.seed)
            for gate in ("G1", "G2", "G3", "G4", "G5", "G6"):
                if not verdict.step(gate, getattr(trial, gate.lower())):
                    break
            verdict.max_error = trial.max_error
            if verdict.status == "passed":
                verdict.step("G7", lambda: self._speed(trial, verdict))
        return verdict

    def _static(self, task: Task, proposal: Proposal, root: Path) -> str:
        found = static_checks.check(task, proposal, root)
        if found:
            raise Failed("discard", "; ".join(found[:8]))
        return f"{len(proposal.files)} files"

    def _speed(self, trial: "_Trial", verdict: Verdict) -> str:
        with self.host.working() as other:
            _answer(other.ask("reference", definition_reference=trial.task.definition.reference))
            measured = timing.measure(trial.worker, other, trial.recorded, self.kind)
        ops = timing.count_ops(trial.run, trial.recorded[0][0].cast(torch.device("meta")))
        verdict.timing = measured.summary() | {"bound": trial.task.bound_seconds, "ops": ops}
        failed = timing.judge(measured, trial.task.bound_seconds, ops, self.rules)
        if failed is not None:
            raise Failed(*failed)
        return f"{measured.kernel * 1e6:.1f} us, PyTorch {measured.reference * 1e6:.1f} us"


class _Trial:
    """One candidate in its worker, and what was seen of it so far."""

    def __init__(
        self, judge: KernelJudge, task: Task, proposal: Proposal, root: Path, recording: Path, worker: Worker, seed: int
    ) -> None:
        self.judge, self.task, self.proposal, self.root, self.worker = judge, task, proposal, root, worker
        self.definition = task.definition
        self.run = reference.load(self.definition.reference, self.definition.name)
        self.generator = torch.Generator().manual_seed(seed)
        self.recorded = recorded(recording, self.generator)
        first = self.recorded[0][0].inputs
        self.numbers = {n: v for n, v in first.items() if not isinstance(v, torch.Tensor)}
        self.dishonest: dict[str, None] = {}
        self.files = 0
        self.max_error = 0.0

    def g1(self) -> str:
        solution = self.proposal.solution.to_json()
        self._ask("candidate", root=str(self.root), solution=solution)
        file, described = self._write(self._small(3))
        found = self._ask("compile", file=file, described=described, architectures=list(self.task.architectures))
        if found["errors"]:
            raise Failed("crash", "; ".join(f"{arch}: {error}" for arch, error in found["errors"].items()))
        return f"{found['launches']} launches for {', '.join(self.task.architectures)}"

    def g2(self) -> str:
        return self._compare([self._small(2)])

    def g3(self) -> str:
        calls = [call for call, _ in self.recorded]
        calls += list(sweep(self.definition, self.numbers, self.judge.kind, self.generator))
        calls += list(strided(self._small(5)))
        found = self._compare(calls)
        refused = []
        for call in other_dtypes(self.definition, self._small(5)):
            try:
                self._compare([call])
            except Failed as failed:  # another dtype may be refused, and the model then keeps to PyTorch
                if failed.status != "crash" or not failed.detail.startswith("UnsupportedError"):
                    raise
                refused.append(call.name)
        return found + (f"; refused: {'; '.join(refused)}" if refused else "")

    def g4(self) -> str:
        return self._compare(list(extreme(self.definition, self._small(4), self.generator)))

    def g5(self) -> str:
        call = self.recorded[0][0]
        runs = [self._outputs([call])[0] for _ in range(3)]
        equal = all(torch.equal(_bits(a), _bits(b)) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
        if not equal and NONDETERMINISTIC not in self.definition.tags:
            raise Failed("incorrect", "three runs on the same inputs gave different bits")
        return "equal bit for bit" if equal else "they differ, as the Definition declares"

    def g6(self) -> str:
        one, two = self._small(6), self._small(6)
        first, second = self._outputs([one, two])
        for call, got, what in ((two, second, "new contents at the same addresses"), (one, first, "outputs kept")):
            wrong = self._wrong(call, got)
            if wrong is not None:
                raise Failed("incorrect", f"{what}: {wrong}; something is remembered between calls")
        plain = self._outputs([one], poison="nan")[0]
        other = self._outputs([one], poison="finite")[0]
        if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(plain, other, strict=True)):
            raise Failed("incorrect", "an output depends on what its memory held before: it is not fully written")
        if self.dishonest:
            raise Failed("incorrect", "; ".join(self.dishonest))
        try:
            self._outputs([one], sanitize=True)
        except Failed as failed:
            raise Failed("incorrect", f"under the sanitizer: {failed.detail}") from failed
        return "inputs untouched, outputs written, nothing remembered, nothing left to PyTorch"

    def _small(self, size: int) -> Call:
        return small(self.definition, self.numbers, self.generator, size)

    def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return _answer(self.worker.ask(command, **arguments))

    def _write(self, call: Call) -> tuple[str, str]:
        flats, described = tensors.pack(call.inputs)
        self.files += 1
        path = self.worker.folder / f"call{self.files}.safetensors"
        tensors.write(path, flats)
        return str(path), json.dumps(described)

    def _outputs(
        self, calls: list[Call], poison: str = "nan", sanitize: bool = False
    ) -> list[tuple[torch.Tensor, ...]]:
        """The outputs of calls of one layout in the same memory; what was dishonest about them is noted."""
        packed = [tensors.pack(call.inputs) for call in calls]
        files = [self._write(call) for call in calls]
        described, output = files[0][1], str(self.worker.folder / "output.safetensors")
        names = [file for file, _ in files]
        found = self._ask("run", files=names, described=described, output=output, poison=poison, sanitize=sanitize)
        try:
            got = tensors.read(Path(output))
        except Exception as error:  # whatever the candidate has put there
            raise Failed("crash", f"its outputs cannot be read: {error}") from error
        self._note(found, packed, got)
        outputs = [_in_order(got, f"out{index}.") for index in range(len(calls))]
        for file in (*names, output):
            Path(file).unlink(missing_ok=True)
        return outputs

    def _note(self, found: dict[str, Any], packed: list, got: dict[str, torch.Tensor]) -> None:
        notes = self.dishonest
        for index, (flats, _) in enumerate(packed):
            for name, flat in flats.items():
                after = got.get(f"in{index}.{name}")
                if after is None or not torch.equal(_bits(flat), _bits(after)):
                    notes[f"input {name!r}, or memory beside it, was written to"] = None
        if found["forbidden"]:
            notes[f"PyTorch does the work: {', '.join(sorted(found['forbidden']))}"] = None
        if not found["guards"]:
            notes["memory beside an output was written to"] = None
        if not found["launches"]:
            notes["no kernel is launched"] = None
        if found["threads"]:
            notes["it leaves threads behind"] = None
        kinds = {kind for values in found["types"] for kind in values} - {"torch.Tensor"}
        if kinds:
            notes[f"an output is a {', '.join(sorted(kinds))}, not a plain tensor"] = None

    def _compare(self, calls: list[Call]) -> str:
        for call in calls:
            (got,) = self._outputs([call])
            wrong = self._wrong(call, got)
            if wrong is not None:
                raise Failed("incorrect", f"{call.name}: {wrong}")
        return f"{len(calls)} calls"

    def _wrong(self, call: Call, got: tuple[torch.Tensor, ...]) -> str | None:
        """What is wrong with the outputs of a call, or None."""
        with torch.no_grad():
            expected = _tuple(self.run(*call.cast(self.judge.device).values()))
            exact = _tuple(self.run(*call.cast(self.judge.device, torch.float64).values()))
        if len(got) != len(expected):
            return f"{len(got)} tensors came back, the Definition has {len(expected)}"
        for name, value, should, oracle in zip(self.definition.outputs, got, expected, exact, strict=True):
            wrong = difference(value, should, oracle)
            if wrong is not None:
                return f"output {name!r}: {wrong}"
            if value.is_floating_point() and value.numel():
                error = (value.double() - oracle.cpu().double()).abs()
                finite = error[error.isfinite()]
                self.max_error = max(self.max_error, float(finite.max()) if finite.numel() else 0.0)
        return None


def _answer(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise Failed("crash", f"{answer['error']}\n{answer.get('trace', '')}".strip())
    return answer


def _in_order(values: dict[str, torch.Tensor], prefix: str) -> tuple[torch.Tensor, ...]:
    names = sorted((n for n in values if n.startswith(prefix)), key=lambda n: int(n.rpartition(".")[2]))
    return tuple(values[name] for name in names)


def _tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in which NaN equals itself."""
    return value.contiguous().reshape(-1).view(torch.uint8)
