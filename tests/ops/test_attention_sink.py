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
from eager_attention import gpt_oss

from tilegym.ops import attention_sink
from tilegym.ops import attention_sink_decode
from tilegym.ops.pytorch.attention_sink import attention_sink as reference
from tilegym.ops.pytorch.attention_sink import attention_sink_decode as decode_reference

# B, Sq, Hkv, G, Skv, D
SHAPES = [(2, 33, 2, 4, 33, 64), (1, 5, 1, 3, 71, 20), (1, 70, 2, 1, 70, 16)]
GPU_SHAPES = [(1, 512, 8, 8, 512, 64), (2, 300, 8, 8, 4000, 64)]
DECODE_SHAPES = [(2, 1, 2, 4, 150, 64), (1, 1, 1, 20, 70, 16), (2, 1, 2, 3, 1, 32)]
GPU_DECODE_SHAPES = [(1, 1, 8, 8, 8192, 64), (8, 1, 8, 8, 1000, 64)]


def tensors(batch, queries, kv_heads, group, keys, head_dim, dtype=torch.float32):
    return dict(
        query=randn(batch, queries, kv_heads, group, head_dim, dtype=dtype),
        key=randn(batch, keys, kv_heads, head_dim, dtype=dtype, seed=1),
        value=randn(batch, keys, kv_heads, head_dim, dtype=dtype, seed=2),
        sinks=randn(kv_heads * group, dtype=dtype, seed=5),
    )


def positions(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device())


def as_the_model(query, key, value, sinks, sm_scale, sliding_window=None, start_q=None):
    """What gpt-oss in transformers computes, in attention_sink's layout."""
    q = query.flatten(2, 3).transpose(1, 2)
    mask = additive_mask(q.shape[2], key.shape[1], sliding_window, start_q)
    out = gpt_oss(q, key.transpose(1, 2), value.transpose(1, 2), sinks, sm_scale, mask)
    return out.transpose(1, 2).flatten(2)


OPTIONS = {
    "at the end": {},
    "scale": dict(sm_scale=0.5),
    "window": dict(sliding_window=9),
    "from the start": dict(start_q=0),
    "chunk": dict(start_q=20),
    "chunk, window": dict(start_q=20, sliding_window=7),
    "position on the device": dict(start_q=positions(13), sliding_window=7),
    "positions": dict(start_q=positions(3, 40, dtype=torch.int32), sm_scale=0.3),
}


class Test_AttentionSink(PyTestCase):
    @backends("attention_sink")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = tensors(*shape, dtype=dtype)
        self.assertCorrectness(attention_sink, reference, kwargs, {"backend": backend}, gradient=dtype == torch.float32)

    @backends("attention_sink")
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, backend, options):
        kwargs = tensors(2, 6, 2, 2, 50, 32) | options
        self.assertCorrectness(attention_sink, reference, kwargs, {"backend": backend})

    @backends("attention_sink")
    @pytest.mark.parametrize("queries", [1, 6, 50])
    @pytest.mark.parametrize("window", [None, 1, 9])
    def test_as_gpt_oss(self, backend, queries, window):
        kwargs = tensors(2, queries, 2, 2, 50, 32) | dict(sm_scale=0.3, sliding_window=window)
        torch.testing.assert_close(attention_sink(**kwargs, backend=backend), as_the_model(**kwargs))
        for start in (0, 44) if queries == 6 else ():
            expected = as_the_model(**kwargs, start_q=start)
            torch.testing.assert_close(attention_sink(**kwargs, start_q=start, backend=backend), expected)
            got = attention_sink(**kwargs, start_q=positions(start), backend=backend)
            torch.testing.assert_close(got, expected)

    @backends("attention_sink")
    def test_bf16_is_no_worse_than_gpt_oss(self, backend):
        kwargs = tensors(2, 6, 2, 2, 50, 64, dtype=torch.bfloat16) | dict(sm_scale=0.125, sliding_window=9)
        exact = as_the_model(**{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})
        self.assertClose("output", attention_sink(**kwargs, backend=backend), as_the_model(**kwargs).bfloat16(), exact)

    @backends("attention_sink")
    def test_chunks_are_the_whole(self, backend):
        kwargs = tensors(2, 40, 2, 2, 40, 32) | {"sliding_window": 13}
        whole = attention_sink(**kwargs, backend=backend)
        cuts = [(0, 17), (17, 18), (18, 40)]
        chunks = [
            attention_sink(**kwargs | {"query": kwargs["query"][:, a:b]}, start_q=a, backend=backend) for a, b in cuts
        ]
        torch.testing.assert_close(torch.cat(chunks, 1), whole)

    @backends("attention_sink")
    def test_layouts(self, backend):
        kwargs = tensors(2, 6, 2, 3, 50, 32)
        expected = attention_sink(**kwargs, backend=backend)
        flat = attention_sink(**kwargs | {"query": kwargs["query"].flatten(2, 3)}, backend=backend)
        assert torch.equal(flat, expected) and expected.shape == (2, 6, 6 * 32)
        strided = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in kwargs.items() if t.dim() > 2}
        assert torch.equal(attention_sink(**kwargs | strided, backend=backend), expected)

    @backends("attention_sink")
    def test_a_large_sink_takes_everything(self, backend):
        kwargs = tensors(1, 4, 1, 2, 30, 16)
        kwargs["sinks"][:] = torch.tensor([1e4, -math.inf])
        with sanitized():
            out = attention_sink(**kwargs, backend=backend).view(1, 4, 2, 16)
        assert not out[:, :, 0].any()
        torch.testing.assert_close(out, reference(**kwargs).view(1, 4, 2, 16))

    @backends("attention_sink")
    def test_wrong_arguments(self, backend):
        kwargs = tensors(2, 6, 2, 2, 50, 32)
        with pytest.raises(ValueError, match="attention_sink: expected query"):
            attention_sink(**kwargs | {"query": randn(2, 6, 4, 2, 32)}, backend=backend)
        with pytest.raises(ValueError, match="attention_sink: sinks must be \\[4\\]"):
            attention_sink(**kwargs | {"sinks": randn(2)}, backend=backend)
        for start in (-1, 45):
            with pytest.raises(ValueError, match=f"attention_sink: start_q is {start}, but 6 queries"):
                attention_sink(**kwargs, start_q=start, backend=backend)
        with pytest.raises(ValueError, match="attention_sink: start_q must be a number or integers"):
            attention_sink(**kwargs, start_q=positions(1, 2, 3), backend=backend)
        with pytest.raises(TypeError, match="attention_sink: sinks must be a tensor, it is None"):
            attention_sink(**kwargs | {"sinks": None}, backend=backend)
        with pytest.raises(TypeError, match="attention_sink: start_q must be .*, it is a list"):
            attention_sink(**kwargs, start_q=[0], backend=backend)
        with pytest.raises(ValueError, match="attention_sink: sliding_window"):
            attention_sink(**kwargs, sliding_window=0, backend=backend)
        with pytest.raises(TypeError, match="attention_sink: q, k and v must have one dtype"):
            attention_sink(**kwargs | {"query": kwargs["query"].half()}, backend=backend)

    @backends("attention_sink")
    @pytest.mark.parametrize(("batch", "queries"), [(0, 4), (1, 0)])
    def test_empty(self, backend, batch, queries):
        assert attention_sink(**tensors(batch, queries, 2, 2, 4, 16), backend=backend).shape == (batch, queries, 64)

    def test_compiled(self):
        kwargs = tensors(2, 6, 2, 2, 50, 32)
        start = positions(13)
        self.assertCompiledEqualsEager(
            lambda q, k, v, s: attention_sink(q, k, v, s, 0.3, 9, start, backend="cutile"), *kwargs.values()
        )

    @gpu
    def test_graph_replays_at_another_position(self):
        kwargs = tensors(1, 64, 8, 8, 1024, 64, dtype=torch.bfloat16) | {"start_q": positions(100)}
        attention_sink(**kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention_sink(**kwargs)
        for start in (0, 960):
            kwargs["start_q"].fill_(start)
            graph.replay()
            torch.testing.assert_close(out, attention_sink(**kwargs), rtol=0, atol=0)


class Test_AttentionSinkDecode(PyTestCase):
    @backends("attention_sink_decode")
    @dtypes()
    @pytest.mark.parametrize("shape", DECODE_SHAPES + (GPU_DECODE_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = tensors(*shape, dtype=dtype)
        self.assertCorrectness(attention_sink_decode, decode_reference, kwargs, {"backend": backend})

    @backends("attention_sink_decode")
    @pytest.mark.parametrize("queries", [1, 3], ids=["one query", "speculative"])
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, backend, queries, options):
        kwargs = tensors(2, queries, 2, 2, 50, 32) | options
        self.assertCorrectness(attention_sink_decode, decode_reference, kwargs, {"backend": backend})
        expected = attention_sink(**kwargs, backend="pytorch")
        torch.testing.assert_close(attention_sink_decode(**kwargs, backend=backend), expected)

    @backends("attention_sink_decode")
    @pytest.mark.parametrize("queries", [1, 3], ids=["one query", "speculative"])
    def test_as_gpt_oss(self, backend, queries):
        kwargs = tensors(2, queries, 2, 2, 50, 32) | dict(sm_scale=0.3, sliding_window=9)
        for per_split in (None, 7):
            got = attention_sink_decode(**kwargs, kv_len_per_split=per_split, backend=backend)
            torch.testing.assert_close(got, as_the_model(**kwargs))

    def test_kernels(self):
        """One query is split, several are a prefill."""
        for queries, kernel in ((1, "decode_rows_kernel"), (3, "attention_kernel")):
            kwargs = {k: v.cpu() for k, v in tensors(1, queries, 2, 2, 50, 32).items()}
            with recorded_launches() as launches:
                attention_sink_decode(**kwargs, backend="cutile")
            assert launches[0][0]._pyfunc.__name__ == kernel

    @backends("attention_sink_decode")
    def test_wrong_arguments(self, backend):
        kwargs = tensors(2, 1, 2, 2, 50, 32)
        with pytest.raises(ValueError, match="attention_sink_decode: sinks must be \\[4\\]"):
            attention_sink_decode(**kwargs | {"sinks": randn(2)}, backend=backend)
        with pytest.raises(ValueError, match="attention_sink_decode: start_q is 50"):
            attention_sink_decode(**kwargs, start_q=50, backend=backend)
        with pytest.raises(ValueError, match="attention_sink_decode: kv_len_per_split"):
            attention_sink_decode(**kwargs, kv_len_per_split=0, backend=backend)

    @backends("attention_sink_decode")
    def test_empty(self, backend):
        assert attention_sink_decode(**tensors(0, 1, 2, 2, 4, 16), backend=backend).shape == (0, 1, 64)

    def test_compiles(self):
        kwargs = tensors(1, 1, 8, 8, 150, 64, dtype=torch.bfloat16) | {"start_q": positions(99)}
        kwargs = {k: v.cpu() for k, v in kwargs.items()} | {"sliding_window": 128}
        assert_launches_compile(lambda: attention_sink_decode(**kwargs, backend="cutile"), ("sm_90",))

    @gpu
    def test_graph_replays_at_another_position(self):
        kwargs = tensors(1, 1, 8, 8, 4096, 64, dtype=torch.bfloat16) | {"start_q": positions(100)}
        attention_sink_decode(**kwargs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention_sink_decode(**kwargs)
        for start in (0, 4095):
            kwargs["start_q"].fill_(start)
            graph.replay()
            torch.testing.assert_close(out, attention_sink_decode(**kwargs), rtol=0, atol=0)
