"""Patches under and over what accelerate puts into instances: hooks, and casts around a forward for mixed precision."""

import functools
import types

import pytest
import torch
from torch import nn

from tilegym.transformers.forwards import reproducible
from tilegym.transformers.patching import ALREADY_PATCHED
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

ENTRY = Entry("somewhere", "something", "pytorch")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return 2 * x * self.weight


@reproducible
def plus(n):
    def forward(self, x):
        return x * self.weight + n

    return forward


def put_hook(layer, calls):
    """As accelerate's ``add_hook_to_module``."""

    def hooked(module, x):
        calls.append("hook")
        return module._old_forward(x)

    layer._hf_hook, layer._old_forward = object(), layer.forward
    layer.forward = functools.partial(hooked, layer)


def take_hook(layer):
    """As accelerate's ``remove_hook_from_module``."""
    layer.forward = layer._old_forward
    del layer._hf_hook, layer._old_forward


def test_under_a_hook_of_accelerate_the_inner_forward_is_replaced():
    layer, x, calls = Scaled(), torch.ones(3), []
    put_hook(layer, calls)
    with PatchSet() as patches:
        patches.replace_forward(layer, plus(1), ENTRY)
        assert torch.equal(layer(x), x + 1)
    assert torch.equal(layer(x), 2 * x)
    assert calls == ["hook", "hook"]


@pytest.mark.parametrize("times", [(1, 2), (2, 1), (2, 2), (1, 1)])
def test_patches_are_undone_under_a_hook_that_came_since_and_behind_one_that_has_gone(times):
    """A hook that comes moves the forward away, and one that goes moves it back."""
    put_at, taken_at = times
    layer, x, calls = Scaled(), torch.ones(3), []
    sets = PatchSet(), PatchSet()
    for i, patches in enumerate(sets, 1):
        if put_at == i:
            put_hook(layer, calls)
        patches.replace_forward(layer, plus(i), ENTRY)
    assert torch.equal(layer(x), x + 2) and calls == ["hook"]
    for i, patches in enumerate(sets, 1):
        if taken_at == i:
            take_hook(layer)
        patches.revert()
        assert torch.equal(layer(x), x + 2 if i == 1 else 2 * x)
    assert len(calls) == taken_at and not PatchSet.active()


def put_casts(layer):
    """As accelerate's ``prepare`` puts mixed precision around a forward."""
    layer._original_forward, function = layer.forward, layer.forward.__func__

    @functools.wraps(function)
    def cast(*args, **kwargs):
        return function(*args, **kwargs).float()

    layer.forward = types.MethodType(cast, layer)


def take_casts(layer):
    """As accelerate's ``unwrap_model(layer, keep_fp32_wrapper=False)``, which takes out more than it had put in."""
    forward, original = layer.forward, vars(layer).pop("_original_forward")
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        if forward == original:
            break
    layer.forward = types.MethodType(forward, layer)


@reproducible
def passing_on():
    @functools.wraps(Scaled.forward)
    def forward(self, x):
        return getattr(self, "changed", lambda y: y)(Scaled.forward(self, x))

    forward.may_stay = True
    return forward


def put_another_loss(layer):
    """As trl's trainers put theirs around a forward, of which they do not tell that they call it."""
    former = layer.forward

    @functools.wraps(type(layer).forward)
    def forward(self, *args, **kwargs):
        return former(*args, **kwargs)

    layer.forward = types.MethodType(forward, layer)


@pytest.mark.parametrize("wrap", [put_casts, put_another_loss])
def test_a_forward_that_others_have_wrapped_may_stay_if_it_does_nothing_by_itself(wrap):
    layer, x = Scaled(), torch.ones(3)
    patches = PatchSet()
    patches.replace_attribute(layer, "changed", torch.neg, ENTRY, own=False)
    patches.replace_forward(layer, passing_on(), ENTRY)
    wrap(layer)
    assert torch.equal(layer(x), -2 * x)
    patches.revert()
    assert torch.equal(layer(x), 2 * x)
    with PatchSet() as again:
        again.replace_attribute(layer, "changed", torch.neg, ENTRY, own=False)
        assert not again.replace_forward(layer, passing_on(), ENTRY)
        assert again.skipped[0].why == ALREADY_PATCHED or "replaced already" in again.skipped[0].why
        assert torch.equal(layer(x), -2 * x)
    assert not PatchSet.active()


@pytest.mark.parametrize("function", [plus(1), passing_on()])
def test_a_forward_that_others_have_unwrapped_is_undone(function):
    layer, x, patches = Scaled(), torch.ones(3), PatchSet()
    patches.replace_forward(layer, function, ENTRY)
    put_casts(layer)
    take_casts(layer)
    patches.revert()
    assert torch.equal(layer(x), 2 * x) and "forward" not in vars(layer)
