"""Tests say which backend they mean: without ``use_cutile`` it is PyTorch, also where cuTile is the default."""

import pytest

from tilegym.backend import set_backend
from tilegym.backend.cutile import compile_ahead


@pytest.fixture(autouse=True)
def pytorch_unless_said_otherwise():
    set_backend("pytorch")
    yield
    set_backend(None)


@pytest.fixture
def no_run_ahead(monkeypatch):
    """For tests that count what is run: on a GPU a first call runs once more, to compile ahead."""
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda *_: 0)
