"""A model that runs in a worker, as the judge sees it: asked for runs, in the ways that it can go."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilegym.autokernel import tensors
from tilegym.autokernel.judge import Failed
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.workers import Worker
from tilegym.autokernel.workers import WorkerFailed
from tilegym.autokernel.workers import WorkerHost


class RunningModel:
    """The model with some kernels in it, in a worker: begun when it is needed, and again when it has been ended.

    Args:
        host: makes the worker.
        limits: of the worker.
        arguments: of the worker's command "model"; they may change, and count when it is begun.
    """

    def __init__(self, host: WorkerHost, limits: Limits, arguments: dict[str, Any]) -> None:
        self._host, self._limits, self.arguments = host, limits, arguments
        self._worker: Worker | None = None
        self._warm = False
        self._refused: dict[str, str] = {}  # by way; "" where it goes

    def begin(self) -> Worker:
        """The worker, with the model loaded."""
        if self._worker is None:
            self._worker = self._host.worker("model", self._limits)
            self._first("model", **self.arguments)
        return self._worker

    def warm_up(self) -> None:
        """Makes the first run, if there was none."""
        self.begin()
        if not self._warm:
            self._first("generate")
            self._warm = True

    def _first(self, command: str, **arguments: Any) -> None:
        try:
            _ask(self._worker, command, **arguments)
        except BaseException:
            self.end()
            raise

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The worker's answer; it has made a run before.

        Raises:
            Failed, WorkerFailed: the worker says that it failed, or died.
        """
        self.warm_up()
        return _ask(self._worker, command, **arguments)

    def file(self, name: str) -> Path:
        """A file for the worker to write."""
        return self.begin().folder / name

    def refuses(self, way: str, wrong: Callable[[list[torch.Tensor], list[torch.Tensor]], str]) -> str:
        """Why the model does not run that ``way``; "" if it does, and is right.

        ``wrong`` says what is wrong with its tokens [B, T], given its eager logits along them [B, steps, V].
        """
        if way not in self._refused:
            try:
                self._refused[way] = self._try(way, wrong)
            except (Failed, WorkerFailed) as error:  # in a process that has not tried this, it may run all the same
                self.end()
                detail = error.detail if isinstance(error, Failed) else error.log
                self._refused[way] = detail.strip().partition("\n")[0] or error.status
        return self._refused[way]

    def _try(self, way: str, wrong: Callable[[list[torch.Tensor], list[torch.Tensor]], str]) -> str:
        tokens, logits = self.file("replayed.safetensors"), self.file("along.safetensors")
        answer = self.ask("generate", way=way, output=str(tokens))
        if "refused" in answer:
            return answer["refused"]
        self.ask("logits", tokens=str(tokens), output=str(logits))
        return wrong(read(tokens, "tokens"), read(logits, "logits"))

    def end(self) -> None:
        """Ends the worker, and what it has captured."""
        worker, self._worker, self._warm = self._worker, None, False
        self._refused = {way: why for way, why in self._refused.items() if why}
        if worker is not None:
            worker.close()
            shutil.rmtree(worker.folder, ignore_errors=True)


def not_greedy(tokens: list[torch.Tensor], logits: list[torch.Tensor], tie: float) -> str:
    """Why a model with these logits does not choose these tokens, up to a ``tie``; or "".

    Args:
        tokens: int64 [B, T] each.
        logits: along them, [B, steps, V] each, of the first steps.
        tie: how far logits may be apart that count as equal.
    """
    for chosen, values in zip(tokens, logits, strict=True):
        if chosen.min() < 0 or chosen.max() >= values.shape[2]:
            return "a replayed run gives tokens that there are not"
        values = values.float()
        lost = values.amax(2) - values.gather(2, chosen[:, : values.shape[1], None]).squeeze(2)
        if not bool((lost <= tie).all()):
            return f"a replayed run chooses a token whose logit is {lost.max().item():.3g} below the best one's"
    return ""


def read(path: Path, name: str) -> list[torch.Tensor]:
    """The tensors ``name``0, ``name``1 and so on of a file that a worker has written.

    Raises:
        Failed: it cannot be read.
    """
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
