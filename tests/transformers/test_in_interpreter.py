"""Whole models on the cuTile kernels where there is no GPU: the interpreter runs them, so few and small."""

import pytest
import torch
from common import HAS_GPU
from common import some
from tiny_models import assert_close
from tiny_models import few_families
from tiny_models import make_model
from tiny_models import observed
from tiny_models import ops_of
from tiny_models import padded

from tilegym.transformers import monkey_patch

pytestmark = pytest.mark.skipif(HAS_GPU, reason="on a GPU the other files run the kernels themselves")


@few_families
def test_prefill_and_decoding(family, monkeypatch):
    """A left-padded batch, prompts longer than the window, then greedy tokens one by one."""
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    model = make_model(family)
    ids, mask = padded([9, 4], "left")
    options = dict(attention_mask=mask, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    with torch.no_grad():
        expected = model.generate(ids, **options), model(ids, attention_mask=mask).logits
        with monkey_patch.apply(model, use_cutile=True), observed() as served:
            assert torch.equal(model.generate(ids, **options), expected[0])
            logits = model(ids, attention_mask=mask).logits
    assert_close(logits[mask.bool()], expected[1][mask.bool()])
    ops = {op for op, backend in served if backend == "cutile"}
    assert ops >= ops_of(family) | {"linear", "fmha_decode"}
    assert not any(backend == "pytorch" for _, backend in served)


@pytest.mark.parametrize("family", some(["llama", "qwen3"], "qwen3"))
def test_a_training_step(family, monkeypatch):
    """Every gradient, through the backward kernels of attention, norm, MLP and rotation."""
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    model = make_model(family).train()
    ids, mask = padded([7, 5], "right")

    def step():
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = step()
    with monkey_patch.apply(model, use_cutile=True), observed() as served:
        got = step()
    assert served >= {(op, "cutile") for op in ops_of(family)}
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert_close(got[name], gradient)
