"""Small models: every family by one recipe, with every kind of layer of the original."""

import operator
import types

import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig

from tilegym.errors import ModelError
from tilegym.integrate.inputs import example
from tilegym.integrate.inputs import has_loss
from tilegym.integrate.small_model import MAX_PARAMETERS
from tilegym.integrate.small_model import default_config
from tilegym.integrate.small_model import small_model
from tilegym.integrate.trace import functions_of
from tilegym.integrate.trace import record

# Families whose layers differ from each other: dense and sparse, sliding and full, recurrent and attention.
MIXED = [
    "deepseek_v3", "exaone4", "falcon_h1", "gemma3_text", "glm4_moe", "gpt_oss", "jamba", "llama4_text", "minimax",
    "nemotron_h", "olmo3", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "smollm3", "zamba2",
    # Layers in sections, heads as wide as their parts in some layers only, a loop over some layers, an open indexer.
    "dory", "dots3_note_text", "inkling2_loop_text", "qwen4_exp_text",
]  # fmt: skip


def _kinds(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


@pytest.mark.parametrize("family", MIXED)
def test_every_kind_of_layer_is_kept(family):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not have it yet")
    small = small_model(family)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(small.config)
    assert _kinds(small.model) == _kinds(whole)
    types = {str(t) for t in getattr(whole.config, "layer_types", None) or ()}
    assert {str(t) for t in getattr(small.model.config, "layer_types", None) or ()} == types
    assert sum(p.numel() for p in small.model.parameters()) < 3_000_000


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_what_is_said_of_each_layer_is_kept(layers):
    """Of one layer as well, whose list could be that of layers' numbers."""
    config = transformers.SmolLM3Config(num_hidden_layers=layers)
    small = small_model(config).model.config
    assert small.no_rope_layers == config.no_rope_layers and small.num_hidden_layers == layers


def test_sections_of_a_model_that_has_few_layers():
    """They stay as they are, whether as many layers can be shared out among them or not."""
    if "dory" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not have it yet")
    small = small_model(transformers.DoryConfig(num_hidden_layers=5, n_input_layers=1, n_output_layers=1)).model.config
    assert (small.n_input_layers, small.n_recurrent_layers, small.n_output_layers) == (1, 3, 1)


def test_sizes_change_and_constants_do_not():
    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=3e-5, hidden_act="gelu",
        attention_bias=True, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    before = config.to_dict()
    small = small_model(config)
    now = small.model.config
    assert config.to_dict() == before, "the given config is left alone"
    assert (now.rms_norm_eps, now.hidden_act, now.attention_bias) == (3e-5, "gelu", True)
    assert now.rope_parameters == config.rope_parameters
    assert now.num_key_value_heads < now.num_attention_heads, "queries stay grouped"
    assert small.changes["hidden_size"] == (4096, now.hidden_size)
    assert small.model.num_parameters() < MAX_PARAMETERS


def test_weights_are_reproducible_and_matter():
    one, two, other = (small_model("llama", seed=seed).model for seed in (0, 0, 1))
    ids = example(one)
    with torch.no_grad():
        logits = [model(ids).logits for model in (one, two, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert logits[0].std() > 0.1


def test_randomness_of_the_caller_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    small_model("llama")
    assert torch.equal(torch.rand(3), expected)


def test_a_default_config_with_gaps_is_filled():
    assert default_config("deepseek_v2").num_experts_per_tok is None
    small = small_model("deepseek_v2")
    assert small.config.num_experts_per_tok == 2
    assert small.failures, "the usual recipe fails without it"


@pytest.mark.parametrize("family", ["t5", "vit", "no_such_family"])
def test_what_is_no_causal_language_model_is_refused(family):
    with pytest.raises(ModelError, match=family):
        small_model(family)


def test_what_takes_no_text_without_an_image_is_no_language_model():
    with pytest.raises(ModelError, match="GitForCausalLM takes no text without an image: tilegym.apply serves it"):
        small_model("git")
    assert type(small_model("git", model_class=transformers.GitForCausalLM).model) is transformers.GitForCausalLM


def test_a_config_that_contradicts_itself_is_refused():
    config = AutoConfig.for_model("llama", hidden_act="no_such_activation")
    with pytest.raises(ModelError, match="no_such_activation"):
        small_model(config)


@pytest.mark.parametrize(
    "kind, sections",
    [
        ("CLIPModel", None),
        pytest.param("SiglipModel", None, marks=pytest.mark.slow),
        pytest.param("Qwen2VLForConditionalGeneration", [16, 24, 24], marks=pytest.mark.slow),
        ("Qwen2_5_VLForConditionalGeneration", [16, 24, 24]),
        ("Glm4vForConditionalGeneration", [8, 12, 12]),
        ("Glm5NextForConditionalGeneration", None),
        ("Phi4MultimodalForCausalLM", None),  # and for sounds
    ],
)
def test_parts_for_images_are_made_small_too(kind, sections):
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {kind}")
    config = model_class.config_class()
    if sections:
        config.text_config.rope_parameters["mrope_section"] = sections
    before = config.to_dict()
    small = small_model(config, model_class=model_class)
    assert type(small.model) is model_class and config.to_dict() == before
    assert sum(p.numel() for p in small.model.parameters()) < 5_000_000
    with torch.device("meta"):
        assert _kinds(small.model) == _kinds(model_class._from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize(
    "kind, chosen, layers, small",
    [
        ("Dinov2Model", dict(out_indices=[3, 6, 9, 12]), 5, [1, 2, 3, 4]),
        ("Dinov2Model", {}, 2, [1]),
        ("BeitModel", dict(out_indices=[1]), 2, [1]),
        ("DPTModel", dict(backbone_out_indices=[2, 5, 8, 11]), 5, [1, 2, 3, 4]),
        ("ConvNextModel", dict(out_indices=[2, 4]), None, [2, 4]),
    ],
)
def test_layers_that_are_read_are_among_those_left(kind, chosen, layers, small):
    model_class = getattr(transformers, kind)
    config = small_model(model_class.config_class(**chosen), model_class=model_class).model.config
    name = next(iter(chosen), "out_indices")
    assert getattr(config, name) == small
    assert layers is None or config.num_hidden_layers == layers


@pytest.mark.parametrize(
    "kind, small",
    [("PixtralVisionModel", 256), ("CLIPVisionModel", 224), ("YolosModel", [512, 864]), ("SwinModel", 224)],
)
def test_large_images_are_made_small_where_patches_are_alike(kind, small):
    model_class = getattr(transformers, kind)
    config = small_model(model_class.config_class(), model_class=model_class).model.config
    assert config.image_size == small


@pytest.mark.parametrize(
    "kind, image, same",
    [
        (
            "SamModel",
            "vision_config.image_size",
            ("vision_config.output_channels", "prompt_encoder_config.hidden_size"),
        ),
        (
            "Sam2Model",
            "prompt_encoder_config.image_size",
            ("vision_config.fpn_hidden_size", "mask_decoder_config.hidden_size"),
        ),
        ("Sam3ViTModel", "image_size", ()),
    ],
)
def test_widths_and_sides_stay_in_proportion(kind, image, same):
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {kind}")
    config = model_class.config_class()
    small = small_model(config, model_class=model_class)
    assert small.model.num_parameters() < MAX_PARAMETERS
    side, now = small.changes[image]
    assert now == side // 4 and operator.attrgetter(image)(small.model.config) == now
    assert len({operator.attrgetter(name)(small.model.config) for name in same}) <= 1
    with torch.device("meta"):
        assert _kinds(small.model) == _kinds(model_class._from_config(config, attn_implementation="eager"))


def test_windows_and_what_sees_the_whole_image_are_kept():
    small = small_model(transformers.SamVisionConfig(), model_class=transformers.SamVisionModel).model.config
    assert (small.num_hidden_layers, list(small.global_attn_indexes), small.window_size) == (3, [2], 14)


@pytest.mark.parametrize(
    "family, kind",
    [
        ("hrm_text", None),  # its layers are run several times
        ("xlstm", None),
        ("mimi", "MimiModel"),
        ("omniasr_ctc", "OmniASRForCTC"),
        ("perceiver", "PerceiverForMaskedLM"),
        ("perceiver", "PerceiverForImageClassificationLearned"),
        ("vilt", "ViltForQuestionAnswering"),
        ("idefics", "IdeficsForVisionText2Text"),
    ],
)
def test_families_whose_sizes_or_inputs_are_their_own(family, kind):
    if family not in transformers.CONFIG_MAPPING or (kind and not hasattr(transformers, kind)):
        pytest.skip(f"this transformers has no {family}")
    small = small_model(family, model_class=kind and getattr(transformers, kind))
    assert small.model.num_parameters() < MAX_PARAMETERS


def test_layers_with_windows_are_found_by_their_numbers():
    config = transformers.VitDetConfig(num_hidden_layers=12, window_block_indices=[0, 1, 3, 4, 6, 7, 9, 10])
    small = small_model(config, model_class=transformers.VitDetModel).model.config
    assert (small.num_hidden_layers, small.window_block_indices) == (3, [0, 1])


def test_a_loss_that_is_not_of_text_is_left_out():
    if not hasattr(transformers, "CsmForConditionalGeneration"):
        pytest.skip("this transformers has no CSM")
    model = small_model("csm", model_class=transformers.CsmForConditionalGeneration).model
    assert not has_loss(model, example(model))
    assert {call.stage for call in record(model).modules} == {"prefill", "decode"}
    llama = small_model("llama").model
    assert has_loss(llama, example(llama))


def test_functions_of_no_python_module_are_nobodys():
    file = types.ModuleType("modeling_mine")
    exec("def own(): ...\n\ndef generated(): ...", vars(file))
    file.generated.__module__ = None
    assert list(functions_of([file]).values()) == [file.own]
