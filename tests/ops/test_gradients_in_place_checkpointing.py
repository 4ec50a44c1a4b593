"""set_gradients_in_place where tensors are computed anew for the backward pass, or kept by hooks."""

import pytest
import torch
from common import randn
from in_place_calls import CALLS
from in_place_calls import activations_of
from in_place_calls import assert_equal
from in_place_calls import backward
from in_place_calls import leaves_of
from in_place_calls import one_each
from in_place_calls import step
from in_place_calls import tuple_of
from torch.utils.checkpoint import checkpoint

import tilegym
from tilegym import ops
from tilegym.backend import in_place


@pytest.fixture
def written(monkeypatch):
    """The tensors that are overwritten."""
    tensors, original = [], in_place.overwritten
    monkeypatch.setattr(in_place, "overwritten", lambda *ts: tensors.extend(ts) or original(*ts))
    return tensors


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_checkpointing(name, reentrant, written):
    (call, shapes), rotation = CALLS[name], name.startswith("rope")
    leaves = leaves_of(shapes)

    def run(reentrant=None):
        def block(*given):
            return call(*activations_of(given))

        outputs = block(*leaves) if reentrant is None else checkpoint(block, *leaves, use_reentrant=reentrant)
        upstream = [randn(*o.shape, dtype=o.dtype, seed=7) for o in tuple_of(outputs)]
        torch.autograd.backward(outputs, upstream)
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients

    with tilegym.set_gradients_in_place(False):
        expected = run()
    with tilegym.set_gradients_in_place(True):
        assert_equal(run(reentrant), expected)
    # Where hooks save tensors q and k may be rotated once more: they stay.
    assert len(written) == (0 if rotation and not reentrant else len(shapes))


@one_each
def test_checkpointing_of_what_others_need_too(call, shapes):
    """In non-reentrant checkpointing autograd cannot tell that something has changed."""
    leaves = leaves_of(shapes)

    def saved_by_another(*given):
        given = activations_of(given)
        other = given[-1].sin().sum()
        return other + sum(o.sum() for o in tuple_of(call(*given)))

    def run(block, given):
        return torch.autograd.grad(checkpoint(block, *given, use_reentrant=False), leaves)

    def arguments_of_two(*given):
        first = checkpoint(lambda *ts: sum(t.sin().sum() for t in ts), *given, use_reentrant=False)
        return first + checkpoint(lambda *ts: sum(o.sum() for o in tuple_of(call(*ts))), *given, use_reentrant=False)

    expected = run(saved_by_another, leaves), torch.autograd.grad(arguments_of_two(*activations_of(leaves)), leaves)
    with tilegym.set_gradients_in_place(True):
        assert_equal(run(saved_by_another, leaves), expected[0])
        assert_equal(torch.autograd.grad(arguments_of_two(*activations_of(leaves)), leaves), expected[1])


def test_two_norms_of_one_activation_in_a_checkpointed_block():
    x, weight = randn(8, 64).requires_grad_(), randn(64, seed=1)

    def block(x):
        x = x * 1.5
        first, second = (ops.rms_norm(x, 64, w, 1e-6, backend="cutile") for w in (weight, None))
        return first * weight + second

    def run():
        return backward((checkpoint(block, x, use_reentrant=False),), (x,))

    expected = run()
    with tilegym.set_gradients_in_place(True):
        assert_equal(run(), expected)


@one_each
def test_hooks_that_save_elsewhere(call, shapes, written):
    leaves = leaves_of(shapes)
    expected = step(call, leaves)
    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        with tilegym.set_gradients_in_place(True), hooks:
            given, *got = step(call, leaves)
        assert_equal([*got[0], *got[1]], [*expected[1], *expected[2]])
        assert_equal([t.detach() for t in given], [t.detach() for t in expected[0]])
