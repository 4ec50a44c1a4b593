"""What training ops keep and allocate: beside outputs and gradients nothing that grows with rows times columns."""

import pytest
import torch
from common import HAS_GPU
from common import randn
from peak_memory import PeakMemory

from tilegym import interpreter
from tilegym import ops

M, N = 256, 512
SIZE = 2  # of bf16
PART = M * N * SIZE // 8  # statistics of rows, and sums over the rows of a few blocks


def leaf(*shape, seed=0):
    return randn(*shape, dtype=torch.bfloat16, seed=seed).requires_grad_()


TABLES = randn(1, M, 64, dtype=torch.bfloat16)
# For each op the call and its inputs.
CALLS = {
    "cross_entropy": (lambda x: ops.cross_entropy(x, torch.arange(M), backend="cutile"), [(M, N)]),
    "swiglu": (lambda a, b: ops.swiglu(a, b, backend="cutile"), [(M, N), (M, N)]),
    "geglu": (lambda a, b: ops.geglu(a, b, backend="cutile"), [(M, N), (M, N)]),
    "silu_and_mul": (lambda x: ops.silu_and_mul(x, backend="cutile"), [(M, 2 * N)]),
    "rms_norm": (lambda x, w: ops.rms_norm(x, N, w, 1e-6, backend="cutile"), [(M, N), (N,)]),
    "layer_norm": (lambda x, w, b: ops.layer_norm(x, N, w, b, 1e-6, backend="cutile"), [(M, N), (N,), (N,)]),
    "rms_norm_gated": (lambda x, z, w: ops.rms_norm_gated(x, z, w, 1e-6, backend="cutile"), [(M, N), (M, N), (N,)]),
    "group_norm": (lambda x, w, b: ops.group_norm(x, 8, w, b, backend="cutile"), [(4, 16, M * N // 64), (16,), (16,)]),
    "apply_rope_base": (
        lambda q, k: ops.apply_rope_base(q, k, TABLES, TABLES, backend="cutile"),
        [(1, N // 64, M, 64), (1, 2, M, 64)],
    ),
    "gelu": (lambda x: ops.gelu(x, backend="cutile"), [(M, N)]),
    "relu": (lambda x: ops.relu(x, backend="cutile"), [(M, N)]),
    "softmax": (lambda x: ops.softmax(x, backend="cutile"), [(M, N)]),
    "dropout": (lambda x: ops.dropout(x, 3, backend="cutile"), [(M, N)]),
    "sigmoid_mul": (lambda x, z: ops.sigmoid_mul(x, z, backend="cutile"), [(M, N), (M, N)]),
}


def bytes_of(tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
@pytest.mark.parametrize(("call", "shapes"), CALLS.values(), ids=CALLS)
def test_only_outputs_and_gradients(call, shapes, monkeypatch):
    monkeypatch.setattr(interpreter, "launch", lambda *_: None)  # kernels allocate nothing
    inputs = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
    with PeakMemory() as memory:
        outputs = call(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        forward, allowed = memory.peak, bytes_of(outputs) + PART
        assert forward < allowed
        upstream = [torch.empty_like(t) for t in outputs]
        torch.autograd.backward(outputs, upstream)
    both, allowed = memory.peak, bytes_of((*outputs, *upstream, *(t.grad for t in inputs))) + PART
    assert both < allowed


@pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
@pytest.mark.parametrize("used", [0, 1])
def test_no_gradient_of_an_output_that_nothing_uses(used, monkeypatch):
    """The sum of fused_add_rms_norm behind a model's last layer, or what it is normalised to."""
    monkeypatch.setattr(interpreter, "launch", lambda *_: None)
    x, residual, weight = leaf(M, N), leaf(M, N, seed=1), leaf(N, seed=2)
    outputs = ops.fused_add_rms_norm(x, residual, weight, 1e-6, backend="cutile")
    upstream = torch.empty_like(outputs[used])
    with PeakMemory() as memory:
        torch.autograd.grad(outputs[used], x, upstream)
    peak, allowed = memory.peak, (M * N * SIZE if used == 0 else 0) + PART
    assert peak < allowed
