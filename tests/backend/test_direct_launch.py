"""Launches by the addresses of their tensors: with a driver that is made up here, and on a GPU."""

import ctypes
import itertools
import struct
import threading

import cuda.tile as ct
import pytest
import torch
from common import gpu

from tilegym import ops
from tilegym.backend import recording
from tilegym.backend.cutile import direct_launch
from tilegym.backend.cutile import launch as launch_module
from tilegym.backend.recording_writer import Submission


@ct.kernel
def scale_kernel(x, factor: float, y, shift: int, TILE: ct.Constant[int]):
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (TILE,)) * factor + shift)


class FakeDriver:
    """A driver that captures what ``ct.launch``, replaced as well, is called with, and notes what is launched.

    Its kernels have parameters as cuTile's have: of a tensor the address, then sizes and strides of 4 bytes.
    """

    def __init__(self, monkeypatch, nodes: int = 1, cluster: int = 1, wide: bool = False) -> None:
        self.nodes, self.cluster, self.wide = nodes, cluster, wide
        self.mode = 1  # as a thread has it
        self.capturing, self.launched, self.alive = None, [], []
        self.cut = 0  # how many parameters it will not tell of
        monkeypatch.setattr(direct_launch, "_driver", lambda: self)
        monkeypatch.setattr(direct_launch, "_raw_stream", lambda index: 77)
        monkeypatch.setattr(direct_launch, "_current_device", lambda: 0)
        monkeypatch.setattr(direct_launch.allocation, "one_gpu", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(ct, "launch", self.launch)
        self.values = []

    def launch(self, stream, grid, kernel, args):
        assert self.capturing == stream == 5
        self.grid = (*grid, 1, 1)[:3]
        for arg in args[:-1]:
            if isinstance(arg, torch.Tensor):
                self.values += [struct.pack("=Q", arg.data_ptr()), *(struct.pack("=i", n) for n in arg.shape)]
            else:
                self.values.append(struct.pack("=f" if isinstance(arg, float) else "=i", arg))

    def cuStreamCreate(self, stream, flags):
        stream._obj.value = 5
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert self.mode == mode == 2
        self.capturing = stream.value
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self.capturing = None
        graph._obj.value = 6
        self.alive.append("graph")
        return 0

    def cuGraphDestroy(self, graph):
        self.alive.remove("graph")
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        count._obj.value = self.nodes
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = 0
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params):
        params, self.kept = params._obj, [ctypes.create_string_buffer(v, len(v)) for v in self.values]
        self.pointers = (ctypes.c_void_p * len(self.kept))(*map(ctypes.addressof, self.kept))
        params.function, params.shared_bytes = 99, 1024
        params.dimensions = (*self.grid, 128, 1, 1)
        params.parameters = ctypes.cast(self.pointers, ctypes.POINTER(ctypes.c_void_p))
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, attribute, value):
        if attribute == 4:
            value[:3] = [self.cluster, 1, 1]
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        assert function.value == 99
        if index.value >= len(self.values) - self.cut:
            return 1 if index.value == len(self.values) else 700
        size._obj.value = 16 if self.wide and index.value == 1 else len(self.values[index.value])
        return 0

    cuKernelGetParamInfo = None

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        config = config._obj
        values = [ctypes.string_at(p, len(v)) for p, v in zip(parameters, self.values, strict=True)]
        attributes = [(a.id, a.value[0]) for a in config.attributes[: config.attribute_count]]
        self.launched.append((tuple(config.dimensions), config.shared_bytes, config.stream, attributes, values))
        return 0


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.empty(8) for _ in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_launched(monkeypatch, overlap):
    driver = FakeDriver(monkeypatch)
    a, b, c, d = tensors(4)
    launch = direct_launch.prepare(0, (2,), scale_kernel, (a, 0.5, b, 7, 4), overlap)
    assert launch.tensors == (0, 2) and driver.alive == [] and driver.launched == [] and driver.mode == 1
    for x, y in ((a, b), (c, d)):
        assert launch.submit(x.data_ptr(), y.data_ptr()) == 0
        dimensions, shared, stream, attributes, values = driver.launched.pop()
        assert dimensions == (2, 1, 1, 128, 1, 1) and shared == 1024 and stream == 77
        assert attributes == ([(6, 1)] if overlap else [])
        address, eight = (lambda t: struct.pack("=Q", t.data_ptr())), struct.pack("=i", 8)
        assert values == [address(x), eight, struct.pack("=f", 0.5), address(y), eight, struct.pack("=i", 7)]


def test_what_is_not_prepared(monkeypatch):
    a, b = tensors(2)
    args = (a, 0.5, b, 7, 4)
    for wrong in ({"nodes": 2}, {"cluster": 2}, {"wide": True}):
        driver = FakeDriver(monkeypatch, **wrong)
        assert direct_launch.prepare(0, (2,), scale_kernel, args, False) is None and driver.alive == []
    for other in ((a, 0.5, a, 7, 4), (a, 0.5, a.view(2, 4), 7, 4), ([a], 0.5, b, 7, 4), (a, 0.5, b[:0], 7, 4), (1, 2)):
        FakeDriver(monkeypatch)
        assert direct_launch.prepare(0, (2,), scale_kernel, other, False) is None
    driver = FakeDriver(monkeypatch)
    monkeypatch.setattr(driver, "launch", None)
    monkeypatch.setattr(ct, "launch", lambda *args: 1 / 0)
    assert direct_launch.prepare(0, (2,), scale_kernel, args, False) is None and driver.capturing is None
    assert driver.alive == [] and driver.mode == 1
    driver = FakeDriver(monkeypatch)
    driver.cut = 2  # the device is lost, say
    assert direct_launch.prepare(0, (2,), scale_kernel, args, False) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert direct_launch.prepare(0, (2,), scale_kernel, args, False) is None
    FakeDriver(monkeypatch)
    assert direct_launch.prepare(1, (2,), scale_kernel, args, False) is None
    monkeypatch.setattr(direct_launch, "_driver", lambda: None)
    assert direct_launch.prepare(0, (2,), scale_kernel, args, False) is None


def test_another_current_gpu(monkeypatch):
    driver = FakeDriver(monkeypatch)
    a, b = tensors(2)
    launch = direct_launch.prepare(0, (2,), scale_kernel, (a, 0.5, b, 7, 4), False)
    monkeypatch.setattr(direct_launch, "_current_device", lambda: 1)
    assert launch.submit(a.data_ptr(), b.data_ptr()) != 0 and driver.launched == []


def test_a_launch_within_a_launch(monkeypatch):
    """As a collection of garbage between two bytecodes may make one: each keeps its addresses."""
    driver = FakeDriver(monkeypatch)
    a, b, c, d = tensors(4)
    launch = direct_launch.prepare(0, (2,), scale_kernel, (a, 0.5, b, 7, 4), False)
    inner = [True]

    def raw_stream(index):
        if inner and inner.pop():
            assert launch.submit(c.data_ptr(), d.data_ptr()) == 0
        return 77

    monkeypatch.setattr(direct_launch, "_raw_stream", raw_stream)
    assert launch.submit(a.data_ptr(), b.data_ptr()) == 0
    seen = [[struct.unpack("=Q", values[i])[0] for i in (0, 3)] for *_, values in driver.launched]
    assert seen == [[c.data_ptr(), d.data_ptr()], [a.data_ptr(), b.data_ptr()]]


@pytest.fixture
def prepared(monkeypatch):
    """What was prepared on the GPU, by kernel."""
    found = []

    def prepare(index, grid, kernel, *more):
        found.append(direct_launch.prepare(index, grid, kernel, *more))
        return found[-1]

    for name in ("_ONE_GPU", "_SEVERAL_GPUS"):
        monkeypatch.setattr(launch_module, name, Submission(getattr(launch_module, name).submit, prepare))
    monkeypatch.setattr(recording, "USES_BEFORE_ADDRESSES", 1)
    recording.forget()
    yield found
    recording.forget()


@pytest.fixture
def call():
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(512, device="cuda", generator=generator)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 512, device="cuda", generator=generator)
        return x, torch.nn.functional.rms_norm(x, (512,), weight, 1e-5)

    return make, lambda x: ops.rms_norm(x, (512,), weight, 1e-5, backend="cutile")


@gpu
def test_on_a_gpu(prepared, call):
    make, norm = call
    for _ in range(6):
        x, expected = make()
        torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)
    assert len(prepared) == 1 and prepared[0] is not None
    unaligned = torch.empty(64 * 512 + 1, device="cuda")[1:].view(64, 512).copy_(x)
    torch.testing.assert_close(norm(unaligned), expected, rtol=1e-5, atol=1e-5)


@gpu
def test_in_a_cuda_graph_and_on_streams(prepared, call):
    make, norm = call
    for _ in range(4):
        norm(make()[0])
    x, expected = make()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm(x)
    other, other_expected = make()
    x.copy_(other)
    graph.replay()
    torch.testing.assert_close(y, other_expected, rtol=1e-5, atol=1e-5)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        x, expected = make()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1000000)
            x = x + 0
            y = norm(x)
        stream.synchronize()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@gpu
def test_from_threads(prepared, call):
    make, norm = call
    for _ in range(4):
        norm(make()[0])
    pairs, wrong = [make() for _ in range(4)], []
    torch.cuda.synchronize()

    def work(x, expected):
        for _ in itertools.repeat(None, 200):
            if not torch.allclose(norm(x), expected, rtol=1e-5, atol=1e-5):
                wrong.append(1)

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
def test_overlapping_launches(prepared):
    """Kernels that begin before the one in front has ended, by the thousand, each on what that one wrote."""
    x = torch.randn(4096, device="cuda")
    y = x
    expected = x.double()
    for _ in range(4):
        ops.gelu(x, backend="cutile")
    for _ in range(1000):
        y = ops.gelu(1.0 - 0.5 * y, backend="cutile")
        expected = torch.nn.functional.gelu(1.0 - 0.5 * expected)
    assert prepared[-1] is not None
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
