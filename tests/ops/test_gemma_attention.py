import math

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from eager_attention import additive_mask
from eager_attention import gemma

from tilegym.ops import gemma_attention
from tilegym.ops import gemma_attention_decode
from tilegym.ops.pytorch.gemma_attention import gemma_attention as reference
from tilegym.ops.pytorch.gemma_attention import gemma_attention_decode as decode_reference

# B, Hq, Hkv, Sq, Skv, D
SHAPES = [(2, 4, 2, 33, 33, 64), (1, 3, 1, 5, 71, 40), (1, 2, 2, 17, 17, 256)]
GPU_SHAPES = [(1, 8, 4, 1000, 1000, 256), (2, 8, 4, 64, 3000, 256)]
DECODE_SHAPES = [(2, 4, 2, 1, 150, 64), (1, 2, 1, 1, 70, 256), (2, 4, 2, 1, 1, 32)]
GPU_DECODE_SHAPES = [(1, 8, 4, 1, 8192, 256), (8, 16, 8, 1, 1000, 256)]


def tensors(batch, heads, kv_heads, queries, keys, head_dim, dtype=torch.float32):
    return dict(
        q=randn(batch, heads, queries, head_dim, dtype=dtype),
        k=randn(batch, kv_heads, keys, head_dim, dtype=dtype, seed=1),
        v=randn(batch, kv_heads, keys, head_dim, dtype=dtype, seed=2),
    )


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=device())


OPTIONS = {
    "none": {},
    "scaling": dict(scaling=0.7),
    "window": dict(window_size=9),
    "no window": dict(window_size=0),
    "soft cap": dict(soft_cap=1.5),
    "padding mask": dict(attention_mask=randn(2, 1, 1, 50, seed=3) > -0.5),
    "additive mask": dict(attention_mask=randn(1, 4, 1, 50, seed=3)),
    "lengths": dict(kv_len=lengths(50, 31)),
    "all": dict(
        scaling=0.7,
        window_size=20,
        soft_cap=1.5,
        attention_mask=randn(2, 1, 1, 50, seed=3) > -0.5,
        kv_len=lengths(31, 50),
    ),
}
PREFILL_OPTIONS = OPTIONS | {"full": dict(is_causal=False, soft_cap=1.5)}
# Gemma 2 caps its scores, Gemma 3 does not; both have layers with a window and a scaling of their own.
FAMILIES = {
    "gemma2": dict(scaling=0.6, soft_cap=1.5),
    "gemma2, local": dict(scaling=0.6, soft_cap=1.5, window_size=9),
    "gemma3": dict(scaling=0.6),
    "gemma3, local": dict(scaling=0.6, window_size=9),
}


def as_the_model(name, q, k, v, scaling, soft_cap=None, window_size=None):
    mask = additive_mask(q.shape[2], k.shape[2], window_size)
    return gemma(q, k, v, scaling, soft_cap, mask, name.split(",")[0])


class Test_GemmaAttention(PyTestCase):
    @backends("gemma_attention")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = tensors(*shape, dtype=dtype) | {"soft_cap": 5.0, "window_size": 12}
        gradient = dtype == torch.float32 and shape[-1] < 128
        self.assertCorrectness(gemma_attention, reference, kwargs, {"backend": backend}, gradient=gradient)

    @backends("gemma_attention")
    @pytest.mark.parametrize(
        "options", [*OPTIONS.values(), {"is_causal": False, "soft_cap": 1.5}], ids=[*OPTIONS, "full"]
    )
    def test_options(self, backend, options):
        kwargs = tensors(2, 4, 2, 6, 50, 32) | options
        self.assertCorrectness(gemma_attention, reference, kwargs, {"backend": backend})

    @backends("gemma_attention")
    @pytest.mark.parametrize("queries", [1, 6, 50])
    @pytest.mark.parametrize("name", FAMILIES)
    def test_as_gemma(self, backend, name, queries):
        kwargs = tensors(2, 4, 2, queries, 50, 32) | FAMILIES[name]
        torch.testing.assert_close(gemma_attention(**kwargs, backend=backend), as_the_model(name, **kwargs))

    @backends("gemma_attention")
    def test_bf16_is_no_worse_than_gemma(self, backend):
        kwargs = tensors(2, 4, 2, 6, 50, 64, dtype=torch.bfloat16) | FAMILIES["gemma2, local"]
        double = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        model = as_the_model("gemma2", **kwargs).bfloat16()
        got = gemma_attention(**kwargs, backend=backend)
        self.assertClose("output", got, model, as_the_model("gemma2", **double))

    @backends("gemma_attention")
    def test_rows_that_see_nothing(self, backend):
        kwargs = tensors(2, 4, 2, 6, 50, 32) | {"soft_cap": 1.5, "kv_len": lengths(0, 50)}
        with sanitized():
            out = gemma_attention(**kwargs, backend=backend)
        assert not out[0].any() and out[1].all()

    @backends("gemma_attention")
    def test_wrong_arguments(self, backend):
        kwargs = tensors(2, 4, 2, 6, 50, 32)
        with pytest.raises(ValueError, match="gemma_attention: soft_cap must be positive"):
            gemma_attention(**kwargs, soft_cap=0.0, backend=backend)
        with pytest.raises(ValueError, match="gemma_attention: window_size must be at least 1"):
            gemma_attention(**kwargs, window_size=-3, backend=backend)
        with pytest.raises(ValueError, match="gemma_attention: expected q"):
            gemma_attention(**kwargs | {"v": kwargs["v"][:, :1]}, backend=backend)
        with pytest.raises(TypeError, match="gemma_attention: q, k and v must have one dtype"):
            gemma_attention(**kwargs | {"q": kwargs["q"].half()}, backend=backend)

    def test_compiled(self):
        kwargs = tensors(2, 4, 2, 6, 50, 32)
        self.assertCompiledEqualsEager(
            lambda q, k, v: gemma_attention(q, k, v, 0.3, 9, 1.5, backend="cutile"), *kwargs.values()
        )

    @gpu
    def test_captures(self):
        kwargs = tensors(1, 8, 4, 512, 512, 256, dtype=torch.bfloat16)
        self.assertCaptures(lambda q, k, v: gemma_attention(q, k, v, 0.0625, 128, 50.0), *kwargs.values())


class Test_GemmaAttentionDecode(PyTestCase):
    @backends("gemma_attention_decode")
    @dtypes()
    @pytest.mark.parametrize("shape", DECODE_SHAPES + (GPU_DECODE_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = tensors(*shape, dtype=dtype) | {"soft_cap": 5.0}
        self.assertCorrectness(gemma_attention_decode, decode_reference, kwargs, {"backend": backend})

    @backends("gemma_attention_decode")
    @pytest.mark.parametrize("queries", [1, 3], ids=["one query", "speculative"])
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, backend, queries, options):
        kwargs = tensors(2, 4, 2, queries, 50, 32) | options
        self.assertCorrectness(gemma_attention_decode, decode_reference, kwargs, {"backend": backend})
        expected = gemma_attention(**kwargs, backend="pytorch")
        torch.testing.assert_close(gemma_attention_decode(**kwargs, backend=backend), expected)

    @backends("gemma_attention_decode")
    @pytest.mark.parametrize("queries", [1, 3], ids=["one query", "speculative"])
    @pytest.mark.parametrize("name", FAMILIES)
    def test_as_gemma(self, backend, name, queries):
        kwargs = tensors(2, 4, 2, queries, 50, 32) | FAMILIES[name]
        for per_split in (None, 7):
            got = gemma_attention_decode(**kwargs, kv_len_per_split=per_split, backend=backend)
            torch.testing.assert_close(got, as_the_model(name, **kwargs))

    def test_scaling_is_obeyed(self):
        """With equal keys the output is the mean of the values whatever the scaling; else it is not."""
        kwargs = tensors(1, 2, 1, 1, 40, 16)
        outs = [gemma_attention_decode(**kwargs, scaling=s, backend="cutile") for s in (0.01, 0.5, None, 0.25)]
        assert not torch.allclose(outs[0], outs[1], atol=1e-2)
        assert torch.equal(outs[2], outs[3])  # 1/sqrt(16)

    def test_kernels(self):
        """One query is split, several are a prefill."""
        for queries, kernel in ((1, "decode_rows_kernel"), (3, "attention_kernel")):
            kwargs = {k: v.cpu() for k, v in tensors(1, 4, 2, queries, 50, 32).items()}
            with recorded_launches() as launches:
                gemma_attention_decode(**kwargs, backend="cutile")
            assert launches[0][0]._pyfunc.__name__ == kernel

    @backends("gemma_attention_decode")
    def test_nan_spreads(self, backend):
        kwargs = tensors(1, 4, 2, 1, 50, 32) | {"soft_cap": 1.5}
        kwargs["k"][0, 1, 7, 3] = math.nan
        out = gemma_attention_decode(**kwargs, backend=backend)
        assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all()

    @backends("gemma_attention_decode")
    def test_wrong_arguments(self, backend):
        kwargs = tensors(2, 4, 2, 1, 50, 32)
        with pytest.raises(ValueError, match="gemma_attention_decode: soft_cap must be positive"):
            gemma_attention_decode(**kwargs, soft_cap=-1.0, backend=backend)
        with pytest.raises(ValueError, match="gemma_attention_decode: kv_len must be \\[2\\]"):
            gemma_attention_decode(**kwargs, kv_len=lengths(3), backend=backend)
        with pytest.raises(ValueError, match="gemma_attention_decode: kv_len_per_split must be at least 1"):
            gemma_attention_decode(**kwargs, kv_len_per_split=0, backend=backend)

    @backends("gemma_attention_decode")
    @pytest.mark.parametrize(("batch", "keys"), [(0, 4), (1, 0)])
    def test_empty(self, backend, batch, keys):
        out = gemma_attention_decode(**tensors(batch, 4, 2, 1, keys, 16), backend=backend)
        assert out.shape == (batch, 4, 1, 16) and not out.any()

    def test_compiles(self):
        kwargs = {k: v.cpu() for k, v in tensors(1, 8, 4, 1, 150, 256, dtype=torch.bfloat16).items()}
        assert_launches_compile(lambda: gemma_attention_decode(**kwargs, soft_cap=50.0, backend="cutile"), ("sm_90",))

    @gpu
    def test_graph_replays_with_new_inputs_and_lengths(self):
        kwargs = tensors(2, 8, 4, 1, 4096, 256, dtype=torch.bfloat16) | {"kv_len": lengths(4096, 20)}
        kwargs |= {"soft_cap": 50.0, "window_size": 1024, "scaling": 0.0625}
        gemma_attention_decode(**kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemma_attention_decode(**kwargs)
        for values in ((1, 1), (700, 4000)):
            kwargs["kv_len"].copy_(lengths(*values))
            kwargs["q"].copy_(randn(*kwargs["q"].shape, dtype=torch.bfloat16, seed=values[0]))
            graph.replay()
            torch.testing.assert_close(out, gemma_attention_decode(**kwargs), rtol=0, atol=0)
            torch.testing.assert_close(out, decode_reference(**kwargs), rtol=2e-2, atol=2e-2)
