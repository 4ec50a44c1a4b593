"""Puts the interpreter in the place of ``cuda.tile.launch``, so that code which knows nothing of it runs on a CPU."""

from __future__ import annotations

import os
import sys

from . import _cutile
from .launch import launch

ENVIRONMENT_VARIABLE = "TILEGYM_INTERPRET"

_original = None


def is_requested() -> bool:
    """Whether the environment asks for the interpreter (``TILEGYM_INTERPRET=1``)."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def is_installed() -> bool:
    """Whether ``cuda.tile.launch`` is the interpreter's now."""
    return _original is not None


def interpreted_launch(stream, grid, kernel, args, /, *, programmatic_dependent_launch: bool = False) -> None:
    """``cuda.tile.launch`` on CPU tensors. The stream is ignored: the kernel has run when the call returns."""
    launch(grid, kernel, args)


def install() -> None:
    """Makes ``cuda.tile.launch`` run kernels in the interpreter, also in modules that have imported it by name.

    Does nothing when installed already. Code that keeps the function elsewhere (in an attribute or a closure) before
    this call keeps the real one.
    """
    global _original
    if _original is None:
        _original = _cutile.cext.launch
        _rebind(_original, interpreted_launch)


def uninstall() -> None:
    """Undoes ``install()``."""
    global _original
    if _original is not None:
        _rebind(interpreted_launch, _original)
        _original = None


def _rebind(old, new) -> None:
    """Gives every module global that is ``old`` the value ``new``."""
    for module in list(sys.modules.values()):
        if module is None or module is sys.modules[__name__]:
            continue
        variables = getattr(module, "__dict__", {})
        for name in [name for name, value in list(variables.items()) if value is old]:
            variables[name] = new
