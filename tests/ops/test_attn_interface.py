import pytest
import torch
from common import PyTestCase
from common import backends
from test_attention import OPTIONS
from test_attention import tensors

from tilegym.backend import use_backend
from tilegym.ops import fmha
from tilegym.ops.attn_interface import fmha_interface
from tilegym.ops.attn_interface import get_fmha_interface
from tilegym.ops.pytorch.attention import fmha as reference


class Test_Interface(PyTestCase):
    @backends("fmha")
    @pytest.mark.parametrize("queries", [1, 17], ids=["decoding", "prefill"])
    @pytest.mark.parametrize("name", ["full", "scaling", "window", "soft cap", "sinks", "padding mask", "all"])
    def test_op(self, backend, queries, name):
        kwargs = tensors(2, 4, 2, queries, 50, 32, 32) | OPTIONS[name]
        expected = reference(**kwargs)
        torch.testing.assert_close(get_fmha_interface(backend)(**kwargs), expected)
        torch.testing.assert_close(get_fmha_interface()(**kwargs, backend=backend), expected)

    @pytest.mark.parametrize("options", [{}, {"soft_cap": 1.5}, {"window_size": 30}], ids=str)
    def test_dropout(self, options):
        kwargs = tensors(1, 2, 1, 64, 64, 16, 16) | options
        ones = kwargs | {"v": torch.ones_like(kwargs["v"])}
        with use_backend("cutile"):
            out = fmha_interface(**ones, dropout=0.5)
            assert torch.equal(fmha_interface(**kwargs, dropout=0.0), fmha(**kwargs))
        # Rows of weights sum to one; half of them are dropped, and the others doubled.
        assert not torch.allclose(out, torch.ones_like(out))
        assert abs(out.mean() - 1) < 0.2
        everything = fmha_interface(**kwargs, dropout=1.0)
        assert not everything.any()

    @pytest.mark.parametrize("queries", [1, 17], ids=["decoding", "prefill"])
    def test_autocast(self, queries):
        kwargs = tensors(2, 4, 2, queries, 50, 32, 32)
        mixed = kwargs | {"v": kwargs["v"].bfloat16()}
        with pytest.raises(TypeError, match="q, k and v must have one dtype"):
            fmha_interface(**mixed)
        expected = fmha_interface(**{name: t.bfloat16() for name, t in kwargs.items()})
        with torch.autocast(kwargs["q"].device.type, torch.bfloat16):
            assert torch.equal(fmha_interface(**mixed), expected)
            assert torch.equal(fmha_interface(**kwargs), expected)
