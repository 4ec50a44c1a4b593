import warnings

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import backends
from common import device
from common import randn
from common import recorded_launches
from eager_attention import additive_mask
from eager_attention import gemma
from eager_attention import gpt_oss
from test_attention import OPTIONS
from test_attention import tensors

from tilegym.backend import use_backend
from tilegym.errors import BackendError
from tilegym.ops import fmha
from tilegym.ops.attn_interface import attention_sink_interface
from tilegym.ops.attn_interface import fmha_interface
from tilegym.ops.attn_interface import gemma_attention_interface
from tilegym.ops.attn_interface import get_attention_sink_interface
from tilegym.ops.attn_interface import get_fmha_interface
from tilegym.ops.attn_interface import get_gemma_attention_interface
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

    def test_compiled_where_pytorch_serves_it(self):
        """As many queries as keys, so that SDPA's own causal mask serves; sizes stay open."""
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()

        def call(q, k, v):
            return fmha_interface(q, k, v, dropout=1e-12)

        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
        for tokens in (5, 9):
            kwargs = tensors(2, 4, 2, tokens, tokens, 16, 16)
            torch.testing.assert_close(compiled(**kwargs), call(**kwargs))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        torch.compiler.reset()

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

    @pytest.mark.parametrize("queries", [1, 6], ids=["decoding", "prefill"])
    def test_gradients(self, queries):
        """Also of a single query, which the decoding kernel would not differentiate, and without a fallback."""
        kwargs = tensors(2, 4, 2, queries, 50, 32, 32) | {"sinks": randn(4, seed=5)}
        with use_backend("cutile"), warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertCorrectness(fmha_interface, reference, kwargs, gradient=True)


def padding(lengths, keys):
    """Padding on the left, as boolean [B, 1, 1, Skv]."""
    first = keys - torch.tensor(lengths, device=device())
    return (torch.arange(keys, device=device()) >= first[:, None])[:, None, None]


QUERIES = pytest.mark.parametrize("queries", [1, 6, 30], ids=["decoding", "speculative", "prefill"])
MASKS = pytest.mark.parametrize("masked", [None, "padding", "additive"])


def masks(kind, queries, keys, window):
    """What TileGym is given for a kind of mask, and the mask that eager attention is given."""
    full = additive_mask(queries, keys, window)
    if kind is None:
        return {"window_size": window}, full
    keep = padding((keys, keys - 9), keys)
    written_out = full.masked_fill(~keep, torch.finfo(torch.float32).min)
    if kind == "padding":
        return {"window_size": window, "attention_mask": keep}, written_out
    return {"is_causal": False, "attention_mask": written_out}, written_out


def seen(queries, keys, kind):
    """Which rows see a key: the others are zeros here, and a mean of what is masked in eager attention."""
    position = torch.arange(queries, device=device()) + keys - queries
    return (position[None] >= (torch.tensor([0, 9], device=device())[:, None] if kind else 0))[:, None, :, None]


class Test_GptOss(PyTestCase):
    @backends("fmha")
    @QUERIES
    @MASKS
    @pytest.mark.parametrize("window", [None, 7])
    def test_as_transformers(self, backend, queries, masked, window):
        kwargs = tensors(2, 4, 2, queries, 30, 32, 32)
        sinks, scaling = randn(4, seed=5), 0.3
        options, mask = masks(masked, queries, 30, window)
        expected = gpt_oss(*kwargs.values(), sinks, scaling, mask)
        got = attention_sink_interface(**kwargs, sinks=sinks, scaling=scaling, **options, backend=backend)
        rows = seen(queries, 30, masked)
        torch.testing.assert_close(got * rows, expected * rows)
        assert torch.equal(
            get_attention_sink_interface(backend)(**kwargs, sinks=sinks, scaling=scaling, **options), got
        )

    @backends("fmha")
    @pytest.mark.parametrize("start_q", [4, torch.tensor([4], device=device()), torch.tensor([4, 20], device=device())])
    def test_position_of_the_first_query(self, backend, start_q):
        kwargs = tensors(2, 4, 2, 6, 30, 32, 32) | {"sinks": randn(4, seed=5), "window_size": 3}
        kv_len = torch.as_tensor(start_q, device=device()).expand(2).to(torch.int32) + 6
        keep = padding((30, 21), 30)
        for mask in (None, keep, torch.tensor(True, device=device())):
            got = attention_sink_interface(**kwargs, start_q=start_q, attention_mask=mask, backend=backend)
            torch.testing.assert_close(got, reference(**kwargs, kv_len=kv_len, attention_mask=mask))
        with pytest.raises(ValueError, match="kv_len or start_q"):
            attention_sink_interface(**kwargs, start_q=start_q, kv_len=kv_len, backend=backend)
        with pytest.raises(ValueError, match="attention_sink_interface: start_q is 25"):
            attention_sink_interface(**kwargs, start_q=25, backend=backend)

    @backends("fmha")
    @pytest.mark.skipif(HAS_GPU, reason="the order in which random numbers are drawn is the CPU's")
    def test_dropout_as_transformers(self, backend):
        kwargs, sinks = tensors(2, 4, 2, 30, 30, 32, 32), randn(4, seed=5)
        torch.manual_seed(3)
        expected = gpt_oss(*kwargs.values(), sinks, 0.3, additive_mask(30, 30, 7), dropout=0.4)
        torch.manual_seed(3)
        got = attention_sink_interface(**kwargs, sinks=sinks, scaling=0.3, window_size=7, dropout=0.4, backend=backend)
        torch.testing.assert_close(got, expected)

    @backends("fmha")
    def test_gradients(self, backend):
        kwargs = tensors(1, 4, 2, 6, 20, 32, 32) | {"sinks": randn(4, seed=5)}
        self.assertCorrectness(attention_sink_interface, reference, kwargs, {"backend": backend}, gradient=True)


class Test_Gemma(PyTestCase):
    @backends("fmha")
    @QUERIES
    @MASKS
    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize("family", ["gemma2", "gemma3"])
    def test_as_transformers(self, backend, family, queries, masked, window):
        kwargs = tensors(2, 4, 2, queries, 30, 32, 32)
        scaling, soft_cap = 0.3, 1.5 if family == "gemma2" else None
        options, mask = masks(masked, queries, 30, window)
        expected = gemma(*kwargs.values(), scaling, soft_cap, mask, family)
        options |= {"scaling": scaling, "soft_cap": soft_cap}
        got = gemma_attention_interface(**kwargs, **options, backend=backend)
        rows = seen(queries, 30, masked)
        torch.testing.assert_close(got * rows, expected * rows)
        assert torch.equal(get_gemma_attention_interface(backend)(**kwargs, **options), got)

    @backends("fmha")
    def test_lengths(self, backend):
        """A static cache: the last query stands at the last valid key."""
        kwargs = tensors(2, 4, 2, 6, 30, 32, 32)
        kv_len = torch.tensor([20, 20], dtype=torch.int32, device=device())
        got = gemma_attention_interface(
            **kwargs, scaling=0.3, soft_cap=1.5, window_size=7, kv_len=kv_len, backend=backend
        )
        filled = {name: t if name == "q" else t[:, :, :20] for name, t in kwargs.items()}
        torch.testing.assert_close(got, gemma(*filled.values(), 0.3, 1.5, additive_mask(6, 20, 7)))

    @backends("fmha")
    @pytest.mark.parametrize("soft_cap", [None, 1.5])
    @pytest.mark.skipif(HAS_GPU, reason="the order in which random numbers are drawn is the CPU's")
    def test_dropout_as_transformers(self, backend, soft_cap):
        kwargs = tensors(2, 4, 2, 30, 30, 32, 32)
        torch.manual_seed(3)
        expected = gemma(*kwargs.values(), 0.3, soft_cap, additive_mask(30, 30, 7), dropout=0.4)
        torch.manual_seed(3)
        options = dict(scaling=0.3, soft_cap=soft_cap, window_size=7, dropout=0.4)
        torch.testing.assert_close(gemma_attention_interface(**kwargs, **options, backend=backend), expected)

    @pytest.mark.parametrize("interface", [fmha_interface, gemma_attention_interface])
    def test_dropout_goes_to_pytorch(self, interface):
        kwargs = {name: t.cpu() for name, t in tensors(1, 4, 2, 6, 20, 32, 32).items()}
        with recorded_launches() as launches:
            interface(**kwargs, dropout=0.1, backend="cutile")
        assert not launches
        for dropout in (-0.1, 1.5):
            with pytest.raises(ValueError, match=f"fmha_interface: dropout is {dropout}; it must be between 0 and 1"):
                interface(**kwargs, dropout=dropout, backend="cutile")
        with pytest.raises(BackendError, match="no backend is called 'none'"):
            interface(**kwargs, dropout=0.1, backend="none")
