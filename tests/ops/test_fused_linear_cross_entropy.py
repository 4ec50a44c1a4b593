import pytest
import torch
import torch.nn.functional as F
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn
from common import sanitized
from peak_memory import PeakMemory

from tilegym import interpreter
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import fused_linear_cross_entropy
from tilegym.ops.cutile.fused_linear_cross_entropy import MOST_ROUNDED
from tilegym.ops.cutile.fused_linear_cross_entropy import linear_cross_entropy_chunks
from tilegym.ops.cutile.fused_linear_cross_entropy import rows_of_chunk
from tilegym.ops.pytorch.fused_linear_cross_entropy import fused_linear_cross_entropy as reference

M, H, V = 20, 24, 70


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


class Test_FusedLinearCrossEntropy(PyTestCase):
    @backends("fused_linear_cross_entropy")
    @dtypes()
    @pytest.mark.parametrize("chunk_size", [4096, 7])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_op(self, backend, dtype, chunk_size, reduction):
        kwargs = arguments(dtype=dtype, reduction=reduction)
        self.assertCorrectness(
            fused_linear_cross_entropy, reference, kwargs, {"backend": backend, "chunk_size": chunk_size}, gradient=True
        )

    @pytest.mark.parametrize(
        "kwargs",
        [
            arguments(bias=False),
            arguments(3, 5, reduction="none"),
            arguments(3, 5, ignore_index=4),
            arguments(6, vocab=5000, dtype=torch.bfloat16),
        ],
        ids=["without_bias", "batch_none", "batch_and_index", "wide"],
    )
    def test_shapes(self, kwargs):
        self.assertCorrectness(
            fused_linear_cross_entropy, reference, kwargs, {"backend": "cutile", "chunk_size": 4}, gradient=True
        )

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
        """No tensor of either pass has more rows of V than a chunk has, but the weight's transpose."""
        largest = 0

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                nonlocal largest
                out = function(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == V and out.shape[0] != H:
                    largest = max(largest, out.shape[0])
                return out

        kwargs = arguments(64)
        kwargs["hidden_states"].requires_grad_()
        with Watch():
            fused_linear_cross_entropy(**kwargs, chunk_size=chunk_size, backend=backend).backward()
        assert largest == chunk_size

    @pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_peak_memory(self, dtype, reduction, monkeypatch):
        """Both passes hold the gradients, a chunk's logits, and a few numbers for each token; no copy of a gradient."""
        hidden, vocab, chunk, size = 128, 512, 16, dtype.itemsize
        monkeypatch.setattr(interpreter, "launch", lambda *_: None)  # kernels allocate nothing

        def peak(tokens):
            kwargs = arguments(tokens, dtype=dtype, hidden=hidden, vocab=vocab, bias=False, reduction=reduction)
            inputs = kwargs["hidden_states"].requires_grad_(), kwargs["weight"].requires_grad_()
            with PeakMemory() as memory:
                fused_linear_cross_entropy(**kwargs, chunk_size=chunk, backend="cutile").backward()
            assert all(t.grad.dtype == dtype for t in inputs)
            return memory.peak - tokens * hidden * size

        weight, logits = vocab * hidden * size, chunk * vocab * size
        for chunks in (1, MOST_ROUNDED):
            assert weight + logits <= peak(chunks * chunk) <= weight + logits + 64 * chunks * chunk
        # Beyond that the sum in fp32, and a last copy: still nothing that grows with tokens * vocabulary.
        several = weight + logits if dtype == torch.float32 else 3 * weight
        for chunks in (4 * MOST_ROUNDED, 8 * MOST_ROUNDED):
            assert peak(chunks * chunk) <= several + 64 * chunks * chunk

    @pytest.mark.parametrize("chunks", [MOST_ROUNDED, 8 * MOST_ROUNDED])
    @dtypes(torch.float16, torch.bfloat16)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_sums_over_many_chunks(self, chunks, dtype, reduction):
        tokens = 512
        kwargs = arguments(tokens, dtype=dtype, hidden=16, vocab=12, bias=False, reduction=reduction)
        kwargs["target"] = (randn(tokens, seed=5).abs() * 3).long()
        options = {"backend": "cutile", "chunk_size": tokens // chunks}
        self.assertCorrectness(fused_linear_cross_entropy, reference, kwargs, options, ("hidden_states", "weight"))

    def test_rows_of_chunk(self):
        assert rows_of_chunk(8192, 128256, 4096) == 2048
        assert rows_of_chunk(100, 128256, 4096) == 1024
        assert rows_of_chunk(12000, 128256, 4096) == 3072
        assert rows_of_chunk(8192, 16384, 4096) == 4096  # 128 MiB of logits
        assert rows_of_chunk(10**6, 128256, 4096) == 4096
        assert rows_of_chunk(10**6, 128256, 100) == 100
        assert rows_of_chunk(0, 0, 7) == 7

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

    def test_unsupported_dtype_falls_back(self):
        kwargs = arguments(dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            loss = fused_linear_cross_entropy(**kwargs)
        assert torch.equal(loss, reference(**kwargs))

    @backends("fused_linear_cross_entropy")
    def test_wrong_arguments(self, backend):
        kwargs = arguments()
        for error, message, wrong in (
            (ValueError, "hidden_states has shape", {"weight": randn(V, H + 1)}),
            (ValueError, "target has shape", {"target": kwargs["target"][:1]}),
            (TypeError, "target is torch.float32", {"target": randn(M)}),
            (ValueError, "bias has shape", {"bias": randn(V + 1)}),
            (TypeError, "weight is torch.float16", {"weight": kwargs["weight"].half()}),
            (ValueError, "chunk_size is 0", {"chunk_size": 0}),
            (ValueError, "reduction is 'max'", {"reduction": "max"}),
        ):
            with pytest.raises(error, match=f"fused_linear_cross_entropy: {message}"):
                fused_linear_cross_entropy(**kwargs | wrong, backend=backend)

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
        kwargs = arguments(4, dtype=torch.bfloat16, hidden=8, vocab=5000)
        kwargs["hidden_states"].requires_grad_()
        assert_launches_compile(lambda: fused_linear_cross_entropy(**kwargs, backend="cutile").backward())

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
