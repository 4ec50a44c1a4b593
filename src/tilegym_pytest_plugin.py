"""The pytest plugin that tilegym installs: nothing, unless ``TILEGYM_INTERPRET`` is set.

Pytest imports its plugins in every run, also of suites that have nothing to do with tilegym. This module lies beside
the package, so that those runs import neither tilegym nor torch.
"""

import os

if os.environ.get("TILEGYM_INTERPRET"):
    from tilegym.interpreter.pytest_plugin import pytest_addoption
    from tilegym.interpreter.pytest_plugin import pytest_configure
    from tilegym.interpreter.pytest_plugin import pytest_load_initial_conftests
    from tilegym.interpreter.pytest_plugin import pytest_unconfigure

    __all__ = ["pytest_addoption", "pytest_configure", "pytest_load_initial_conftests", "pytest_unconfigure"]
