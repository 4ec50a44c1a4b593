"""Runs at every start of a Python that tilegym is installed in, if ``TILEGYM_INTERPRET`` is set: see the .pth file.

A script that knows nothing of tilegym then runs its cuTile kernels in the interpreter, as under
``python -m tilegym.interpreter script.py``. Nothing happens before it imports ``cuda.tile``, nor if tilegym itself is
what imports it: its own commands and the pytest plugin know what to do.
"""

import atexit
import importlib.machinery
import os
import sys


class _Watch:
    """A finder that lets the others find ``cuda.tile``, and acts when it has been imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "cuda.tile":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and "tilegym" not in sys.modules:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _interpret()

            spec.loader.exec_module = exec_module
        return spec


def _interpret():
    from tilegym.interpreter import install
    from tilegym.interpreter.cuda_on_cpu import redirect

    install()
    redirection = redirect()
    redirection.__enter__()
    atexit.register(redirection.__exit__, None, None, None)


if os.environ["TILEGYM_INTERPRET"].strip().lower() in ("1", "true", "yes", "on"):
    sys.meta_path.insert(0, _Watch)
