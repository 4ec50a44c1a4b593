"""Replicas of patched models, as ``nn.DataParallel`` makes them: what a Trainer uses where it sees several GPUs."""

import threading

import pytest
import torch
import transformers
from common import device
from common import some
from replicas import SCALE
from replicas import replicas_of
from tiny_models import FAMILIES
from tiny_models import assert_close
from tiny_models import make_model
from tiny_models import padded

import tilegym
from tilegym.transformers import monkey_patch


def run(replicas, calls):
    """Each replica's output of its call, each in a thread of its own, as ``parallel_apply`` does it."""
    outputs, gradients = [None] * len(calls), torch.is_grad_enabled()

    def call(i):
        with torch.set_grad_enabled(gradients):
            outputs[i] = replicas[i](**calls[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


def calls_of(*lengths):
    for several in lengths:
        ids, mask = padded(several, "right")
        yield dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)


@pytest.mark.parametrize("family", some(FAMILIES, "llama"))
def test_steps(family, monkeypatch):
    model = make_model(family)
    calls = list(calls_of([9, 6], [4, 7]))

    def unpatched():
        weights = {name: weight * SCALE for name, weight in model.named_parameters()}
        return [torch.func.functional_call(model, weights, (), call) for call in calls]

    def step(outputs):
        model.zero_grad()
        sum(output.loss for output in outputs()).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    with torch.no_grad():
        expected = unpatched()
    gradients = step(unpatched)
    with monkey_patch.apply(model):
        with torch.no_grad():
            got = run(replicas_of(model, monkeypatch), calls)
            assert all(
                torch.equal(a.loss, b.loss)
                for a, b in zip(run(replicas_of(model, monkeypatch), calls), got, strict=True)
            )
        for a, b in zip(got, expected, strict=True):
            assert_close(a.logits + 0, b.logits)
            assert_close(a.loss, b.loss)
        got = step(lambda: run(replicas_of(model, monkeypatch), calls))
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        assert_close(got[name], gradient)


@pytest.mark.parametrize("name", ["BertModel", "GPT2Model", "OPTModel", "ModernBertModel", "T5EncoderModel"])
def test_other_models(name, monkeypatch):
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    config = getattr(transformers, name).config_class(**sizes, max_position_embeddings=64, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval().to(device())
    calls = [dict(input_ids=call["input_ids"], attention_mask=call["attention_mask"]) for call in calls_of([9, 6])]
    with torch.no_grad():
        weights = {name: weight * SCALE for name, weight in model.named_parameters()}
        expected = torch.func.functional_call(model, weights, (), calls[0])[0]
        (unpatched,) = run(replicas_of(model, monkeypatch), calls)
        torch.testing.assert_close(unpatched[0], expected)
        with tilegym.apply(model, use_cutile=False) as report:
            assert report.patched
            (got,) = run(replicas_of(model, monkeypatch), calls)
    mask = calls[0]["attention_mask"].bool()
    torch.testing.assert_close(got[0][mask], expected[mask])
