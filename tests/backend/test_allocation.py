"""Allocations: on the device that is meant, whichever is current, with and without PyTorch's shorter ways."""

import pytest
import torch

from tilegym.backend import allocation

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_remembered():
    functions = (allocation.empty_on, allocation.one_gpu)
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


@pytest.mark.parametrize("shorter", [True, False])
@pytest.mark.parametrize("shape, strides", [((2, 3), (1, 2)), ((), ()), ((0, 4), (4, 1))])
def test_geometry(monkeypatch, shorter, shape, strides):
    if not shorter:
        monkeypatch.setattr(allocation, "_empty_on_cpu", None)
    else:
        assert allocation._empty_on_cpu is not None
    tensor = allocation.empty_on(CPU)(shape, strides, torch.bfloat16)
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == (shape, strides, torch.bfloat16, CPU)
    with torch.inference_mode():
        assert allocation.empty_on(CPU)(shape, strides, torch.float32).is_inference()


@pytest.mark.parametrize("count, current, shorter", [(1, 0, True), (2, 1, True), (2, 0, False)])
def test_one_gpu_of_several(monkeypatch, count, current, shorter):
    device, asked = torch.device("cuda", count - 1), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(allocation, "_current_device", lambda: asked.append(1) or current)
    monkeypatch.setattr(allocation, "_empty_on_gpu", lambda *how: ("shorter", *how))
    monkeypatch.setattr(torch, "empty_strided", lambda *how, dtype, device: (device, *how, dtype))
    wanted = ((2, 3), (3, 1), torch.float32)
    assert allocation.empty_on(device)(*wanted) == ("shorter" if shorter else device, *wanted)
    assert len(asked) == count - 1
