"""One change to a class, module, model or table that can be undone, whatever lies over or below it by then."""

import enum
import types
import weakref
from collections.abc import Callable
from typing import Any

from tilegym.transformers.forwards import is_bound
from tilegym.transformers.forwards import is_bound_to
from tilegym.transformers.forwards import place_of_forward


class _Missing(enum.Enum):
    MISSING = "missing"  # an enum member stays itself through deepcopy and pickle


MISSING = _Missing.MISSING


def read(owner: Any, name: str) -> Any:
    """What ``owner`` itself holds under ``name``, not what it inherits."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, MISSING)


def write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        if value is MISSING:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def may_stay(forward: Callable | None) -> bool:
    """Whether it is the original once its patch set is undone, and may stay in what others have put around it."""
    return getattr(forward, "may_stay", False)


_FORWARDS = ("forward", "_old_forward")  # one takes the place of the other when accelerate's hooks come and go


class Replacement:
    """``owner.name`` (``owner[name]`` for a dict) is ``new`` once ``do`` was called, and was ``former``."""

    active: "weakref.WeakSet[Replacement]" = weakref.WeakSet()
    newest = 0

    def __init__(self, owner: Any, name: str, new: Any) -> None:
        self.owner, self.name, self.new = owner, name, new
        self.former = read(owner, name)
        self.order = Replacement.newest = Replacement.newest + 1

    def do(self) -> None:
        self.active.add(self)
        write(self.owner, self.name, self.new)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy, or unpickled: what lies on it has to be found
        vars(self).update(state)
        Replacement.newest = max(Replacement.newest, self.order)
        self.active.add(self)

    def undo(self) -> bool:
        """Puts ``former`` back; False if somebody else has replaced the value since."""
        self.active.discard(self)
        if is_bound(self.new) and self.name in _FORWARDS:
            self.name = place_of_forward(self.owner)
        current = read(self.owner, self.name)
        on_top = None if is_bound(self.new) and current is self.new else self._on_top()
        if on_top is not None:  # it shall put back what was below this one
            on_top.former = self.former
            return True
        if self._is_new(current):
            write(self.owner, self.name, self._below())
            return True
        return current is self.former or may_stay(getattr(self.new, "__func__", None))

    def _on_top(self) -> "Replacement | None":
        """The patch of ours that came right after this one; on top of that may lie the same as this once more."""
        found = [r for r in self.active if r.owner is self.owner and r.former is self.new and r.order > self.order]
        same = [r for r in found if r.name == self.name or {r.name, self.name} <= set(_FORWARDS)]
        return min(same, key=lambda r: r.order, default=None)

    def _is_new(self, current: Any) -> bool:
        if is_bound(self.new) and is_bound_to(current, self.new.__func__):
            return True
        return current is self.new or (isinstance(self.new, str) and current == self.new)

    def _below(self) -> Any:
        """``former``; a hook of accelerate's that came since needs something to call."""
        if self.name == "_old_forward" and self.former is MISSING:
            return types.MethodType(type(self.owner).forward, self.owner)
        return self.former


class Callback:
    """Something else to undo."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def undo(self) -> bool:
        self.function()
        return True
