"""Long rows that begin anywhere: softmax and cross entropy read and write them as groups of 16 bytes."""

import struct

import pytest
import torch
from common import HAS_GPU
from common import dtypes
from common import randn
from common import recorded_launches

from tilegym import interpreter
from tilegym.backend import recording
from tilegym.ops.cutile import cross_entropy_ahead as ahead
from tilegym.ops.cutile import parts
from tilegym.ops.cutile import softmax as kernels
from tilegym.ops.cutile import softmax_long as long
from tilegym.ops.cutile.row_groups import group_size

LDG, STG = 0x981, 0x986
BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}


def accesses(cubin: bytes, operation: int) -> list[int]:
    """Of a kernel for sm_90 how many bytes each of its instructions of this kind moves."""
    (table,), (count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    found = []
    for name, _, _, _, offset, size in headers:
        if cubin.startswith(b".text.", headers[names][4] + name):
            words = struct.iter_unpack("<QQ", cubin[offset : offset + size])
            found += [BYTES[high >> 9 & 7] for low, high in words if low & 0xFFF == operation]
    return found


@pytest.fixture
def multiprocessors(monkeypatch):
    """Sets how many of them rows are planned for; blocks, which run one after the other, do not wait."""

    def planned_for(number):
        for module in (kernels, long, ahead):
            monkeypatch.setattr(module, "sm_count", lambda device: number)
        monkeypatch.setattr(long, "wide_plan", long.wide_plan.__wrapped__)
        monkeypatch.setattr(ahead, "ahead_plan", ahead.ahead_plan.__wrapped__)
        monkeypatch.setattr(kernels, "MAX_HELD", ({2: 1024, 4: 1024},) * 2)
        if not HAS_GPU:
            monkeypatch.setattr(parts, "PATIENCE", 0)

    return planned_for


@pytest.mark.parametrize("n", [13, 61, 8193])
def test_rows_of_one_part_have_no_parts(n):
    assert ahead.ahead_plan(4096, n, -1, 4, 4) is None


def test_which_rows():
    x = torch.empty(8, 50257)
    assert group_size(50257, x, x) == 4 and group_size(50257, x.bfloat16()) == 8
    assert group_size(50256, torch.empty(8, 50256)) == 0, "the compiler knows where rows end"
    assert group_size(50264, torch.empty(8, 50264).bfloat16()) == 8, "it does not, though they begin where groups do"
    assert group_size(50257, torch.empty(7, 50257)) == 0, "the last group would not be whole"
    assert group_size(50257, x, torch.empty(8, 50258)[:, :50257]) == 0
    assert group_size(2**17 + 1, torch.empty(2**13, 2**17 + 1, device="meta")) == 4
    assert group_size(2**17 + 1, torch.empty(2**14, 2**17 + 1, device="meta")) == 0, "more than 32 bits can count"


@dtypes()
@pytest.mark.parametrize("processors", [4, 132], ids=["one launch", "two launches"])
@pytest.mark.parametrize("more", [1, 3, 4, 6, 7, 8])
def test_every_number_of_every_row(more, processors, dtype, multiprocessors):
    """Rows begin at each number of a group that there is, and so they end."""
    multiprocessors(processors)
    n = 16384 + more
    x, dy = (randn(8, n, dtype=dtype, seed=seed).to("cuda" if HAS_GPU else "cpu") for seed in (0, 1))
    x[:, 0], x[:, -1], dy[:, 0], dy[:, -1] = 5.0, 6.0, 7.0, 8.0
    v = 16 // x.element_size()
    assert group_size(n, x, dy) == v
    for backward, given in ((False, (x,)), (True, (dy, x))):
        out = torch.full((10, n), 77, dtype=dtype, device=x.device)
        kernels._launch(x, (*given, out[1:9]), x, backward)
        exact = [t.double() for t in given]
        expected = exact[1] * (exact[0] - (exact[0] * exact[1]).sum(-1, True)) if backward else exact[0].softmax(-1)
        error = (out[1:9].double() - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert error.max() < (1e-5 if dtype == torch.float32 else 5e-3)
        assert (out[0] == 77).all() and (out[9] == 77).all(), "rows of others were written"


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@dtypes(torch.bfloat16, torch.float32)
@pytest.mark.parametrize("n", [50257, 50264])
def test_memory_is_moved_16_bytes_at_a_time(n, dtype, multiprocessors):
    """All but the edges: of the kernels that a GPU with as many multiprocessors as an H200 runs."""
    multiprocessors(132)
    x, target = torch.empty(4096, n, dtype=dtype), torch.zeros(4096, dtype=torch.int64)
    recording.forget()
    with recorded_launches() as launches:
        kernels.softmax_forward(x, -1), kernels.softmax_backward(x, x, -1)
        ahead.cross_entropy_forward_ahead(x, target, torch.ones(2), -100)
    chosen = long.softmax_wide_kernel, long.softmax_backward_wide_kernel, ahead.gradient_kernel
    found = [launch for launch in launches if launch[0]._pyfunc in {kernel._pyfunc for kernel in chosen}]
    assert len(found) == 3
    for kernel, args in found:
        cubin = interpreter.compile_kernel(kernel, args, "sm_90")
        for operation, few in ((LDG, 8), (STG, 4)):
            moved = accesses(cubin, operation)
            assert moved.count(16) >= 8 and len(moved) - moved.count(16) <= few, (kernel, moved)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_from_how_many_columns_on_rows_are_groups(monkeypatch):
    for module in (kernels, long):
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
    wide = long.softmax_wide_kernel._pyfunc, long.softmax_backward_wide_kernel._pyfunc
    for n, grouped in ((8191, False), (8200, True), (12345, True), (12352, False), (32003, True)):
        x = torch.empty(4096, n, dtype=torch.bfloat16)
        recording.forget()
        with recorded_launches() as launches:
            kernels.softmax_forward(x, -1), kernels.softmax_backward(x, x, -1)
        found = [kernel._pyfunc for kernel, _ in launches if kernel._pyfunc in wide]
        assert found == (list(wide) if grouped else []), n
