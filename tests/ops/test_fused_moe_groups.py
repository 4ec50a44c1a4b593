"""``fused_moe`` of the PyTorch backend, of all experts in one call."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common import HAS_GPU
from common import PyTestCase
from common import randn
from test_fused_moe import LAYOUTS
from test_fused_moe import arguments
from torch.testing._internal.two_tensor import TwoTensor

from tilegym.ops.pytorch import moe_experts as pytorch_experts
from tilegym.ops.pytorch.moe_experts import fused_moe as reference


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="PyTorch has no grouped_mm before 2.10")
class Test_Groups(PyTestCase):
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_equals_the_loop(self, layout, monkeypatch):
        """As in fp32 on a GPU."""

        def grouped(**kwargs):
            with monkeypatch.context() as patch, mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as called:
                patch.setattr(pytorch_experts, "_are_groups", lambda *_: True)
                out = reference(**kwargs)
            assert called.call_count == 2 + (kwargs.get("w1_up") is not None)
            return out

        for size in ((3, 2, 5, 48, 24), (40, 3, 7, 32, 16)):
            kwargs = arguments(size, torch.float32, **LAYOUTS[layout])
            self.assertCorrectness(grouped, reference, kwargs, gradient=True)
            kwargs["topk_ids"][1] = torch.tensor([5, -1, 99][: size[1]])
            kwargs["topk_ids"][2] = size[2]
            kwargs["shared_output"] = randn(size[0], size[3], seed=9)
            self.assertCorrectness(grouped, reference, kwargs, gradient=True)
            self.assertCorrectness(grouped, reference, kwargs, gradient=("topk_weights",))
            kwargs["topk_ids"][2] = -1
            kwargs["hidden_states"][2] = kwargs["topk_weights"][1:3][kwargs["topk_ids"][1:3] == -1] = math.nan
            self.assertCorrectness(grouped, reference, kwargs, gradient=True)

    @pytest.mark.skipif(HAS_GPU, reason="is about tensors that are not on a GPU")
    def test_for_fp32_on_a_gpu_only(self, monkeypatch):
        kwargs = arguments((3, 2, 5, 48, 24), torch.float32)
        given = [kwargs[name] for name in ("hidden_states", "w1", "w2")]
        assert not pytorch_experts._are_groups(*given)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        assert pytorch_experts._are_groups(*given)
        assert not pytorch_experts._are_groups(*given, torch.empty(3, 0)), "no expert is chosen"
        for name, other in (
            ("hidden_states", "bfloat16"),
            ("w1", "mT"),
            ("w1", "odd"),
            ("w2", "parts"),
            ("w2", "behind 4 bytes"),
        ):
            changed = dict(zip(("hidden_states", "w1", "w2"), given, strict=True))
            t = changed[name]
            parts = TwoTensor(t, t)  # as a DTensor has several processes'
            others = {"bfloat16": t.bfloat16(), "mT": t.mT, "odd": t[..., :47], "parts": parts}
            changed[name] = others.get(other, torch.empty(t.numel() + 1)[1:].view(t.shape))
            assert not pytorch_experts._are_groups(*changed.values()), other
