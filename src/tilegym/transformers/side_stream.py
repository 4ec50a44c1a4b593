"""What the next token does not wait for: small launches beside a step, and what the host reads of them later."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Aside:
    """What the next token does not wait for: small launches on a stream of their own, beside the model's step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Within it launches go aside; they see what has been launched before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from here on sees what was launched aside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class LateFlag:
    """A boolean of the device that the host reads one posting later, when it has long been copied."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._posts: list[tuple[Tensor, int, Any]] = []

    def post(self, flag: Tensor, length: int) -> None:
        copy = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=self._pinned)
        copy.copy_(flag, non_blocking=True)
        event = None
        if self._pinned:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        self._posts.append((copy, length, event))

    def read(self, wait_for_last: bool = False) -> int | None:
        """The length at which the flag was first posted as true, as far as it is known; None if it was not."""
        while len(self._posts) > (0 if wait_for_last else 1):
            copy, length, event = self._posts.pop(0)
            if event is not None:
                event.synchronize()
            if bool(copy):
                return length
        return None
