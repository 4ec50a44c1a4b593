"""``tilegym.apply`` to models of images and texts that are no decoders of text with images in it.

They write about an image, or cut out of it what they are shown.
"""

import contextlib

import pytest
import torch
import transformers
from common import HAS_GPU
from common import device
from common import some

import tilegym
from tilegym.backend import observe_calls
from tilegym.integrate.inputs import continues_text
from tilegym.integrate.inputs import forward_inputs
from tilegym.integrate.inputs import main_output

_TEXT = dict(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, sep_token_id=2,
)  # fmt: skip
_IMAGE = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
)
_BOTH = dict(text_config=_TEXT, vision_config=_IMAGE)
_KOSMOS = dict(vocab_size=61, embed_dim=64, layers=2, ffn_dim=96, attention_heads=4, max_position_embeddings=64)
_QUESTIONS = _TEXT | dict(encoder_hidden_size=64)
_T5 = dict(model_type="t5", vocab_size=61, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16,
           decoder_start_token_id=0)  # fmt: skip
_BLIP_2 = dict(vision_config=_IMAGE, qformer_config=_QUESTIONS, text_config=_T5, num_query_tokens=4,
               image_token_index=60)  # fmt: skip
_SERVED = {"gelu", "layer_norm"}
_IDEFICS = _TEXT | dict(
    vision_config=dict(embed_dim=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32,
                       patch_size=8),
    additional_vocab_size=2, alpha_initializer="ones",
)  # fmt: skip
_RESAMPLER = dict(use_resampler=True, resampler_n_latents=4, resampler_depth=2, resampler_n_heads=4,
                  resampler_head_dim=16)  # fmt: skip
WRITERS = {
    "blip": ("BlipForConditionalGeneration", _BOTH, _SERVED),
    "blip, questions": ("BlipForQuestionAnswering", _BOTH, _SERVED),
    "blip-2, t5": ("Blip2ForConditionalGeneration", _BLIP_2, _SERVED | {"attn", "rms_norm"}),
    "instructblip, t5": ("InstructBlipForConditionalGeneration", _BLIP_2, _SERVED | {"attn", "rms_norm"}),
    "git": ("GitForCausalLM", _TEXT | dict(vision_config=_IMAGE), _SERVED),
    "kosmos-2": (
        "Kosmos2ForConditionalGeneration",
        dict(text_config=_KOSMOS, vision_config=_IMAGE, latent_query_num=4),
        _SERVED | {"attn"},
    ),
    "idefics": ("IdeficsForVisionText2Text", _IDEFICS, _SERVED | {"attn", "rms_norm", "rope", "swiglu"}),
    "idefics, resampled": (
        "IdeficsForVisionText2Text",
        _IDEFICS | dict(use_resampler=True, alpha_type="vector", qk_layer_norms=True, cross_layer_interval=2,
                        perceiver_config=_RESAMPLER),
        _SERVED | {"attn", "relu", "rms_norm", "rope", "swiglu"},
    ),
}  # fmt: skip
# What reads texts and images, and generates nothing.
_VILT = _TEXT | _IMAGE
TOGETHER = {
    "words": ("ViltForMaskedLM", _VILT),
    "answers": ("ViltForQuestionAnswering", _VILT | dict(num_labels=5)),
    "pairs": ("ViltForImageAndTextRetrieval", _VILT),
    "two images": ("ViltForImagesAndTextClassification", _VILT | dict(num_images=2, modality_type_vocab_size=3)),
    "tokens": ("ViltForTokenClassification", _VILT),
    "idefics": ("IdeficsModel", _IDEFICS),
}
_SIDE = 64
_WIDTHS = dict(hidden_size=32, num_attention_heads=4, intermediate_size=64)
_PROMPTS = dict(hidden_size=32, image_size=_SIDE, patch_size=16)
_MASKS = dict(hidden_size=32, mlp_dim=64, num_attention_heads=4, iou_head_hidden_dim=32)
_WINDOWS = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=_SIDE, patch_size=16,
                window_size=3, global_attn_indexes=[1])  # fmt: skip
_STAGES = dict(hidden_size=32, embed_dim_per_stage=[32, 64, 96, 128], num_attention_heads_per_stage=[1, 2, 4, 8],
               blocks_per_stage=[1, 1, 2, 1], global_attention_blocks=[3], image_size=[_SIDE, _SIDE])  # fmt: skip
_SAM = dict(vision_config=_WINDOWS | dict(output_channels=32, num_pos_feats=16), prompt_encoder_config=_PROMPTS)
_FEATURES = [[_SIDE // n] * 2 for n in (4, 8, 16)]
CUTTERS = {
    "sam": ("SamModel", _SAM | dict(mask_decoder_config=_MASKS)),
    "sam2": (
        "Sam2Model",
        dict(
            vision_config=dict(
                model_type="sam2_vision_model", backbone_config=_STAGES | dict(model_type="sam2_hiera_det_model"),
                backbone_channel_list=[128, 96, 64, 32], backbone_feature_sizes=_FEATURES, fpn_hidden_size=32,
            ),
            prompt_encoder_config=_PROMPTS, mask_decoder_config=_MASKS,
        ),
    ),
    "sam3_tracker": (
        "Sam3TrackerModel",
        dict(
            vision_config=dict(
                model_type="sam3_vision_model", fpn_hidden_size=32, backbone_feature_sizes=_FEATURES,
                backbone_config=_WINDOWS | dict(model_type="sam3_vit_model", intermediate_size=96,
                                                pretrain_image_size=32),
            ),
            prompt_encoder_config=_PROMPTS, mask_decoder_config=_MASKS,
        ),
    ),
}  # fmt: skip


def make(kind, config):
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(device())


def inputs_of(model, padded=False):
    return {name: value.to(model.device) for name, value in forward_inputs(model, padded).items()}


def assert_near(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * b.abs().max().item())


@contextlib.contextmanager
def ops():
    called = set()

    def observer(op, backend):
        called.add(op)
        return contextlib.nullcontext()

    with observe_calls(observer):
        yield called


@pytest.mark.parametrize("name", some(WRITERS, "blip", "blip, questions", "blip-2, t5", "git", "kosmos-2", "idefics"))
def test_what_writes_about_images_writes_the_same(name):
    kind, config, served = WRITERS[name]
    model = make(kind, config)
    assert not continues_text(type(model), model.config), "it takes no text without an image"
    given = {n: value for n, value in inputs_of(model, padded=True).items() if n != "decoder_input_ids"}
    calls = [given, {n: value[:1] for n, value in given.items()}]
    if name in ("blip", "git"):
        calls.append({"pixel_values": given["pixel_values"]})
    kinds = [dict(max_new_tokens=5, min_new_tokens=5, do_sample=False)]
    if not name.startswith("idefics"):  # versions of transformers forget its additional tokens
        kinds.append(kinds[0] | dict(num_beams=2))

    def written():
        copies = ({n: value.clone() for n, value in call.items()} for call in calls)  # BLIP writes into its prompt
        return [model.generate(**call, **kind) for call in copies for kind in kinds]

    def outputs():
        with torch.no_grad():
            return [main_output(model(**inputs_of(model, padded))) for padded in (False, True)]

    numbers, tokens = outputs(), written()
    before = [set(vars(module)) for module in model.modules()]
    with tilegym.apply(model, use_cutile=False) as report:
        assert {entry.compute for entry in report.patched} >= served
        graphs = {entry.module.rpartition(".")[2] for entry in report.patched if entry.compute == "graph"}
        assert graphs <= {"vision_model", "image_encoder"}, "of no decoder"
        assert len(graphs) == (not name.startswith("idefics")), "whose part for images is no model by itself"
        assert_near(outputs(), numbers)
        with ops() as called:
            assert all(torch.equal(a, b) for a, b in zip(written(), tokens, strict=True))
        assert "layer_norm" in called
    assert [set(vars(module)) for module in model.modules()] == before
    assert all(torch.equal(a, b) for a, b in zip(written(), tokens, strict=True))


@pytest.mark.parametrize("use_cutile", [False, True])
@pytest.mark.parametrize("name", TOGETHER)
def test_what_reads_texts_and_images_at_once_gives_the_same(name, use_cutile, monkeypatch):
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")
    model = make(*TOGETHER[name])
    given = [inputs_of(model, padded) for padded in (False, True)]
    masked = {"pixel_mask": torch.ones(2, 32, 32, device=model.device)} if name == "words" else {}
    if masked:
        masked["pixel_mask"][1, 20:] = 0
    given.append(given[1] | masked)

    @torch.no_grad()
    def outputs():
        found = []
        for inputs in given:
            torch.manual_seed(0)  # ViLT chooses at random which patch stands for one that is none
            output, mask = main_output(model(**inputs)), inputs.get("attention_mask")
            words = mask is not None and output.shape[:2] == mask.shape
            found.append(output[mask.bool()] if words else output)
        return found

    expected = outputs()
    with tilegym.apply(model, use_cutile=use_cutile) as report:
        assert {entry.compute for entry in report.patched} >= _SERVED
        with ops() as called:
            assert_near(outputs(), expected)
        assert "layer_norm" in called
    assert HAS_GPU or all(torch.equal(a, b) for a, b in zip(outputs(), expected, strict=True))


def test_tokens_before_an_image_see_none():
    """And those between two images one of them."""
    model = make(*WRITERS["idefics"][:2])
    inputs = inputs_of(model)
    seen = inputs["image_attention_mask"].sum(-1)
    assert seen[0].tolist() == sorted(seen[0].tolist()) and set(seen[0].tolist()) == {0, 1, 2}
    assert inputs["pixel_values"].shape == (2, 2, 3, 32, 32)


def test_attention_of_the_part_for_images_is_served_by_itself():
    """GIT's text reads the mask, which is no reason to leave its image encoder to transformers."""
    kind, config, _ = WRITERS["git"]
    model = make(kind, config)
    with tilegym.apply(model, use_cutile=False, verify=True) as report:
        places = {entry.module for entry in report.patched if entry.compute == "attn"}
        with ops() as called, torch.no_grad():
            model(**inputs_of(model))
    assert places and all(place.startswith("git.image_encoder") for place in places)
    assert "fmha" in called


@pytest.mark.parametrize("name", some(CUTTERS, "sam", "sam2"))
def test_what_cuts_out_of_images_cuts_out_the_same(name):
    model = make(*CUTTERS[name])
    pixels = inputs_of(model)["pixel_values"]
    generator = torch.Generator().manual_seed(2)
    points = (torch.rand(2, 2, 3, 2, generator=generator) * _SIDE).to(model.device)
    labels = torch.tensor([[[1, 0, 1], [1, 1, -10]]] * 2, device=model.device)
    boxes = torch.tensor([[[4.0, 8, 40, 50], [5, 5, 30, 30]]] * 2, device=model.device)
    shown = [{}, dict(input_points=points, input_labels=labels), dict(input_boxes=boxes), dict(input_points=points)]
    shown.append(shown[1] | shown[2] | dict(multimask_output=False))

    @torch.no_grad()
    def outputs():
        found = [model(pixel_values=pixels, **prompts) for prompts in shown]
        return [t for output in found for t in (output.pred_masks, output.iou_scores)]

    expected = outputs()
    before = [set(vars(module)) for module in model.modules()]
    with tilegym.apply(model, use_cutile=False) as report:
        assert {entry.compute for entry in report.patched} >= {"attn", "gelu", "layer_norm", "graph"}
        with ops() as called:
            assert_near(outputs(), expected)
        assert {"fmha", "layer_norm"} <= called
    assert [set(vars(module)) for module in model.modules()] == before
    assert HAS_GPU or all(torch.equal(a, b) for a, b in zip(outputs(), expected, strict=True))


def test_what_finds_what_a_text_says():
    """SAM 3."""
    vision = CUTTERS["sam3_tracker"][1]["vision_config"]
    config = dict(
        vision_config=vision, geometry_encoder_config=_WIDTHS, detr_encoder_config=_WIDTHS | dict(num_layers=2),
        detr_decoder_config=_WIDTHS | dict(num_layers=2, num_queries=5),
        mask_decoder_config=dict(hidden_size=32, num_attention_heads=4),
        text_config=_WIDTHS | dict(model_type="clip_text_model", vocab_size=61, num_hidden_layers=2, eos_token_id=2,
                                   bos_token_id=1, max_position_embeddings=32, projection_dim=32),
    )  # fmt: skip
    model = make("Sam3Model", config)

    @torch.no_grad()
    def outputs():
        found = [model(**inputs_of(model, padded)) for padded in (False, True)]
        return [t for output in found for t in (output.pred_masks, output.pred_boxes, output.pred_logits)]

    expected = outputs()
    with tilegym.apply(model, use_cutile=False) as report:
        assert {entry.compute for entry in report.patched} >= {"attn", "layer_norm", "relu", "rope"}
        assert_near(outputs(), expected)
    assert HAS_GPU or all(torch.equal(a, b) for a, b in zip(outputs(), expected, strict=True))
