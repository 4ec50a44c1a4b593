"""The softmax of attention relative to the first tile's maximum: see attend_all."""

import math

import pytest
import torch
from common import PyTestCase
from common import device
from common import gpu
from common import randn
from common import recorded_launches

from tilegym.backend.cutile.tuning_key import parameter_names
from tilegym.ops import fmha
from tilegym.ops import fmha_varlen
from tilegym.ops.cutile.attention import _configs
from tilegym.ops.cutile.attention import _suits
from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_tiles import may_keep_first_maximum
from tilegym.ops.cutile.attention_varlen import choose_tiles
from tilegym.ops.pytorch.attention import fmha as reference
from tilegym.ops.pytorch.attention_varlen import fmha_varlen as reference_varlen

BF16 = torch.bfloat16
KEYS = 600  # several tiles, of a GPU's kernels too


def tensors(first: float, later: float, at: int = 500, head_dim: int = 64):
    """One text, whose scores are about ``first``, and from key ``at`` on about ``later``."""
    q, k, v = (randn(1, heads, KEYS, head_dim, dtype=BF16, seed=heads) for heads in (4, 2, 1))
    v = v.expand(1, 2, KEYS, head_dim).contiguous()
    q[..., 0], k[..., 0] = 8.0, first * head_dim**0.5 / 8
    k[:, :, at:, 0] = later * head_dim**0.5 / 8
    return dict(q=q, k=k, v=v)


def launched(kwargs, function=fmha):
    with recorded_launches() as launches:
        function(**{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in kwargs.items()}, backend="cutile")
    kernel, args = launches[0]
    return dict(zip(parameter_names(kernel), args, strict=True))


class Test_FirstMaximum(PyTestCase):
    # e^88 is beyond fp32, and so beyond what a later tile may add to the sums of the first.
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("first, later", [(0, 60), (0, 95), (-90, 90), (0, 3000), (90, -90), (-500, -500)], ids=str)
    @pytest.mark.parametrize("head_dim", [64, 96])
    def test_scores_that_rise(self, head_dim, first, later, is_causal):
        kwargs = dict(**tensors(first, later, head_dim=head_dim), is_causal=is_causal)
        assert launched(kwargs)["FIXED"]
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_sums_of_large_values(self):
        kwargs = tensors(0, 80)
        kwargs["v"] *= 1e6  # the probabilities alone stay finite
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("sink", [-math.inf, -200.0, 0.0, 200.0])
    def test_sinks(self, sink):
        sinks = torch.full((4,), sink, device=device())
        for later in (0, 120):
            kwargs = dict(**tensors(0, later), sinks=sinks)
            assert launched(kwargs)["FIXED"]
            self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("name, value", [("k", math.inf), ("k", -math.inf), ("k", math.nan), ("v", math.nan)])
    @pytest.mark.parametrize("at", [0, 550])
    def test_numbers_that_are_not_finite(self, at, name, value):
        kwargs = tensors(0, 0)
        kwargs[name][:, 0, at, 3] = value
        q, k, v = (t.float() for t in kwargs.values())
        # What products of PyTorch make of infinities depends on the CPU.
        weights = (q.unflatten(1, (2, 2)) @ k.mT[:, :, None] * q.shape[-1] ** -0.5).softmax(-1)
        expected = (weights @ v[:, :, None]).flatten(1, 2).to(BF16)
        got = fmha(**kwargs, is_causal=False, backend="cutile")
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2, equal_nan=True)

    # Queries that see none of the first tile's keys, and some that see no key.
    @pytest.mark.parametrize("later", [0, 95])
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("padding", ["left", "right", "both", "everything", "holes"])
    def test_padding(self, padding, is_causal, later):
        mask = torch.zeros(1, 1, 1, KEYS, dtype=torch.bool, device=device())
        begin, end = {"left": (333, KEYS), "right": (0, 333), "both": (100, 580)}.get(padding, (0, 0))
        mask[..., begin:end] = True
        if padding == "holes":
            mask = randn(1, 1, 1, KEYS, seed=3) > 0.5
        kwargs = dict(**tensors(0, later), is_causal=is_causal, attention_mask=mask)
        assert launched(kwargs)["FIXED"]
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("keys", [1, 64, 65, 597])
    def test_lengths(self, keys):
        kv_len = torch.tensor([keys], dtype=torch.int32, device=device())
        kwargs = dict(**tensors(0, 95, at=70), kv_len=kv_len)
        kwargs["q"] = kwargs["q"][:, :, :40]
        assert launched(kwargs)["FIXED"]
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("later", [0, 95])
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    def test_packed(self, is_causal, later):
        given = {name: t[0].transpose(0, 1).contiguous() for name, t in tensors(0, later, at=580).items()}
        starts = torch.tensor([0, 30, 30, 590, KEYS], dtype=torch.int32, device=device())
        kwargs = dict(**given, cu_seqlens_q=starts, cu_seqlens_k=starts, is_causal=is_causal)
        assert launched(kwargs, fmha_varlen)["FIXED"]
        self.assertCorrectness(fmha_varlen, reference_varlen, kwargs, {"backend": "cutile"})

    @gpu
    def test_is_taken_on_this_gpu(self):
        if torch.cuda.get_device_capability()[0] == 9:
            assert _configs("sm_90", 64)[0].FIXED
            assert choose_tiles(2, 64, False, torch.cuda.current_device())[4]


@pytest.mark.parametrize("tile_d", [32, 64, 80, 96, 160])
def test_for_which_calls_it_is_tried(tile_d):
    def tried(keys=512, dtype=BF16, mask=NO_MASK, windowed=False):
        q, k = torch.empty(1, 1, 512, tile_d, dtype=dtype), torch.empty(1, 1, keys, tile_d, dtype=dtype)
        fixed = [vars(c).get("FIXED") for c in _configs("sm_90", tile_d) if _suits(q, k, windowed, mask, c)]
        assert False in fixed or None in fixed
        return True in fixed

    assert may_keep_first_maximum(BF16, 512, NO_MASK, False, 0)
    assert not may_keep_first_maximum(BF16, 511, NO_MASK, False, 0)
    assert [tried(keys) for keys in (32, 33)] == [False, True]  # in the interpreter
    assert [tried(mask=mask) for mask in (KEY_MASK, BOOLEAN_MASK, ADDITIVE_MASK)] == [True, False, False]
    assert [tried(dtype=dtype) for dtype in (torch.float16, torch.float32)] == [False, False]
    assert not tried(windowed=True)


@pytest.mark.parametrize(
    "arch, tile_d", [("sm_90", 128), ("sm_90", 256), ("sm_80", 64), ("sm_100", 64), ("sm_120", 64)]
)
def test_where_it_is_never_tried(arch, tile_d):
    assert not any(vars(config).get("FIXED") for config in _configs(arch, tile_d))
