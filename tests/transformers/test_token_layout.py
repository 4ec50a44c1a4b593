"""Hidden states out of a convolution are laid out by tokens, with the same results."""

import copy
import pickle

import pytest
import torch
import transformers
from common import device
from common import randn

import tilegym
from tilegym.transformers import token_layout

_SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
MODELS = {
    "SiglipVisionModel": ("encoder", dict(image_size=32, patch_size=8, **_SIZES)),
    "WhisperModel": (
        "encoder.layers.0",
        dict(
            d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16, vocab_size=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
    ),
    "ViTModel": (None, dict(image_size=32, patch_size=8, **_SIZES)),
}  # fmt: skip
models = pytest.mark.parametrize("name", MODELS)


def make(name):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**MODELS[name][1])).eval().to(device())


def inputs_of(name):
    if name == "WhisperModel":
        ids = torch.tensor([[1, 5, 7], [1, 9, 8]], device=device())
        return dict(input_features=randn(2, 8, 32), decoder_input_ids=ids)
    return dict(pixel_values=randn(2, 3, 32, 32))


def layers_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith(("EncoderLayer", "ViTLayer"))]


def run(model, inputs, gradient=False):
    """The last hidden states, and whether the layers' inputs had strided channels, but for the first one's: that may be
    where they are laid out."""
    strided = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: strided.append(args[0].stride(2) != 1))
        for layer in layers_of(model)[1:]
    ]
    with torch.set_grad_enabled(gradient):
        output = model(**inputs)
    for hook in hooks:
        hook.remove()
    assert strided
    return output[0], strided


@models
def test_layers_get_their_inputs_by_tokens(name):
    model, inputs, (where, _) = make(name), inputs_of(name), MODELS[name]
    expected, strided = run(model, inputs)
    assert all(strided) if where else not any(strided)
    with tilegym.apply(model, use_cutile=False) as report:
        assert [entry.module for entry in report.patched if entry.compute == "layout"] == ([where] if where else [])
        got, strided = run(model, inputs)
        assert not any(strided)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        for other in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
            assert not any(run(other, inputs)[1])
    again, strided = run(model, inputs)
    assert torch.equal(again, expected)
    assert all(strided) if where else not any(strided)
    with tilegym.apply(model, use_cutile=False, layout=False) as report:
        assert not [entry for entry in report.patched if entry.compute == "layout"]


@models
def test_gradients(name):
    model, inputs = make(name), inputs_of(name)

    def gradients():
        model.zero_grad()
        run(model, inputs, gradient=True)[0].square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with tilegym.apply(model, use_cutile=False):
        got = gradients()
    assert got.keys() == expected.keys()
    for n, gradient in expected.items():
        torch.testing.assert_close(got[n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item() + 1e-6)


def test_what_is_contiguous_or_no_hidden_states_is_handed_on():
    seen = []

    def forward(module, *args, **kwargs):
        seen.extend((*args, *kwargs.values()))

    x, image, ids = randn(2, 3, 4), randn(2, 3, 4, 4).transpose(1, 3), torch.ones(2, 3, 4, dtype=torch.int64).mT
    token_layout.by_tokens(forward)(None, x, image, ids=ids, nothing=None, strided=x.mT)
    assert seen[0] is x and seen[1] is image and seen[2] is ids and seen[3] is None
    assert seen[4].is_contiguous() and torch.equal(seen[4], x.mT)
