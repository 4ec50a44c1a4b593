"""Ctrl-C where Python only prints it."""

import os
import signal
import sys

import pytest

from tilegym import interrupts
from tilegym.bench.training import Trainer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


class InterruptedWhenGone:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def printed(monkeypatch):
    """The exceptions that Python has only printed."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: seen.append(what.exc_type))
    return seen


@pytest.mark.parametrize("step", [interrupts.check, lambda: Trainer.step(None)], ids=["check", "training"])
def test_it_comes_again_between_steps(step, printed):
    former = signal.getsignal(signal.SIGINT)
    with interrupts.Interrupts():
        interrupts.check()
        gone = InterruptedWhenGone()
        del gone
        assert printed == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt):
            step()
    interrupts.check()
    assert signal.getsignal(signal.SIGINT) is former


def test_it_comes_at_once_elsewhere():
    with pytest.raises(KeyboardInterrupt), interrupts.Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
    interrupts.check()


def test_a_block_within_another(printed):
    with interrupts.Interrupts():
        with pytest.raises(KeyboardInterrupt), interrupts.Interrupts():
            InterruptedWhenGone()
            interrupts.check()
        interrupts.check()
