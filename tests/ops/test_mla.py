import math

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import of_plain_sdpa
from common import randn
from common import recorded_launches
from common import sanitized

from tilegym.backend import dispatcher
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError
from tilegym.ops import fmha
from tilegym.ops import mla
from tilegym.ops.cutile.mla import _configs
from tilegym.ops.cutile.mla import _configs_fp32
from tilegym.ops.cutile.mla import _suits
from tilegym.ops.cutile.mla import mla_forward
from tilegym.ops.cutile.mla import mla_forward_lse
from tilegym.ops.cutile.mla import mla_kernel
from tilegym.ops.pytorch.mla import mla as reference

# B, H, Hkv, Sq, Skv, D, Dr, Dv: one tile; chunk of a prompt, groups, nothing a power of two; more queries than keys.
SHAPES = [(1, 2, 2, 16, 16, 16, 16, 16), (2, 4, 2, 17, 50, 40, 24, 20), (1, 2, 2, 40, 23, 32, 16, 48)]
GPU_SHAPES = [(2, 16, 16, 2048, 2048, 128, 64, 128), (1, 128, 128, 300, 1111, 128, 64, 128)]


def tensors(batch, heads, kv_heads, queries, keys, dim, rope_dim, v_dim, dtype=torch.float32):
    # As a model has them: queries [B, Sq, H, D + Dr] split, keys and values [B, Skv, H, D + Dv] split.
    q, qpe = randn(batch, queries, heads, dim + rope_dim, dtype=dtype).transpose(1, 2).split((dim, rope_dim), -1)
    k, v = randn(batch, keys, kv_heads, dim + v_dim, dtype=dtype, seed=1).transpose(1, 2).split((dim, v_dim), -1)
    return dict(q=q, k=k, v=v, qpe=qpe, kpe=randn(batch, 1, keys, rope_dim, dtype=dtype, seed=2))


def boolean(*shape):
    return randn(*shape, seed=3) > -0.5


def additive(*shape):
    return randn(*shape, seed=4).masked_fill(~boolean(*shape), -math.inf)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=device())


OPTIONS = {
    "full": dict(is_causal=False),
    "scaling": dict(scaling=0.1),
    "lengths": dict(kv_len=lengths(50, 31)),
    "lengths beyond the ends": dict(kv_len=lengths(0, 999)),
    "padding mask": dict(attention_mask=boolean(2, 1, 1, 50)),
    "padding mask, full": dict(attention_mask=boolean(2, 1, 1, 50), is_causal=False),
    "mask of heads": dict(attention_mask=boolean(2, 4, 17, 50)),
    "all masked": dict(attention_mask=torch.zeros(50, dtype=torch.bool, device=device())),
    "additive mask": dict(attention_mask=additive(1, 4, 17, 50), is_causal=False),
    "all": dict(attention_mask=additive(2, 1, 17, 50), kv_len=lengths(44, 20), scaling=0.3),
}


class Test_MLA(PyTestCase):
    @backends("mla")
    @dtypes()
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, is_causal, shape):
        kwargs = tensors(*shape, dtype=dtype) | {"is_causal": is_causal}
        self.assertCorrectness(mla, reference, kwargs, {"backend": backend})

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, dtype, options):
        self.assertCorrectness(mla, reference, tensors(*SHAPES[1], dtype=dtype) | options, {"backend": "cutile"})

    @backends("mla")
    def test_is_the_definition(self, backend):
        """Written out in fp64, with the diagonal aligned bottom-right."""
        kwargs = tensors(*SHAPES[1])
        q, k, v, qpe, kpe = (t.double() for t in kwargs.values())
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.mT + qpe @ kpe.mT) / math.sqrt(40 + 24)
        above = torch.ones(17, 50, dtype=torch.bool, device=q.device).triu(50 - 17 + 1)
        expected = scores.masked_fill(above, -math.inf).softmax(-1) @ v
        with sanitized():
            got = mla(**kwargs, backend=backend)
        torch.testing.assert_close(got, expected.float())

    @backends("mla")
    @pytest.mark.parametrize("cut", [16, 21])
    def test_chunks_of_a_prompt(self, backend, cut):
        """The queries of a prompt, in chunks that see the keys so far, give what they give at once."""
        kwargs = tensors(1, 2, 2, 37, 37, 32, 16, 32)
        whole = mla(**kwargs, backend=backend)
        first = {name: t[:, :, :cut] for name, t in kwargs.items()}
        second = kwargs | {name: kwargs[name][:, :, cut:] for name in ("q", "qpe")}
        with sanitized():
            chunks = [mla(**chunk, backend=backend) for chunk in (first, second)]
        torch.testing.assert_close(torch.cat(chunks, 2), whole)

    @backends("mla")
    def test_without_positions_it_is_fmha(self, backend):
        kwargs = tensors(*SHAPES[1]) | {"scaling": 0.2}
        kwargs["qpe"] = torch.zeros_like(kwargs["qpe"])
        q, k, v = (kwargs[name] for name in "qkv")
        torch.testing.assert_close(mla(**kwargs, backend=backend), fmha(q, k, v, 0.2, backend=backend))

    @backends("mla")
    def test_what_lies_behind_the_last_key_does_not_matter(self, backend):
        kwargs = tensors(*SHAPES[1]) | {"kv_len": lengths(20, 41)}
        expected = reference(**kwargs)
        for b, length in enumerate((20, 41)):
            for name in ("k", "kpe"):
                kwargs[name][b, :, length:] = math.nan
            kwargs["v"][b, :, length:] = math.inf
        with sanitized():
            torch.testing.assert_close(mla(**kwargs, backend=backend), expected)

    @pytest.mark.parametrize("where", ["q", "k", "v", "qpe", "kpe"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_and_infinity(self, where, value):
        kwargs = tensors(1, 2, 2, 20, 20, 16, 16, 16) | {"is_causal": False}
        kwargs[where][0, 0, 5, 3] = value
        self.assertCorrectness(mla, of_plain_sdpa(reference), kwargs, {"backend": "cutile"})

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("name", ["scaling", "full", "lengths", "padding mask, full", "additive mask"])
    def test_gradients(self, dtype, name):
        kwargs = tensors(*SHAPES[1], dtype=dtype) | OPTIONS[name]
        wanted = ("q", "k", "v", "qpe", "kpe")
        self.assertCorrectness(mla, reference, kwargs, {"backend": "cutile"}, gradient=wanted)

    @pytest.mark.parametrize("name", ["q", "k", "v", "qpe", "kpe"])
    def test_gradient_of_one_argument(self, name, monkeypatch):
        monkeypatch.setenv("DISABLE_FALLBACK", "1")
        kwargs = tensors(*SHAPES[0])
        self.assertCorrectness(mla, reference, kwargs, {"backend": "cutile"}, gradient=(name,))

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    def test_gradcheck(self, monkeypatch):
        monkeypatch.setenv("DISABLE_FALLBACK", "1")
        inputs = [t.detach().clone().requires_grad_() for t in tensors(1, 2, 1, 5, 7, 16, 16, 16).values()]
        torch.autograd.gradcheck(
            lambda *a: mla(*a, backend="cutile"), inputs, eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0.0, fast_mode=True
        )

    def test_compiled_with_gradients(self):
        inputs = [t.contiguous() for t in tensors(1, 2, 1, 20, 20, 16, 16, 16).values()]
        self.assertCompiledEqualsEager(lambda *a: mla(*a, backend="cutile"), *inputs)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda a: {name: t.double() for name, t in a.items()}, "float64"),
            (lambda a: tensors(1, 2, 1, 5, 7, 320, 16, 16), "head dimensions up to 256"),
            (lambda a: tensors(1, 2, 1, 5, 7, 16, 320, 16), "head dimensions up to 256"),
            (lambda a: a | {"scaling": -1.0}, "positive scalings"),
            (lambda a: a | {"attention_mask": additive(5, 7).requires_grad_()}, "no gradient for attention_mask"),
            (
                lambda a: {n: t.requires_grad_() for n, t in tensors(1, 2, 1, 5, 7, 256, 16, 16).items()},
                "up to 256 wide in all",
            ),
        ],
        ids=["fp64", "wide heads", "wide positions", "negative scaling", "gradient of a mask", "wide gradients"],
    )
    def test_unsupported_falls_back(self, change, reason, monkeypatch):
        kwargs = change(tensors(1, 2, 1, 5, 7, 16, 16, 16))
        dispatcher._warned.clear()
        with use_backend("cutile"), pytest.warns(FallbackWarning, match=reason):
            assert torch.equal(mla(**kwargs), reference(**kwargs))
        monkeypatch.setenv("DISABLE_FALLBACK", "1")
        with pytest.raises(UnsupportedError, match=reason):
            mla(**kwargs, backend="cutile")

    @backends("mla")
    @pytest.mark.parametrize(
        ("wrong", "error", "message"),
        [
            (dict(k=randn(1, 2, 5, 8)), ValueError, "expected q \\[B, Hq, Sq, D\\]"),
            (dict(qpe=randn(1, 2, 4, 16)), ValueError, "expected qpe \\[B, H, Sq, Dr\\]"),
            (dict(kpe=randn(1, 2, 5, 16)), ValueError, "kpe \\[B, 1, Skv, Dr\\]"),
            (dict(kpe=randn(1, 1, 5, 8)), ValueError, "kpe \\[B, 1, Skv, Dr\\]"),
            (dict(kpe=randn(1, 1, 5, 16).half()), TypeError, "must have q's dtype"),
            (dict(v=randn(1, 2, 5, 16).half()), TypeError, "one dtype"),
            (dict(kv_len=lengths(1, 2)), ValueError, "kv_len must be \\[1\\]"),
            (dict(attention_mask=boolean(1, 1, 4, 6)), ValueError, "cannot be broadcast"),
        ],
        ids=lambda p: "" if not isinstance(p, dict) else next(iter(p)),
    )
    def test_wrong_arguments(self, backend, wrong, error, message):
        with pytest.raises(error, match=f"mla: .*{message}"):
            mla(**tensors(1, 4, 2, 4, 5, 16, 16, 16) | wrong, backend=backend)

    @backends("mla")
    @pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (1, 0, 4), (1, 4, 0)])
    def test_empty(self, backend, batch, queries, keys):
        out = mla(**tensors(batch, 2, 1, queries, keys, 16, 16, 32), backend=backend)
        assert out.shape == (batch, 2, queries, 32) and not out.any()

    @pytest.mark.parametrize("options", ["lengths", "padding mask", "all"])
    def test_compiled(self, options):
        kwargs = tensors(*SHAPES[1]) | OPTIONS[options]

        def call(q, k, v, qpe, kpe):
            changed = {"q": q * 2, "k": k, "v": v, "qpe": qpe, "kpe": kpe}
            return mla(**kwargs | changed, backend="cutile").relu()

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
        inputs = [kwargs[name] for name in ("q", "k", "v", "qpe", "kpe")]
        torch.testing.assert_close(compiled(*inputs), call(*inputs), rtol=0, atol=0)

    def test_operator(self):
        inputs = tuple(tensors(*SHAPES[1]).values())
        torch.library.opcheck(mla_forward.operator, (*inputs, 0.25, True, None, None))
        torch.library.opcheck(mla_forward.operator, (*inputs, 0.25, True, boolean(2, 1, 1, 50), lengths(40, 50)))
        torch.library.opcheck(mla_forward_lse.operator, (*inputs, 0.25, True, additive(50), None))

    @pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
    def test_compiles(self, arch):
        """With the tiles of DeepSeek's sizes, causal and with lengths."""
        q, qpe, kpe = (torch.empty(1, n, 512, d, dtype=torch.bfloat16) for n, d in ((4, 128), (4, 64), (1, 64)))
        config = _configs(arch, 128)[0]
        tile = (config.TILE_M, config.TILE_N, 128, 64, 128)
        kernel = mla_kernel.replace_hints(**config.hints)
        for kv_len, has_kv_len in ((0, False), (torch.empty(1, dtype=torch.int32), True)):
            flags = (True, 0, 1, has_kv_len, False, True, config.TWO_LOOPS or has_kv_len, False, not has_kv_len)
            lse = 0 if has_kv_len else torch.empty(1, 1, 4, 512)
            assert_compiles(kernel, (q, q, q, qpe, kpe, q, 0, kv_len, lse, 0.1, *tile, *flags), (arch,))

    def test_everything_compiles(self):
        kwargs = {name: t.half().cpu() for name, t in tensors(*SHAPES[1]).items()}
        options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in OPTIONS["all"].items()}
        assert_launches_compile(lambda: mla(**kwargs, **options, backend="cutile"), ("sm_90",))

    def test_nothing_is_joined_or_copied(self):
        """What a model splits off its projections goes to the kernel as it is."""
        kwargs = {name: t.cpu() for name, t in tensors(*SHAPES[1]).items()}
        with recorded_launches() as launches:
            mla(**kwargs, backend="cutile")
        [(_, args)] = launches
        assert [t.data_ptr() for t in args[:5]] == [t.data_ptr() for t in kwargs.values()]

    @pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
    @pytest.mark.parametrize("tile_d", [16, 128, 256])
    def test_something_suits_every_length(self, arch, tile_d):
        for queries in (1, 16, 100, 8192):
            for configs in (_configs, _configs_fp32):
                assert any(_suits(torch.empty(1, 1, queries, 0), config) for config in configs(arch, tile_d))

    @gpu
    def test_graph_capture(self):
        inputs = tensors(2, 16, 16, 300, 500, 128, 64, 128, dtype=torch.bfloat16).values()
        self.assertCaptures(lambda *a: mla(*a, backend="cutile"), *(t.contiguous() for t in inputs))
