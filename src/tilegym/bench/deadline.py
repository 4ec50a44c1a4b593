"""Ends what takes too long."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Late(BaseException):
    """Time is up. No Exception, so that code which expects those does not hide it."""


@contextlib.contextmanager
def at_most(seconds: float, error: type[Late] = Late) -> Iterator[None]:
    """Raises ``error`` in the block when it takes longer. Only the first thread gets signals: others go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if seconds <= 0:
        raise error("no time is left")

    def late(*_: object) -> None:
        raise error(f"more than {seconds:g} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
