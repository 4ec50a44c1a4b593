"""Gate 8: the whole model with a kernel in it: logits, greedy tokens, throughput, memory.

Unpatched, best so far and candidate each run in a worker of their own. They take turns, and the judge's clock counts.
"""

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym.autokernel import tensors
from tilegym.autokernel.judge import Failed
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.workers import Worker
from tilegym.autokernel.workers import WorkerFailed
from tilegym.autokernel.workers import WorkerHost
from tilegym.bench import compare

# The 95% quantiles of Student's t distribution, one side, by degrees of freedom.
_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)
_LEAST_ROUNDS = 4
_MORE_MEMORY = 1.05  # peak memory may grow by this factor, for workspaces


@dataclass(frozen=True)
class ModelRules:
    """What gate 8 asks for.

    Attributes:
        rounds: how often the models take turns at most; a comparison ends before, when it is decided.
        throughput: whether throughput decides; not in the interpreter, where kernels are slow.
        least_noise: the noise band is at least this wide.
    """

    rounds: int = 8
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
    """

    def __init__(
        self, host: WorkerHost, settings: ModelSettings, rules: ModelRules, limits: Limits, folder: Path
    ) -> None:
        self.host, self.settings, self.rules, self.limits, self.folder = host, settings, rules, limits, folder
        self._models: dict[str, Worker] = {}  # that have run, by the kernels in them

    def baseline(self) -> dict[str, Any]:
        """Runs the unpatched model; keeps its tokens and logits, and an oracle's; row one of the ledger.

        Raises:
            WorkerFailed, Failed: the model cannot be run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        one = self._model({})
        with self.host.working("model", self.limits) as other:
            _ask(other, "model", **self.settings.arguments({}))
            tokens = one.folder / "tokens.safetensors"
            _ask(one, "generate", output=str(tokens))
            for name, oracle in (("logits", False), ("oracle", True)):
                output = one.folder / f"{name}.safetensors"
                found = _ask(one, "logits", tokens=str(tokens), output=str(output), oracle=oracle)
                shutil.copy(output, self.folder / output.name)
            shutil.copy(tokens, self.folder / tokens.name)
            _ask(other, "generate")
            times = _turns([one, other], self.rules.rounds)
            last = _ask(one, "generate")
        noise = max(self.rules.least_noise, 2 * _spread(times[0], times[1]))
        seconds = statistics.median(times[0] + times[1])
        return {
            "seconds": seconds,
            "throughput": last["tokens"] / seconds,
            "peak": last["peak"],
            "noise": noise,
            "dtype": found["dtype"],
            "confined": one.confined,
        }

    def judge(self, kernels: dict[str, Any], best: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
        """Judges the model with ``kernels`` against the unpatched one and the one with ``best``.

        Each runs in a process of its own. The unpatched one, the best and the candidate wait for the next call.

        Args:
            kernels, best: by region: ``root`` and ``solution``.
            baseline: what :meth:`baseline` returned.

        Returns:
            What was measured.

        Raises:
            Failed, WorkerFailed: it is not good enough, or it died.
        """
        seconds, begin = {}, time.monotonic()

        def lap(what: str) -> None:
            nonlocal begin
            seconds[what], begin = round(time.monotonic() - begin, 2), time.monotonic()

        mine = _key(kernels)
        self._keep_only({}, best)
        worker = self.host.worker("model", self.limits)
        try:
            _ask(worker, "model", **self.settings.arguments(kernels))
            lap("load")
            generated = worker.folder / "generated.safetensors"
            given = worker.folder / "given.safetensors"
            logits = worker.folder / "logits.safetensors"
            _ask(worker, "generate", output=str(generated))
            lap("first run")
            shutil.copy(self.folder / "tokens.safetensors", given)
            _ask(worker, "logits", tokens=str(given), output=str(logits))
            found = self._exactness(_read(generated, "tokens"), _read(logits, "logits"), baseline["dtype"])
            lap("exactness")
            others = [self._model({})] + ([self._model(best)] if best else [])
            lap("others")
            found |= self._speed(worker, others, baseline)
            lap("turns")
        except BaseException as error:
            _end(worker)
            if isinstance(error, WorkerFailed):
                self.close()  # whoever it was: the next call begins anew
            raise
        self._models[mine] = worker  # the best, if it is kept
        return found | {"steps": seconds}

    def close(self) -> None:
        """Ends the models that were kept."""
        self._keep_only()

    def _keep_only(self, *sets: dict[str, Any]) -> None:
        """Ends all models but those with one of these ``sets`` of kernels."""
        wanted = {_key(kernels) for kernels in sets}
        for key in [key for key in self._models if key not in wanted]:
            _end(self._models.pop(key))

    def _model(self, kernels: dict[str, Any]) -> Worker:
        """The worker in which the model runs with ``kernels``, warmed up."""
        key = _key(kernels)
        if key not in self._models:
            worker = self.host.worker("model", self.limits)
            try:
                _ask(worker, "model", **self.settings.arguments(kernels))
                _ask(worker, "generate")
            except BaseException:
                _end(worker)
                raise
            self._models[key] = worker
        return self._models[key]

    def _exactness(self, tokens: list[torch.Tensor], logits: list[torch.Tensor], dtype: str) -> dict[str, Any]:
        expected = _read(self.folder / "tokens.safetensors", "tokens")
        plain = _read(self.folder / "logits.safetensors", "logits")
        oracle = _read(self.folder / "oracle.safetensors", "logits")
        shapes = [[t.shape for t in values] for values in (tokens, expected, logits, plain)]
        if shapes[0] != shapes[1] or shapes[2] != shapes[3]:
            raise Failed("incorrect", "the model gave another number of tokens or logits")
        patched, unpatched = compare.Deviation(), compare.Deviation()
        for ours, theirs, exact in zip(logits, plain, oracle, strict=True):
            patched.add(ours, exact)
            unpatched.add(theirs, exact)
        scale = max(exact.abs().max().item() for exact in oracle)
        rounding = torch.finfo(tensors.torch_dtype(dtype)).eps * scale
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

    def _speed(self, worker: Worker, others: list[Worker], baseline: dict[str, Any]) -> dict[str, Any]:
        least = 1 - baseline["noise"]
        times = _turns([worker, *others], self.rules.rounds, lambda times: decided(times, least))
        last = _ask(worker, "generate")
        found = {
            "seconds": statistics.median(times[0]),
            "throughput": last["tokens"] / statistics.median(times[0]),
            "peak": last["peak"],
        }
        for name, other in zip(("original", "best"), times[1:], strict=False):
            found[f"ratio_to_{name}"], found[f"least_ratio_to_{name}"] = confident_ratio(other, times[0])
        if self.rules.throughput:
            wrong = throughput_problem(found, baseline)
            if wrong is not None:
                raise Failed("discard", wrong)
        return found


def throughput_problem(found: dict[str, Any], baseline: dict[str, Any]) -> str | None:
    """Why throughput or memory speaks against keeping, or None: both as :meth:`ModelJudge.judge` measures them."""
    for name in ("original", "best"):
        least = found.get(f"least_ratio_to_{name}")
        if least is not None and not least >= 1 - baseline["noise"]:
            return (
                f"throughput may drop to {least:.4f} of the {name} one; the noise band ends at "
                f"{1 - baseline['noise']:.4f}"
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


def _end(worker: Worker) -> None:
    worker.close()
    shutil.rmtree(worker.folder, ignore_errors=True)


def decided(times: list[list[float]], least: float) -> bool:
    """Whether it is beyond doubt that the first model is at least ``least`` times as fast as others, or is not."""
    if len(times[0]) < _LEAST_ROUNDS:
        return False
    found = [confident_ratio(other, times[0]) for other in times[1:]]
    return all(low >= least for _, low in found) or any(mean * mean / low < least for mean, low in found)


def _turns(
    workers: list[Worker], rounds: int, enough: Callable[[list[list[float]]], bool] = lambda times: False
) -> list[list[float]]:
    """Seconds of one run of each worker in every round, by the judge's clock; the order alternates."""
    times: list[list[float]] = [[] for _ in workers]
    for number in range(rounds):
        order = range(len(workers))
        for index in order if number % 2 == 0 else reversed(order):
            begin = time.perf_counter()
            _ask(workers[index], "generate")
            times[index].append(time.perf_counter() - begin)
        if enough(times):
            break
    return times


def _read(path: Path, name: str) -> list[torch.Tensor]:
    try:
        values = tensors.read(path)
    except Exception as error:  # whatever a worker has put there
        raise Failed("crash", f"what the model gave cannot be read: {error}") from error
    return [values[key] for key in sorted(values, key=lambda k: int(k.removeprefix(name)))]


def _ask(worker: Worker, command: str, **arguments: Any) -> dict[str, Any]:
    answer = worker.ask(command, **arguments)
    if "error" in answer:
        raise Failed("crash", f"{answer['error']}\n{answer.get('trace', '')}".strip())
    return answer
