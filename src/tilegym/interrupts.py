"""Ctrl-C that is not lost: in what Python calls by itself, such as ``__del__`` or a weak reference's callback, the
exception is only printed. It is remembered, and raised again between the steps of whatever takes long."""

import signal
import threading
from typing import Any


class Interrupts:
    """Remembers Ctrl-C within the block, which raises KeyboardInterrupt as ever."""

    innermost: "Interrupts | None" = None

    def __enter__(self) -> "Interrupts":
        self.seen, self.former = False, None
        if threading.current_thread() is threading.main_thread():
            self.former = signal.signal(signal.SIGINT, self._interrupt)
        self.outer, Interrupts.innermost = Interrupts.innermost, self
        return self

    def __exit__(self, *_: Any) -> None:
        Interrupts.innermost = self.outer
        if self.former is not None:
            signal.signal(signal.SIGINT, self.former)

    def _interrupt(self, number: int, frame: Any) -> None:
        self.seen = True
        raise KeyboardInterrupt


def check(*_: Any) -> None:
    """Raises KeyboardInterrupt if there was one in the block of the innermost :class:`Interrupts`."""
    block = Interrupts.innermost
    if block is not None and block.seen:
        raise KeyboardInterrupt
