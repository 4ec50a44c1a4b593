"""``tilegym.apply`` to models that continue text with images in it."""

import contextlib

import pytest
import torch
import transformers
from common import device

import tilegym
from tilegym.backend import observe_calls
from tilegym.transformers import decode_graph

IMAGE = 98  # the token that stands for a part of an image
_TEXT = dict(
    vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
_VISION = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
)
# The class, the kinds of its parts, how many tokens an image is, and what else its config says.
MODELS = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model", 4,
               dict(mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=97, eoi_token_index=96)),
    "llava": ("LlavaForConditionalGeneration", "llama", "clip_vision_model", 16, dict(image_token_index=IMAGE)),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", "pixtral", 4,
                 dict(image_token_index=IMAGE, spatial_merge_size=2)),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "qwen2_5_vl_vision", 4,
                   dict(image_token_id=IMAGE, video_token_id=97, vision_start_token_id=96, vision_end_token_id=95)),
}  # fmt: skip
_PARTS = {  # of those whose parts have other sizes
    "qwen2_5_vl_text": dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])),
    "qwen2_5_vl_vision": dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64),
}
models = pytest.mark.parametrize("name", MODELS)


def make(name):
    kind, text, vision, _, others = MODELS[name]
    model_class = getattr(transformers, kind)
    parts = dict(
        text_config=_TEXT | {"model_type": text} | _PARTS.get(text, {}),
        vision_config=_PARTS.get(vision, _VISION) | {"model_type": vision},
    )
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
    if name == "qwen2_5_vl":  # 4x4 patches of an image, two pictures of 14x14 pixels each, joined by fours
        pixels = torch.randn(2 * 16, 3 * 2 * 14 * 14, generator=generator)
    inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=pixels)
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if name == "mistral3":
        inputs["image_sizes"] = torch.tensor([[32, 32], [32, 32]])
    if name == "qwen2_5_vl":
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


@models
@pytest.mark.parametrize("images", [True, False])
def test_logits_stay_and_attention_is_served(name, images):
    model = make(name)
    inputs = inputs_of(name, model)
    if not images:
        inputs = dict(input_ids=inputs["input_ids"].clamp(max=90), attention_mask=inputs["attention_mask"])
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs).logits
        report = tilegym.apply(model, use_cutile=False)
        assert {"attn", "linear", "rms_norm", "rope"} <= {entry.compute for entry in report.patched}
        with calls_of_ops() as calls:
            got = model(**inputs).logits
        # Two layers of the text, and two of what reads images, but Pixtral's, whose masks are not left to it.
        served = calls.count("fmha") + calls.count("fmha_varlen")
        assert served == 2 if not images or name == "mistral3" else served >= 4
        torch.testing.assert_close(got[kept], expected[kept], rtol=1e-4, atol=1e-5 * expected.abs().max().item())
        report.revert()
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
