"""``tilegym.apply`` to what does not continue text: encoders, classifiers, images, sound, and models of two parts."""

import pytest
import torch
import transformers
from common import HAS_GPU
from common import device
from common import some
from transformers.masking_utils import bidirectional_mask_function

import tilegym
from tilegym.backend import observe_calls
from tilegym.backend import use_backend
from tilegym.errors import FlagError
from tilegym.errors import ModelError
from tilegym.integrate import apply as apply_module
from tilegym.integrate import recipes
from tilegym.integrate.inputs import forward_inputs
from tilegym.integrate.inputs import main_output
from tilegym.transformers import monkey_patch
from tilegym.transformers.attention import NAMES
from tilegym.transformers.attention import causal_mask
from tilegym.transformers.patching import ALREADY_PATCHED

_TEXT = dict(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_TWO = dict(
    vocab_size=61, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, pad_token_id=0,
    decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, forced_eos_token_id=None,
)  # fmt: skip
_IMAGE = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
)
_BOTH = dict(text_config=_TEXT, vision_config=_IMAGE)
_DECODER = _TEXT | dict(num_key_value_heads=2)
_ENCODER = {"attn", "gelu", "layer_norm", "linear"}
_PERCEIVER = dict(
    vocab_size=61, d_latents=64, d_model=48, num_latents=8, num_self_attends_per_block=2, max_position_embeddings=32,
    image_size=16,
)  # fmt: skip
# The class, what differs in its config, and what is served of it.
MODELS = {
    "bert": ("BertModel", _TEXT, _ENCODER),
    "roberta": ("RobertaForSequenceClassification", _TEXT, _ENCODER),
    "bert, choices": ("BertForMultipleChoice", _TEXT, _ENCODER),
    "modernbert": (  # its first layer sees all tokens, the second a window
        "ModernBertForMaskedLM",
        _TEXT | dict(local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
        _ENCODER | {"geglu", "rope"},
    ),
    "nomic": ("NomicBertModel", _TEXT, {"attn", "layer_norm", "linear", "rope", "swiglu"}),
    "deberta": ("DebertaV2Model", _TEXT, {"gelu", "layer_norm", "linear"}),
    "t5": (
        "T5ForConditionalGeneration",
        dict(vocab_size=61, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, decoder_start_token_id=0),
        {"linear", "rms_norm"},
    ),
    "bart": ("BartForConditionalGeneration", _TWO | dict(max_position_embeddings=64), _ENCODER),
    "bart, classes": ("BartForSequenceClassification", _TWO | dict(max_position_embeddings=64), _ENCODER),
    "whisper": (
        "WhisperForConditionalGeneration",
        _TWO | dict(max_source_positions=20, max_target_positions=64, num_mel_bins=16),
        _ENCODER,
    ),
    "wav2vec2": ("Wav2Vec2Model", _TEXT, _ENCODER),
    "data2vec-audio": ("Data2VecAudioModel", _TEXT | dict(conv_pos_kernel_size=3), _ENCODER),
    "ast": ("ASTModel", _IMAGE | dict(max_length=64, num_mel_bins=32, frequency_stride=16, time_stride=16), _ENCODER),
    "parakeet": (  # writes down what is said, and generates it at once
        "ParakeetForCTC",
        dict(vocab_size=61, pad_token_id=60, encoder_config=dict(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_mel_bins=16,
            subsampling_conv_channels=16,
        )),
        {"layer_norm", "linear"},
    ),
    "wav2vec2-bert": ("Wav2Vec2BertModel", _TEXT | dict(feature_projection_input_dim=16), {"layer_norm", "linear"}),
    "vit": ("ViTForImageClassification", _IMAGE, _ENCODER),
    "dinov2": ("Dinov2Model", _IMAGE | dict(num_hidden_layers=4, mlp_ratio=2), _ENCODER),  # names its last layer
    "dpt": (
        "DPTForDepthEstimation",
        _IMAGE | dict(num_hidden_layers=6, backbone_out_indices=[2, 3, 4, 5], neck_hidden_sizes=[16, 16, 32, 32],
                      fusion_hidden_size=16, is_hybrid=False),
        _ENCODER,
    ),
    "videomae": ("VideoMAEModel", _IMAGE | dict(num_frames=4), _ENCODER),
    "siglip2": ("Siglip2VisionModel", _IMAGE | dict(num_patches=16), _ENCODER),  # of any shape
    "siglip": ("SiglipVisionModel", _IMAGE, _ENCODER),
    "convnext": ("ConvNextModel", dict(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], image_size=32),
                 {"gelu", "layer_norm", "linear"}),
    "qwen3": ("Qwen3Model", _DECODER | dict(head_dim=16), {"attn", "linear", "rms_norm", "rope", "swiglu"}),
    "mamba": ("MambaModel", _TEXT | dict(state_size=8), {"causal_conv1d", "linear", "rms_norm"}),
    "clip": ("CLIPModel", _BOTH, {"attn", "layer_norm", "linear"}),
    "siglip, whole": ("SiglipModel", _BOTH, _ENCODER),
    "siglip2, whole": (
        "Siglip2Model", dict(text_config=_TEXT, vision_config=_IMAGE | dict(num_patches=16)), _ENCODER
    ),
    "pix2struct": ("Pix2StructForConditionalGeneration", dict(
        text_config=dict(vocab_size=61, hidden_size=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4),
        vision_config=_IMAGE | dict(patch_embed_hidden_size=48, d_ff=96, d_kv=16, seq_len=32),
    ), {"attn", "geglu", "linear", "rms_norm"}),
    "perceiver": ("PerceiverForMaskedLM", _PERCEIVER, {"gelu", "layer_norm", "linear"}),
    "perceiver, images": ("PerceiverForImageClassificationLearned", _PERCEIVER, {"gelu", "layer_norm", "linear"}),
    "perceiver, fourier": (
        "PerceiverForImageClassificationFourier", _PERCEIVER | dict(num_cross_attention_heads=1),
        {"gelu", "layer_norm", "linear"},
    ),
    "perceiver, conv": (
        "PerceiverForImageClassificationConvProcessing",
        _PERCEIVER | dict(num_cross_attention_heads=1, image_size=64),
        {"gelu", "layer_norm", "linear"},
    ),
    "lw-detr": (
        "LwDetrForObjectDetection",
        dict(
            backbone_config=dict(
                model_type="lw_detr_vit", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, image_size=64,
                pretrain_image_size=32, window_block_indices=[0, 2], out_indices=[2, 4], num_windows=4,
            ),
            projector_scale_factors=[1.0], d_model=64, decoder_ffn_dim=96, decoder_layers=2, num_queries=6,
            decoder_self_attention_heads=4, decoder_cross_attention_heads=4, group_detr=2,
        ),
        _ENCODER | {"relu"},
    ),
    "stablelm": ("StableLmForSequenceClassification", _DECODER, {"attn", "layer_norm", "linear", "rope", "swiglu"}),
}  # fmt: skip
models = pytest.mark.parametrize("name", MODELS)


def make(name, **options):
    kind, changes, _ = MODELS[name]
    model_class = getattr(transformers, kind, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**changes | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(device())


@torch.no_grad()
def outputs(model):
    """Of a forward pass, and of one with padding, without it."""
    found = []
    for padded in (False, True):
        inputs = {n: t.to(model.device) for n, t in forward_inputs(model, padded).items()}
        output, mask = main_output(model(**inputs)), inputs.get("attention_mask")
        found.append(output[mask.bool()] if mask is not None and output.shape[:2] == mask.shape else output)
    return found


def assert_near(got, expected, tolerance=1e-5):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * b.abs().max().item())


@pytest.mark.parametrize("name", some(MODELS, *(MODELS.keys() - {"data2vec-audio", "siglip, whole"})))
def test_outputs_stay_and_revert(name):
    model = make(name)
    expected = outputs(model)
    report = tilegym.apply(model, use_cutile=False, by_hand=False, linear=True)
    assert {entry.compute for entry in report.patched} >= MODELS[name][2]
    assert_near(outputs(model), expected)
    report.revert()
    assert_near(outputs(model), expected)
    # On a GPU cuDNN may convolve in another way each time.
    assert HAS_GPU or all(torch.equal(a, b) for a, b in zip(outputs(model), expected, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "name",
    some(
        ["bert", "modernbert", "nomic", "bart", "whisper", "vit", "clip", "stablelm"],
        *("modernbert", "nomic", "bart", "vit", "clip", "stablelm"),
    ),
)
def test_on_the_cutile_kernels(name, monkeypatch):
    """In the interpreter without a GPU, the mask of padding, windows on both sides and all of a picture included."""
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")
    model = make(name)
    expected, served = outputs(model), set()

    def observer(op, backend):
        served.add((op, backend))
        return torch.no_grad()

    with tilegym.apply(model, by_hand=False, linear=True), observe_calls(observer):
        assert_near(outputs(model), expected, 5e-3 if HAS_GPU else 1e-5)
    assert {("fmha", "cutile"), ("linear", "cutile"), ("layer_norm", "cutile")} <= served
    assert HAS_GPU or not any(backend == "pytorch" for _, backend in served)


@pytest.mark.slow
@models
def test_verified_on_the_models_own_tensors(name):
    model = make(name)
    with tilegym.apply(model, use_cutile=False, by_hand=False, verify=True, linear=True) as report:
        patched = {entry.compute for entry in report.patched}
        assert patched >= MODELS[name][2] - ({"attn"} if name in ("t5", "pix2struct") else set())


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name, positions", [("bert", 10), ("roberta", 16), ("siglip, whole", 10), ("gpt2", 10)])
def test_models_of_few_positions(name, positions, verify):
    if name == "gpt2":
        kind, changes = "GPT2LMHeadModel", dict(vocab_size=61, n_embd=64, n_layer=2, n_head=4, n_positions=positions)
    else:
        kind, changes, _ = MODELS[name]
        text = _TEXT | dict(max_position_embeddings=positions)
        changes = changes | (dict(text_config=text) if "text_config" in changes else text)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**changes)).eval().to(device())
    expected = outputs(model)
    with tilegym.apply(model, use_cutile=False, verify=verify) as report:
        assert {"attn", "layer_norm"} <= {entry.compute for entry in report.patched}
        assert_near(outputs(model), expected)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_models_of_two_parts_generate_the_same(name):
    model = make(name)
    inputs = {n: t.to(model.device) for n, t in forward_inputs(model).items() if n != "decoder_input_ids"}
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    static = options | dict(cache_implementation="static", disable_compile=True)  # generate makes the masks itself
    expected = [model.generate(**inputs, **kind) for kind in (options, static)]
    with tilegym.apply(model, use_cutile=False) as report:
        for kind, tokens in zip((options, static), expected, strict=True):
            assert torch.equal(model.generate(**inputs, **kind), tokens)
    # Of T5, whose attention has a bias that is learned, transformers writes out the masks.
    places = {entry.module for entry in report.patched if entry.compute == "graph"}
    assert places == (set() if name == "t5" else {"model.encoder"})


@pytest.mark.parametrize("name", ["roberta", "vit", "stablelm"])
def test_a_training_step(name):
    model = make(name, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    inputs = {n: t.to(model.device) for n, t in forward_inputs(model, True).items()}
    labels = torch.tensor([1, 0], device=model.device)

    def gradients():
        model.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    assert len(expected) > 20
    with tilegym.apply(model, use_cutile=False, by_hand=False, linear=True):
        for got, wanted in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


# Some norms of Data2VecAudio have no weights: two places for one class.
@pytest.mark.parametrize("name", ["bert", "whisper", "convnext", "data2vec-audio"])
def test_twice_changes_nothing(name):
    model = make(name)
    first = tilegym.apply(model, use_cutile=False)
    assert "graph" in {entry.compute for entry in first.patched}
    assert len(first.patched) == len(set(first.patched)), "each module once"
    assert not tilegym.apply(model, use_cutile=False).patched
    first.revert()
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_a_patch_of_the_whole_process_serves_is_named_as_patched():
    process = monkey_patch.apply_tilegym_kernel_to_llama(use_cutile=False)
    try:
        config = transformers.LlamaConfig(**_TEXT | dict(num_key_value_heads=2))
        model = transformers.LlamaForCausalLM(config)
        with tilegym.apply(model, use_cutile=False, by_hand=False) as report:
            why = {entry.compute: entry.why for entry in report.skipped}
    finally:
        process.revert()
    assert why["rope"] == why["loss"] == ALREADY_PATCHED


@pytest.mark.parametrize("name", ["bert", "vit", "stablelm"])
def test_products_are_left_to_pytorch_unless_asked_for(name):
    model = make(name)
    for flags in ({}, {"linear": False}, {"linear": True}):
        with tilegym.apply(model, use_cutile=False, by_hand=False, **flags) as report:
            assert ("linear" in {entry.compute for entry in report.patched}) == flags.get("linear", False)
            assert any("linear=True puts it in" in entry.why for entry in report.skipped) == (not flags)
            assert model.config._attn_implementation == NAMES[None]


def test_products_of_rows_that_begin_anywhere_are_the_kernels(monkeypatch):
    """As of BERT's 30522 tokens: cuBLAS takes several times as long for those."""
    monkeypatch.setattr(apply_module, "LEAST", 1 << 10)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**_TEXT)).eval().to(device())
    expected = outputs(model)
    with tilegym.apply(model, use_cutile=False) as report:
        assert {e.module for e in report.patched if e.compute == "linear"} == {"cls.predictions.decoder"}
        assert any("linear=True puts it in" in entry.why for entry in report.skipped)
        assert_near(outputs(model), expected)
    with tilegym.apply(model, use_cutile=False, linear=False) as report:
        assert "linear" not in {entry.compute for entry in report.patched}
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("flags, why", [({}, ""), ({"graph": False}, None), ({"attn": False}, "not TileGym's")])
def test_whole_calls_are_replayed(flags, why):
    model = make("bert")
    with tilegym.apply(model, use_cutile=False, **flags) as report:
        patched = [entry.module for entry in report.patched if entry.compute == "graph"]
        skipped = [entry.why for entry in report.skipped if entry.compute == "graph"]
    assert patched == (["BertModel"] if why == "" else [])
    assert all(why in reason for reason in skipped) and len(skipped) == bool(why)


def test_attention_of_a_family_that_is_patched_by_hand_has_the_same_flag():
    model = make("qwen3")
    for attn in (True, False):
        with tilegym.apply(model, use_cutile=False, attn=attn) as report:
            assert ("attn" in {entry.compute for entry in report.patched}) == attn


def test_masks_of_encoders():
    """None where nothing is padded, else a mask of keys, which is as that which is written out."""
    padded = torch.ones(2, 5, dtype=torch.long)
    options = dict(batch_size=2, q_length=5, kv_length=5, mask_function=bidirectional_mask_function)
    assert causal_mask(**options, allow_is_bidirectional_skip=True) is None
    assert causal_mask(**options, attention_mask=padded, allow_is_bidirectional_skip=True) is None
    padded[1, :2] = 0
    mask = causal_mask(**options, attention_mask=padded, allow_is_bidirectional_skip=True)
    whole = causal_mask(**options, attention_mask=padded)
    assert mask.shape == (2, 1, 1, 5) and whole.shape == (2, 1, 5, 5) and mask.dtype == torch.bool
    assert torch.equal(mask.expand_as(whole), whole)
    longer = causal_mask(**options | dict(kv_length=7), attention_mask=padded, allow_is_bidirectional_skip=True)
    assert longer[1, 0, 0].tolist() == [False, False, True, True, True, False, False]


def test_an_attention_that_loses_the_padding_is_not_put_in(monkeypatch):
    functions = transformers.AttentionInterface._global_mapping
    ours = functions[NAMES[None]]
    monkeypatch.setitem(functions, NAMES[None], lambda m, q, k, v, mask, **how: ours(m, q, k, v, None, **how))
    model = make("bert")
    expected = outputs(model)
    with tilegym.apply(model, use_cutile=False) as report, use_backend("pytorch"):
        assert "attn" not in {entry.compute for entry in report.patched}
        assert any("gives something else (padded batch)" in entry.why for entry in report.skipped)
        assert_near(outputs(model), expected)


def test_the_attention_stays_where_the_model_fails_by_itself(monkeypatch):
    kind = transformers.BertModel
    real = kind.forward

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        if attention_mask is not None:
            raise AttributeError("its config lacks something")
        return real(self, input_ids, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    with tilegym.apply(make("bert"), use_cutile=False) as report:
        assert "layer_norm" in {entry.compute for entry in report.patched}
        assert "attn" not in {entry.compute for entry in report.patched}
    assert any("the model by itself fails: AttributeError: its config lacks" in entry.why for entry in report.skipped)


class _OfASession(transformers.BlipForConditionalGeneration):
    """As SAM 2 of videos, it is run with an object of its own."""

    def forward(self, pixel_values, session, **kwargs):
        return super().forward(pixel_values, **kwargs)


class _Unrunnable(transformers.BlipVisionModel):
    def forward(self, session):
        raise NotImplementedError


def test_what_cannot_be_run_is_refused():
    config = transformers.BlipConfig(text_config=_TEXT, vision_config=_IMAGE)
    model = _OfASession(config)
    model.other = _Unrunnable(config.vision_config)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ModelError) as refused:
        tilegym.apply(model, use_cutile=False)
    for part in (
        "no small model of type 'blip' can be made",
        "argument: 'session'",
        "give a part of it that is a model",
    ):
        assert part in str(refused.value)
    assert [dict(vars(module)) for module in model.modules()] == before
    named = str(refused.value).rpartition("by itself: ")[2].split(", ")
    assert named == ["model.vision_model", "model.text_decoder"], "what can be run, and nothing else"
    for path in named:
        with tilegym.apply(model.get_submodule(path.removeprefix("model.")), use_cutile=False) as report:
            assert "layer_norm" in {entry.compute for entry in report.patched}


def test_what_has_several_output_layers_is_refused_for_what_it_reads():
    config = dict(vocab_size=61, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(**config))
    with pytest.raises(ModelError, match="invalid for input of size"):
        tilegym.apply(model, use_cutile=False)


def test_a_classifier_without_a_token_for_padding():
    """It takes one text at a time."""
    config = transformers.GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=4, pad_token_id=None)
    model = transformers.GPT2ForSequenceClassification(config).eval().to(device())
    ids = torch.randint(3, 60, (1, 9), device=device())
    with torch.no_grad():
        expected = model(ids).logits
        with tilegym.apply(model, use_cutile=False) as report:
            assert {"attn", "layer_norm"} <= {entry.compute for entry in report.patched}
            assert_near(model(ids).logits, expected)
    assert model.config.pad_token_id is None


def test_a_part_that_returns_maps_of_features():
    config = transformers.Dinov2Config(**_IMAGE | dict(num_hidden_layers=4), out_indices=[2, 4])
    model = transformers.Dinov2Backbone(config).eval().to(device())
    pixels = forward_inputs(model)["pixel_values"].to(device())
    with torch.no_grad():
        expected = model(pixels).feature_maps
        with tilegym.apply(model, use_cutile=False) as report:
            assert "attn" in {entry.compute for entry in report.patched}
            assert_near(model(pixels).feature_maps, expected)


def test_what_reads_something_else_is_refused():
    model = make("vit")
    model.__class__ = type("Other", (type(model),), {"main_input_name": "spectrum"})
    with pytest.raises(ModelError, match="Other reads 'spectrum': give a model of tokens, images or sound"):
        forward_inputs(model)


def test_texts_for_models_that_look_for_their_end():
    """CLIP looks for the token that ends a text, or, in older configs, for the largest one; padding must not be it."""
    for end, last in ((2, 60), (49, 49)):
        model = make("clip", text_config=_TEXT | dict(eos_token_id=end))
        for padded in (False, True):
            ids = forward_inputs(model, padded)["input_ids"]
            assert (ids[:, -1] == last).all()


def test_any_compute_that_may_be_found_can_be_left_out():
    monkey_patch.require_known("apply", {*recipes.COMPUTES.values(), "attn", "use_attn"})
    with pytest.raises(FlagError, match="no family has rmsnorm; flags are attn, .*use_attn"):
        monkey_patch.require_known("apply", ["rmsnorm"])
