import functools

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
from common import sanitized
from common import some

from tilegym.backend import dispatcher
from tilegym.errors import FallbackWarning
from tilegym.ops import fmha
from tilegym.ops import fmha_varlen
from tilegym.ops.cutile import attention_varlen
from tilegym.ops.cutile import decode_varlen
from tilegym.ops.cutile.attention_varlen import choose_tiles
from tilegym.ops.cutile.attention_varlen import varlen_forward
from tilegym.ops.cutile.decode_varlen import decode_packed
from tilegym.ops.pytorch import attention_varlen as pytorch_module
from tilegym.ops.pytorch.attention_varlen import fmha_varlen as reference

# Queries and keys of each sequence: a prompt, tokens to decode, nothing, chunks, more queries than keys.
MIXED = ((13, 13), (1, 50), (1, 1), (0, 0), (34, 70), (0, 5), (6, 4))
TOKENS = ((1, 50), (1, 1), (0, 0), (1, 150), (1, 0), (0, 7))
# sequences, Hq, Hkv, D, Dv
SHAPES = [
    (MIXED, 8, 2, 80, 80),
    (MIXED, 2, 2, 32, 16),
    (MIXED[2:3], 3, 1, 16, 16),
    (((40, 40),) * 3, 20, 1, 16, 32),
    (TOKENS, 8, 2, 80, 80),
    (((30, 90), (1, 400), (1, 3), (0, 9), (1, 0), (5, 5)), 8, 2, 32, 32),
]
GPU_SHAPES = [
    (((1024, 1024), (1, 4000), (300, 2300), *((1, n) for n in range(1, 60))), 32, 8, 128, 128),
    (((700, 900), (1, 33)), 16, 2, 256, 256),
    (((129, 129), (5, 600)), 71, 1, 64, 64),
]


def starts(lengths, dtype=torch.int32):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype, device=device())


def tensors(sequences, heads, kv_heads, head_dim, v_dim, dtype=torch.float32, behind=(0, 0)):
    """Arguments, with that many queries and keys ``behind`` all sequences; queries and keys as models have them."""
    queries, keys = zip(*sequences, strict=True)
    total_q, total_k = sum(queries) + behind[0], sum(keys) + behind[1]
    return dict(
        q=randn(heads, total_q, head_dim, dtype=dtype).transpose(0, 1),
        k=randn(total_k, kv_heads, head_dim, dtype=dtype, seed=1),
        v=randn(total_k, kv_heads, v_dim, dtype=dtype, seed=2),
        cu_seqlens_q=starts(queries),
        cu_seqlens_k=starts(keys),
    )


OPTIONS = {
    "scale": dict(scaling=0.6),
    "not causal": dict(is_causal=False),
    "window": dict(window_size=9),
    "window of one": dict(window_size=1),
    "window beyond 32 bits": dict(window_size=2**40),
    "soft cap": dict(soft_cap=1.5),
    "sinks": dict(sinks=randn(8, seed=5)),
    "all": dict(scaling=0.3, window_size=21, soft_cap=2.0, sinks=randn(8, seed=5)),
    "not causal, all": dict(is_causal=False, window_size=21, soft_cap=2.0, sinks=randn(8, seed=5)),
}


class Test_FmhaVarlen(PyTestCase):
    @backends("fmha_varlen")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=lambda shape: str(shape[1:]))
    def test_op(self, backend, dtype, shape):
        self.assertCorrectness(fmha_varlen, reference, tensors(*shape, dtype=dtype), {"backend": backend})

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, dtype, options):
        kwargs = tensors(*SHAPES[0], dtype=dtype, behind=(3, 20)) | options
        self.assertCorrectness(fmha_varlen, reference, kwargs, {"backend": "cutile"})

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["none", *OPTIONS])
    def test_single_tokens(self, dtype, options):
        """By another kernel, whatever is said of the longest keys."""
        kwargs = tensors(*SHAPES[4], dtype=dtype, behind=(3, 20)) | options
        self.assertCorrectness(fmha_varlen, reference, kwargs, {"backend": "cutile", "max_seqlen_q": 1})
        most = {"max_seqlen_q": 1, "max_seqlen_k": 150}
        self.assertCorrectness(fmha_varlen, reference, kwargs, {"backend": "cutile", **most})

    @backends("fmha_varlen")
    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    def test_each_sequence_is_one_of_fmha(self, backend, max_seqlen_q):
        sequences = TOKENS if max_seqlen_q else MIXED
        kwargs = tensors(sequences, 8, 2, 80, 80, behind=(2, 3))
        options = dict(scaling=0.2, window_size=30, soft_cap=2.0, sinks=randn(8, seed=5))
        out = fmha_varlen(**kwargs, **options, max_seqlen_q=max_seqlen_q, backend=backend)
        q, k, v = (kwargs[name].transpose(0, 1)[None] for name in "qkv")
        first_q = first_k = 0
        for queries, keys in sequences:
            of_q, of_k = slice(first_q, first_q + queries), slice(first_k, first_k + keys)
            alone = fmha(q[:, :, of_q], k[:, :, of_k], v[:, :, of_k], **options, backend="pytorch")
            torch.testing.assert_close(out[of_q], alone[0].transpose(0, 1), rtol=1e-4, atol=1e-4)
            first_q, first_k = first_q + queries, first_k + keys
        assert out.shape[0] == first_q + 2 and not out[first_q:].any()

    @backends("fmha_varlen")
    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    def test_what_lies_elsewhere_does_not_matter(self, backend, max_seqlen_q):
        """Keys of other sequences and behind all of them, queries behind all of them."""
        sequences = TOKENS if max_seqlen_q else MIXED
        kwargs = tensors(sequences, 8, 2, 32, 32, behind=(2, 30))
        queries, keys = (kwargs[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        expected = reference(**kwargs)
        for name in "kv":
            kwargs[name][keys[1] : keys[2]] = float("nan")
            kwargs[name][keys[-1] :] = float("nan")
        kwargs["q"][queries[-1] :] = float("nan")
        with sanitized():
            got = fmha_varlen(**kwargs, max_seqlen_q=max_seqlen_q, backend=backend)
        others = [i for i in range(got.shape[0]) if not queries[1] <= i < queries[2]]
        torch.testing.assert_close(got[others], expected[others], rtol=1e-4, atol=1e-4)
        assert got[queries[1] : queries[2]].isnan().all()

    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    def test_many_sequences(self, max_seqlen_q):
        """More than are looked through at once, most of them empty."""
        sequences = [(1, 3) if n % 40 == 7 else (0, 0) for n in range(300)]
        kwargs = tensors(sequences, 2, 1, 16, 16) | {"max_seqlen_q": max_seqlen_q}
        self.assertCorrectness(fmha_varlen, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("max_seqlen_q", some([None, 1], 1))
    def test_more_sequences_than_are_looked_through_at_once(self, max_seqlen_q, monkeypatch):
        monkeypatch.setattr(decode_varlen, "MOST_AT_ONCE", 256)
        sequences = [(1, 3 + n) if n % 40 == 7 else (0, 0) for n in range(300)] + [(1, 700), (1, 9)]
        kwargs = tensors(sequences, 2, 1, 16, 16) | {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": 700}
        self.assertCorrectness(fmha_varlen, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    def test_one_query_behind_all_sequences(self, max_seqlen_q):
        """Is none of a sequence, and its output zeros."""
        kwargs = tensors(TOKENS, 8, 2, 32, 32, behind=(1, 3)) | {"max_seqlen_q": max_seqlen_q}
        with sanitized():
            out = fmha_varlen(**kwargs, backend="cutile")
        assert not out[-1].any()
        torch.testing.assert_close(out, reference(**kwargs), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    def test_starts_of_64_bits(self, max_seqlen_q):
        kwargs = tensors(TOKENS, 8, 2, 80, 80) | {"max_seqlen_q": max_seqlen_q}
        wide = kwargs | {name: kwargs[name].long() for name in ("cu_seqlens_q", "cu_seqlens_k")}
        assert torch.equal(fmha_varlen(**wide, backend="cutile"), fmha_varlen(**kwargs, backend="cutile"))

    @backends("fmha_varlen")
    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    @pytest.mark.parametrize("sequences", [((0, 0),), ((0, 5), (0, 0)), ((1, 0), (1, 0)), ()], ids=str)
    def test_empty(self, backend, sequences, max_seqlen_q):
        queries, keys = (sum(lengths) for lengths in zip(*sequences, strict=True)) if sequences else (2, 0)
        kwargs = dict(q=randn(queries, 4, 16), k=randn(keys, 2, 16), v=randn(keys, 2, 24))
        kwargs |= dict(cu_seqlens_q=starts([q for q, _ in sequences]), cu_seqlens_k=starts([k for _, k in sequences]))
        with sanitized():
            out = fmha_varlen(**kwargs, max_seqlen_q=max_seqlen_q, backend=backend)
        assert out.shape == (queries, 4, 24) and not out.any()

    def test_by_a_mask(self, monkeypatch):
        """As while a graph is captured: one attention over all sequences."""
        kwargs = tensors(MIXED, 8, 2, 32, 32, behind=(2, 30)) | OPTIONS["all"]
        expected = reference(**kwargs)
        for name, starts in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", "cu_seqlens_k")):
            kwargs[name][kwargs[starts][-1] :] = float("nan")
            kwargs[name].requires_grad_()
        monkeypatch.setattr(pytorch_module, "can_decide", lambda t: False)
        got = reference(**kwargs)
        torch.testing.assert_close(got, expected)
        assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), [kwargs[name] for name in "qkv"]))

    @pytest.mark.parametrize("lengths", [[0, 2], [0]], ids=str)
    def test_gradients_without_keys(self, lengths):
        q, k, v = (randn(tokens, 2, 16).requires_grad_() for tokens in (2, 0, 0))
        starts_q = torch.tensor(lengths, device=device())
        out = fmha_varlen(q, k, v, starts_q, torch.zeros_like(starts_q))
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))

    def test_gradients_come_from_pytorch(self):
        kwargs = tensors(*SHAPES[1])
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="no backward kernel"):
            self.assertCorrectness(fmha_varlen, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @backends("fmha_varlen")
    def test_wrong_arguments(self, backend):
        kwargs = tensors(*SHAPES[1])
        call = functools.partial(fmha_varlen, backend=backend)
        with pytest.raises(ValueError, match="fmha_varlen: q, k and v must have three dimensions"):
            call(**kwargs | {"q": randn(1, 2, 3, 32)})
        with pytest.raises(ValueError, match="fmha_varlen: q's 3 heads are not a multiple of k's 2"):
            call(**kwargs | {"q": randn(55, 3, 32)})
        with pytest.raises(ValueError, match=r"must both be \[N \+ 1\], they are \(8,\) and \(4,\)"):
            call(**kwargs | {"cu_seqlens_k": starts([1, 2, 3])})
        with pytest.raises(TypeError, match="cu_seqlens_q must be int32 or int64, it is torch.float32"):
            call(**kwargs | {"cu_seqlens_q": kwargs["cu_seqlens_q"].float()})
        with pytest.raises(TypeError, match="fmha_varlen: cu_seqlens_k must be a tensor, it is a list"):
            call(**kwargs | {"cu_seqlens_k": kwargs["cu_seqlens_k"].tolist()})
        with pytest.raises(ValueError, match="max_seqlen_k must not be negative"):
            call(**kwargs, max_seqlen_k=-1)
        with pytest.raises(ValueError, match="window_size must be at least 1"):
            call(**kwargs, window_size=0)

    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    def test_compiled(self, max_seqlen_q):
        """Lengths are read when it runs."""
        kwargs = tensors(TOKENS, 8, 2, 80, 80) | OPTIONS["all"] | {"max_seqlen_q": max_seqlen_q}

        def call(q, cu_seqlens_k):
            return fmha_varlen(**kwargs | {"q": q * 2, "cu_seqlens_k": cu_seqlens_k}, backend="cutile").relu()

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
        for keys in (kwargs["cu_seqlens_k"], starts([10, 0, 3, 99, 1, 20])):
            torch.testing.assert_close(compiled(kwargs["q"], keys), call(kwargs["q"], keys), rtol=0, atol=0)

    def test_operators(self):
        arguments = list(tensors(*SHAPES[0]).values())
        torch.library.opcheck(varlen_forward.operator, (*arguments, 0.25, True, 9, 2.0, randn(8)))
        torch.library.opcheck(varlen_forward.operator, (*arguments, 0.25, False, None, None, None))
        arguments = list(tensors(*SHAPES[4]).values())
        torch.library.opcheck(decode_packed.operator, (*arguments, 150, 0.25, 9, 2.0, randn(8)))
        torch.library.opcheck(decode_packed.operator, (*arguments, None, 0.25, None, None, None))

    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    @pytest.mark.parametrize("name", ["scale", "all"])
    def test_compiles_for_every_architecture(self, name, max_seqlen_q):
        given = tensors(TOKENS, 8, 2, 128, 128, dtype=torch.bfloat16) | OPTIONS[name] | {"max_seqlen_q": max_seqlen_q}
        kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        architectures = ("sm_80", "sm_90", "sm_100", "sm_120") if name == "scale" else ("sm_90",)
        assert_launches_compile(lambda: fmha_varlen(**kwargs, backend="cutile"), architectures)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("head_dim, heads", [(64, 64), (128, 32), (256, 16), (64, 71)])
    def test_real_tiles_compile(self, dtype, head_dim, heads, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
        choose_tiles.cache_clear()
        for module in (attention_varlen, decode_varlen):  # the tiles of a GPU
            chosen = module.choose_tiles
            monkeypatch.setattr(module, "choose_tiles", lambda *sizes, chosen=chosen: chosen(*sizes[:-1], 0))
        kv_heads = 1 if heads == 71 else 8
        q, k = torch.empty(9, heads, head_dim, dtype=dtype), torch.empty(900, kv_heads, head_dim, dtype=dtype)
        few = torch.tensor([0, 1, 2], dtype=torch.int32)
        call = functools.partial(fmha_varlen, q, k, k, few, few, max_seqlen_k=900, backend="cutile")
        for most in (None, 1):
            assert_launches_compile(functools.partial(call, max_seqlen_q=most), ("sm_90",))
        choose_tiles.cache_clear()

    @gpu
    @pytest.mark.parametrize("max_seqlen_q", [None, 1])
    def test_a_graph_replays_with_other_lengths(self, max_seqlen_q):
        kwargs = tensors(TOKENS, 8, 2, 128, 128, dtype=torch.bfloat16) | {"max_seqlen_q": max_seqlen_q}
        fmha_varlen(**kwargs, backend="cutile")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fmha_varlen(**kwargs, backend="cutile")
        kwargs["cu_seqlens_k"].copy_(starts([10, 0, 3, 99, 1, 20]))
        graph.replay()
        torch.testing.assert_close(captured, reference(**kwargs), rtol=2e-2, atol=2e-2)
