"""Puts the interpreter in the place of ``cuda.tile.launch``, so that code which knows nothing of it runs on a CPU.

What ``cuda.tile.tune`` times candidates with is replaced too.
"""

from __future__ import annotations

import os
import sys
import time

from . import _cutile
from .launch import launch

ENVIRONMENT_VARIABLE = "TILEGYM_INTERPRET"


def is_requested() -> bool:
    """Whether the environment asks for the interpreter (``TILEGYM_INTERPRET=1``)."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def is_installed() -> bool:
    """Whether ``cuda.tile.launch`` is the interpreter's now."""
    return bool(_replaced)


def interpreted_launch(stream, grid, kernel, args, /, *, programmatic_dependent_launch: bool = False) -> None:
    """``cuda.tile.launch`` on CPU tensors. The stream is ignored: the kernel has run when the call returns."""
    if not isinstance(args, tuple):  # which the other one refuses, too
        raise TypeError(f"ct.launch takes the arguments of a kernel as a tuple, got {type(args).__name__}")
    launch(grid, kernel, args)


def _interpreted_benchmark(stream, grid, kernel, args, flush_l2=True, /) -> float:
    """Microseconds of one run, rounded up to milliseconds: a CPU's times tell nothing of a GPU's, and those that
    are equal end a search at once."""
    start = time.perf_counter()
    launch(grid, kernel, args)
    return 1e3 * -(-(time.perf_counter() - start) // 1e-3)


def _no_benchmark_elsewhere(*args) -> None:
    """No payload for another process: the search then measures in this one."""


_REPLACEMENTS = {
    _cutile.cext.launch: interpreted_launch,
    _cutile.cext._benchmark: _interpreted_benchmark,
    _cutile.cext._export_ipc_benchmark_payload: _no_benchmark_elsewhere,
}
_replaced = {}


def install() -> None:
    """Makes ``cuda.tile.launch`` run kernels in the interpreter, also in modules that have imported it by name.

    Does nothing when installed already. Code that keeps the function elsewhere (in an attribute or a closure) before
    this call keeps the real one.
    """
    if not _replaced:
        _replaced.update(_REPLACEMENTS)
        _rebind(_replaced)


def uninstall() -> None:
    """Undoes ``install()``."""
    if _replaced:
        _rebind({new: old for old, new in _replaced.items()})
        _replaced.clear()


def _rebind(replacements: dict) -> None:
    """Gives every module global that is a key the value that belongs to it."""
    by_id = {id(old): new for old, new in replacements.items()}
    for module in list(sys.modules.values()):
        if module is None or module is sys.modules[__name__]:
            continue
        variables = getattr(module, "__dict__", {})
        for name in [name for name, value in list(variables.items()) if id(value) in by_id]:
            variables[name] = by_id[id(variables[name])]
