"""Regions: what is cut out of forwards, and that putting them back as functions changes no bit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tilegym.autokernel import profile
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.regions import find_regions
from tilegym.autokernel.regions import install
from tilegym.integrate.small_model import example
from tilegym.integrate.small_model import small_model
from tilegym.inventory import reference
from tilegym.inventory.rules import check_definition

MODELS = Path(__file__).with_name("autokernel_models.py")


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "granite", "qwen3_5_text", "mixtral"])
def small(request):
    return small_model(request.param).model


def test_regions_put_back_change_nothing(small):
    ids = example(small)
    with torch.no_grad():
        expected = small(input_ids=ids).logits
        found = find_regions(small)
        with install(small, {r.key: reference.load(r.source, r.key) for r in found}) as patches:
            assert torch.equal(small(input_ids=ids).logits, expected)
            assert len(patches.patched) >= 10 and not patches.skipped
        assert torch.equal(small(input_ids=ids).logits, expected)
    assert len({r.key for r in found}) == len(found)
    assert [r.key for r in find_regions(small)] == [r.key for r in found]


def test_every_region_runs_where_it_stands(small):
    ids = example(small)
    found = find_regions(small)
    called = []

    def noted(region):
        run = reference.load(region.source, region.key)
        return lambda *inputs: called.append(region.key) or run(*inputs)

    with torch.no_grad(), install(small, {r.key: noted(r) for r in found}):
        small(input_ids=ids)
    assert len(set(called)) >= 0.8 * len(found)


def test_a_residual_and_the_norm_behind_it_are_one_region():
    model, _ = ModelSpec(f"{MODELS}::gated_norm", "float32").load(torch.device("cpu"))
    found = {r.outputs: r for r in find_regions(model) if r.index is not None and "DecoderLayer" in r.key}
    fused = found["hidden_states", "residual"]
    assert "residual + hidden_states" in fused.source and "rsqrt" in fused.source
    assert fused.inputs == ("residual", "hidden_states", "post_attention_layernorm_weight")


@pytest.mark.parametrize("name, text", [("scaled_residual", "* 0.22"), ("unusual_activation", ".square()")])
def test_unusual_parts_are_regions(name, text):
    model, _ = ModelSpec(f"{MODELS}::{name}", "float32").load(torch.device("cpu"))
    assert any(text in r.source for r in find_regions(model))


def test_drafts_are_definitions():
    model, _ = ModelSpec(f"{MODELS}::gated_norm", "float32").load(torch.device("cpu"))

    def run():
        with torch.no_grad():
            for batch, length in ((2, 5), (3, 9)):
                model(input_ids=example(model, batch, length))

    found = profile.record(model, [run])
    for region in find_regions(model):
        definition = profile.draft(region, found[region.key], "llama")
        profile.check_draft(definition, found[region.key])
        wrong = [message for _, message, _ in check_definition(definition) if "permalink" not in message]
        assert not wrong, region.key
        assert definition.reference.startswith("# Source: https://github.com/")
        work = profile.work(definition, found[region.key])
        assert work.bytes > 0 and (work.flops > 0) == (region.index is None)


def test_seconds_add_up():
    model, _ = ModelSpec(f"{MODELS}::gated_norm", "float32").load(torch.device("cpu"))
    ids = example(model)

    def run():
        with torch.no_grad():
            model(input_ids=ids)

    found = profile.profile(model, run, torch.device("cpu"))
    assert set(found.seconds) <= {r.key for r in find_regions(model)}
    assert 0 < sum(found.seconds.values()) < found.total


class Branches(nn.Module):
    """Computation around what is more than computation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x, flag=True):
        y = torch.exp(x) * 2
        self.seen.append(y)
        if flag:
            y = y + 1
        z = self.linear(torch.tanh(y) * self.linear(x)) + torch.sin(x)
        z += 1
        return z.cos() * 2


def test_what_is_more_than_computation_stays():
    model = nn.Sequential(Branches())
    x = torch.randn(3, 4)
    expected = model(x)
    found = [r for r in find_regions(model) if r.index is not None]
    assert len(found) == 4
    with install(model, {r.key: reference.load(r.source, r.key) for r in found}):
        assert torch.equal(model(x), expected)
    assert len(model[0].seen) == 2
