"""Attention of images that lie one behind the other, against transformers' own, which takes them one by one."""

import contextlib
import copy

import pytest
import torch
from common import device
from common import randn
from tiny_models import assert_close
from transformers import Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers import SiglipVisionConfig
from transformers import SiglipVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention

from tilegym.backend import PREFER_CUTILE
from tilegym.backend import observe_calls
from tilegym.transformers.attention import NAMES
from tilegym.transformers.attention import NAMES_OF_PACKED
from tilegym.transformers.attention import name_for
from tilegym.transformers.packed_attention import attends_packed

LENGTHS = [5, 16, 1, 12]


def make(name, head_dim=16):
    config = Qwen2_5_VLVisionConfig(hidden_size=2 * head_dim, num_heads=2)
    config._attn_implementation_internal = name
    torch.manual_seed(0)
    return Qwen2_5_VLVisionAttention(config).to(device())


def call(module, lengths=LENGTHS, gradient=False):
    tokens, head_dim = sum(lengths), module.head_dim
    x = randn(tokens, 2 * head_dim).requires_grad_(gradient)
    starts = torch.tensor([0, *lengths], device=device()).cumsum(0, dtype=torch.int32)
    angles = randn(tokens, head_dim, seed=1)
    output = module(x, starts, position_embeddings=(angles.cos(), angles.sin()))
    if gradient:
        output.square().sum().backward()
        return output.detach(), x.grad
    return output


@contextlib.contextmanager
def served():
    calls = []

    def observer(op, backend):
        calls.append((op, backend))
        return contextlib.nullcontext()

    with observe_calls(observer):
        yield calls


@pytest.mark.parametrize("backend", [None, PREFER_CUTILE])
@pytest.mark.parametrize("head_dim", [16, 20])
def test_the_same_as_one_by_one(backend, head_dim):
    with torch.no_grad():
        expected = call(make("eager", head_dim))
        with served() as calls:
            got = call(make(NAMES_OF_PACKED[backend], head_dim))
    assert_close(got, expected, "cutile")
    assert [op for op, _ in calls] == (["fmha_varlen"] if backend else ["fmha", "fmha", "fmha_decode", "fmha"])


def test_one_image_goes_to_attention_as_others_know_it():
    with torch.no_grad(), served() as calls:
        got = call(make(NAMES_OF_PACKED[PREFER_CUTILE]), [24])
        assert [op for op, _ in calls] == ["fmha"]
        assert_close(got, call(make("eager"), [24]), "cutile")


@pytest.mark.parametrize("backend", [None, PREFER_CUTILE])
def test_gradients(backend):
    modules = [make(name) for name in ("eager", NAMES_OF_PACKED[backend])]
    expected, got = (call(module, gradient=True) for module in modules)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, "cutile")
    assert_close(modules[1].qkv.weight.grad, modules[0].qkv.weight.grad, "cutile")


def test_dropout_is_applied():
    module = make(NAMES_OF_PACKED[PREFER_CUTILE])
    module.attention_dropout = 0.5
    with torch.no_grad():
        assert torch.equal(call(module.eval()), call(module))
        module.train()
        assert not torch.equal(call(module), call(module))


def test_it_is_chosen_where_all_of_a_model_is_so():
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    text = dict(model_type="qwen2_5_vl_text", num_key_value_heads=1, vocab_size=64, **sizes)
    text["rope_parameters"] = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
    vision = dict(model_type="qwen2_5_vl_vision", depth=1, hidden_size=32, num_heads=2, intermediate_size=32)
    whole = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    part = whole.model.visual
    assert attends_packed(part) and attends_packed(copy.deepcopy(part))
    assert not attends_packed(whole) and not attends_packed(whole.model.language_model)
    siglip = SiglipVisionModel(SiglipVisionConfig(image_size=32, patch_size=16, **sizes))
    for backend, name in NAMES.items():
        assert name_for(siglip, backend) == name_for(whole, backend) == name
        assert name_for(part, backend) == f"{name}_flash"
