"""How a test process uses what it shares: each has a GPU of its own if there are several, and waits for memory there.

The interpreter keeps the kernels that it has read, and torch and transformers what they are made of: millions of
objects that stay. Python's collector went through them all so often that it took a third of the tests' time. It comes
by less often here, and passes over what was there when a file of tests ended.
"""

import contextlib
import gc
import os
import time
from pathlib import Path

import pytest
import torch

from tilegym.backend import recording
from tilegym.backend import slower
from tilegym.backend.cutile import compile_ahead

pytest_plugins = ["selection"]
WAITS = (5, 20, 60)  # seconds; other processes' large tests end within them


def gpu_order(gpus: list[str], worker: str) -> list[str]:
    """``gpus`` in the order in which pytest-xdist's ``worker`` (gw0, gw1, ...) sees them: first, each has its turn."""
    turn = int(worker.removeprefix("gw") or 0) % max(len(gpus), 1)
    return gpus[turn:] + gpus[:turn]


def pytest_configure():
    gc.set_threshold(50_000, 20, 20)
    torch.backends.cudnn.allow_tf32 = False  # convolutions of fp32: what a test compares is to be fp32 throughout
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else sorted(p.name[6:] for p in Path("/dev").glob("nvidia[0-9]*"))
    if len(gpus) > 1 and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_order(gpus, worker))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that finds too little of the GPU's memory runs again when others may have given theirs back."""
    for wait in (*WAITS, None):
        try:
            return (yield) if wait == WAITS[0] else item.runtest()
        except torch.OutOfMemoryError:
            if wait is None:
                raise
        # Out of the except clause: the exception holds the frames, and they the tensors.
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(wait)


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_collected_once():
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def freed_memory():
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def slower_calls_stay():
    """Tests of kernels shall run them, also where dispatch would turn to PyTorch for being faster on this GPU."""
    with slower.ignored() if torch.cuda.is_available() else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def nothing_recorded():
    """A test may change what the implementations of ops are made of, or look at how a call is served first."""
    recording.forget()
    yield


@pytest.fixture
def no_run_ahead(monkeypatch):
    """For tests that count what is run: on a GPU a first call runs once more, to compile ahead."""
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda *_: 0)
