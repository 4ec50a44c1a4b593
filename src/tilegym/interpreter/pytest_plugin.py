"""A pytest plugin that runs tests of cuTile kernels without a GPU.

Installed with tilegym and inert, unless ``TILEGYM_INTERPRET=1`` is set: then ``cuda.tile.launch`` runs kernels in the
interpreter, and tests that ask for ``cuda`` devices get CPU tensors, from before the first conftest is imported to the
end of the run. The option ``--tilegym-sanitize``, there in that case only, also checks every launch (see
``tilegym.interpreter.sanitize``).
"""

from __future__ import annotations

import contextlib

import pytest

from .install import install
from .install import is_requested
from .install import uninstall

_active = contextlib.ExitStack()


def pytest_addoption(parser):
    if is_requested():
        parser.addoption(
            "--tilegym-sanitize",
            action="store_true",
            help="check what interpreted cuTile kernels leave undefined",
        )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config, parser, args):
    if not is_requested():
        return
    from .cuda_on_cpu import redirect

    install()
    _active.callback(uninstall)
    _active.enter_context(redirect())


def pytest_configure(config):
    if is_requested():
        config.pluginmanager.register(_WhileInterpreting(config.getoption("--tilegym-sanitize")))


def pytest_unconfigure(config):
    _active.close()


class _WhileInterpreting:
    def __init__(self, sanitized: bool):
        self.sanitized = sanitized

    def pytest_report_header(self):
        checked = ", sanitized" if self.sanitized else ""
        return f"tilegym: cuda.tile kernels run in the interpreter, on CPU tensors{checked}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        from .sanitizer import sanitize

        with sanitize(self.sanitized):
            return (yield)
