"""Tests say which backend they mean: without ``use_cutile`` it is PyTorch, also where cuTile is the default."""

import pytest

from tilegym.backend import set_backend


@pytest.fixture(autouse=True)
def pytorch_unless_said_otherwise():
    set_backend("pytorch")
    yield
    set_backend(None)
