"""Configs that a model has for itself while it is patched, and gives back."""

import itertools

import pytest
import torch
from tiny_models import make_model
from tiny_models import tokens

from tilegym.errors import PatchError
from tilegym.transformers import monkey_patch


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_configs_come_back_whatever_is_reverted_first(order):
    """Two sets on a model, and one on the model in it."""
    model = make_model("mixtral")
    config = model.config
    sets = [
        monkey_patch.apply(model, use_cutile=False, moe=False),
        monkey_patch.apply(model.model, use_cutile=True, use_attn=True, moe=False),
        monkey_patch.apply(model, use_cutile=False),
    ]
    model.config.pad_token_id = 7
    for i in order:
        sets[i].revert()
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == {id(config)}
    assert config.pad_token_id == 7 and config._attn_implementation == "sdpa"
    assert config._experts_implementation == make_model("mixtral").config._experts_implementation
    assert not any(name.startswith("_tilegym") for module in model.modules() for name in vars(module))


@torch.no_grad()
def test_another_attention_chosen_meanwhile_stays_and_is_said():
    model, ids = make_model("llama"), tokens(2, 11)
    config, expected = model.config, model(ids).logits
    report = monkey_patch.apply(model, use_cutile=False)
    model.set_attn_implementation("eager")
    with pytest.raises(PatchError, match="_attn_implementation_internal. All else is as it was.*set them there"):
        report.revert()
    assert model.config is config and config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, expected)
