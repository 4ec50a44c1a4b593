"""The elementwise ops whose gradients may be written in place, and what their tests share."""

import pytest
import torch
from common import device
from common import randn

from tilegym import ops


def angles(tokens, width):
    return torch.arange(0.0, tokens * 3, 6 / width, device=device()).view(1, tokens, -1).repeat(1, 1, 2)


def rope(q, k, rotated=None):
    angle = angles(q.shape[2], rotated or q.shape[3])
    factor = angle.shape[2] / q.shape[3]
    tables = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    return ops.apply_rope_base(q, k, *tables, partial_rotary_factor=factor, backend="cutile")


def cross_entropy(x, **options):
    target = torch.arange(x[..., 0].numel(), device=x.device).view(x.shape[:-1]) % x.shape[-1]
    target.view(-1)[1::3] = -100
    return ops.cross_entropy(x, target, **options, backend="cutile")


def swiglu(a, b):
    return ops.swiglu(a, b, backend="cutile")


# For each op the call, and shapes of what it overwrites.
CALLS = {
    "swiglu": (swiglu, [(37, 130), (37, 130)]),
    "swiglu 3-D": (swiglu, [(2, 3, 1000), (2, 3, 1000)]),
    "geglu": (lambda a, b: ops.geglu(a, b, backend="cutile"), [(2, 5, 77), (2, 5, 77)]),
    "geglu none": (lambda a, b: ops.geglu(a, b, "none", backend="cutile"), [(1, 3), (1, 3)]),
    "silu_and_mul": (lambda x: ops.silu_and_mul(x, backend="cutile"), [(7, 2 * 65)]),
    "silu_and_mul 3-D": (lambda x: ops.silu_and_mul(x, backend="cutile"), [(2, 3, 2 * 40)]),
    "cross_entropy": (cross_entropy, [(5, 130)]),
    "cross_entropy 3-D": (
        lambda x: cross_entropy(x, softcap=3.0, label_smoothing=0.1, z_loss=0.1, reduction="none"),
        [(2, 3, 5000)],
    ),
    "rope": (rope, [(2, 4, 9, 64), (2, 2, 9, 64)]),
    "rope partial": (lambda q, k: rope(q, k, 20), [(1, 5, 3, 80), (1, 1, 3, 80)]),
}
# What backward passes overwrite.
BACKWARD = {name: case for name, case in CALLS.items() if not name.startswith("rope")}
calls = pytest.mark.parametrize(("call", "shapes"), CALLS.values(), ids=CALLS)
backward_calls = pytest.mark.parametrize(("call", "shapes"), BACKWARD.values(), ids=BACKWARD)
ONE_EACH = {name: CALLS[name] for name in ("swiglu", "geglu", "silu_and_mul", "cross_entropy", "rope")}
one_each = pytest.mark.parametrize(("call", "shapes"), ONE_EACH.values(), ids=ONE_EACH)


def leaves_of(shapes, dtype=torch.float32):
    return [randn(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def activations_of(leaves):
    """What is computed of leaves, saving nothing; [B, H, S, D] with the heads of a token side by side."""
    made = [leaf * 1.5 for leaf in leaves]
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made] if made[0].dim() == 4 else made


def tuple_of(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def backward(outputs, inputs, **options):
    upstream = [randn(*o.shape, dtype=o.dtype, seed=7) for o in outputs]
    return torch.autograd.grad(outputs, inputs, upstream, **options)


def step(call, leaves, make=activations_of):
    """(activations, outputs as they were, gradients of the leaves)."""
    given = make(leaves)
    outputs = tuple_of(call(*given))
    copies = [o.detach().clone() for o in outputs]
    return given, copies, backward(outputs, leaves)


def assert_equal(got, expected):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0)
