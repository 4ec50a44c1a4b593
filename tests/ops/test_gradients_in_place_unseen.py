"""Gradients of gated activations lie where these were, unless set otherwise and where nothing could tell."""

import numpy as np
import pytest
import torch
from common import HAS_GPU
from common import randn
from common import sanitized
from in_place_calls import BACKWARD
from in_place_calls import activations_of
from in_place_calls import assert_equal
from in_place_calls import backward
from in_place_calls import leaves_of
from in_place_calls import tuple_of
from torch.multiprocessing import reductions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilegym
from tilegym import ops
from tilegym.backend import in_place

GATED = {name: case for name, case in BACKWARD.items() if not name.startswith("cross_entropy")}
gated = pytest.mark.parametrize(("call", "shapes"), GATED.values(), ids=GATED)
ONE_EACH = {name: GATED[name] for name in ("swiglu", "geglu", "silu_and_mul")}
one_each = pytest.mark.parametrize(("call", "shapes"), ONE_EACH.values(), ids=ONE_EACH)


@pytest.fixture
def written(monkeypatch):
    """The addresses that are overwritten."""
    addresses, original = [], in_place.overwritten
    monkeypatch.setattr(
        in_place, "overwritten", lambda *ts: addresses.extend(t.data_ptr() for t in ts) or original(*ts)
    )
    return addresses


def outputs_of(call, leaves, look=lambda given: None):
    """The outputs, with what ``look`` returns; nothing else holds the activations behind this."""
    given = activations_of(leaves)
    held = look(given)
    return tuple_of(call(*given)), held


def expected_of(call, leaves):
    with tilegym.set_gradients_in_place(False):
        return backward(outputs_of(call, leaves)[0], leaves)


@gated
def test_the_same_gradients_where_nothing_can_tell(call, shapes, written):
    leaves = leaves_of(shapes, torch.bfloat16)
    with sanitized():
        expected = expected_of(call, leaves)
        assert not written
        outputs, addresses = outputs_of(call, leaves, lambda given: [t.data_ptr() for t in given])
        got = backward(outputs, leaves)
    assert written == addresses
    assert_equal(got, expected)


def _in_a_hook(t):
    t.register_hook(lambda gradient: gradient * (t == t))


HOLDERS = {
    "variable": lambda t: t,
    "view": lambda t: t.view(-1),
    "detached": lambda t: t.detach(),
    "storage": lambda t: t.untyped_storage(),
    "array": lambda t: t.detach().numpy() if not t.is_cuda else t.data,
    "hook": _in_a_hook,
    "another operation": lambda t: t.sin(),
    "operation on a view": lambda t: t[..., :2].square(),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@one_each
def test_left_alone_where_something_holds_one(call, shapes, hold, written):
    leaves = leaves_of(shapes)
    expected = expected_of(call, leaves)
    outputs, held = outputs_of(call, leaves, lambda given: hold(given[-1]))
    before = held.detach().clone() if isinstance(held, torch.Tensor) else None
    assert_equal(backward(outputs, leaves), expected)
    assert not written
    if before is not None:
        assert_equal([held.detach()], [before])


class _Exp(torch.autograd.Function):
    """Keeps its result as an array, whose memory the tensor has."""

    @staticmethod
    def forward(ctx, x):
        ctx.result = np.exp(x.detach().numpy())
        return torch.from_numpy(ctx.result)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.from_numpy(ctx.result)


class _Shared(torch.autograd.Function):
    """Its result may be read by other processes."""

    @staticmethod
    def forward(ctx, x):
        return (x * 1.5).share_memory_()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.5


class _Transposed(torch.autograd.Function):
    """Its gradient must be laid out as an op's own is."""

    @staticmethod
    def forward(ctx, x):
        return x.mT.contiguous().mT * 1.5  # elementwise results keep the strides

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.view(-1) * 1.5).view(gradient.shape)


@pytest.mark.skipif(HAS_GPU, reason="arrays and what processes share are on the CPU")
@pytest.mark.parametrize("set_to", [None, True])
@pytest.mark.parametrize("function", [_Exp, _Shared])
@one_each
def test_memory_that_others_know_of(call, shapes, function, set_to, written):
    """PyTorch does not count who else refers to it."""
    leaves = leaves_of(shapes)
    with tilegym.set_gradients_in_place(False):
        expected = backward(tuple_of(call(*map(function.apply, leaves))), leaves)
    with tilegym.set_gradients_in_place(set_to):
        assert_equal(backward(tuple_of(call(*map(function.apply, leaves))), leaves), expected)
    assert not written


def test_what_was_sent_to_another_process_on_a_gpu(monkeypatch):
    t = torch.zeros(2)
    assert in_place._has_memory_of_pytorch(t)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert in_place._has_memory_of_pytorch(t)
    monkeypatch.setattr(reductions, "shared_cache", {"handle": reductions.StorageWeakRef(t.untyped_storage())})
    assert not in_place._has_memory_of_pytorch(t)


@one_each
def test_gradients_are_laid_out_as_ever(call, shapes, written):
    leaves = leaves_of(shapes)
    with tilegym.set_gradients_in_place(False):
        expected = backward(tuple_of(call(*map(_Transposed.apply, leaves))), leaves)
    assert_equal(backward(tuple_of(call(*map(_Transposed.apply, leaves))), leaves), expected)
    assert not written


def test_references_are_counted_without_modes():
    """One that keeps what is made would make what it holds look like what nobody holds."""
    kept = []

    class Keeping(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kept.append(function(*args, **(kwargs or {})))
            return kept[-1]

    class KeepingDispatched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kept.append(function(*args, **(kwargs or {})))
            return kept[-1]

    for mode in (Keeping, KeepingDispatched):
        with mode():
            assert in_place._references_to_what_only_torch_holds() == in_place._REFERENCES_OF_SAVED
    assert not any(isinstance(value, torch.Tensor) for value in kept)


@one_each
def test_left_alone_while_the_graph_is_retained(call, shapes, written):
    leaves = leaves_of(shapes)
    expected = expected_of(call, leaves)
    outputs, _ = outputs_of(call, leaves)
    for retain in (True, True, False):
        assert not written
        assert_equal(backward(outputs, leaves, retain_graph=retain), expected)
    assert len(written) == len(shapes)


@one_each
def test_leaves_are_left_alone(call, shapes, written):
    leaves = leaves_of(shapes)
    with tilegym.set_gradients_in_place(False):
        expected = backward(tuple_of(call(*leaves)), leaves)
    assert_equal(backward(tuple_of(call(*leaves)), leaves), expected)
    assert not written


@pytest.mark.parametrize("reentrant", [True, False])
@one_each
def test_checkpointing(call, shapes, reentrant, written):
    leaves = leaves_of(shapes)
    expected, held = expected_of(call, leaves), []

    def run(look):
        outputs = checkpoint(lambda *given: outputs_of(call, given, look)[0], *leaves, use_reentrant=reentrant)
        torch.autograd.backward(outputs, [randn(*o.shape, dtype=o.dtype, seed=7) for o in outputs])
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients

    assert_equal(run(lambda given: None), expected)
    assert len(written) == len(shapes)
    assert_equal(run(held.extend), expected)
    assert len(written) == len(shapes) and len(held) >= 2 * len(shapes)


@pytest.mark.parametrize("norm", [ops.rms_norm, ops.layer_norm])
def test_norms_are_not_slowed_down(norm, written):
    """In place they take longer."""
    (x,) = leaves_of([(8, 64)])
    weight = torch.ones(64, device=x.device)
    options = (weight, 1e-6) if norm is ops.rms_norm else (weight, torch.zeros_like(weight), 1e-6)
    outputs, _ = outputs_of(lambda t: norm(t, 64, *options, backend="cutile"), [x])
    backward(outputs, [x])
    assert not written


@one_each
def test_every_backward_pass_looks_anew(call, shapes, written):
    """Calls like one before are repeated from a record."""
    leaves = leaves_of(shapes)
    expected, count = expected_of(call, leaves), 0
    for holds in (False, False, False, True, True, False, True):
        outputs, held = outputs_of(call, leaves, lambda given, holds=holds: given if holds else None)
        before = [t.detach().clone() for t in held or ()]
        assert_equal(backward(outputs, leaves), expected)
        assert_equal([t.detach() for t in held or ()], before)
        count += 0 if holds else len(shapes)
        assert len(written) == count
