"""The plan: every requirement with its candidates, or with the reason why there are none."""

import dataclasses

import pytest
import torch
from integrate_models import Unseen
from integrate_models import UnseenConfig
from integration import small

from tilegym.integrate.plan import family_of
from tilegym.integrate.plan import make_plan
from tilegym.integrate.recipes import ways


def test_llama_has_the_kernels_of_its_parts_best_first():
    plan = make_plan(small("llama"))
    assert plan.by_hand and plan.family == "llama"
    assert {"loss", "rope", "attn", "linear", "swiglu", "rms_norm"} == set(plan.computes)
    norm = plan.computes["rms_norm"][0]
    assert [c.solution for c in norm.candidates] == ["rms_norm_cutile", "rms_norm_fp32_weight_cutile"]
    assert norm.candidates[0].place.options == {"weight": "weight", "eps": "variance_epsilon"}
    for item in plan.items:
        assert bool(item.candidates) != bool(item.why)


def test_a_family_that_nobody_has_patched_is_not_by_hand():
    plan = make_plan(small("stablelm"), look_up=False)
    assert not plan.by_hand
    assert plan.computes["layer_norm"][0].candidates[0].place.options["bias"] == "bias"


def test_a_model_of_ones_own_is_planned_by_what_it_computes():
    plan = make_plan(Unseen(UnseenConfig()), look_up=False)
    norm = plan.computes["rms_norm"][0].candidates[0].place
    assert norm.options == {"weight": "w", "eps": "small", "offset": 1.0, "casting": "gemma"}
    rope = plan.computes["rope"][0].candidates[0].place
    assert rope.options["parameters"] == ("a", "b", "s", "c") and rope.options["style"] == "interleaved"


@pytest.mark.parametrize(
    "kind, changes, why",
    [
        ("rope", {"style": "half_tail"}, "no kernel rotates"),
        ("gated_mlp", {"dropout": 0.1}, "dropout"),
        ("loss", None, "written in the model's forward"),
    ],
)
def test_what_cannot_be_served_is_said(kind, changes, why):
    model = small("llama")
    requirement = make_plan(model, look_up=False).research.of_kind(kind)[0]
    if changes is None:
        requirement = dataclasses.replace(requirement, implementation="somewhere.else")
    else:
        requirement = dataclasses.replace(requirement, parameters={**requirement.parameters, **changes})
    assert why in ways(requirement, model)[1]


def test_no_weights_are_needed():
    from transformers import AutoModelForCausalLM

    config = small("qwen3").config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert "swiglu" in make_plan(model, look_up=False).computes


def test_families_have_names_that_python_takes():
    assert family_of("modernbert-decoder") == "modernbert_decoder"
