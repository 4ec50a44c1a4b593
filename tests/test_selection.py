"""Which tests run by themselves, and that each is reached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize(("b", "c"), [(1, 1), (1, 2), (2, 2), (2, 1)])
def test_two_lists(a, b, c): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_slow_value(a): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.fixture(params=["x", "y"])
def kind(request): return request.param

class Test_Fixtures:
    @pytest.mark.parametrize("a", [1, 2])
    def test_of_them(self, kind, a): pass

def test_plain(): pass
"""


@pytest.fixture
def collected(tmp_path):
    """The tests that such arguments collect."""
    (tmp_path / "test_some.py").write_text(TESTS)

    def collect(*args):
        command = [sys.executable, "-m", "pytest", "-p", "selection", "--collect-only", "-q", *args]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    return collect


def test_every_entry_of_every_list_is_met(collected):
    chosen = collected()
    assert [name for name in chosen if name.startswith("test_two")] == [
        "test_two_lists[1-1-1]", "test_two_lists[1-2-2]", "test_two_lists[2-2-3]", "test_two_lists[2-1-1]"
    ]  # fmt: skip
    assert [name for name in chosen if name.startswith("Test_")] == [
        "Test_Fixtures::test_of_them[x-1]", "Test_Fixtures::test_of_them[y-2]"
    ]  # fmt: skip
    assert chosen[4:6] == ["test_a_slow_value[1]", "test_a_slow_value[3]"]
    assert "test_plain" in chosen and "test_slow" not in chosen and len(chosen) == 9


@pytest.mark.parametrize(
    ("args", "number"), [(["--all"], 21), (["-k", "two_lists or slow"], 16), (["test_some.py::test_slow"], 1)], ids=str
)
def test_who_asks_gets_all(collected, args, number):
    assert len(collected(*args)) == number
