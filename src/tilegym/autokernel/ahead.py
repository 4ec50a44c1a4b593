"""Models that are made ready before their turn, several at once; nothing is timed meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait
from typing import Any

from tilegym.autokernel.running import RunningModel


class Ahead:
    """Models that are worked on in the background, by name."""

    def __init__(self) -> None:
        self._models: dict[str, tuple[RunningModel, ThreadPoolExecutor, Future]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def begin(self, name: str, model: RunningModel, work: Callable[[], Any]) -> None:
        """Has ``work`` done, which asks ``model`` for something."""
        pool = ThreadPoolExecutor(1)
        self._models[name] = model, pool, pool.submit(work)

    def take(self, name: str) -> tuple[RunningModel, Any] | None:
        """The model of this name and what its work returned, when all work is done; None if there is none.

        One whose work has failed is ended, and nothing said: who needs it makes it again, alone.
        """
        wait([future for _, _, future in self._models.values()])
        found = self._models.pop(name, None)
        if found is None:
            return None
        model, pool, future = found
        pool.shutdown()
        if future.exception() is None:
            return model, future.result()
        model.end()
        return None

    def keep_only(self, names: list[str]) -> None:
        """Ends all models but those of these names."""
        ended = [self._models.pop(name) for name in list(self._models) if name not in names]
        for model, _, _ in ended:
            model.end()
        while wait([future for _, _, future in ended], timeout=0.2).not_done:
            for model, _, _ in ended:
                model.end()  # its work may have begun it again
        for model, pool, _ in ended:
            pool.shutdown()
            model.end()
