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
from common import randn
from common import recorded_launches
from common import sanitized
from common import some
from test_attention import GPU_SHAPES
from test_attention import OPTIONS
from test_attention import SHAPES
from test_attention import additive
from test_attention import boolean
from test_attention import lengths
from test_attention import tensors
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from tilegym import interpreter
from tilegym.ops import fmha
from tilegym.ops.cutile import attention_backward as backward_module
from tilegym.ops.cutile.attention import attention_forward_lse
from tilegym.ops.cutile.attention_backward import attention_backward
from tilegym.ops.cutile.attention_backward_configs import dkdv_configs
from tilegym.ops.cutile.attention_backward_configs import dq_configs
from tilegym.ops.cutile.attention_backward_kernels import attention_dkdv_kernel
from tilegym.ops.cutile.attention_backward_kernels import attention_dq_kernel
from tilegym.ops.cutile.attention_backward_rows import sum_heads_kernel
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import parts_of
from tilegym.ops.cutile.attention_tiles import interleave_of
from tilegym.ops.pytorch.attention import fmha as reference

QKV = ("q", "k", "v")
# A query that sees one key has gradients of zero, of which PyTorch's error is none: shapes have more keys than that.
HEAD_DIMS = [(1, 2, 1, 33, 40, d, d) for d in (64, 96, 128, 256)]
# What is zero but for rounding, or nearly, since a query sees no key, one or a few, is not measured.
ELSEWHERE = ("all masked", "window of one", "all, additive")


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")


def leaves(kwargs, names=QKV):
    return [kwargs[name].detach().clone().requires_grad_() for name in names]


def gradients(kwargs, names=QKV, function=fmha, **more):
    """The gradients of all outputs' weighted sum, with respect to ``names``."""
    inputs = leaves(kwargs, names)
    out = function(**kwargs | dict(zip(names, inputs, strict=True)) | more)
    return torch.autograd.grad(out, inputs, randn(*out.shape, dtype=out.dtype, seed=7).to(out))


def with_sinks_of(dtype, options):
    """Sinks in the dtype of the model."""
    return options | {"sinks": options["sinks"].to(dtype)} if "sinks" in options else options


def named(kernel, args):
    """The arguments of a launch by the names of the kernel's parameters."""
    return dict(zip(kernel._pyfunc.__code__.co_varnames, args, strict=False))


def tile_constants(config, head_dim):
    """The first constants of a kernel."""
    tile, rest = parts_of(head_dim, torch.bfloat16)
    columns = min(vars(config).get("TILE_P", tile), tile)
    return config.TILE_M, config.TILE_N, columns, tile // columns, rest, tile, rest


class Test_FMHA_Backward(PyTestCase):
    @dtypes()
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("shape", SHAPES[:3] + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, dtype, is_causal, shape):
        kwargs = tensors(*shape, dtype=dtype) | {"is_causal": is_causal}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.parametrize("shape", HEAD_DIMS, ids=str)
    def test_head_dims(self, shape):
        kwargs = tensors(*shape, dtype=torch.bfloat16)
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            *((name, torch.float32) for name in OPTIONS if name not in ELSEWHERE),
            *(
                pytest.param(name, torch.bfloat16, marks=pytest.mark.slow)
                for name in ("window", "soft cap", "sinks", "additive mask", "lengths")
            ),
            ("all", torch.bfloat16),
        ],
        ids=str,
    )
    def test_options(self, name, dtype):
        kwargs = tensors(*SHAPES[1], dtype=dtype) | with_sinks_of(dtype, OPTIONS[name])
        wanted = (*QKV, "sinks") if "sinks" in kwargs else QKV
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=wanted)

    @dtypes(torch.float32, torch.bfloat16)
    def test_everything_at_once(self, dtype):
        options = dict(
            window_size=25,
            soft_cap=2.0,
            sinks=randn(4, seed=5, dtype=dtype),
            attention_mask=additive(17, 50),
            kv_len=lengths(50, 33),
        )
        kwargs = tensors(*SHAPES[1], dtype=dtype) | options
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=(*QKV, "sinks"))

    @backends("fmha")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("number", [None, -1e9, -1e5])
    def test_a_finite_number_masks_all_keys(self, backend, dtype, number, monkeypatch):
        """Of the first query: it attends to all alike, or nearly."""
        monkeypatch.delenv("DISABLE_FALLBACK")
        kwargs = tensors(1, 2, 2, 5, 6, 16, 16, dtype=dtype) | {"is_causal": False}
        mask = torch.zeros(5, 6, dtype=dtype, device=device())
        mask[0] = torch.finfo(dtype).min if number is None else number
        q, k, v = inputs = leaves(kwargs)
        scores = q @ k.mT / 4
        p = (scores.to(torch.promote_types(dtype, torch.float32)) + mask).softmax(-1).to(dtype)
        expected = torch.autograd.grad(p @ v, inputs, randn(1, 2, 5, 16, dtype=dtype, seed=7))
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
        got = gradients(kwargs | {"attention_mask": mask}, backend=backend)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)

    def test_large_numbers_as_mask(self):
        """exp of it overflows: so would the probabilities of queries behind the last one, in a ragged tile."""
        kwargs = tensors(*SHAPES[1]) | {"attention_mask": additive(1, 1, 1, 50) + 500.0}
        with sdpa_kernel(SDPBackend.MATH):
            wanted = gradients(kwargs, function=reference)
        for got, expected in zip(gradients(kwargs, backend="cutile"), wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("head_dim", [33, 64, 128, 256])
    def test_one_visible_key_in_fp32(self, head_dim):
        """P is one, whatever the score: the first query has no gradient and gives none to its key, not by rounding."""
        kwargs = tensors(1, 2, 1, 33, 33, head_dim, head_dim)
        inputs = leaves(kwargs)
        out = fmha(*inputs, backend="cutile")
        out.register_hook(lambda grad: grad * (torch.arange(33, device=grad.device) == 0)[:, None])
        dq, dk, _ = torch.autograd.grad(out, inputs, randn(*out.shape, seed=7).to(out))
        assert not dq.any() and not dk.any()

    def test_large_scores(self):
        kwargs = tensors(1, 2, 2, 40, 40, 16, 16) | {"scaling": 30.0}
        with sdpa_kernel(SDPBackend.MATH):
            self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
    @pytest.mark.parametrize("options", [{}, {"window_size": 3, "soft_cap": 2.0}, {"is_causal": False}], ids=str)
    def test_gradcheck(self, options):
        kwargs = tensors(1, 2, 1, 3, 5, 4, 3) | {"sinks": randn(2)}

        def call(q, k, v, sinks):
            return fmha(q, k, v, sinks=sinks, **options, backend="cutile")

        inputs = leaves(kwargs, (*QKV, "sinks"))
        assert torch.autograd.gradcheck(call, inputs, eps=1e-2, atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize("name", some(["full", "padding mask", "all"], "full", "all"))
    def test_three_runs_are_equal(self, name):
        kwargs = tensors(*(GPU_SHAPES[0] if HAS_GPU and name == "full" else SHAPES[1]), dtype=torch.bfloat16)
        torch.use_deterministic_algorithms(True)
        try:
            first, *others = [gradients(kwargs | OPTIONS[name], backend="cutile") for _ in range(3)]
        finally:
            torch.use_deterministic_algorithms(False)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))

    @pytest.mark.parametrize("kind", ["boolean", "additive", "keys", "lengths", "few keys"])
    def test_who_sees_nothing_has_no_gradient(self, kind):
        mask = torch.ones(2, 1, 24, 24, dtype=torch.bool, device=device())
        mask[0, :, 3] = mask[1, :, 8:] = False
        options = {
            "boolean": {"attention_mask": mask},
            "additive": {"attention_mask": torch.zeros(mask.shape, device=device()).masked_fill(~mask, -math.inf)},
            "keys": {"attention_mask": torch.tensor([True, False], device=device()).view(2, 1, 1, 1)},
            "lengths": {"kv_len": lengths(24, 0)},
            "few keys": {"kv_len": lengths(24, 5), "is_causal": True},
        }[kind]
        kwargs = tensors(2, 2, 1, 24, 24, 16, 16) | {"is_causal": False} | options
        dq, dk, dv = gradients(kwargs, backend="cutile")
        if kind in ("boolean", "additive"):
            assert not dq[0, :, 3].any() and not dq[1, :, 8:].any() and dq[1, :, :8].any()
        elif kind == "few keys":
            assert not dq[1, :, :19].any() and not dk[1, :, 5:].any() and not dv[1, :, 5:].any()
        else:
            assert not dq[1].any() and not dk[1].any() and not dv[1].any()
        for got, expected in zip((dq, dk, dv), gradients(kwargs, function=reference), strict=True):
            torch.testing.assert_close(got, expected)

    @backends("fmha")
    @pytest.mark.parametrize("soft_cap", [None, 5.0])
    def test_what_lies_behind_the_last_key_does_not_matter(self, backend, soft_cap):
        kwargs = tensors(*SHAPES[1]) | {"kv_len": lengths(20, 41), "soft_cap": soft_cap}
        expected = gradients(kwargs, function=reference)
        for b, length in enumerate((20, 41)):
            kwargs["k"][b, :, length:] = math.nan
            kwargs["v"][b, :, length:] = math.inf
        for got, want in zip(gradients(kwargs, backend=backend), expected, strict=True):
            torch.testing.assert_close(got, want)

    def test_tiles_that_are_not_seen_are_not_read(self):
        """NaN in keys that no query sees, and in queries that see none of some keys, would spread."""
        kwargs = tensors(1, 1, 1, 64, 256, 16, 16) | {"window_size": 16}
        kwargs["v"][:, :, : 256 - 64 - 32] = math.nan
        assert gradients(kwargs, backend="cutile")[0].isfinite().all()
        kwargs = tensors(1, 2, 1, 96, 96, 16, 16)
        kwargs["q"][:, :, :32] = math.nan
        _, dk, dv = gradients(kwargs, backend="cutile")
        assert dk[:, :, 32:].isfinite().all() and dv[:, :, 32:].isfinite().all() and dk[:, :, :32].isnan().all()

    def test_masks_of_heads_in_one_group(self):
        """Padding that differs between the heads of a group: [B, Hq, 1, Skv]."""
        kwargs = tensors(*SHAPES[1]) | {"attention_mask": boolean(2, 4, 1, 50), "is_causal": False}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("full", torch.float32), *((name, torch.bfloat16) for name in ("scaling", "padding mask", "mask of heads"))],
        ids=str,
    )
    def test_heads_of_a_group_apart(self, name, dtype, monkeypatch):
        """Where keys are few, blocks of their own for each query head, and a sum over them."""
        monkeypatch.setattr(backward_module, "sm_count", lambda device: 10**6)
        kwargs = {k: v.cpu() for k, v in tensors(*SHAPES[1], dtype=dtype).items()}
        kwargs |= {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
        with recorded_launches(run=True) as launches:
            gradients(kwargs, backend="cutile")
        assert [kernel for kernel, _ in launches[1:]] == [attention_dq_kernel, attention_dkdv_kernel, sum_heads_kernel]
        assert_compiles(*launches[-1])
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    def test_padded_tiles(self):
        """Whole tiles of keys that are masked for all queries, at either end."""
        mask = torch.zeros(2, 1, 1, 100, dtype=torch.bool, device=device())
        mask[0, ..., 70:] = mask[1, ..., 5:30] = True
        kwargs = tensors(2, 2, 1, 20, 100, 16, 16) | {"attention_mask": mask, "is_causal": False}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
        assert not any(g[~mask.view(2, 1, 100)].any() for g in gradients(kwargs, backend="cutile")[1:])

    @pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("sinks",), ("q", "sinks")], ids=str)
    def test_some_gradients(self, wanted):
        kwargs = tensors(1, 2, 1, 20, 24, 16, 16) | {"sinks": randn(2)}
        got, expected = gradients(kwargs, wanted, backend="cutile"), gradients(kwargs, wanted, reference)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.mT.contiguous().mT, lambda x: x[:, :1].expand(-1, 4, -1, -1), lambda x: x[:, :, ::2]],
        ids=["transposed", "expanded", "every_other_token"],
    )
    def test_not_contiguous(self, view):
        kwargs = {name: view(t) for name, t in tensors(1, 4, 4, 40, 40, 16, 16).items()}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.parametrize(
        "change", [lambda do: do.sum(), lambda do: do.mT.contiguous().mT.mean()], ids=["sum", "mean"]
    )
    def test_upstream_gradients_of_any_strides(self, change):
        inputs = leaves(tensors(1, 2, 1, 20, 24, 16, 16))
        got = torch.autograd.grad(change(fmha(*inputs, backend="cutile")), inputs)
        expected = torch.autograd.grad(change(reference(*inputs)), inputs)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)

    def test_gradients_are_laid_out_as_the_inputs(self):
        """Those of a model's q, k and v, [B, S, H, D] in memory, go back through its views without a copy."""
        inputs = [randn(2, 20, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
        for gradient in torch.autograd.grad(fmha(*inputs, backend="cutile").sum(), inputs):
            assert gradient.stride() == inputs[0].stride()

    @backends("fmha")
    @pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (1, 0, 4), (1, 4, 0)])
    def test_empty(self, backend, batch, queries, keys):
        kwargs = tensors(batch, 2, 1, queries, keys, 16, 16) | {"sinks": randn(2)}
        names = (*QKV, "sinks")
        for name, gradient in zip(names, gradients(kwargs, names, backend=backend), strict=True):
            assert gradient.shape == kwargs[name].shape and not gradient.any()

    @pytest.mark.parametrize("name", ["scaling", "window", "window, not causal", "padding mask", "mask of heads"])
    def test_one_loop_or_two(self, name):
        """The interpreter's configurations have two loops; one with a branch gives the same."""
        options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
        kwargs = {k: v.cpu() for k, v in tensors(*SHAPES[1]).items()} | options
        with recorded_launches(run=True) as launches:
            expected = gradients(kwargs, backend="cutile")
        _, (dq_kernel, dq_args), (dkdv_kernel, dkdv_args) = launches
        dq_named, dkdv_named = named(dq_kernel, dq_args), named(dkdv_kernel, dkdv_args)
        assert dq_named["TWO_LOOPS"] and dkdv_named["TWO_LOOPS"]
        arrays = dq_named["dq"], dkdv_named["dk"], dkdv_named["dv"]
        for t in arrays:
            t.fill_(math.nan)
        grids = (8 * -(-17 // dq_named["TILE_M"]),), (4 * -(-50 // dkdv_named["TILE_N"]),)
        for grid, kernel, args in zip(grids, (dq_kernel, dkdv_kernel), (dq_named, dkdv_named), strict=True):
            with interpreter.sanitize():
                interpreter.launch(grid, kernel, (*(args | {"TWO_LOOPS": False}).values(),))
        for got, want in zip(arrays, expected, strict=True):
            torch.testing.assert_close(got, want)

    @pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "sinks": True}], ids=["plain", "soft cap, sinks"])
    def test_lse(self, options):
        """Base 2 in half precision; in fp32 the largest score and one over the sum relative to it."""
        for dtype in (torch.bfloat16, torch.float32):
            q, k, v = tensors(1, 4, 2, 9, 12, 16, 16, dtype=dtype).values()
            sinks = randn(4) if options.get("sinks") else None
            with sanitized():
                _, lse = attention_forward_lse(q, k, v, 0.5, False, None, options.get("soft_cap"), sinks, None, None)
            scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.5
            if "soft_cap" in options:
                scores = 2.0 * torch.tanh(scores / 2.0)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(1, 4, 1, 1).expand(1, 4, 9, 1)), 3)
            unit = 1.0 if "soft_cap" in options else 0.5
            got = lse[0].double() / math.log2(math.e) if len(lse) == 1 else lse[0] * unit - lse[1].double().log()
            torch.testing.assert_close(got, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("options", ["full", "window", "all"])
    def test_compiled(self, options):
        kwargs = tensors(*SHAPES[1]) | OPTIONS[options]

        def call(q, k, v):
            return fmha(**kwargs | {"q": q * 2, "k": k, "v": v}, backend="cutile").relu()

        with sanitized():
            self.assertCompiledEqualsEager(call, *(kwargs[name] for name in QKV))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_operators(self, dtype):
        plain = dtype is torch.bfloat16
        q, k, v = tensors(1, 2, 1, 9, 12, 16, 16, dtype=dtype).values()
        more = (None,) * 5 if plain else (5, 2.0, randn(2), boolean(1, 1, 1, 12), lengths(11))
        options = (0.25, True, *more)
        torch.library.opcheck(attention_forward_lse.operator, (q, k, v, *options))
        out, lse = attention_forward_lse(q, k, v, *options)
        torch.library.opcheck(attention_backward.operator, (out, q, k, v, out, lse, *options))

    @pytest.mark.parametrize(
        ("arch", "head_dim"), [*((arch, dim) for arch in ARCHITECTURES for dim in (80, 128)), ("sm_90", 256)]
    )
    def test_compiles(self, arch, head_dim):
        q, k, v = (torch.empty(1, heads, 512, head_dim, dtype=torch.bfloat16) for heads in (8, 2, 2))
        lse = torch.empty(1, 1, 8, 512)
        tail = (True, False, False, 0, 1, False, False, True)
        for kernel, arrays, configs, more in (
            (attention_dq_kernel, (q, k, v, q, q, lse, 0, 0, q, lse, 0, 0, 0), dq_configs, (False,)),
            (attention_dkdv_kernel, (q, k, v, q, lse, lse, 0, 0, k, v, 0, 0, 0, 0, 0), dkdv_configs, (0, 0, 0, False)),
        ):
            config = configs(arch, head_dim)[0]
            constants = (
                *tile_constants(config, head_dim),
                *tail,
                config.TWO_LOOPS,
                False,
                interleave_of(config, True),
                *more,
            )
            arrays = [t.clone() if isinstance(t, torch.Tensor) else t for t in arrays]
            assert_compiles(kernel.replace_hints(**config.hints), (*arrays, 0.1, 1.0, 0, *constants), (arch,))

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    def test_every_configuration_compiles_with_padding(self, head_dim):
        q, k, v, do, dk, dv = (torch.empty(2, h, 50, head_dim, dtype=torch.bfloat16) for h in (4, 2, 2, 4, 2, 2))
        lse, delta, mask = torch.empty(1, 2, 4, 50), torch.empty(1, 2, 4, 50), torch.empty(2, 1, 1, 50).bool()
        arrays = (q, k, v, do, lse, delta, mask, 0, dk, dv, 0, 0, 0, 0, 0)
        for config in dkdv_configs("sm_90", head_dim):
            constants = (
                *tile_constants(config, head_dim),
                True,
                False,
                False,
                KEY_MASK,
                1,
                False,
                False,
                True,
                config.TWO_LOOPS,
            )
            kernel = attention_dkdv_kernel.replace_hints(**config.hints)
            assert_compiles(kernel, (*arrays, 0.1, 1.0, 0, *constants, False, 1, 0, 0, 0, False), ("sm_90",))

    def test_everything_compiles(self):
        kwargs = {k: v.half().cpu() for k, v in tensors(*SHAPES[1]).items()}
        options = dict(soft_cap=2.0, sinks=randn(4).cpu(), attention_mask=additive(17, 50).cpu(), window_size=9)
        with recorded_launches() as launches:
            gradients(kwargs | options | {"kv_len": torch.tensor([50, 33])}, backend="cutile")
        assert len(launches) == 3
        for kernel, args in launches[1:]:
            assert_compiles(kernel, args, ("sm_90",))

    @gpu
    def test_graph_capture(self):
        kwargs = tensors(2, 8, 2, 300, 500, 128, 128, dtype=torch.bfloat16)

        def call(q, k, v):
            inputs = [t.requires_grad_() for t in (q.detach(), k.detach(), v.detach())]
            return torch.autograd.grad(fmha(*inputs, backend="cutile").square().sum(), inputs)

        self.assertCaptures(call, *kwargs.values())


class Test_BackwardConfigs:
    @pytest.mark.parametrize("arch", ARCHITECTURES)
    @pytest.mark.parametrize("tile_d", [16, 80, 96, 128, 256])
    def test_something_suits_every_length(self, arch, tile_d):
        for configs, name in ((dq_configs, "TILE_M"), (dkdv_configs, "TILE_N")):
            assert min(getattr(config, name) for config in configs(arch, tile_d)) <= 64
