"""Gradients of gated activations lie where these were, unless set otherwise and where nothing could tell."""

import pytest
import torch
from common import randn
from common import sanitized
from in_place_calls import BACKWARD
from in_place_calls import activations_of
from in_place_calls import assert_equal
from in_place_calls import backward
from in_place_calls import leaves_of
from in_place_calls import tuple_of
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
