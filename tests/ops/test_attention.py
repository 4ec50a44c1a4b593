import inspect
import math

import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import of_plain_sdpa
from common import randn
from common import recorded_launches
from common import sanitized

from tilegym import interpreter
from tilegym.backend import use_backend
from tilegym.backend.cutile.tuning_key import parameter_names
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError
from tilegym.ops import fmha
from tilegym.ops.cutile import attention_tiles
from tilegym.ops.cutile.attention import _configs
from tilegym.ops.cutile.attention import _suits
from tilegym.ops.cutile.attention import attention_forward
from tilegym.ops.cutile.attention import attention_kernel
from tilegym.ops.cutile.attention_common import check_supported
from tilegym.ops.cutile.attention_common import parts_of
from tilegym.ops.cutile.attention_tiles import interleave_of
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.pytorch.attention import fmha as reference

# B, Hq, Hkv, Sq, Skv, D, Dv: grouped heads, more keys than queries and fewer, no power of two anywhere.
SHAPES = [
    (1, 2, 2, 64, 64, 32, 32),
    (2, 4, 2, 17, 50, 80, 80),
    (1, 6, 1, 40, 33, 24, 16),
    (1, 1, 1, 1, 1, 16, 16),
    (1, 2, 1, 30, 40, 144, 96),
    (1, 2, 1, 30, 40, 64, 72),
]
GPU_SHAPES = [
    (2, 32, 8, 2048, 2048, 128, 128),
    (1, 8, 8, 1000, 4001, 64, 64),
    (1, 4, 2, 777, 777, 256, 256),
    (1, 4, 1, 500, 500, 96, 128),
]


def tensors(batch, heads, kv_heads, queries, keys, head_dim, v_dim, dtype=torch.float32):
    # q as a model has it: [B, S, H, D] transposed
    q = randn(batch, queries, heads, head_dim, dtype=dtype).transpose(1, 2)
    k = randn(batch, kv_heads, keys, head_dim, dtype=dtype, seed=1)
    return dict(q=q, k=k, v=randn(batch, kv_heads, keys, v_dim, dtype=dtype, seed=2))


def boolean(*shape):
    return randn(*shape, seed=3) > -0.5


def additive(*shape, lowest=-math.inf):
    return randn(*shape, seed=4).masked_fill(~boolean(*shape), lowest)


def lowest_numbers(*shape):
    """A mask as transformers' eager attention has it; its first row masks every key, which then count alike."""
    mask = additive(*shape, lowest=torch.finfo(torch.float32).min)
    mask[:, :, 0] = torch.finfo(torch.float32).min
    return mask


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=device())


OPTIONS = {
    "full": dict(is_causal=False),
    "scaling": dict(scaling=0.6),
    "window": dict(window_size=7),
    "window of one": dict(window_size=1),
    "window beyond 32 bits": dict(window_size=2**40),
    "window, not causal": dict(window_size=20, is_causal=False),
    "soft cap": dict(soft_cap=1.5),
    "soft cap, full": dict(soft_cap=1.5, is_causal=False),
    "sinks": dict(sinks=randn(4, seed=5)),
    "sinks of -inf": dict(sinks=torch.tensor([-math.inf, 0.0, 9.0, -9.0], device=device())),
    "padding mask": dict(attention_mask=boolean(2, 1, 1, 50)),
    "mask of queries and keys": dict(attention_mask=boolean(17, 50)),
    "mask of heads": dict(attention_mask=boolean(2, 4, 17, 50), is_causal=False),
    "mask of one column": dict(attention_mask=boolean(2, 1, 17, 1)),
    "all masked": dict(attention_mask=torch.zeros(1, 1, 1, 50, dtype=torch.bool, device=device())),
    "additive mask": dict(attention_mask=additive(1, 4, 17, 50)),
    "additive bias, soft cap": dict(attention_mask=additive(2, 1, 1, 50), soft_cap=1.5),
    "lowest number as mask": dict(attention_mask=lowest_numbers(1, 1, 17, 50)),
    "lengths": dict(kv_len=lengths(50, 31)),
    "lengths beyond the ends": dict(kv_len=lengths(0, 99)),
    "lengths in 64 bits": dict(kv_len=lengths(20, 40).long()),
    "all": dict(
        scaling=0.3,
        window_size=30,
        soft_cap=2.0,
        sinks=randn(4, seed=5),
        attention_mask=boolean(2, 1, 1, 50),
        kv_len=lengths(47, 18),
    ),
    "all, additive": dict(
        window_size=9, soft_cap=2.0, sinks=randn(4, seed=5), attention_mask=additive(17, 50), kv_len=lengths(50, 33)
    ),
}


def definition(
    q, k, v, scaling=None, is_causal=True, window_size=None, soft_cap=None, sinks=None, attention_mask=None, kv_len=None
):
    """The contract, one query and one key at a time."""
    batch, heads, queries, head_dim = q.shape
    _, kv_heads, keys, v_dim = v.shape
    scaling = head_dim**-0.5 if scaling is None else scaling
    mask = None if attention_mask is None else attention_mask.expand(batch, heads, queries, keys)
    out = torch.zeros(batch, heads, queries, v_dim, dtype=torch.float64)
    for b in range(batch):
        length = keys if kv_len is None else min(max(int(kv_len[b]), 0), keys)
        for h in range(heads):
            kv_head = h * kv_heads // heads
            for i in range(queries):
                position = length - queries + i
                scores, values = [], []
                for j in range(length):
                    if is_causal and j > position or window_size is not None and position - j >= window_size:
                        continue
                    score = scaling * float(q[b, h, i].double() @ k[b, kv_head, j].double())
                    if soft_cap is not None:
                        score = soft_cap * math.tanh(score / soft_cap)
                    if mask is not None and mask.dtype == torch.bool and not mask[b, h, i, j]:
                        continue
                    if mask is not None and mask.dtype != torch.bool:
                        score += float(mask[b, h, i, j])
                        if score == -math.inf:
                            continue
                    scores.append(score)
                    values.append(v[b, kv_head, j].double())
                if scores:
                    top = max(scores)
                    weights = [math.exp(s - top) for s in scores]
                    sink = 0.0 if sinks is None else math.exp(float(sinks[h]) - top)
                    out[b, h, i] = sum(w * x for w, x in zip(weights, values, strict=True)) / (sum(weights) + sink)
    return out


class Test_FMHA(PyTestCase):
    @backends("fmha")
    @dtypes()
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, is_causal, shape):
        kwargs = tensors(*shape, dtype=dtype) | {"is_causal": is_causal}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": backend})

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    @dtypes(torch.float32, torch.bfloat16)
    def test_options(self, dtype, options):
        self.assertCorrectness(fmha, reference, tensors(*SHAPES[1], dtype=dtype) | options, {"backend": "cutile"})

    @backends("fmha")
    @pytest.mark.parametrize("shape", [(1, 4, 2, 9, 12, 16, 16), (1, 4, 2, 12, 9, 16, 16)], ids=["more", "fewer"])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            dict(is_causal=False),
            dict(window_size=3),
            dict(window_size=4, is_causal=False),
            dict(soft_cap=1.5, sinks=[0.5, -1.0, 2.0, 0.0]),
            dict(kv_len=[7]),
            dict(kv_len=[7], window_size=2, attention_mask=True, scaling=0.5),
            dict(attention_mask=False, sinks=[0.5, -1.0, 2.0, 0.0], kv_len=[5], soft_cap=2.0),
        ],
        ids=str,
    )
    def test_contract(self, backend, shape, options):
        options = dict(options)
        if "sinks" in options:
            options["sinks"] = torch.tensor(options["sinks"], device=device())
        if "kv_len" in options:
            options["kv_len"] = lengths(*options["kv_len"])
        if "attention_mask" in options:
            kind = boolean if options["attention_mask"] else additive
            options["attention_mask"] = kind(1, 1, shape[3], shape[4])
        kwargs = tensors(*shape) | options
        with sanitized():
            got = fmha(**kwargs, backend=backend)
        oracle = definition(**{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})
        torch.testing.assert_close(got.cpu(), oracle.float())

    @backends("fmha")
    def test_what_lies_behind_the_last_key_does_not_matter(self, backend):
        kwargs = tensors(*SHAPES[1]) | {"kv_len": lengths(20, 41)}
        expected = reference(**kwargs)
        for b, length in enumerate((20, 41)):
            kwargs["k"][b, :, length:] = math.nan
            kwargs["v"][b, :, length:] = math.inf
        with sanitized():
            torch.testing.assert_close(fmha(**kwargs, backend=backend), expected)

    @gpu
    @backends("fmha")
    @dtypes()
    @pytest.mark.parametrize("window", [None, 16])
    def test_views_that_begin_anywhere(self, backend, dtype, window):
        """Beside 16 bytes, which PyTorch's kernels read at a time; and queries that are all the same one."""
        kwargs = tensors(1, 4, 2, 40, 40, 64, 64, dtype=dtype)
        pad = torch.nn.functional.pad
        for view in (
            lambda t: t[..., 1:-7],
            lambda t: pad(t, (0, 3))[..., :-3],
            lambda t: t[:, :, :1].expand_as(t),
            lambda t: t[:, :1].expand_as(t),
            lambda t: t[:, :, :1].as_strided((1, t.shape[1], 1, 64), (64 * t.shape[1], 64, 1, 1)),
        ):
            views = kwargs | {name: view(kwargs[name]) for name in "qkv"} | {"window_size": window}
            expected = reference(**(views | {name: views[name].double() for name in "qkv"}))
            torch.testing.assert_close(fmha(**views, backend=backend), expected.to(dtype), atol=4e-3, rtol=2e-2)

    @backends("fmha")
    @dtypes()
    def test_mask_in_fp64(self, backend, dtype):
        kwargs = tensors(*SHAPES[1], dtype=dtype)
        mask = additive(1, 1, 17, 50)
        got = fmha(**kwargs, attention_mask=mask.double(), backend=backend)
        torch.testing.assert_close(got, fmha(**kwargs, attention_mask=mask, backend=backend))

    @pytest.mark.parametrize("where", ["q", "k", "v"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_and_infinity(self, where, value):
        kwargs = tensors(1, 2, 1, 20, 20, 16, 16) | {"is_causal": False}
        kwargs[where][0, 0, 5, 3] = value
        self.assertCorrectness(fmha, of_plain_sdpa(reference), kwargs, {"backend": "cutile"})

    def test_large_scores(self):
        kwargs = tensors(1, 2, 2, 40, 40, 16, 16) | {"scaling": 300.0}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"})

    def test_gradients_of_blind_queries_are_finite(self):
        kwargs = tensors(1, 2, 2, 8, 8, 16, 16)
        mask = torch.ones(8, 8, dtype=torch.bool, device=device())
        mask[3] = False
        for attention_mask in (mask, torch.zeros(8, 8, device=device()).masked_fill(~mask, -math.inf)):
            leaves = [kwargs[name].detach().requires_grad_() for name in "qkv"]
            out = fmha(*leaves, is_causal=False, attention_mask=attention_mask)
            assert not out[:, :, 3].any()
            assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda a: a | {"attention_mask": randn(5, 7).requires_grad_()}, "no gradient for attention_mask"),
            (lambda a: {name: t.double() for name, t in a.items()}, "float64"),
            (lambda a: tensors(1, 2, 1, 5, 7, 320, 16), "head dimensions up to 256"),
            (lambda a: a | {"scaling": -1.0}, "positive scalings"),
        ],
        ids=["gradient of a mask", "fp64", "wide heads", "negative scaling"],
    )
    def test_unsupported_falls_back(self, change, reason, monkeypatch):
        kwargs = change(tensors(1, 2, 1, 5, 7, 16, 16))
        with use_backend("cutile"), pytest.warns(FallbackWarning, match=reason):
            from tilegym.backend import dispatcher

            dispatcher._warned.clear()
            assert torch.equal(fmha(**kwargs), reference(**kwargs))
        monkeypatch.setenv("DISABLE_FALLBACK", "1")
        with pytest.raises(UnsupportedError, match=reason):
            fmha(**kwargs, backend="cutile")

    def test_strides_that_the_kernel_cannot_count_are_refused(self):
        q, kv = torch.empty(2, 1, 1, 128, device="meta"), torch.empty(2, 1, 1 << 24, 128, device="meta")
        check_supported(q, q, q, 1.0, None, None)
        with pytest.raises(UnsupportedError, match="strides"):
            check_supported(q, kv, kv, 1.0, None, None)

    @backends("fmha")
    @pytest.mark.parametrize(
        ("wrong", "error", "message"),
        [
            (dict(k=randn(1, 2, 5, 8)), ValueError, "expected q \\[B, Hq, Sq, D\\]"),
            (dict(q=randn(1, 4, 4, 0), k=randn(1, 2, 5, 0)), ValueError, "head dimension of 0"),
            (dict(q=randn(1, 3, 4, 16)), ValueError, "3 heads are not a multiple of k's 2"),
            (dict(v=randn(1, 2, 5, 16).half()), TypeError, "one dtype"),
            ({x: randn(1, 2, 5, 16).int() for x in "qkv"}, TypeError, "q is torch.int32, it must be floating point"),
            (dict(window_size=0), ValueError, "window_size must be at least 1"),
            (dict(window_size=(3, 0)), TypeError, "window_size is one number of keys"),
            (dict(soft_cap=0.0), ValueError, "soft_cap must be positive"),
            (dict(sinks=randn(3)), ValueError, "sinks must be \\[4\\]"),
            (dict(kv_len=lengths(1, 2)), ValueError, "kv_len must be \\[1\\]"),
            (dict(kv_len=randn(1)), TypeError, "kv_len must be of integers"),
            (dict(kv_len=5), TypeError, "kv_len must be a tensor \\[1\\]"),
            (dict(attention_mask=boolean(1, 1, 4, 6)), ValueError, "cannot be broadcast"),
            (dict(attention_mask=lengths(1).view(1, 1)), TypeError, "boolean or floating point"),
        ],
        ids=lambda p: "" if not isinstance(p, dict) else next(iter(p)),
    )
    def test_wrong_arguments(self, backend, wrong, error, message):
        with pytest.raises(error, match=f"fmha: .*{message}"):
            fmha(**tensors(1, 4, 2, 4, 5, 16, 16) | wrong, backend=backend)

    @backends("fmha")
    @pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (1, 0, 4), (1, 4, 0)])
    def test_empty(self, backend, batch, queries, keys):
        out = fmha(**tensors(batch, 2, 1, queries, keys, 16, 16), backend=backend)
        assert out.shape == (batch, 2, queries, 16) and not out.any()

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.mT.contiguous().mT, lambda x: x[:, :1].expand(-1, 4, -1, -1), lambda x: x[:, :, ::2]],
        ids=["transposed", "expanded", "every_other_token"],
    )
    def test_not_contiguous(self, view):
        kwargs = {name: view(t) for name, t in tensors(1, 4, 4, 40, 40, 16, 16).items()}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("head_dim", [SHAPES[1][5], 144])  # wide rows have a loop of their own
    @pytest.mark.parametrize("name", ["scaling", "window", "padding mask", "mask of heads", "all masked", "sinks"])
    def test_one_loop_or_two(self, name, head_dim):
        kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
        qkv = {k: v.cpu() for k, v in tensors(*SHAPES[1][:5], head_dim, head_dim).items()}
        with recorded_launches() as launches:
            fmha(**qkv, **kwargs, backend="cutile")
        [(kernel, args)] = launches
        names = list(inspect.signature(kernel._pyfunc).parameters)
        which = names.index("TWO_LOOPS")
        grid, out, results = (8 * -(-17 // args[names.index("TILE_M")]),), args[names.index("out")], []
        for two_loops in (True, False):
            with interpreter.sanitize():
                interpreter.launch(grid, kernel, (*args[:which], two_loops, *args[which + 1 :]))
            results.append(out.clone())
        torch.testing.assert_close(*results)
        torch.testing.assert_close(results[0], reference(**qkv, **kwargs))

    @pytest.mark.parametrize("low", [0, 20, 33])
    @pytest.mark.parametrize("high", [34, 50])
    @pytest.mark.parametrize("hole", [None, 33])
    def test_padding_at_either_end(self, low, high, hole):
        mask = torch.zeros(2, 1, 1, 50, dtype=torch.bool, device=device())
        mask[0, ..., low:high] = True
        mask[1, ..., 3:48] = True
        if hole is not None:
            mask[..., hole] = False
        kwargs = tensors(*SHAPES[1]) | {"attention_mask": mask, "is_causal": False}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"})

    def test_tiles_that_no_query_sees_are_not_read(self):
        """NaN in the values of keys outside the window and above the diagonal would spread to the output."""
        kwargs = tensors(1, 1, 1, 64, 256, 16, 16) | {"window_size": 16}
        kwargs["v"][:, :, : 256 - 64 - 32] = math.nan
        with sanitized():
            assert fmha(**kwargs, backend="cutile").isfinite().all()

    @pytest.mark.parametrize("options", ["full", "window", "all"])
    def test_compiled(self, options):
        kwargs = tensors(*SHAPES[1]) | OPTIONS[options]

        def call(q, k, v):
            return fmha(**kwargs | {"q": q * 2, "k": k, "v": v}, backend="cutile").relu()

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
        qkv = [kwargs[name] for name in "qkv"]
        torch.testing.assert_close(compiled(*qkv), call(*qkv), rtol=0, atol=0)

    def test_operator(self):
        q, k, v = tensors(*SHAPES[1]).values()
        plain = (q, k, v, 0.25, True, None, None, None, None, None)
        torch.library.opcheck(attention_forward.operator, plain)
        everything = (q, k, v, 0.25, True, 9, 2.0, randn(4), boolean(2, 1, 1, 50), lengths(40, 50))
        torch.library.opcheck(attention_forward.operator, everything)

    @pytest.mark.parametrize("arch", ARCHITECTURES)
    @pytest.mark.parametrize("head_dim", [72, 128, 192, 256])
    @pytest.mark.parametrize("fixed", [False, True], ids=["", "fixed"])
    def test_compiles(self, arch, head_dim, fixed):
        q = torch.empty(1, 8, 512, head_dim, dtype=torch.bfloat16)
        k, v, out = (torch.empty(1, n, 512, head_dim, dtype=torch.bfloat16) for n in (2, 2, 8))
        parts = parts_of(head_dim, torch.bfloat16)
        config = _configs(arch, sum(parts))[0]
        tile = (config.TILE_M, config.TILE_N, *parts, *parts)
        interleave = interleave_of(config, True)
        flags = (True, False, False, 0, 1, False, False, False, True, config.TWO_LOOPS, False, False, fixed, interleave)
        kernel = attention_kernel.replace_hints(**config.hints)
        assert_compiles(kernel, (q, k, v, out, 0, 0, 0, 0, 0.1, 1.0, 0, *tile, *flags), (arch,))

    @pytest.mark.parametrize("dtype, widths", [(torch.bfloat16, (64, 16, 64, 32)), (torch.float32, (128, 0, 128, 0))])
    def test_columns_in_two_tiles(self, dtype, widths):
        q, k, v = (t.cpu() for t in tensors(1, 2, 1, 5, 6, 80, 96, dtype=dtype).values())
        with recorded_launches() as launches:
            fmha(q, k, v, backend="cutile")
        [(kernel, args)] = launches
        args = dict(zip(parameter_names(kernel), args, strict=True))
        assert tuple(args[name] for name in ("TILE_D", "TILE_R", "TILE_DV", "TILE_RV")) == widths

    def test_everything_compiles(self):
        q, k, v = (t.half().cpu() for t in tensors(*SHAPES[1]).values())
        with recorded_launches() as launches:
            options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in OPTIONS["all, additive"].items()}
            fmha(q, k, v, **options, backend="cutile")
        [(kernel, args)] = launches
        assert_compiles(kernel, args, ("sm_90",))

    @gpu
    def test_graph_capture(self):
        kwargs = tensors(2, 8, 2, 300, 500, 128, 128, dtype=torch.bfloat16)
        self.assertCaptures(lambda q, k, v: fmha(q, k, v, backend="cutile"), *kwargs.values())

    @gpu
    def test_graph_replays_with_new_lengths(self):
        kwargs = tensors(2, 8, 2, 16, 500, 128, 128, dtype=torch.bfloat16) | {"kv_len": lengths(500, 20)}
        fmha(**kwargs, backend="cutile")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fmha(**kwargs, backend="cutile")
        kwargs["kv_len"].copy_(lengths(123, 456))
        graph.replay()
        torch.testing.assert_close(out, fmha(**kwargs, backend="cutile"), rtol=0, atol=0)


@pytest.mark.parametrize("dim", range(1, 257))
def test_parts(dim):
    first, second = parts_of(dim, torch.bfloat16)
    assert dim <= first + second <= max(16, next_power_of_2(dim))
    assert second == 0 or first % second == 0 and second >= 16
    assert parts_of(dim, torch.float32) == (max(16, next_power_of_2(dim)), 0)


class Test_Configs:
    @pytest.mark.parametrize("arch", ARCHITECTURES)
    @pytest.mark.parametrize("tile_d", [16, 80, 96, 128, 256])
    def test_something_suits_every_length(self, arch, tile_d):
        for queries in (1, 16, 100, 8192):
            q = torch.empty(1, 1, queries, tile_d, device="meta")
            assert any(_suits(q, q, False, 0, config) for config in _configs(arch, tile_d))

    def test_few_blocks_of_wide_heads_have_short_tiles(self, monkeypatch):
        monkeypatch.setattr(attention_tiles, "sm_count", lambda device: 132)
        for queries, head_dim, tallest in ((2048, 256, 64), (4096, 256, 4096), (2048, 128, 2048)):
            q = torch.empty(1, 4, queries, head_dim, device="meta")
            assert attention_tiles.tallest_tile(q) == tallest
