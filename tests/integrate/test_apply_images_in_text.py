"""``tilegym.apply`` to models that continue text with images in it."""

import contextlib
import warnings

import pytest
import torch
import transformers
from common import device

import tilegym
from tilegym.backend import observe_calls
from tilegym.errors import FallbackWarning
from tilegym.transformers import decode_graph

IMAGE = 98  # the token that stands for a part of an image
_TEXT = dict(
    vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
_VISION = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
)
_TOKENS = dict(image_token_id=IMAGE, video_token_id=97, vision_start_token_id=96, vision_end_token_id=95)
_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
# The class, the kinds of its parts, how many tokens an image is, and what else its config says.
MODELS = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model", 4,
               dict(mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=97, eoi_token_index=96)),
    "llava": ("LlavaForConditionalGeneration", "llama", "clip_vision_model", 16, dict(image_token_index=IMAGE)),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", "pixtral", 4,
                 dict(image_token_index=IMAGE, spatial_merge_size=2)),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "qwen2_5_vl_vision", 4,
                   _TOKENS),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", "qwen3_vl_vision", 4, _TOKENS),
    "glm4v": ("Glm4vForConditionalGeneration", "glm4v_text", "glm4v_vision", 4,
              dict(image_token_id=IMAGE, video_token_id=97, image_start_token_id=96, image_end_token_id=95,
                   video_start_token_id=94, video_end_token_id=93)),
    "internvl": ("InternVLForConditionalGeneration", "qwen2", "internvl_vision", 4, dict(image_token_id=IMAGE)),
    "voxtral": ("VoxtralForConditionalGeneration", "llama", "voxtral_encoder", 8,
                dict(audio_token_id=IMAGE, hidden_size=64)),
}  # fmt: skip
PACKED = ("qwen2_5_vl", "qwen3_vl", "glm4v")  # images of any sizes, patch behind patch
_PARTS = {  # of those whose parts have other sizes
    "qwen2_5_vl_text": dict(rope_parameters=_ROPE),
    "qwen3_vl_text": dict(rope_parameters=_ROPE),
    "glm4v_text": dict(rope_parameters=_ROPE | dict(partial_rotary_factor=1.0)),
    "qwen2_5_vl_vision": dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64),
    "qwen3_vl_vision": dict(
        depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64, patch_size=14,
        num_position_embeddings=16, deepstack_visual_indexes=[0, 1],
    ),
    "glm4v_vision": dict(
        depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64, image_size=56
    ),
    "internvl_vision": dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=[32, 32],
        patch_size=[8, 8],
    ),
    "voxtral_encoder": dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, num_mel_bins=16,
        max_source_positions=32,
    ),
}  # fmt: skip
models = pytest.mark.parametrize("name", MODELS)


def make(name):
    kind, text, vision, _, others = MODELS[name]
    model_class = getattr(transformers, kind)
    media = "audio_config" if vision == "voxtral_encoder" else "vision_config"
    parts = {
        "text_config": _TEXT | {"model_type": text} | _PARTS.get(text, {}),
        media: _PARTS.get(vision, _VISION) | {"model_type": vision},
    }
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**parts, **others)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(device())


def inputs_of(name, model):
    """A text with an image in it, and another one with padding before it."""
    tokens, generator = MODELS[name][3], torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (2, tokens + 7), generator=generator)
    ids[:, 4 : 4 + tokens] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    if name in PACKED:  # 4x4 patches of an image, two pictures of 14x14 pixels each, joined by fours
        pixels = torch.randn(2 * 16, 3 * 2 * 14 * 14, generator=generator)
    inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=pixels)
    if name == "voxtral":
        del inputs["pixel_values"]
        inputs["input_features"] = torch.randn(2, 16, 64, generator=generator)
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if name == "mistral3":
        inputs["image_sizes"] = torch.tensor([[32, 32], [32, 32]])
    if name in PACKED:
        ids[:, 3], ids[:, 4 + tokens] = 96, 95
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    return {n: value.to(model.device) for n, value in inputs.items()}


@contextlib.contextmanager
def calls_of_ops():
    calls = []

    def observer(op, backend):
        calls.append(op)
        return contextlib.nullcontext()

    with observe_calls(observer):
        yield calls


def state_of(model):
    """The very configs that the modules hold, the parts in the model's, and what of TileGym's the modules hold."""
    held = {path: id(module.config) for path, module in model.named_modules() if hasattr(module, "config")}
    parts = {name: id(value) for name, value in vars(model.config).items() if name.endswith("_config")}
    return held, parts, {name for module in model.modules() for name in vars(module) if name.startswith("_tilegym")}


@models
@pytest.mark.parametrize("images", [True, False])
def test_logits_stay_and_attention_is_served(name, images):
    model = make(name)
    inputs = inputs_of(name, model)
    if not images:
        inputs = dict(input_ids=inputs["input_ids"].clamp(max=90), attention_mask=inputs["attention_mask"])
    kept, before = inputs["attention_mask"].bool(), state_of(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        report = tilegym.apply(model, use_cutile=False)
        patched = {(entry.module.split(".layers.")[0], entry.compute) for entry in report.patched}
        of_text = {"linear", "rms_norm", "rope"} | (set() if name == "glm4v" else {"decode_step"})
        assert {("model.language_model", compute) for compute in of_text} <= patched
        assert {(type(model).__name__, compute) for compute in ("attn", "graph", "loss")} <= patched
        with calls_of_ops() as calls:
            got = model(**inputs).logits
        # Two layers of the text, and two of what reads images, but Pixtral's, whose masks are not left to it.
        served = calls.count("fmha") + calls.count("fmha_varlen")
        assert served == 2 if not images or name == "mistral3" else served >= 4
        torch.testing.assert_close(got[kept], expected[kept], rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        report.revert()
        assert state_of(model) == before
        assert torch.equal(model(**inputs).logits, expected)


@pytest.fixture
def steps(monkeypatch):
    """The steps that decoding graphs have made."""
    made, step = [], decode_graph.Session.step
    monkeypatch.setattr(decode_graph.Session, "step", lambda *args: (made.append(args[1:]), step(*args))[1])
    return made


@models
def test_tokens_stay(name, steps):
    model = make(name)
    inputs = inputs_of(name, model)
    plain = dict(input_ids=inputs["input_ids"].clamp(max=90), attention_mask=inputs["attention_mask"])
    typed = {n: torch.zeros_like(plain["input_ids"]) for n in inputs if n.endswith("token_type_ids")}
    alone = {n: value[len(value) // 2 :] for n, value in inputs.items()}
    calls = inputs, plain, plain | typed, alone, inputs
    options = dict(do_sample=False, max_new_tokens=6, min_new_tokens=6, pad_token_id=0)
    expected = [model.generate(**given, **options) for given in calls]
    with decode_graph.eager_steps("cpu"), tilegym.apply(model, use_cutile=False):
        steps.clear()  # of the trial by a small model
        for given, tokens in zip(calls, expected, strict=True):
            assert torch.equal(model.generate(**given, **options), tokens)
            assert len(steps) == 5, "decoding ran without a session"
            steps.clear()


class _Shifted(transformers.LlavaForConditionalGeneration):
    """Its steps need what the prompt was given, too."""

    def forward(self, *args, pixel_values=None, spatial_shapes=None, **kwargs):
        output = super().forward(*args, pixel_values=pixel_values, **kwargs)
        if spatial_shapes is not None:
            output.logits = output.logits.roll(int(spatial_shapes), -1)
        return output


def test_steps_that_need_what_the_prompt_was_given_are_left_to_transformers(steps, monkeypatch):
    monkeypatch.setattr(transformers, "LlavaForConditionalGeneration", _Shifted)
    model = make("llava")
    inputs = inputs_of("llava", model)
    given = inputs | {"spatial_shapes": torch.tensor(3)}
    options = dict(do_sample=False, max_new_tokens=6, min_new_tokens=6, pad_token_id=0)
    expected = model.generate(**given, **options)
    assert not torch.equal(model.generate(**inputs, **options), expected)
    with decode_graph.eager_steps("cpu"), tilegym.apply(model, use_cutile=False):
        steps.clear()
        with pytest.warns(FallbackWarning, match="behind prompts with pixel_values, spatial_shapes a step is off by"):
            assert torch.equal(model.generate(**given, **options), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            assert torch.equal(model.generate(**given, **options), expected)  # it was tried already
            assert not steps
            model.generate(**inputs, **options)
        assert len(steps) == 5


@models
def test_others_of_the_same_config_stay(name):
    """The parts' configs, which models share, are theirs."""
    model = make(name)
    other = type(model)(model.config).eval().to(model.device)
    inputs = inputs_of(name, model)
    with torch.no_grad(), tilegym.apply(model, use_cutile=False), calls_of_ops() as calls:
        other(**inputs)
        assert not calls
        assert not {other.config._attn_implementation, other.config.text_config._attn_implementation} & {"tilegym"}


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2_5_vl"])
def test_the_part_for_images_by_itself(name):
    model = make(name)
    inputs = inputs_of(name, model)
    part = model.model.visual if name == "qwen2_5_vl" else model.model.vision_tower
    with torch.no_grad():
        expected = model(**inputs).logits
        with tilegym.apply(part, use_cutile=False), calls_of_ops() as calls:
            got = model(**inputs).logits
        assert calls.count("fmha") + calls.count("fmha_varlen") >= 2
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        # What has been patched already stays so in a patch of the whole.
        with tilegym.apply(part, use_cutile=False), tilegym.apply(model, use_cutile=False):
            got = model(**inputs).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        assert torch.equal(model(**inputs).logits, expected)


def test_experts_of_the_text_are_served():
    """Which experts a model uses is chosen by its whole config: such a text is no part with a patch of its own."""
    text = _TEXT | dict(
        model_type="qwen3_5_moe_text", moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
        rope_parameters=_ROPE | dict(mrope_section=[1, 1, 0], partial_rotary_factor=0.25),
    )  # fmt: skip
    vision = _PARTS["qwen3_vl_vision"] | dict(model_type="qwen3_5_moe_vision", deepstack_visual_indexes=[])
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, **_TOKENS)
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).eval().to(device())
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(1)).to(device())
    options = dict(do_sample=False, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
    expected = model.generate(ids, **options)
    with decode_graph.eager_steps("cpu"), tilegym.apply(model, use_cutile=False) as report:
        assert {"moe", "gated_delta_rule", "graph"} <= {entry.compute for entry in report.patched}
        assert torch.equal(model.generate(ids, **options), expected)
