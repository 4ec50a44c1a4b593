"""Canned proposals, for tests."""

from collections.abc import Callable

from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task


class Scripted:
    """Proposes what it was given: the n-th for a region that has a history of n.

    Args:
        make: the proposals for a task, in order.
    """

    name = "scripted"

    def __init__(self, make: Callable[[Task], list[Proposal]]) -> None:
        self.make = make

    def propose(self, task: Task) -> Proposal | None:
        """The next one; None when there are no more."""
        given = self.make(task)
        return given[len(task.history)] if len(task.history) < len(given) else None
