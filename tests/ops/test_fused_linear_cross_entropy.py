import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from common import some

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import fused_linear_cross_entropy
from tilegym.ops.cutile import linear_cross_entropy_plan
from tilegym.ops.cutile.fused_linear_cross_entropy import linear_cross_entropy_chunks
from tilegym.ops.cutile.fused_linear_cross_entropy import losses_plan
from tilegym.ops.pytorch.fused_linear_cross_entropy import fused_linear_cross_entropy as reference

M, H, V = 20, 24, 70
FLOATING = ("hidden_states", "weight", "bias")
MODULE = sys.modules[linear_cross_entropy_chunks.__module__]


def arguments(*lead, dtype=torch.float32, bias=True, hidden=H, vocab=V, **options):
    """Hidden states, an output layer, and targets of which every third is ignored."""
    lead = lead or (M,)
    target = (randn(*lead, seed=1).abs() * 1e4).long() % vocab
    target.view(-1)[1::3] = options.get("ignore_index", -100)
    return dict(
        hidden_states=randn(*lead, hidden, dtype=dtype),
        weight=randn(vocab, hidden, dtype=dtype, seed=2) * hidden**-0.5,
        target=target,
        bias=randn(vocab, dtype=dtype, seed=3) if bias else None,
    ) | options  # fmt: skip


def of_columns(hidden_states, weight, target, bias=None, ignore_index=-100, reduction="mean"):
    """The reference with logits [V, M] and their gradient, as the kernels have them, tokens beside each other.

    On an H200 cuBLAS gives hidden states' gradient by these, [60, 300] @ [300, 80] in fp32, an error of 3.0e-7, and by
    logits [M, V] one of 1.3e-7; with [2048, 32000] @ [32000, 2048] it is 1.1e-6 and 1.5e-6.
    """
    logits = weight @ hidden_states.reshape(-1, hidden_states.shape[-1]).t()
    if logits.requires_grad:
        logits.register_hook(torch.Tensor.contiguous)
    logits = logits.t() if bias is None else logits.t() + bias
    losses = F.cross_entropy(logits, target.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return losses.view(target.shape) if reduction == "none" else losses


class Test_FusedLinearCrossEntropy(PyTestCase):
    def check(self, kwargs, options):
        """:meth:`assertCorrectness` with all gradients, but for a sum or mean of losses with those of the tokens.

        Losses of logits that are rounded to 16 bits are off either way, and their sum by what these leave of each
        other: how little that is in one case, for other roundings than another's, is luck.
        """
        others = (of_columns,) if kwargs["weight"].dtype == torch.float32 else ()
        if kwargs["reduction"] == "none":
            self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, options, True, others)
            return
        parts, add_losses = [], MODULE.add_losses

        def seen(losses, *args):
            parts.append((losses, *add_losses(losses, *args)))
            return parts[-1][1:]

        def losses_and_total(**kwargs):
            with mock.patch.object(MODULE, "add_losses", seen):
                total = fused_linear_cross_entropy(**kwargs)
            return parts[-1][0].view(kwargs["target"].shape), total

        def losses_and_total_of(function):
            return lambda **kwargs: (function(**kwargs | {"reduction": "none"}).detach(), function(**kwargs))

        def gradient_of_total(function):
            """What only has the total's gradient, and no value to compare."""
            return lambda **kwargs: [x - x.detach() if x.requires_grad else x for x in function(**kwargs)]

        of_reference = losses_and_total_of(reference)
        others = tuple(gradient_of_total(losses_and_total_of(function)) for function in others)
        self.assertCorrectness(
            gradient_of_total(losses_and_total), gradient_of_total(of_reference), kwargs, options, True, others
        )
        losses, total, number = parts[0]
        torch.testing.assert_close(total, losses.sum() / (number if kwargs["reduction"] == "mean" else 1))
        exact = of_reference(**{k: v.double() if k in FLOATING and v is not None else v for k, v in kwargs.items()})[0]
        # Errors that do not depend on each other add up to about their norm, and those of one sign to more.
        assert (losses.sum() - exact.sum()).abs() <= 4 * (of_reference(**kwargs)[0] - exact).norm() + 1e-6 * exact.sum()

    @backends("fused_linear_cross_entropy")
    @dtypes()
    @pytest.mark.parametrize("chunk_size", [4096, 7])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_op(self, backend, dtype, chunk_size, reduction):
        kwargs, options = arguments(dtype=dtype, reduction=reduction), {"backend": backend, "chunk_size": chunk_size}
        if backend == "pytorch":
            self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, options, gradient=True)
        else:
            self.check(kwargs, options)

    @pytest.mark.parametrize(
        "kwargs",
        [
            arguments(bias=False, reduction="mean"),
            arguments(3, 5, reduction="none"),
            arguments(3, 5, ignore_index=4, reduction="mean"),
            arguments(6, vocab=5000, dtype=torch.bfloat16, reduction="mean"),
        ],
        ids=["without_bias", "batch_none", "batch_and_index", "wide"],
    )
    def test_shapes(self, kwargs):
        self.check(kwargs, {"backend": "cutile", "chunk_size": 4})

    @backends("fused_linear_cross_entropy")
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_equals_the_two_ops(self, backend, reduction):
        kwargs = arguments(reduction=reduction)
        got = fused_linear_cross_entropy(**kwargs, chunk_size=6, backend=backend)
        logits = F.linear(kwargs["hidden_states"], kwargs["weight"], kwargs["bias"])
        torch.testing.assert_close(got, F.cross_entropy(logits, kwargs["target"], reduction=reduction))

    @pytest.mark.parametrize("wanted", ["hidden_states", "weight", "bias"])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_gradient_of_one(self, wanted, reduction):
        self.assertCorrectness(
            fused_linear_cross_entropy, reference, arguments(reduction=reduction), {"backend": "cutile"}, (wanted,)
        )

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_everything_ignored(self, reduction):
        kwargs = arguments(reduction=reduction)
        kwargs["target"].fill_(-100)
        self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_upstream_gradient_scales(self, reduction):
        """As with a loss scaled for fp16, and twice through one graph."""
        kwargs = arguments(reduction=reduction)
        weight = kwargs["weight"].requires_grad_()
        loss = fused_linear_cross_entropy(**kwargs, backend="cutile").sum()
        one = torch.autograd.grad(loss, weight, retain_graph=True)[0]
        torch.testing.assert_close(torch.autograd.grad(loss * 1024, weight)[0], one * 1024)

    @pytest.mark.parametrize("chunk_size", [8, 16])
    @backends("fused_linear_cross_entropy")
    def test_never_holds_all_logits(self, backend, chunk_size):
        """No GEMM's result has more elements than a chunk's logits, but the gradients."""
        largest, products = 0, {torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default,
                                torch.ops.aten.addmm.out, torch.ops.aten.linear.default}  # fmt: skip

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                nonlocal largest
                out = function(*args, **(kwargs or {}))
                if function in products and H not in out.shape:
                    largest = max(largest, out.numel())
                return out

        kwargs = arguments(64)
        for name in ("hidden_states", "weight"):
            kwargs[name].requires_grad_()
        with Watch():
            fused_linear_cross_entropy(**kwargs, chunk_size=chunk_size, backend=backend).backward()
        assert V * chunk_size / 2 < largest <= V * chunk_size

    @staticmethod
    def make_small(monkeypatch):
        for name, value in {"FEWEST_CLASSES": 32, "CLASSES_OF_TILE": 8, "SLICE_ELEMENTS": 1024}.items():
            monkeypatch.setattr(linear_cross_entropy_plan, name, value)

    @pytest.mark.parametrize(
        "hidden, tokens, chunk_size",
        [
            (32, 20, 64),
            (40, 100, 64),
            (40, 40, 40),
            (8, 17, 64),
            (48, 90, 20),
            (64, 20, 64),
            (100, 20, 64),
            (80, 60, 64),
        ],
    )
    @dtypes()
    def test_logits_in_the_memory_of_the_gradient(self, hidden, tokens, chunk_size, dtype, monkeypatch):
        """Rows shorter than the gradient's, by half, as long, of several chunks; slices with and without a copy."""
        self.make_small(monkeypatch)
        kwargs = arguments(tokens, hidden=hidden, vocab=300, dtype=dtype, reduction="sum")
        self.check(kwargs, {"backend": "cutile", "chunk_size": chunk_size})

    @pytest.mark.parametrize(
        "hidden, tokens, chunk_size", [(16, 50, 64), (40, 100, 64), (40, 100, 128), (88, 100, 300)]
    )
    @dtypes()
    def test_chunks_of_more_tokens_than_there_is_room_for(self, hidden, tokens, chunk_size, dtype, monkeypatch):
        """All tokens in two pieces, slices that double, some tokens computed again, rows a little longer than room."""
        self.make_small(monkeypatch)
        monkeypatch.setattr(linear_cross_entropy_plan, "ALL_THERE_IS_ROOM_FOR", 16)
        monkeypatch.setattr(MODULE, "ROWS_SUMMED", 32)
        written, write = [], MODULE._write_slices
        monkeypatch.setattr(
            MODULE, "_write_slices", lambda stored, *a: (written.append(len(stored)), write(stored, *a))
        )
        kwargs = arguments(tokens, hidden=hidden, vocab=300, dtype=dtype, reduction="sum")
        self.check(kwargs, {"backend": "cutile", "chunk_size": chunk_size})
        # In fp16 the gradient is held in fp32, which gives room for twice the tokens.
        assert written[0] == (1 if dtype == torch.float16 and 2 * hidden >= min(tokens, chunk_size) else 2)

    @pytest.mark.parametrize("chunks", [4, 32])
    @dtypes(torch.float16, torch.bfloat16)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_sums_over_many_chunks(self, chunks, dtype, reduction):
        tokens = 512
        kwargs = arguments(tokens, dtype=dtype, hidden=16, vocab=12, bias=False, reduction=reduction)
        kwargs["target"] = (randn(tokens, seed=5).abs() * 3).long()
        options = {"backend": "cutile", "chunk_size": tokens // chunks}
        self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, options, ("hidden_states", "weight"))

    @dtypes(*some((torch.float16, torch.bfloat16), torch.bfloat16))
    def test_chunks_add_no_error(self, dtype):
        """The gradient of weight is rounded once, whether it is of one chunk's tokens or of several."""
        kwargs = arguments(512, dtype=dtype, hidden=64, vocab=96, bias=False, reduction="sum")
        weight = kwargs["weight"].requires_grad_()
        wide = {name: t.detach().double() for name, t in kwargs.items() if name in ("hidden_states", "weight")}
        expected = torch.autograd.grad(reference(**kwargs | wide | {"weight": wide["weight"].requires_grad_()}),
                                       wide["weight"])[0]  # fmt: skip

        def error(chunk_size):
            loss = fused_linear_cross_entropy(**kwargs, chunk_size=chunk_size, backend="cutile")
            return (torch.autograd.grad(loss, weight)[0].double() - expected).norm()

        assert error(16) < 1.1 * error(512)

    def test_sums_beyond_the_range_of_fp16(self):
        """The gradient of a mean, whose sum over tokens, of one chunk as of several, is far beyond it."""
        tokens, hidden = 2048, 16
        weight = torch.zeros(8, hidden)
        weight[0] = -0.01
        for chunk_size in (4096, 300):
            leaves = [t.half().to(device()).requires_grad_() for t in (torch.full((tokens, hidden), 200.0), weight)]
            target = torch.zeros(tokens, dtype=torch.int64, device=device())
            fused_linear_cross_entropy(*leaves, target, chunk_size=chunk_size, backend="cutile").backward()
            expected = [t.detach().double().requires_grad_() for t in leaves]
            reference(*expected, target).backward()
            assert expected[1].grad.abs().max() * tokens > 2 * torch.finfo(torch.float16).max
            for got, wanted in zip(leaves, expected, strict=True):
                torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=2e-3, atol=1e-6)

    @pytest.mark.parametrize("classes", [0, 1, 31, 33, 128, 5000])
    @pytest.mark.parametrize("tokens", [1, 7, 100, 130])
    def test_parts_cover_the_vocabulary(self, classes, tokens):
        (across, parts), tiles, tile_v, tile_t = losses_plan(classes, tokens, -1)
        of_part = tiles * MODULE.STRIPS * tile_v
        assert across * tile_t >= tokens and parts * of_part >= classes
        assert parts == 1 or (parts - 1) * of_part < classes

    def test_several_parts(self, monkeypatch):
        """As on a GPU, where multiprocessors share the vocabulary; one part's logits are -inf, another's small."""
        monkeypatch.setattr(MODULE, "sm_count", lambda _: 2)
        losses_plan.cache_clear()
        tokens, vocab = 5, 4096 // 8 * 40
        assert losses_plan(vocab, tokens, -1)[:2] == ((1, 20), 2)
        bias = randn(vocab, seed=3)
        bias[:1000], bias[2000:3000] = float("-inf"), -1e4
        kwargs = arguments(tokens, hidden=4, vocab=vocab) | {"bias": bias, "target": torch.arange(tokens) * 2 + 1200}
        kwargs["target"] = kwargs["target"].to(bias.device)
        kwargs["reduction"] = "none"
        try:
            self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, {"backend": "cutile"}, ("weight",))
        finally:
            losses_plan.cache_clear()

    @pytest.mark.parametrize("chunk_size", [4096, 7])
    def test_repeats_itself(self, chunk_size):
        kwargs = arguments(dtype=torch.bfloat16)
        inputs = [kwargs[name].requires_grad_() for name in ("hidden_states", "weight", "bias")]
        first, *others = (
            torch.autograd.grad(fused_linear_cross_entropy(**kwargs, chunk_size=chunk_size, backend="cutile"), inputs)
            for _ in range(3)
        )
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_upstream_gradient_of_one(self, reduction):
        kwargs = arguments(reduction=reduction)
        inputs = [kwargs[name].requires_grad_() for name in ("hidden_states", "weight", "bias")]
        with sanitized():
            got = torch.autograd.grad(fused_linear_cross_entropy(**kwargs, backend="cutile"), inputs)
        torch.testing.assert_close(got, torch.autograd.grad(reference(**kwargs), inputs))

    def test_chunks_do_not_matter(self):
        kwargs = arguments(dtype=torch.bfloat16, reduction="none")
        with sanitized():
            results = [fused_linear_cross_entropy(**kwargs, chunk_size=c, backend="cutile") for c in (1, 6, 20, 1000)]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-2)

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    def test_gradcheck(self):
        target = torch.tensor([1, -100, 4]).to(randn(1).device)
        inputs = tuple(randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(((3, 4), (6, 4), (6,))))
        torch.autograd.gradcheck(
            lambda h, w, b: fused_linear_cross_entropy(h, w, target, b, chunk_size=2, backend="cutile"),
            inputs, eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0,
        )  # fmt: skip

    def test_loss_changed_in_place(self):
        kwargs = arguments()
        weight = kwargs["weight"].requires_grad_()
        expected = torch.autograd.grad(fused_linear_cross_entropy(**kwargs, backend="cutile") / 4, weight)[0]
        loss = fused_linear_cross_entropy(**kwargs, backend="cutile")
        loss /= 4
        torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], expected)

    def test_not_contiguous(self):
        kwargs = arguments(6, 5)
        kwargs |= {name: kwargs[name].transpose(0, 1) for name in ("hidden_states", "target")}
        kwargs["weight"] = kwargs["weight"].t().contiguous().t()
        kwargs["bias"] = kwargs["bias"].repeat_interleave(2)[::2]
        self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @backends("fused_linear_cross_entropy")
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_empty(self, backend, reduction):
        kwargs = arguments(0, reduction=reduction)
        self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
    def test_special_values(self, value):
        kwargs = arguments(reduction="none")
        kwargs["hidden_states"][3, 2] = value
        self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, {"backend": "cutile"})

    def test_all_logits_minus_infinity(self):
        kwargs = arguments(reduction="none")
        kwargs["bias"].fill_(-float("inf"))
        kwargs["target"].clamp_(min=0)
        self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_unsupported_falls_back(self):
        for kwargs, why in (
            (arguments(dtype=torch.float64), "not fp32, fp16 or bf16"),
            (arguments(ignore_index=2**31), "does not fit 32 bits"),
        ):
            with use_backend("cutile"), pytest.warns(FallbackWarning, match=why):
                loss = fused_linear_cross_entropy(**kwargs)
            assert torch.equal(loss, reference(**kwargs))

    @backends("fused_linear_cross_entropy")
    def test_wrong_arguments(self, backend):
        kwargs = arguments()
        for error, message, wrong in (
            (ValueError, "hidden_states has shape", {"weight": randn(V, H + 1)}),
            (ValueError, "hidden_states has shape", {"hidden_states": randn(M, 0), "weight": randn(V, 0)}),
            (ValueError, "hidden_states has shape", {"weight": randn(0, H), "bias": randn(0)}),
            (ValueError, "target has shape", {"target": kwargs["target"][:1]}),
            (TypeError, "target is torch.float32", {"target": randn(M)}),
            (ValueError, "bias has shape", {"bias": randn(V + 1)}),
            (TypeError, "weight is torch.float16", {"weight": kwargs["weight"].half()}),
            (ValueError, "chunk_size is 0", {"chunk_size": 0}),
            (ValueError, "reduction is 'max'", {"reduction": "max"}),
        ):
            with pytest.raises(error, match=f"fused_linear_cross_entropy: {message}"):
                fused_linear_cross_entropy(**kwargs | wrong, backend=backend)

    @backends("fused_linear_cross_entropy")
    def test_transforms(self, backend):
        hidden, weight, target, bias, _ = arguments(reduction="sum").values()

        def loss(hidden, weight):
            return fused_linear_cross_entropy(hidden, weight, target, bias, chunk_size=4, backend=backend)

        inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
        expected = torch.autograd.grad(loss(*inputs), inputs)
        torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(hidden, weight), expected)

    def test_autocast_changes_nothing(self):
        kwargs = arguments()
        inputs = [kwargs[name].requires_grad_() for name in ("hidden_states", "weight", "bias")]
        runs = []
        for enabled in (True, False):
            with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=enabled):
                loss = fused_linear_cross_entropy(**kwargs, backend="cutile")
            runs.append((loss, *torch.autograd.grad(loss, inputs)))
        assert all(map(torch.equal, *runs))

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_compiled(self, reduction):
        hidden, weight, target, bias, _ = arguments(reduction=reduction).values()
        self.assertCompiledEqualsEager(
            lambda h, w, b: fused_linear_cross_entropy(
                h * 2, w, target, b, chunk_size=8, reduction=reduction, backend="cutile"
            ).sin(),
            hidden, weight, bias,
        )  # fmt: skip

    def test_operators(self):
        hidden, weight, target, bias = arguments().values()
        scale = torch.ones_like(target, dtype=torch.float32)
        for wanted in ((True, True, True), (False, True, False)):
            arrays = (hidden, weight, bias, target, scale)
            torch.library.opcheck(linear_cross_entropy_chunks.operator, (*arrays, -100, 8, *wanted))

    @pytest.mark.skipif(HAS_GPU, reason="compiles from CPU tensors")
    def test_compiles_for_every_architecture(self):
        kwargs = arguments(128, dtype=torch.bfloat16, hidden=8, vocab=5000)  # the tiles of all long chunks
        kwargs["hidden_states"].requires_grad_()
        assert_launches_compile(lambda: fused_linear_cross_entropy(**kwargs, backend="cutile").backward())

    @pytest.mark.skipif(HAS_GPU, reason="compiles from CPU tensors")
    def test_what_only_large_chunks_launch_compiles(self, monkeypatch):
        self.make_small(monkeypatch)
        monkeypatch.setattr(linear_cross_entropy_plan, "ALL_THERE_IS_ROOM_FOR", 16)
        kwargs = arguments(128, dtype=torch.bfloat16, hidden=8, vocab=300)
        kwargs["weight"].requires_grad_()
        with recorded_launches() as launches:
            fused_linear_cross_entropy(**kwargs, chunk_size=100, backend="cutile").backward()
        for kernel in (MODULE.copy_kernel, MODULE.token_losses_kernel):
            assert_compiles(kernel, next(args for launched, args in launches if launched is kernel))

    @gpu
    def test_peak_memory_and_graph_capture(self):
        tokens, hidden, vocab = 16384, 512, 32000
        kwargs = arguments(tokens, dtype=torch.bfloat16, hidden=hidden, vocab=vocab, bias=False)
        for name in ("hidden_states", "weight"):
            kwargs[name].requires_grad_()
        fused_linear_cross_entropy(**kwargs, chunk_size=512, backend="cutile").backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused_linear_cross_entropy(**kwargs, chunk_size=512, backend="cutile").backward()
        assert torch.cuda.max_memory_allocated() - before < tokens * vocab * 2 / 2
        target = kwargs["target"]
        self.assertCaptures(
            lambda h, w: fused_linear_cross_entropy(h, w, target, chunk_size=4096, backend="cutile"),
            kwargs["hidden_states"].detach(), kwargs["weight"].detach(),
        )  # fmt: skip
