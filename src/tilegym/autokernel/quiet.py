"""A device that several use at once, and one alone while it measures."""

import contextlib
import threading
from collections.abc import Iterator


class Quiet:
    """Whoever uses a device does so in a block of :meth:`shared`; whoever times it, of :meth:`alone`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._users = self._waiting = 0
        self._alone = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Within the block nobody is alone. Not to be entered twice by one thread: those who wait go first."""
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting and not self._alone)
            self._users += 1
        try:
            yield
        finally:
            with self._condition:
                self._users -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block nobody else is in one."""
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._users and not self._alone)
                self._alone = True
            finally:
                self._waiting -= 1
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()
