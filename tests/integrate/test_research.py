"""Research over whole families: the exact parts of some, nothing missed in many."""

import inspect
import time
from pathlib import Path

import pytest
import torch
import transformers
from common import some
from expected_parts import EXPECTED
from expected_parts import told
from integrate_models import Unseen
from integrate_models import UnseenConfig
from transformers import AutoModelForCausalLM

from tilegym.integrate.formulas import _compiled
from tilegym.integrate.requirement import KINDS
from tilegym.integrate.requirement import Research
from tilegym.integrate.research import research
from tilegym.integrate.small_model import default_config
from tilegym.integrate.small_model import small_model
from tilegym.integrate.source_regions import source_of
from tilegym.inventory.rules import check_definition
from tilegym.inventory.schema import Definition

FAMILIES = [
    "afmoe", "arcee", "bamba", "bart", "bert", "biogpt", "bitnet", "cohere", "cohere2", "deepseek_v2", "deepseek_v3",
    "diffllama", "doge", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj",
    "granite", "granitemoe", "helium", "jamba", "lfm2", "llama", "llama4_text", "mamba2", "minimax_m2", "ministral3",
    "mistral", "mixtral", "modernbert-decoder", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon",
    "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3", "stablelm",
    "starcoder2",
]  # fmt: skip
LIKE_OTHERS = {"mistral", "qwen2", "qwen3", "olmo2", "olmoe", "deepseek_v2"}  # of the families of EXPECTED


@pytest.mark.parametrize("family", some(EXPECTED, *(EXPECTED.keys() - LIKE_OTHERS)))
def test_exact_parts(family):
    found = research(family)
    assert sorted(told(requirement) for requirement in found.requirements) == EXPECTED[family]
    assert not [u for u in found.unrecognised if u.resembles]


@pytest.mark.parametrize("family", some(FAMILIES, *FAMILIES[::8], "bamba", "gemma3_text", "gpt_oss", "mamba2"))
def test_nothing_known_is_missed(family):
    found = research(family)
    assert not [u for u in found.unrecognised if u.resembles]
    kinds = {requirement.kind for requirement in found.requirements}
    assert {"linear", "loss"} <= kinds <= KINDS.keys()
    assert kinds & {"rms_norm", "layer_norm"}
    for requirement in found.requirements:
        assert requirement.modules
        assert requirement.definition["name"] and requirement.source is not None
        assert callable(_compiled(requirement.definition["reference"])), "the draft's reference is a program"
        assert all(error <= 64 for error in requirement.errors.values())
    assert Research.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "family", some(["deepseek_v3", "gemma2", "gpt_oss", "qwen3_5_text"], "deepseek_v3", "qwen3_5_text")
)
def test_drafts_are_definitions(family):
    model = small_model(family).model
    drafts = [requirement.definition for requirement in research(model).requirements]
    assert len({draft["name"] for draft in drafts}) == len(drafts)
    for draft in drafts:
        # Of all rules only the commit may be missing, which is known of few releases.
        problems = check_definition(Definition.model_validate(draft))
        assert not [p for p in problems if "permalink" not in p[1]], draft["name"]


def test_a_draft_computes_what_the_module_computes():
    model = small_model("gemma3_text").model
    requirement = next(r for r in research(model).requirements if r.kind == "gated_mlp")
    module = model.get_submodule(requirement.modules[-1])
    x = torch.randn(5, model.config.hidden_size)
    weights = [module.get_submodule(requirement.roles[role]).weight for role in ("gate", "up", "down")]
    run = _compiled(requirement.definition["reference"])
    torch.testing.assert_close(run(x, *weights), module(x))


def test_the_source_region_is_the_text_of_the_class():
    requirement = next(r for r in research("llama").requirements if r.kind == "rms_norm")
    source = requirement.source
    path = Path(inspect.getfile(transformers)).parents[1] / source.file
    region = path.read_text().splitlines()[source.first - 1 : source.last]
    assert any("class LlamaRMSNorm" in line for line in region[:3])
    assert "return self.weight * hidden_states.to(input_dtype)" in "\n".join(region)
    assert source.url.endswith(f"src/{source.file}#L{source.first}-L{source.last}")
    assert f"# Source: {source.url}" in requirement.definition["reference"]


def test_code_of_ones_own_has_a_region_and_no_link():
    source = source_of(Unseen)
    assert (source.file, source.url, source.immutable) == ("integrate_models.py", "", False)


def test_a_real_model_is_neither_run_nor_changed():
    config = small_model("qwen3").model.config
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = 256, 5, 320
    config.layer_types = ["full_attention"] * 5
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # it could not run
    before = str(model), config.to_dict()
    start = time.process_time()
    found = research(model)
    assert time.process_time() - start < 5
    norm = next(r for r in found.of_kind("rms_norm") if r.parameters["size"] == 256)
    assert len(norm.modules) == 11
    assert found.of_kind("gated_mlp")[0].definition["axes"]["I"]["value"] == 320
    assert (str(model), config.to_dict()) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_language_model_inside_of_one_for_images_is_found_in_its_place():
    from transformers import Gemma3ForConditionalGeneration

    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(default_config("gemma3"))
    found = research(model)
    layers = len(model.model.language_model.layers)
    mlp, add = found.of_kind("gated_mlp")[0], found.of_kind("add_norm")[0]
    assert mlp.modules == tuple(f"model.language_model.layers.{i}.mlp" for i in range(layers))
    assert len(add.modules) == 2 * layers and "model.language_model.layers.0.input_layernorm" not in add.modules
    assert sum(len(r.modules) for r in found.of_kind("attention")) == layers
    assert found.of_kind("linear_cross_entropy")[0].modules == ("lm_head",)


def test_multipliers_are_found():
    config = default_config("granite")
    config.embedding_multiplier, config.residual_multiplier = 12.0, 0.22
    config.attention_multiplier, config.logits_scaling = 0.0078125, 8.0
    found = research(config)
    (pair,) = found.of_kind("add_norm")
    assert pair.parameters["residual_scale"] == 0.22 and pair.op == "", "no op has such a factor"
    assert found.of_kind("attention")[0].parameters["scaling"] == 0.0078125
    head = found.of_kind("linear_cross_entropy")[0]
    assert head.parameters["scale"] == 1 / 8 and head.op == ""


def test_dropout_in_training_is_said():
    config = small_model("gpt2").model.config
    config.resid_pdrop = 0.25
    assert research(config).of_kind("mlp")[0].parameters["dropout"] == 0.25


def test_layers_that_differ_from_the_rest_are_not_taken_for_them():
    config = small_model("llama").model.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.model.norm.variance_epsilon = 0.5
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    found = research(model)
    norm, mlp = found.of_kind("rms_norm")[0], found.of_kind("gated_mlp")[0]
    assert "model.norm" not in norm.modules and mlp.modules == ("model.layers.0.mlp",)
    strange = {path for u in found.unrecognised for path in u.modules if u.resembles}
    assert {"model.norm", "model.layers.1.mlp"} <= strange


def test_a_family_never_seen_is_recognised_by_what_it_computes():
    found = research(Unseen(UnseenConfig()))
    kinds = {r.kind: r for r in found.requirements}
    assert kinds["rms_norm"].parameters | {"offset": 1.0, "casting": "gemma", "eps": 0.001} == (
        kinds["rms_norm"].parameters
    )
    mlp = kinds["gated_mlp"]
    assert mlp.roles == {"gate": "beta", "up": "alpha", "down": "gamma"} and mlp.parameters["activation"] == "relu2"
    assert kinds["rope"].parameters["style"] == "interleaved" and kinds["rope"].roles["cos"] == "c"
    assert kinds["attention"].parameters["scaling"] == 0.2 and kinds["attention"].op == "fmha"
    assert kinds["loss"].op == "cross_entropy"
