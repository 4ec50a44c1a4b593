"""Rows of weights behind a norm in turns: rms_norm_linear and rms_norm_swiglu of one row, as in a captured step."""

import functools

import pytest
import torch
from common import HAS_GPU
from common import OVERLAPS
from common import assert_compiles
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized

from tilegym.backend import recording
from tilegym.ops import rms_norm_linear
from tilegym.ops import rms_norm_swiglu
from tilegym.ops.cutile import fused_gemv
from tilegym.ops.cutile import stream_gemv
from tilegym.ops.cutile.tiling import hinted


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize("k", [64, 128, 192])
@pytest.mark.parametrize("n", [4, 12, 20, 24, 28, 32])
@pytest.mark.parametrize("form", [(0.0, "llama"), (1.0, "gemma"), (1.0, "gemma", "gelu_tanh"), (0.0, "llama", "gelu")])
def test_rows_in_turn_change_no_bit(n, k, form, monkeypatch):
    """All of them at once, one turn ahead, two; with turns that fill the blocks and turns that do not."""
    x, norm, gate, up = (randn(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate(((1, k), (k,), (n, k), (n, k))))

    def call():
        recording.forget()
        with recorded_launches(run=True) as recorded, torch.no_grad(), sanitized():
            y = rms_norm_swiglu(x, norm, 1e-5, gate, up, *form, backend="cutile")
        return y, [kernel for kernel, _ in recorded]

    streamed, kernels = call()
    assert kernels == [stream_gemv.stream_swiglu_kernel]
    monkeypatch.setattr(stream_gemv, "plan", lambda gate: None)
    expected, kernels = call()
    assert kernels == [fused_gemv.norm_swiglu_kernel]
    assert torch.equal(streamed, expected)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize(
    "widths", [(12,), (8, 4), (20, 8, 6), (4, 4, 2), (36, 12, 12), (20, 12, 4, 16), (8, 4, 2, 2)], ids=str
)
@pytest.mark.parametrize("k", [160, 192])
def test_projections_in_turn_change_no_bit(widths, k, monkeypatch):
    """Of one to four weights, one turn ahead and two, in turns that end within a round of blocks or with it.

    With biases or not, and of 160 columns with a last tile of which half is beyond them.
    """
    x, norm = randn(1, k, dtype=torch.bfloat16), randn(k, dtype=torch.bfloat16, seed=1)
    weights = [randn(n, k, dtype=torch.bfloat16, seed=10 + i) * k**-0.5 for i, n in enumerate(widths)]
    biases = [randn(n, dtype=torch.bfloat16, seed=n) for n in widths]

    def call():
        recording.forget()
        with recorded_launches(run=True) as recorded, torch.no_grad(), sanitized():
            found = rms_norm_linear(x, norm, 1e-5, weights, biases, 1.0, "gemma", backend="cutile")
            found += rms_norm_linear(x, norm, 1e-5, weights, backend="cutile")
        return found, [kernel for kernel, _ in recorded]

    streamed, kernels = call()
    assert kernels == [stream_gemv.stream_norm_gemv_kernel] * 2
    monkeypatch.setattr(stream_gemv, "norm_plan", lambda weights: None)
    expected, kernels = call()
    assert kernels == [fused_gemv.norm_gemv_kernel] * 2
    assert all(map(torch.equal, streamed, expected))


# Heads' rows and columns of models whose layers were measured, and the tiles, turns ahead and blocks.
PROJECTIONS = {
    "Llama-3.1-8B": ((4096, 1024, 1024), 4096, (4, 1024, 0), 1536),
    "Llama-3.1-70B": ((8192, 1024, 1024), 8192, (1, 1024, 1), 394),
    "Llama-3.2-3B": ((3072, 1024, 1024), 3072, (2, 1024, 1), 512),
    "Llama-3.2-1B": ((2048, 512, 512), 2048, (2, 1024, 2), 512),
    "Qwen3-14B": ((5120, 1024, 1024), 5120, (1, 1024, 1), 512),
    "Qwen2.5-7B": ((3584, 512, 512), 3584, (2, 1024, 1), 461),
    "a fourth of few rows": ((4096, 1024, 1024, 16), 5120, (1, 1024, 1), 514),
    "gpt-oss-20b": ((4096, 512, 512), 2880, (2, 1024, 1), 512),
    "no pairs of rows": ((2880, 513), 2880, None, 0),
    "16 bytes' columns": ((2880, 512), 2884, None, 0),
    "too wide": ((4096, 512), 16384, None, 0),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_in_turn_by_their_sizes(name, monkeypatch):
    monkeypatch.setattr(stream_gemv, "sm_count", lambda device: 132)
    monkeypatch.setattr(stream_gemv, "overlaps", lambda device: True)
    rows, k, tiles, blocks = PROJECTIONS[name]
    found = stream_gemv._norm_plan.__wrapped__(rows, k, 0)
    assert found is None if tiles is None else (found[1], found[3]) == (blocks, (*tiles, True))


@gpu
def test_rows_in_turn_by_their_sizes():
    """Of models whose layers were measured; the others stay with norm_swiglu_kernel."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    found = {}
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for n, k in ((14336, 4096), (8192, 3072), (3072, 1024), (9728, 2560), (18944, 3584), (8192, 2048), (64, 4096)):
            found[n, k] = stream_gemv.plan(torch.empty(n, k, dtype=torch.bfloat16, device="cuda"))
        assert stream_gemv.plan(torch.empty(8192, 3072, device="cuda")) is None
    assert [plan and (plan[1], plan[2][:3]) for plan in found.values()] == [
        (3 * sms, (1, 1024, 2)), (3 * sms, (1, 1024, 1)), (384, (8, 256, 0)), None, None, None, None
    ]  # fmt: skip


def test_compile():
    """With the sizes of a GPU's, on every architecture."""
    out = torch.empty(1, 512, dtype=torch.bfloat16)
    for overlap, architectures in OVERLAPS:
        for k, *tiles in ((4096, 1, 1024, 2), (8192, 1, 1024, 1), (1024, 8, 256, 0)):
            gate = torch.empty(512, k, dtype=torch.bfloat16)
            args = (gate[:1], gate[0], gate, gate, out, 1e-5, True, 0.0, True, 0, k, *tiles, overlap)
            assert_compiles(hinted(stream_gemv.stream_swiglu_kernel, occupancy=stream_gemv.BLOCKS), args, architectures)
            args = (*args[:9], 1, *args[10:])
            assert_compiles(hinted(stream_gemv.stream_swiglu_kernel, occupancy=stream_gemv.BLOCKS), args, architectures)
        for k, *tiles in ((4096, 4, 1024, 0), (2048, 2, 1024, 2), (2880, 2, 1024, 1)):
            q = torch.empty(512, k, dtype=torch.bfloat16)
            row = (q[:1], q[0], *[q] * 3, *[0] * 3, *[out] * 3)
            form = (True, 0.0, True, False, k, *tiles, overlap)
            for fourth in ((0, 0, 0, 384, False), (q, 0, out, 384, True)):
                args = (*row, 128, 256, 512 if fourth[-1] else 384, 1e-5, *fourth, *form)
                assert_compiles(hinted(stream_gemv.stream_norm_gemv_kernel, occupancy=4), args, architectures)


@gpu
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_in_a_graph(name, bias):
    """Against fp64: at most twice PyTorch's error; replayed with another row, the same bits each time."""
    rows, k, *_ = PROJECTIONS[name]
    made = functools.partial(randn, dtype=torch.bfloat16)
    x, norm = made(1, k, seed=0), made(k, seed=1)
    weights = [made(n, k, seed=2 + i) / 64 for i, n in enumerate(rows)]
    biases = [made(n, seed=5 + i) for i, n in enumerate(rows)] if bias else None
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        rms_norm_linear(x, norm, 1e-5, weights, biases, backend="cutile")
        with torch.cuda.graph(graph):
            found = rms_norm_linear(x, norm, 1e-5, weights, biases, backend="cutile")
        x.copy_(made(1, k, seed=9))
        replays = []
        for _ in range(3):
            graph.replay()
            replays.append([y.clone() for y in found])
        assert all(torch.equal(a, b) for other in replays[1:] for a, b in zip(replays[0], other, strict=True))
        reference = rms_norm_linear(x, norm, 1e-5, weights, biases, backend="pytorch")
        doubles = [t.double() for t in weights], biases and [t.double() for t in biases]
        exact = rms_norm_linear(x.double(), norm.double(), 1e-5, *doubles, backend="pytorch")
    for y, theirs, oracle in zip(found, reference, exact, strict=True):
        assert (y - oracle).norm() <= 2 * (theirs - oracle).norm()
