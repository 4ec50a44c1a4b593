"""The modules and functions with Hugging Face's interfaces against Hugging Face's own."""

import copy
import importlib

import pytest
import torch
from common import backends
from common import device
from common import randn

from tilegym.backend import use_backend
from tilegym.ops import get_apply_rope_func
from tilegym.ops import get_rms_norm_module
from tilegym.ops import get_swiglu
from tilegym.ops import get_swiglu_module
from tilegym.ops import swiglu


def hugging_face(model, name):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def tables(tokens, rotary, dtype):
    angles = (randn(1, tokens, rotary // 2) * 3).repeat(1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Test_RMSNormModule:
    @pytest.mark.parametrize(
        "model, name",
        [
            ("llama", "LlamaRMSNorm"),
            ("mistral", "MistralRMSNorm"),
            ("qwen2", "Qwen2RMSNorm"),
            ("qwen3", "Qwen3RMSNorm"),
            ("gemma", "GemmaRMSNorm"),
            ("gemma2", "Gemma2RMSNorm"),
            ("gemma3", "Gemma3RMSNorm"),
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_equals_the_models(self, model, name, dtype):
        theirs = hugging_face(model, name)(48, eps=1e-5).to(device())
        ours = get_rms_norm_module(model)(48, eps=1e-5).to(device())
        assert repr(ours).split("(", 1)[1] == repr(theirs).split("(", 1)[1]
        assert torch.equal(ours.weight, theirs.weight)
        with torch.no_grad():
            theirs.weight.add_(randn(48))
        ours.load_state_dict(theirs.state_dict())
        x = randn(2, 5, 48, dtype=dtype)
        for module in (ours, theirs):
            module.to(dtype)
        with use_backend("pytorch"):
            assert torch.equal(ours(x), theirs(x))
        with use_backend("cutile"):
            torch.testing.assert_close(ours(x), theirs(x))

    @backends("rms_norm")
    def test_weight_kept_in_fp32(self, backend):
        theirs, ours = hugging_face("llama", "LlamaRMSNorm")(48).to(device()), get_rms_norm_module()(48).to(device())
        x = randn(2, 5, 48, dtype=torch.bfloat16)
        with use_backend(backend):
            assert ours(x).dtype == theirs(x).dtype == torch.float32
            torch.testing.assert_close(ours(x), theirs(x), rtol=2**-7, atol=0)  # one rounding to bf16 within

    def test_unknown_model(self):
        with pytest.raises(ValueError, match="model is 'bert', supported are gemma, .*qwen3"):
            get_rms_norm_module("bert")


class Test_SwiGLUModule:
    @backends("swiglu")
    @pytest.mark.parametrize("bias", [False, True])
    def test_equals_the_models(self, backend, bias):
        config = hugging_face("llama", "LlamaConfig")(hidden_size=32, intermediate_size=80, mlp_bias=bias)
        theirs = hugging_face("llama", "LlamaMLP")(config).to(device())
        ours = get_swiglu_module()(config).to(device())
        ours.load_state_dict(theirs.state_dict())
        x = randn(2, 5, 32)
        with use_backend(backend):
            torch.testing.assert_close(ours(x), theirs(x))

    def test_other_activation(self):
        config = hugging_face("llama", "LlamaConfig")(hidden_act="gelu")
        with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
            get_swiglu_module()(config)

    def test_function(self):
        assert get_swiglu() is swiglu


class Test_ApplyRopeFunc:
    @backends("apply_rope_base")
    @pytest.mark.parametrize(
        "model, name, rotary",
        [
            ("llama", "apply_rotary_pos_emb", 32),
            ("mistral", "apply_rotary_pos_emb", 32),
            ("qwen2", "apply_rotary_pos_emb", 32),
            ("qwen3", "apply_rotary_pos_emb", 32),
            ("gemma2", "apply_rotary_pos_emb", 32),
            ("gemma3", "apply_rotary_pos_emb", 32),
            ("phi3", "apply_rotary_pos_emb", 24),
            ("glm", "apply_rotary_pos_emb", 16),
            ("glm4", "apply_rotary_pos_emb", 32),
            ("deepseek_v3", "apply_rotary_pos_emb_interleave", 32),
        ],
    )
    def test_equals_the_models(self, backend, model, name, rotary):
        ours, theirs = get_apply_rope_func(model), hugging_face(model, name)
        q, k = randn(2, 4, 7, 32), randn(2, 2, 7, 32, seed=1)
        cos, sin = tables(7, rotary, q.dtype)
        swapped = (q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        with use_backend(backend):
            for got, expected in zip(ours(q, k, cos, sin), theirs(q, k, cos, sin), strict=True):
                torch.testing.assert_close(got, expected)
            for got, expected in zip(ours(*swapped, unsqueeze_dim=2), theirs(*swapped, unsqueeze_dim=2), strict=True):
                torch.testing.assert_close(got, expected)

    @backends("apply_rope_base")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_complex(self, backend, dtype):
        ours, theirs = get_apply_rope_func("deepseek_v2"), hugging_face("deepseek_v2", "apply_rotary_emb")
        q, k = randn(2, 4, 7, 32, dtype=dtype), randn(2, 1, 7, 32, dtype=dtype, seed=1)
        freqs_cis = torch.polar(torch.ones(1, 7, 16, device=device()), randn(1, 7, 16))
        with use_backend(backend):
            for got, expected in zip(ours(q, k, freqs_cis), theirs(q, k, freqs_cis), strict=True):
                torch.testing.assert_close(got, expected)

    def test_gradients_pass_the_permutation(self):
        q, k = randn(1, 2, 3, 8), randn(1, 1, 3, 8, seed=1)
        cos, sin = tables(3, 8, q.dtype)
        gradients = []
        for function in (get_apply_rope_func("glm"), hugging_face("glm", "apply_rotary_pos_emb")):
            leaves = [copy.deepcopy(t).requires_grad_() for t in (q, k)]
            with use_backend("cutile"):
                outputs = function(*leaves, cos, sin)
            gradients.append(torch.autograd.grad(outputs, leaves, [o.detach().cos() for o in outputs]))
        torch.testing.assert_close(*gradients)

    def test_unknown_model(self):
        with pytest.raises(ValueError, match="model is 'gpt2', supported are deepseek_v2, .*qwen3"):
            get_apply_rope_func("gpt2")
