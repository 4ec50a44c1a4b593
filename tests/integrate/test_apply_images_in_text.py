"""``tilegym.apply`` to models that continue text with images in it."""

import contextlib
import warnings

import models_with_images
import pytest
import torch
import transformers
from common import device
from common import some
from models_with_images import FEW
from models_with_images import MODELS
from models_with_images import PARTS
from models_with_images import ROPE
from models_with_images import TEXT
from models_with_images import TOKENS
from models_with_images import inputs_of
from models_with_images import make

import tilegym
from tilegym.backend import observe_calls
from tilegym.errors import FallbackWarning
from tilegym.transformers import decode_graph

models = pytest.mark.parametrize("name", MODELS)
few_models = pytest.mark.parametrize("name", some(MODELS, *FEW))


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
def test_logits_stay_and_attention_is_served(name, images, no_run_ahead):
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


@few_models
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
    # transformers is not one module: it puts another in its place at the first class that it is asked for.
    monkeypatch.setattr(models_with_images.transformers, "LlavaForConditionalGeneration", _Shifted)
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


@few_models
def test_others_of_the_same_config_stay(name):
    """The parts' configs, which models share, are theirs."""
    model = make(name)
    other = type(model)(model.config).eval().to(model.device)
    inputs = inputs_of(name, model)
    with torch.no_grad(), tilegym.apply(model, use_cutile=False), calls_of_ops() as calls:
        other(**inputs)
        assert not calls
        assert not {other.config._attn_implementation, other.config.text_config._attn_implementation} & {"tilegym"}


@pytest.mark.parametrize("name", some(["gemma3", "llava", "qwen2_5_vl"], "gemma3", "qwen2_5_vl"))
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
    text = TEXT | dict(
        model_type="qwen3_5_moe_text", moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
        rope_parameters=ROPE | dict(mrope_section=[1, 1, 0], partial_rotary_factor=0.25),
    )  # fmt: skip
    vision = PARTS["qwen3_vl_vision"] | dict(model_type="qwen3_5_moe_vision", deepstack_visual_indexes=[])
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, **TOKENS)
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).eval().to(device())
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(1)).to(device())
    options = dict(do_sample=False, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
    expected = model.generate(ids, **options)
    with decode_graph.eager_steps("cpu"), tilegym.apply(model, use_cutile=False) as report:
        assert {"moe", "gated_delta_rule", "graph"} <= {entry.compute for entry in report.patched}
        assert torch.equal(model.generate(ids, **options), expected)
