"""The loop: draws experiments in rounds, has them judged, decides, and writes every step down before the next.

A round is the most promising regions, one experiment each; how many depends on the settings and the ledger, never on
the devices at hand. A step that the ledger has is not done again; one that it lacks is, from the beginning.
"""

import contextlib
import dataclasses
import fcntl
import gc
import json
import shutil
import textwrap
import time
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

from tilegym.autokernel import report
from tilegym.autokernel.devices import Devices
from tilegym.autokernel.devices import Job
from tilegym.autokernel.judge import Failed
from tilegym.autokernel.judge import GateRecord
from tilegym.autokernel.ledger import KEEP
from tilegym.autokernel.ledger import Decision
from tilegym.autokernel.ledger import Experiment
from tilegym.autokernel.ledger import Ledger
from tilegym.autokernel.ledger import RegionRow
from tilegym.autokernel.ledger import Round
from tilegym.autokernel.model_judge import ModelJudge
from tilegym.autokernel.model_judge import ModelSettings
from tilegym.autokernel.preparation import recording_path
from tilegym.autokernel.preparation import survey
from tilegym.autokernel.protocol import Proposer
from tilegym.autokernel.protocol import Task
from tilegym.autokernel.repository import Repository
from tilegym.autokernel.workers import WorkerFailed
from tilegym.bench import machine
from tilegym.errors import AutokernelError

BY_HAND = "stopped by hand; the same command goes on"
MAX_ATTEMPTS = 5  # for one region without a keep


@dataclass(frozen=True)
class Settings:
    """What a run is to do; the same when it is resumed.

    Attributes:
        model: the model and its prompts.
        device: "cpu" or "cuda": of the whole model, and of every kernel.
        architectures: what kernels have to compile for.
        folder: where in the repository kernels go; ``{family}`` stands for the model's type.
        experiments, minutes: the budget.
        width: how many regions a round tries; the same for any number of devices.
        attempts: for one region without a keep.
        least_share: regions with less of the baseline's time are not worth an experiment.
    """

    model: ModelSettings
    device: str = "cpu"
    architectures: tuple[str, ...] = ("sm_80", "sm_90", "sm_100", "sm_120")
    folder: str = "src/tilegym/transformers/{family}"
    experiments: int = 50
    minutes: float = 240.0
    width: int = 4
    attempts: int = MAX_ATTEMPTS
    least_share: float = 0.001


@dataclass
class Loop:
    """One run.

    Attributes:
        settings: what to do.
        folder: where the ledger, the recordings and the reports are.
        repository: where kernels are kept.
        proposers: who is asked, in order.
        devices: where kernels are judged.
        model_judge: judges the model with them.
        survey: finds the regions; for tests another one.
        tell: is told a line about every step.
        checkpoint: is called with the name of every step before it begins; for tests.
    """

    settings: Settings
    folder: Path
    repository: Repository
    proposers: list[Proposer]
    devices: Devices
    model_judge: ModelJudge
    survey: Callable = survey
    tell: Callable[[str], None] = lambda line: None
    checkpoint: Callable[[str], None] = lambda name: None
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".gitignore").write_text("*\n")  # so that the next run finds a clean tree
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.began, self.spent = time.monotonic(), 0.0

    def run(self) -> str:
        """Goes on from where the ledger ends; returns why it stopped.

        Raises:
            AutokernelError: it cannot start, or the repository fails.
        """
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AutokernelError(
                    f"the run in {self.folder} is under way in another process: wait for it, or give this one a name"
                ) from None
            return self._run()

    def _run(self) -> str:
        self.repository.check_clean()
        self._check_same_settings()
        self.spent = self.ledger.fact("seconds") or 0.0
        try:
            self._prepare()
            stop = None
            while stop is None:
                stop = self._finish_round() or self._stop() or self._open_round()
        except KeyboardInterrupt:
            stop = BY_HAND
        finally:
            self.model_judge.close()
            self.ledger.note("seconds", self.seconds())
            self._tidy()
        self.ledger.note("stopped", stop)
        report.write(self.folder, self.ledger)
        return stop

    def _check_same_settings(self) -> None:
        asked, known = json.loads(json.dumps(asdict(self.settings))), self.ledger.fact("settings")
        now, before = dict(_leaves(asked)), dict(_leaves(known or {}))
        different = [
            f"{name} {before[name]!r}, not {value!r}"
            for name, value in now.items()
            if before.get(name, value) != value and name not in ("experiments", "minutes")  # the budget may grow
        ]
        if different:
            raise AutokernelError(
                f"the run in {self.folder} was started with {'; '.join(different)}: give the run another name"
            )
        if known is not None:
            self.ledger.note("settings", asked)

    def _prepare(self) -> None:
        if self.ledger.fact("baseline") is not None:
            return
        if self.ledger.fact("survey") is None:
            self.checkpoint("survey")
            self._say("profiling the unpatched model")
            device, folder = torch.device(self.settings.device), Path(self.settings.folder)
            recordings = self.folder / "recordings"
            about = self.settings.model, device, self.settings.architectures, folder, recordings
            rows, whole = self.survey(*about, self._say, self.model_judge)
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()  # the workers need what the model had
            self.checkpoint("settings")  # only now: a model that cannot be loaded leaves the run's name free
            self.ledger.note("settings", json.loads(json.dumps(asdict(self.settings))))
            self.ledger.note("machine", machine.describe())
            self.ledger.note("survey", [[asdict(row) for row in rows], whole])
        self.checkpoint("branch")
        self.repository.start_branch()
        if self.ledger.fact("measured") is None:
            self.checkpoint("baseline")
            self._say("measuring the unpatched model")
            try:
                measured = self.model_judge.baseline()
                speed = f"{measured['throughput']:.2f} tokens/s", report.way(measured), f"noise {measured['noise']:.1%}"
                self._say(f"the unpatched model: {', '.join(filter(None, speed))}")
                self.ledger.note("measured", measured)
            except (WorkerFailed, Failed) as error:
                raise AutokernelError(f"the unpatched model cannot be run in a worker: {error}") from error
        self.checkpoint("begin")
        rows, whole = self.ledger.fact("survey")
        self.ledger.begin(self.ledger.fact("measured") | whole, [RegionRow(**row) for row in rows])
        report.write(self.folder, self.ledger)

    def seconds(self) -> float:
        """How long the run has taken, all its parts together."""
        return self.spent + time.monotonic() - self.began

    def _say(self, line: str) -> None:
        self.tell(f"{self.seconds():7.1f} s  {line}")
        self.ledger.note("seconds", self.seconds())  # what a killed run took counts, too

    def _stop(self) -> str | None:
        if len(self.ledger.experiments()) >= self.settings.experiments:
            return f"the budget of {self.settings.experiments} experiments is spent"
        return self._late()

    def _late(self) -> str | None:
        if self.seconds() < 60 * self.settings.minutes:
            return None
        return f"the budget of {self.settings.minutes:g} minutes is spent; with more of them the same command goes on"

    def _open_round(self) -> str | None:
        """Opens the next round; returns why there is none, if there is none."""
        left = self.settings.experiments - len(self.ledger.experiments())
        chosen: list[RegionRow] = []
        for row in self.ranked():
            if len(chosen) < min(self.settings.width, left) and not any(self._nested(row, other) for other in chosen):
                chosen.append(row)
        if not chosen:
            return "every region is covered or exhausted"
        self.checkpoint("open round")
        self.ledger.open_round(tuple(row.key for row in chosen), self.repository.head())
        return None

    def ranked(self) -> list[RegionRow]:
        """The regions that are still open, the largest expected saving first.

        That is the region's share of the time, times what its bound leaves to gain, times how likely a keep is: the
        run's past success, halved by every attempt that this region has seen. What is inside a larger region that is
        covered, or the other way round, does not count.
        """
        total = self.ledger.fact("baseline")["profiled_seconds"]
        experiments = self.ledger.experiments()
        covered = {e.region for e in experiments if e.status == KEEP}
        attempts = {key: sum(e.region == key for e in experiments) for key in {e.region for e in experiments}}
        success = (len(covered) + 1) / (len(experiments) + 2)
        open_rows, now = [], self.coverage()
        for row in self.ledger.regions():
            tried = attempts.get(row.key, 0)
            if row.closed or row.key in covered or row.seconds < self.settings.least_share * total:
                continue
            grows = self.coverage(also=row.key) - now
            if grows <= 0 or grows < self.settings.least_share:
                self.ledger.close_region(row.key, "what is inside it, or around it, is covered")
                continue
            if tried >= self.settings.attempts:
                self.ledger.close_region(row.key, f"{tried} attempts without a keep")
                continue
            gain = grows * (1 - min(row.bound / row.seconds, 1.0)) * success * 0.5**tried
            open_rows.append((-gain, row.key, row))
        return [row for _, _, row in sorted(open_rows)]

    def _finish_round(self) -> str | None:
        """Does what is left to do of the last round; returns why it stopped before the end, if it did."""
        current = self.ledger.last_round()
        if current is None:
            return None
        for key in current.regions:
            self._draw(current, key)
        for experiment in self._in_state("drawn"):
            self._commit(experiment)
        self._judge(self._in_state("committed"))
        for experiment in self.ledger.unfinished():
            if (late := self._late()) is not None:
                return late
            self._decide(experiment)
            report.write(self.folder, self.ledger)
        return None

    def _in_state(self, state: str) -> list[Experiment]:
        return [e for e in self.ledger.unfinished() if e.state == state]

    def _draw(self, current: Round, key: str) -> None:
        row = next(r for r in self.ledger.regions() if r.key == key)
        experiments = self.ledger.experiments()
        if row.closed or any(e.round == current.number and e.region == key for e in experiments):
            return
        history = tuple(e.attempt() for e in experiments if e.region == key and e.state == "finished")
        task = dataclasses.replace(Task.from_json(row.task), history=history)
        problems = []
        for proposer in self.proposers:
            self.checkpoint("draw")
            begin = time.monotonic()
            try:
                proposal = proposer.propose(task)
            except AutokernelError:
                raise
            except Exception as error:  # a proposer's own mistake must not end the run
                problems.append(f"{proposer.name}: {type(error).__name__}: {error}"[:300])
                continue
            if proposal is not None:
                self.checkpoint("drawn")
                number = self.ledger.draw(current, key, proposer.name, proposal, time.monotonic() - begin)
                took = time.monotonic() - begin
                self._say(f"{number}: {proposer.name} proposes {proposal.solution.name} for {key} ({took:.1f} s)")
                return
        self.checkpoint("close region")
        self.ledger.close_region(key, "; ".join(["no proposer has another idea", *problems]))

    def _commit(self, experiment: Experiment) -> None:
        self.checkpoint("commit")
        task = self.task_of(experiment)
        message = f"Attempt {experiment.number}: {experiment.proposal.solution.name}"
        commit = self.repository.commit_attempt(experiment.number, experiment.base, task, experiment.proposal, message)
        self.checkpoint("committed")
        self.ledger.advance(experiment.number, "committed", commit_id=commit)

    def task_of(self, experiment: Experiment) -> Task:
        """The task that an experiment answers."""
        return Task.from_json(next(r.task for r in self.ledger.regions() if r.key == experiment.region))

    def _judge(self, experiments: list[Experiment]) -> None:
        jobs = []
        if experiments:
            self.checkpoint("judge")
        for experiment in experiments:
            path = recording_path(self.folder / "recordings", experiment.region)
            recording = path.read_bytes(), path.with_suffix(".json").read_bytes()
            task = self.task_of(experiment).to_json()
            jobs.append(Job(experiment.number, task, experiment.proposal.to_json(), recording))
        self.model_judge.expect(len(jobs))
        for number, verdict in self.devices.judge(jobs) if jobs else ():
            self.checkpoint("judged")
            self.ledger.advance(number, "judged", verdict=verdict.to_json())
            took = ", ".join(f"{record.gate} {record.seconds:.1f}" for record in verdict.gates)
            self._say(f"{number}: {verdict.status}{f' at {verdict.gate}' if verdict.gate else ''} (seconds: {took})")

    def _decide(self, experiment: Experiment) -> None:
        if experiment.state == "judged":
            self._measure(experiment)
            experiment = self._again(experiment)
        if experiment.state == "measured":
            decision = self.decision(experiment)
            self.checkpoint("decide")
            self.ledger.decide(experiment.number, decision, experiment.model)
            what = (decision.description.splitlines() or [""])[0][:300]  # what a kernel raised goes on for pages
            self._say(f"{experiment.number}: {decision.status}: {what}")
            experiment = self._again(experiment)
        kept = ""
        if experiment.status == KEEP:
            self.checkpoint("keep")
            kept = self.repository.keep(experiment.number, experiment.commit_id)
        self.checkpoint("traces")
        report.write_trace(self.folder / "traces", experiment, self.settings.device)
        self.repository.remove(f"experiment-{experiment.number}")
        self.checkpoint("finish")
        self.ledger.advance(experiment.number, "finished", kept_commit=kept)

    def _again(self, experiment: Experiment) -> Experiment:
        return next(e for e in self.ledger.experiments() if e.number == experiment.number)

    def _measure(self, experiment: Experiment) -> None:
        """Gate 8, for what has passed the others."""
        verdict, found = experiment.verdict, {}
        if verdict.status == "passed":
            self.checkpoint("measure")
            begin = time.monotonic()
            with self._installed(experiment) as (best, kernels, later):
                try:
                    self.model_judge.prepare([kernels, *later], self.ledger.fact("baseline"))
                    found = self.model_judge.judge(kernels, best, self.ledger.fact("baseline"))
                    speed = f"{found['throughput']:.2f} tokens/s", report.times(found), report.way(found)
                    detail = ", ".join(filter(None, speed))
                    record = GateRecord("G8", True, detail, time.monotonic() - begin)
                except (Failed, WorkerFailed) as failed:
                    detail = failed.detail if isinstance(failed, Failed) else failed.log
                    record = GateRecord("G8", False, detail, time.monotonic() - begin)
                    verdict.status, verdict.gate, verdict.log = failed.status, "G8", detail
            verdict.gates.append(record)
            took = ", ".join(f"{step} {value:.1f}" for step, value in found.get("steps", {}).items())
            took = took or f"{record.seconds:.1f}"
            self._say(f"{experiment.number}: the model: {record.detail[:200]} (seconds: {took})")
        self.checkpoint("measured")
        self.ledger.advance(experiment.number, "measured", verdict=verdict.to_json(), model=json.dumps(found))

    @contextlib.contextmanager
    def _installed(self, experiment: Experiment) -> Iterator[tuple[dict[str, Any], dict[str, Any], list]]:
        """(what is kept, the same with the experiment's kernel, what is next if it and what follows it is kept)."""
        head = self.repository.worktree("best", self.repository.head())
        best = {e.region: {"root": str(head), "solution": e.proposal.solution.to_json()} for e in self.ledger.kept()}
        sets = [best]
        for e in self._in_state("judged"):
            if e.verdict.status == "passed":  # the first is the experiment
                tree = self.repository.worktree(f"experiment-{e.number}", e.commit_id)
                sets.append(sets[-1] | {e.region: {"root": str(tree), "solution": e.proposal.solution.to_json()}})
        try:
            yield best, sets[1], sets[2:]
        finally:
            self.repository.remove("best")

    def decision(self, experiment: Experiment) -> Decision:
        """Keep or discard, from what the gates found."""
        verdict = experiment.verdict
        before = self.coverage()
        throughput = experiment.model.get("throughput")
        first = (experiment.proposal.rationale.splitlines() or [""])[0]
        what = f"{experiment.proposer}: {textwrap.shorten(first, 140, placeholder=' ...')}".rstrip(": ")
        if verdict.status != "passed":
            return Decision(verdict.status, verdict.gate, f"{verdict.log[:2000]}", before, throughput)
        after = self.coverage(also=experiment.region)
        if not after > before:
            return Decision("discard", "keep", "displaced coverage does not grow", before, throughput)
        return Decision(KEEP, "", what, after, throughput)

    def coverage(self, also: str = "") -> float:
        """Displaced coverage: the share of the baseline's time that verified kernels have taken over.

        Time in a region inside a larger one counts once, if both are.
        """
        served = {e.region for e in self.ledger.experiments() if e.status == KEEP} | {also}
        baseline = self.ledger.fact("baseline")
        if baseline is None:  # it was stopped before there was one
            return 0.0
        seconds = sum(row.seconds for row in self.ledger.regions() if row.key in served)
        twice = sum(taken for group, key, taken in baseline.get("inside", ()) if group in served and key in served)
        return (seconds - twice) / baseline["profiled_seconds"]

    def _nested(self, one: RegionRow, other: RegionRow) -> bool:
        """Whether one of two regions is inside the other."""
        pair = {one.key, other.key}
        return any({group, key} == pair for group, key, _ in self.ledger.fact("baseline").get("inside", ()))

    def _tidy(self) -> None:
        for path in sorted(self.repository.worktrees.glob("*")) if self.repository.worktrees.exists() else ():
            with contextlib.suppress(AutokernelError):
                self.repository.remove(path.name)
            shutil.rmtree(path, ignore_errors=True)


def _leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and values in nested dictionaries."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value
