"""The backward pass of ``fmha`` by one launch, where queries and keys are few."""

import pytest
import torch
from common import PyTestCase
from common import assert_launches_compile
from test_attention import OPTIONS
from test_attention import SHAPES
from test_attention import tensors
from test_attention_backward import QKV
from test_attention_backward import gradients
from test_attention_backward import with_sinks_of
from test_attention_backward_fused import backward_kernels
from test_mla import SHAPES as LATENT_SHAPES
from test_mla import tensors as latent_tensors

from tilegym.ops import fmha
from tilegym.ops import mla
from tilegym.ops.cutile import attention_backward
from tilegym.ops.cutile.attention_backward_rows import sum_heads_kernel
from tilegym.ops.cutile.attention_backward_short import attention_short_backward_kernel
from tilegym.ops.pytorch.attention import fmha as reference


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    monkeypatch.setattr(attention_backward, "_is_hopper", lambda device: True)


def is_short(kernels):
    rest = kernels[1:]
    return kernels[0]._pyfunc is attention_short_backward_kernel._pyfunc and (not rest or rest == [sum_heads_kernel])


class Test_FMHA_Short_Backward(PyTestCase):
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("shape", [*SHAPES[:3], (1, 2, 1, 16, 16, 192, 192)], ids=str)
    def test_op(self, dtype, is_causal, shape):
        kwargs = tensors(*shape, dtype=dtype) | {"is_causal": is_causal}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
        kernels = backward_kernels(kwargs)
        assert is_short(kernels) and (len(kernels) == 2) == (shape[1] > 4 * shape[2])

    @pytest.mark.parametrize("name", ["scaling", "window", "window, not causal", "soft cap", "soft cap, full"])
    def test_options(self, name):
        kwargs = tensors(*SHAPES[1], dtype=torch.bfloat16) | OPTIONS[name]
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
        assert is_short(backward_kernels(kwargs))

    @pytest.mark.parametrize("name", ["padding mask", "additive mask", "sinks", "lengths"])
    def test_leaves_to_two_kernels(self, name):
        kwargs = tensors(*SHAPES[1], dtype=torch.bfloat16) | with_sinks_of(torch.bfloat16, OPTIONS[name])
        assert not is_short(backward_kernels(kwargs, (*QKV, "sinks") if name == "sinks" else QKV))

    @pytest.mark.parametrize("lengths", [(65, 16), (16, 65)])
    def test_leaves_what_is_longer(self, lengths):
        assert not is_short(backward_kernels(tensors(1, 2, 1, *lengths, 16, 16, dtype=torch.bfloat16)))

    def test_leaves_fp32(self):
        assert not is_short(backward_kernels(tensors(*SHAPES[1])))

    def test_what_is_behind_the_last_key_does_not_count(self):
        """Scores so low that a key of zeros, as the tile has behind the last one, would have an infinite P."""
        kwargs = tensors(1, 2, 1, 40, 50, 16, 16, dtype=torch.bfloat16) | {"is_causal": False, "scaling": 1.0}
        kwargs["q"], kwargs["k"] = kwargs["q"] * 0.1 + 8, kwargs["k"] * 0.1 - 8
        assert all(gradient.isfinite().all() for gradient in gradients(kwargs, backend="cutile"))
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    def test_leaves_latent_attention(self):
        kwargs = latent_tensors(*LATENT_SHAPES[0], dtype=torch.bfloat16)
        assert not is_short(backward_kernels(kwargs, (*QKV, "qpe", "kpe"), mla))

    @pytest.mark.parametrize("head_dim", [64, 256])
    def test_compiles(self, head_dim):
        kwargs = {k: t.cpu() for k, t in tensors(1, 4, 2, 16, 16, head_dim, head_dim, dtype=torch.bfloat16).items()}
        assert_launches_compile(lambda: gradients(kwargs, backend="cutile"), ("sm_90",))
