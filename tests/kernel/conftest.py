"""Fixtures of the kernel registry's tests: a clean registry, packages and repositories on disk."""

import gc
import importlib
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

from tilegym.backend import set_backend
from tilegym.kernel import function_patches
from tilegym.kernel import registry
from tilegym.kernel import reports
from tilegym.kernel import unkernelize_model

from .fakes import HUB_INIT
from .fakes import HUB_LAYERS
from .fakes import MY_KERNELS_LAYERS
from .fakes import calls
from .fakes import lay_out_hub_cache


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    """Each test starts and ends with TileGym's own kernels alone, no function replaced, and no warning given."""
    # Models without parameters count as on the CPU, also on a machine with a GPU.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    registry.clear()
    reports._warned.clear()
    calls.clear()
    set_backend("pytorch")  # the models are on the CPU, also where a GPU makes cutile the default
    yield
    set_backend(None)
    unkernelize_model(None)
    if function_patches._targets:  # claimed by models that the test has dropped
        gc.collect()
        unkernelize_model(None)
    assert not function_patches._targets
    registry.clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes importable packages for the test: ``package("my_pkg.math_ops", source)`` returns the module."""
    made = set()
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, source: str) -> types.ModuleType:
        *parents, last = name.split(".")
        folder = tmp_path.joinpath(*parents)
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(len(parents)):
            tmp_path.joinpath(*parents[: i + 1], "__init__.py").touch()
        (folder / f"{last}.py").write_text(textwrap.dedent(source))
        made.add(parents[0] if parents else last)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    unkernelize_model(None)
    for name in [m for m in sys.modules if m.partition(".")[0] in made]:
        del sys.modules[name]


@pytest.fixture
def math_ops(package):
    """The target module of Twinkle's examples: ``add`` and ``mul``."""
    return package("my_pkg.math_ops", "def add(x, y):\n    return x + y\n\n\ndef mul(x, y):\n    return x * y * 1\n")


@pytest.fixture
def local_repo(tmp_path) -> Path:
    """A folder with the Python package ``my_kernels`` as its users write it."""
    root = tmp_path / "local_repo"
    package = root / "my_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('from . import layers\n\n__all__ = ["layers"]\n')
    (package / "layers.py").write_text(MY_KERNELS_LAYERS)
    return root


@pytest.fixture
def hub_cache(tmp_path) -> Path:
    """A kernels cache that holds ``kernels-community/activation``, main and version 1."""
    cache = tmp_path / "kernels_cache"
    lay_out_hub_cache(
        cache, "kernels-community/activation", {"__init__.py": HUB_INIT, "layers.py": HUB_LAYERS}, ("main", "v1")
    )
    return cache
