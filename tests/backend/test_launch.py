"""Launching kernels: from threads, and on devices that cuTile does not know."""

import contextlib
import threading
import types

import cuda.tile as ct
import pytest
import torch
from common import gpu
from common import randn

from tilegym.backend.cutile import launch as launch_module
from tilegym.backend.cutile.launch import launch
from tilegym.errors import UnsupportedError


@ct.kernel
def add_one_kernel(x, y, TILE: ct.Constant[int]):
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (TILE,)) + 1)


def test_an_empty_grid_launches_nothing():
    x = randn(16)
    launch(x, (0,), add_one_kernel, (x, None, None))


def test_a_cpu_tensor_goes_to_the_interpreter():
    x, y = torch.randn(16), torch.empty(16)
    launch(x, (2,), add_one_kernel, (x, y, 8))
    assert torch.equal(y, x + 1)


def test_other_devices_are_refused():
    x = torch.empty(16, device="meta")
    with pytest.raises(UnsupportedError, match="meta"):
        launch(x, (1,), add_one_kernel, (x, x, 16))


class FakeGPU:
    """Stands in for the driver: notes launches as (device at the time, stream, overlap); the first may fail."""

    def __init__(self, monkeypatch, current: int, fails: bool = False) -> None:
        self.current, self.fails, self.launches = current, fails, []
        monkeypatch.setattr(launch_module, "_current_device", lambda: self.current)
        monkeypatch.setattr(launch_module, "_raw_stream", lambda index: 100 + index)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (0, 0))
        monkeypatch.setattr(ct, "launch", self.launch)

    def launch(self, stream, grid, kernel, args, *, programmatic_dependent_launch=False):
        if self.fails:
            self.fails = False
            raise RuntimeError("invalid device context")
        self.launches.append((self.current, stream, programmatic_dependent_launch))

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_gets_it_on_its_own_stream(monkeypatch, overlap, fails):
    monkeypatch.setattr(launch_module.allocation, "one_gpu", lambda: False)
    gpu_of = types.SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    here = FakeGPU(monkeypatch, 1, fails)
    launch(gpu_of, (2,), add_one_kernel, (), overlap)
    assert here.launches == [(1, 101, overlap and not fails)]
    elsewhere = FakeGPU(monkeypatch, 0)
    launch(gpu_of, (2,), add_one_kernel, (), overlap)
    assert elsewhere.launches == [(1, 101, False)] and elsewhere.current == 0


def test_one_gpu_is_always_the_current_one(monkeypatch):
    gpu_of = types.SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    only = FakeGPU(monkeypatch, 0)
    monkeypatch.setattr(launch_module.allocation, "one_gpu", lambda: True)
    monkeypatch.setattr(launch_module, "_current_device", None)
    launch(gpu_of, (2,), add_one_kernel, (), True)
    assert only.launches == [(0, 100, True)]


@gpu
def test_a_thread_that_has_not_used_cuda_yet():
    """As one of autograd's may be when a backward kernel is the first thing it does."""
    x = randn(16)
    y = torch.empty_like(x)
    errors = []

    def run():
        try:
            launch(x, (2,), add_one_kernel, (x, y, 8))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert torch.equal(y, x + 1)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    x = torch.randn(16, device="cuda:1")
    y = torch.empty_like(x)
    launch(x, (2,), add_one_kernel, (x, y, 8))
    assert torch.cuda.current_device() == 0
    assert torch.equal(y, x + 1)
