"""Gate 8: the whole model with a kernel in it: logits, greedy tokens, throughput, memory.

Unpatched, best so far and candidate each run in a worker of their own. They take turns, and the judge's clock counts.
Where there is a GPU the runs that count are replayed CUDA graphs; all of the compared models' or none's.
"""

import functools
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym.autokernel import tensors
from tilegym.autokernel.ahead import Ahead
from tilegym.autokernel.judge import Failed
from tilegym.autokernel.model_worker import EAGER
from tilegym.autokernel.model_worker import WAYS
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.running import RunningModel
from tilegym.autokernel.running import not_greedy
from tilegym.autokernel.running import read
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.workers import WorkerFailed
from tilegym.autokernel.workers import WorkerHost
from tilegym.bench import compare

# The 95% quantiles of Student's t distribution, one side, by degrees of freedom.
_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)
_LEAST_ROUNDS = 4
_BASELINE = "the unpatched model", "its twin"
_MORE_MEMORY = 1.05  # peak memory may grow by this factor, for workspaces


@dataclass(frozen=True)
class ModelRules:
    """What gate 8 asks for.

    Attributes:
        rounds: how often the models take turns; a comparison ends before, when it is decided.
        seconds: for how long they take further turns, while a comparison is not decided or the noise band is wide.
        throughput: whether throughput decides; not in the interpreter, where kernels are slow.
        least_noise: the noise band is at least this wide.
    """

    rounds: int = 8
    seconds: float = 60.0
    throughput: bool = True
    least_noise: float = 0.005


@dataclass(frozen=True)
class ModelSettings:
    """The model and what it is run on: everything that all of its workers are told."""

    spec: ModelSpec
    input_length: int = 64
    output_length: int = 64

    def arguments(self, kernels: dict[str, Any]) -> dict[str, Any]:
        """Of the worker's command "model"."""
        lengths = {"input_length": self.input_length, "output_length": self.output_length}
        return {"spec": asdict(self.spec), "kernels": kernels, **lengths}


class ModelJudge:
    """Measures the model unpatched, and judges it with kernels.

    Args:
        host: makes the workers.
        settings: the model.
        rules: what is asked for.
        limits: of a worker.
        folder: where the baseline's tokens and logits are kept.
        room: how many more models of so many bytes the device has memory for, to be made ready ahead of their turn.
    """

    def __init__(
        self,
        host: WorkerHost,
        settings: ModelSettings,
        rules: ModelRules,
        limits: Limits,
        folder: Path,
        room: Callable[[int], int] = lambda size: 0,
    ) -> None:
        self.host, self.settings, self.rules, self.limits, self.folder = host, settings, rules, limits, folder
        self.room = room
        self._models: dict[str, RunningModel] = {}  # that may be needed again, by the kernels in them
        self._ahead = Ahead()

    def load_ahead(self, size: int) -> None:
        """Begins to load what the baseline needs, if there is room for models of ``size`` bytes."""
        if self.room(size) >= len(_BASELINE):
            for name in _BASELINE:
                model = self._new({})
                self._ahead.begin(name, model, model.begin)

    def run_ahead(self, wait: bool = False) -> None:
        """Lets what is being loaded make its first run, or only waits until it is loaded."""
        for name in _BASELINE:
            taken = self._ahead.take(name)
            if taken is not None:
                model = taken[0]
                self._ahead.begin(name, model, model.begin if wait else model.warm_up)

    def baseline(self) -> dict[str, Any]:
        """Runs the unpatched model; keeps its tokens and logits, and an oracle's; row one of the ledger.

        Returns:
            What was measured; "way" is how, one of :data:`WAYS`, and "why" says why it is none of those before.

        Raises:
            WorkerFailed, Failed: the model cannot be run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        one, twin = ((self._ahead.take(name) or [self._new({})])[0] for name in _BASELINE)
        self._models[_key({})] = one
        one.begin()
        pool = ThreadPoolExecutor(1)
        try:
            ready = pool.submit(twin.warm_up)  # meanwhile; nothing is timed yet
            tokens = one.file("tokens.safetensors")
            run = one.ask("generate", output=str(tokens))
            for name, oracle in (("logits", False), ("oracle", True)):
                output = one.file(f"{name}.safetensors")
                found = one.ask("logits", tokens=str(tokens), output=str(output), oracle=oracle)
                shutil.copy(output, self.folder / output.name)
            shutil.copy(tokens, self.folder / tokens.name)
            confined = one.begin().confined
            unpatched, rounding = self._unpatched(found["dtype"])
            # A model that is let through may be off by twice as much and a rounding, replayed or not. The difference of
            # two logits, replayed, is then as far as four times that from the same, not replayed.
            tie = 4 * (2 * unpatched.largest + rounding)
            ready.result()
            captured = pool.submit(self._capture, twin, WAYS, tie)
            self._capture(one, WAYS, tie)
            captured.result()
            way, why = self._way({"original": one, "the same again": twin}, WAYS, tie)

            def enough(times: list[list[float]]) -> bool:
                return len(times[0]) >= self.rules.rounds and self._band(*times) <= self.rules.least_noise

            times = self._turns([one, twin], way, enough)
        finally:
            twin.end()  # so that nobody waits for it if the other has failed
            pool.shutdown()
            twin.end()
        seconds = statistics.median(times[0] + times[1])
        return {
            "seconds": seconds,
            "throughput": run["tokens"] / seconds,
            "peak": run["peak"],
            "noise": self._band(*times),
            "rounds": len(times[0]),
            "way": way,
            "why": why,
            "tie": tie,
            "dtype": found["dtype"],
            "confined": confined,
        }

    def expect(self, count: int) -> None:
        """Begins processes for so many models, where they are made ready ahead."""
        if count > 1 and self.room(0):
            self.host.prepare("model", self.limits, count)

    def prepare(self, sets: list[dict[str, Any]], baseline: dict[str, Any]) -> None:
        """Begins to make the model ready with each of these sets of kernels, as far as there is room.

        What :meth:`judge` finds is the same as without; a model that fails meanwhile is made again then, alone.
        """
        keys = [_key(kernels) for kernels in sets]
        self._ahead.keep_only(keys)
        new = [(key, kernels) for key, kernels in zip(keys, sets, strict=True) if key not in self._ahead]
        needed = max(0, 2 - len(self._models))  # the original and the best
        room = self.room(baseline["peak"]) - needed if new else 0
        if room < 2:  # one alone is made as well when it is its turn
            return
        for key, kernels in new[:room]:
            model = self._new(kernels)
            self._ahead.begin(key, model, functools.partial(self._made, model, baseline))

    def _made(self, model: RunningModel, baseline: dict[str, Any]) -> tuple[dict[str, Any], "_Laps"]:
        """All about a model that needs no other one: (exactness and memory, the seconds that each step took)."""
        laps = _Laps()
        model.begin()
        laps.lap("load")
        model.warm_up()
        laps.lap("first run")
        generated, given, logits = (model.file(f"{name}.safetensors") for name in ("generated", "given", "logits"))
        run = model.ask("generate", output=str(generated))
        shutil.copy(self.folder / "tokens.safetensors", given)
        model.ask("logits", tokens=str(given), output=str(logits))
        found = self._exactness(read(generated, "tokens"), read(logits, "logits"), baseline["dtype"])
        found |= {"peak": run["peak"], "tokens": run["tokens"]}
        laps.lap("exactness")
        self._capture(model, _ways(baseline), baseline.get("tie", 0.0))
        laps.lap("graphs")
        return found, laps

    def judge(self, kernels: dict[str, Any], best: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
        """Judges the model with ``kernels`` against the unpatched one and the one with ``best``.

        Each runs in a process of its own. The unpatched one, the best and the candidate wait for the next call.

        Args:
            kernels, best: by region: ``root`` and ``solution``.
            baseline: what :meth:`baseline` returned.

        Returns:
            What was measured; "way" and "why" as of the baseline.

        Raises:
            Failed, WorkerFailed: it is not good enough, or it died.
        """
        self._keep_only({}, best)
        waited = _Laps()
        model, made = self._ahead.take(_key(kernels)) or (self._new(kernels), None)
        waited.lap("waited")
        try:
            found, laps = made or self._made(model, baseline)
            tokens = found.pop("tokens")
            laps.seconds |= waited.seconds if made else {}
            laps.begin = time.monotonic()
            models = {"candidate": model, "original": self._model({})} | ({"best": self._model(best)} if best else {})
            for other in models.values():
                other.warm_up()
            laps.lap("others")
            way, why = self._way(models, _ways(baseline), baseline.get("tie", 0.0))
            laps.lap("graphs")
            found |= {"way": way, "why": "; ".join(filter(None, (baseline.get("why"), why)))}
            found |= self._speed(list(models.values()), tokens, found, baseline)
            laps.lap("turns")
        except BaseException as error:
            model.end()
            if isinstance(error, WorkerFailed):
                self.close()  # whoever it was: the next call begins anew
            raise
        self._models[_key(kernels)] = model  # the best, if it is kept
        return found | {"steps": laps.seconds}

    def close(self) -> None:
        """Ends the models that were kept, and those that were made ready."""
        self._ahead.keep_only([])
        self._keep_only()

    def _keep_only(self, *sets: dict[str, Any]) -> None:
        """Ends all models but those with one of these ``sets`` of kernels."""
        wanted = {_key(kernels) for kernels in sets}
        for key in [key for key in self._models if key not in wanted]:
            self._models.pop(key).end()

    def _new(self, kernels: dict[str, Any]) -> RunningModel:
        return RunningModel(self.host, self.limits, self.settings.arguments(kernels))

    def _model(self, kernels: dict[str, Any]) -> RunningModel:
        """The model with ``kernels`` that is kept; where their files lie may have changed."""
        model = self._models.setdefault(_key(kernels), self._new(kernels))
        model.arguments = self.settings.arguments(kernels)
        return model

    def _unpatched(self, dtype: str) -> tuple[compare.Deviation, float]:
        """(how far the unpatched model is from the oracle, a rounding in ``dtype`` of the largest logit)."""
        oracle, unpatched = read(self.folder / "oracle.safetensors", "logits"), compare.Deviation()
        for theirs, exact in zip(read(self.folder / "logits.safetensors", "logits"), oracle, strict=True):
            unpatched.add(theirs, exact)
        return unpatched, torch.finfo(tensors.torch_dtype(dtype)).eps * max(e.abs().max().item() for e in oracle)

    def _exactness(self, tokens: list[torch.Tensor], logits: list[torch.Tensor], dtype: str) -> dict[str, Any]:
        expected = read(self.folder / "tokens.safetensors", "tokens")
        oracle = read(self.folder / "oracle.safetensors", "logits")
        shapes = [[t.shape for t in values] for values in (tokens, expected, logits, oracle)]
        if shapes[0] != shapes[1] or shapes[2] != shapes[3]:
            raise Failed("incorrect", "the model gave another number of tokens or logits")
        patched = compare.Deviation()
        for ours, exact in zip(logits, oracle, strict=True):
            patched.add(ours, exact)
        unpatched, rounding = self._unpatched(dtype)
        tie = 2 * (unpatched.largest + patched.largest) + rounding
        reason = compare.judge_logits(patched, unpatched, rounding)
        reason = reason or compare.judge_tokens(expected, tokens, oracle, tie)
        if reason is not None:
            raise Failed("incorrect", reason)
        equal = sum(int((a == b).sum()) for a, b in zip(expected, tokens, strict=True))
        return {
            "max_logit_error": patched.largest,
            "unpatched_max_logit_error": unpatched.largest,
            "token_agreement": equal / sum(t.numel() for t in expected),
        }

    def _wrong(self, tie: float) -> Callable[[list[torch.Tensor], list[torch.Tensor]], str]:
        def wrong(tokens: list[torch.Tensor], logits: list[torch.Tensor]) -> str:
            expected = read(self.folder / "tokens.safetensors", "tokens")
            if [t.shape for t in tokens] != [t.shape for t in expected]:
                return "a replayed run gives another number of tokens"
            return not_greedy(tokens, logits, tie)

        return wrong

    def _capture(self, model: RunningModel, ways: tuple[str, ...], tie: float) -> None:
        """Finds out which of ``ways`` a model goes, up to the first that it does."""
        any(not model.refuses(way, self._wrong(tie)) for way in ways[:-1])

    def _way(self, models: dict[str, RunningModel], ways: tuple[str, ...], tie: float) -> tuple[str, str]:
        """(the first of ``ways`` that all models go, why it is none before it)."""
        reasons: list[str] = []
        for way in ways[:-1]:
            found = ((name, model.refuses(way, self._wrong(tie))) for name, model in models.items())
            refusals = (f"{name}: {why}" for name, why in found if why)
            reason = next(refusals, None)
            if reason is None:
                break
            reasons.append(reason)
        else:
            way = ways[-1]  # eagerly all can run
        return way, "; ".join(dict.fromkeys(reasons))

    def _turns(
        self, models: list[RunningModel], way: str, enough: Callable[[list[list[float]]], bool]
    ) -> list[list[float]]:
        """Seconds of one run of each model in every round, by the judge's clock; the order alternates.

        Behind the rules' rounds there are more while there is time. Whether it is ``enough`` is asked only when their
        number has doubled then: every look is a chance to be wrong.
        """
        for model in models:
            model.warm_up()  # one that has failed at another way begins anew
        times: list[list[float]] = [[] for _ in models]
        rounds, begun = self.rules.rounds, time.monotonic()
        seconds = self.rules.seconds if self.rules.throughput else 0.0
        looks = {*range(_LEAST_ROUNDS, rounds), *(rounds << i for i in range(32))}
        while (number := len(times[0])) < rounds or time.monotonic() - begun < seconds:
            order = range(len(models))
            for index in order if number % 2 == 0 else reversed(order):
                begin = time.perf_counter()
                models[index].ask("generate", way=way)
                times[index].append(time.perf_counter() - begin)
            if len(times[0]) in looks and enough(times):
                break
        return times

    def _band(self, one: list[float], other: list[float]) -> float:
        """How wide the noise band is, by the times of two models that are the same."""
        return max(self.rules.least_noise, 2 * _spread(one, other))

    def _speed(
        self, models: list[RunningModel], tokens: int, found: dict[str, Any], baseline: dict[str, Any]
    ) -> dict[str, Any]:
        """Compares the first of ``models`` with the others: the original, and the best if there is one."""
        as_baseline = found["way"] == baseline.get("way", EAGER)

        def noise(times: list[list[float]]) -> float:
            if as_baseline:
                return baseline["noise"]
            half = len(times[1]) // 2  # the original is measured in another way: against itself, a round later
            return self._band(times[1][0 : 2 * half : 2], times[1][1 : 2 * half : 2])

        def enough(times: list[list[float]]) -> bool:
            known = as_baseline or len(times[0]) >= self.rules.rounds
            return known and decided(times, 1 - noise(times))

        times = self._turns(models, found["way"], enough)
        seconds = statistics.median(times[0])
        speed = {"seconds": seconds, "throughput": tokens / seconds, "noise": noise(times), "rounds": len(times[0])}
        for name, other in zip(("original", "best"), times[1:], strict=False):
            speed[f"ratio_to_{name}"], speed[f"least_ratio_to_{name}"] = confident_ratio(other, times[0])
        if self.rules.throughput:
            wrong = throughput_problem(found | speed, baseline | {"noise": speed["noise"]})
            if wrong is not None:
                raise Failed("discard", wrong)
        return speed


class _Laps:
    """How many seconds each step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begin = time.monotonic()

    def lap(self, what: str) -> None:
        """What was done since the last call was ``what``."""
        now = time.monotonic()
        self.seconds[what] = round(self.seconds.get(what, 0.0) + now - self.begin, 2)
        self.begin = now


def _ways(baseline: dict[str, Any]) -> tuple[str, ...]:
    """The ways to try: the baseline's, and those behind it."""
    return WAYS[WAYS.index(baseline.get("way", EAGER)) :]


def throughput_problem(found: dict[str, Any], baseline: dict[str, Any]) -> str | None:
    """Why throughput or memory speaks against keeping, or None: both as :meth:`ModelJudge.judge` measures them."""
    how = f" ({found['way']})" if "way" in found else ""
    for name in ("original", "best"):
        least = found.get(f"least_ratio_to_{name}")
        if least is not None and not least >= 1 - baseline["noise"]:
            return (
                f"throughput may drop to {least:.4f} of the {name} one; the noise band ends at "
                f"{1 - baseline['noise']:.4f}{how}"
            )
    if found["peak"] > _MORE_MEMORY * baseline["peak"]:
        return f"peak memory grows from {baseline['peak'] >> 20} to {found['peak'] >> 20} MiB"
    return None


def confident_ratio(before: list[float], after: list[float]) -> tuple[float, float]:
    """How many times as fast ``after`` is, by pairs of times: (the mean, the lower end of its 95% confidence interval).

    One pair says nothing of its spread: both are the same then.
    """
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), math.exp(mean)
    half = _T95[min(len(logs) - 2, len(_T95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half)


def _spread(one: list[float], other: list[float]) -> float:
    """The standard deviation of the logarithm of the ratio of two models that are the same."""
    logs = [math.log(a / b) for a, b in zip(one, other, strict=True)]
    return statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def _key(kernels: dict[str, Any]) -> str:
    return json.dumps({region: kernel["solution"] for region, kernel in kernels.items()}, sort_keys=True)


def decided(times: list[list[float]], least: float) -> bool:
    """Whether it is beyond doubt that the first model is at least ``least`` times as fast as others, or is not."""
    if len(times[0]) < _LEAST_ROUNDS:
        return False
    found = [confident_ratio(other, times[0]) for other in times[1:]]
    return all(low >= least for _, low in found) or any(mean * mean / low < least for mean, low in found)
