"""Checks for what the hardware leaves undefined; see docs/interpreter.md."""

from __future__ import annotations

import contextlib
import contextvars

_enabled = contextvars.ContextVar("tilegym_interpreter_sanitize", default=False)


def sanitizing() -> bool:
    """Whether launches are checked where they do not say so themselves."""
    return _enabled.get()


@contextlib.contextmanager
def sanitize(enabled: bool = True):
    """Checks every launch in this block of code (and in this thread), also launches made inside library calls."""
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


class Sanitizer:
    def view_store(self, state, location, array, window, value): ...
    def scatter(self, state, location, memory, offsets, values): ...
    def atomic(self, state, location, memory, offsets): ...
    def view_atomic(self, state, location, array, window): ...

    def run_block(self, run, block, grid):
        from .control import BlockState

        run(BlockState(block, grid, self))
