"""The check of a patched model's gradients: what it lets pass and what it does not."""

import math

import pytest
import torch
from bench.tiny import tiny_model

from tilegym.bench import gradients
from tilegym.bench import prompts
from tilegym.errors import ModelError
from tilegym.transformers import monkey_patch

BATCH = prompts.random_batch(2, 24, 300)
NORM = "model.layers.0.input_layernorm.weight"
WRONG = {
    "dropped": lambda gradient: 0 * gradient,
    "flipped": lambda gradient: -gradient,
    "scaled": lambda gradient: 1.001 * gradient,
    "not finite": lambda gradient: gradient * math.nan,
}


def judged(model, change=None):
    """The verdict on ``model`` after ``change`` has been done to it; it returns what undoes it."""
    oracle = gradients.Oracle.of(model, BATCH)
    unpatched = oracle.errors(model)
    undo = change(model) if change else None
    patched = oracle.errors(model)
    if undo:
        undo()
    return oracle.judge(unpatched, patched, model.dtype)


def gradient_of(name, change):
    return lambda model: model.get_parameter(name).register_hook(change).remove


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_cutile", [False, True])
def test_a_right_patch_passes(dtype, use_cutile):
    model = tiny_model(dtype).train()
    check = judged(model, lambda model: monkey_patch.apply(model, use_cutile=use_cutile).revert)
    assert check.passed, check.reason
    assert check.oracle == {torch.float32: "float64", torch.bfloat16: "float32"}[dtype]
    assert (check.rows, check.tokens, check.cut) == (2, 24, False)
    assert {entry.name for entry in check.parameters} == {name for name, _ in model.named_parameters()}
    excesses = [entry.excess for entry in check.parameters]
    assert excesses == sorted(excesses, reverse=True) and 0 < excesses[-1] and excesses[0] <= 1
    # The model is as it was, and no gradient is left in it.
    assert {p.dtype for p in model.parameters()} == {dtype} and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("wrong", "dtype"), [(wrong, torch.float32) for wrong in WRONG] + [("dropped", torch.bfloat16)]
)
@pytest.mark.parametrize("name", [NORM, "lm_head.weight"])
def test_a_wrong_gradient_fails_and_is_named(wrong, dtype, name):
    check = judged(tiny_model(dtype).train(), gradient_of(name, WRONG[wrong]))
    assert not check.passed and check.reason.startswith(f"the patched gradient of {name}")
    assert check.parameters[0].name == name and not check.parameters[0].passed
    assert all(entry.passed for entry in check.parameters[1:])
    assert (check.summary()["parameters"][0]["patched_error"] == "inf") == (wrong == "not finite")


def test_a_patch_that_cuts_a_weight_off_fails():
    def cut_off(model):
        norm = model.get_submodule(NORM.removesuffix(".weight"))
        norm.forward = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight.detach(), 1e-6)
        return lambda: delattr(norm, "forward")

    check = judged(tiny_model().train(), cut_off)
    [wrong] = [entry for entry in check.parameters if not entry.passed]
    assert not check.passed and wrong.name == NORM
    assert wrong.patched_error == pytest.approx(wrong.norm)  # it has no gradient at all


def test_many_small_errors_fail_together():
    """Each within what its parameter is allowed would be within what all are allowed: one error is another's bound."""
    model = tiny_model().train()
    oracle = gradients.Oracle.of(model, BATCH)
    errors = oracle.errors(model)
    twice = gradients.Errors(errors.loss, errors.loss_error, {k: 2 * v for k, v in errors.parameters.items()})
    thrice = gradients.Errors(errors.loss, errors.loss_error, {k: 3 * v for k, v in errors.parameters.items()})
    assert oracle.judge(errors, twice, torch.float32).passed
    check = oracle.judge(errors, thrice, torch.float32)
    assert not check.passed and not check.overall.passed


@pytest.mark.parametrize("added", [0.1, math.nan])
def test_a_wrong_loss_with_right_gradients_fails(added):
    def add(model):
        forward = model.forward

        def other(**inputs):
            output = forward(**inputs)
            output.loss = output.loss + added
            return output

        model.forward = other
        return lambda: delattr(model, "forward")

    check = judged(tiny_model().train(), add)
    assert not check.passed and check.reason.startswith("the patched loss is off by ")


def test_the_oracle_is_of_as_much_as_fits(monkeypatch):
    sizes = []

    def backward(model, batch):
        sizes.append(tuple(batch.input_ids.shape))
        if batch.input_ids.numel() > 40 and model.dtype == torch.float32:
            raise torch.OutOfMemoryError
        return real(model, batch)

    real = gradients.backward
    monkeypatch.setattr(gradients, "backward", backward)
    model = tiny_model(torch.bfloat16).train()
    oracle = gradients.Oracle.of(model, prompts.random_batch(4, 48, 300))
    assert sizes == [(4, 48), (2, 48), (1, 48), (1, 24)]
    assert oracle.cut and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    errors = oracle.errors(model)
    assert sizes[-1] == (1, 24)  # the same part for everybody
    check = oracle.judge(errors, errors, model.dtype)
    assert check.passed and (check.rows, check.tokens, check.cut) == (1, 24, True)


def test_no_memory_at_all(monkeypatch):
    def backward(model, batch):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gradients, "backward", backward)
    model = tiny_model(torch.bfloat16).train()
    with pytest.raises(ModelError, match="out of memory on cpu .*take a smaller --num_layers"):
        gradients.Oracle.of(model, BATCH)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("factor", "what"), [(0.0, "all zero"), (math.inf, "not finite")])
def test_nothing_can_be_compared_with_such_an_oracle(factor, what):
    model = tiny_model().train()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * factor)
    with pytest.raises(ModelError, match=f"gradients in float64 are {what}"):
        gradients.Oracle.of(model, BATCH)


def test_nothing_can_be_compared_with_an_unpatched_model_that_overflows():
    model = tiny_model().train()
    oracle = gradients.Oracle.of(model, BATCH)
    right = oracle.errors(model)
    overflown = gradients.Errors(right.loss, right.loss_error, right.parameters | {NORM: math.inf})
    with pytest.raises(ModelError, match="the unpatched model's gradients are not finite in float32"):
        oracle.judge(overflown, right, torch.float32)
