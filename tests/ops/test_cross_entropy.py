import pytest
import torch
import torch.nn.functional as F
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import sanitized

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import cross_entropy
from tilegym.ops import fused_linear_cross_entropy
from tilegym.ops.cutile import cross_entropy as kernels
from tilegym.ops.cutile.cross_entropy import cross_entropy_backward
from tilegym.ops.cutile.cross_entropy import cross_entropy_forward
from tilegym.ops.pytorch.cross_entropy import cross_entropy as reference

SHAPES = [(9, 3), (37, 10), (2, 5, 1000), (5, 4099)]
GPU_SHAPES = [(1, 128256), (4096, 32000), (100000, 10), (64, 128257)]
NAN, INF = float("nan"), float("inf")


def arguments(*shape, dtype=torch.float32, **options):
    """Logits, and targets of which every third is ignored."""
    target = (randn(*shape[:-1], seed=1).abs() * 1e4).long() % shape[-1]
    target.view(-1)[1::3] = options.get("ignore_index", -100)
    return dict(logits=randn(*shape, dtype=dtype) * 3, target=target) | options


class Test_CrossEntropy(PyTestCase):
    @backends("cross_entropy")
    @dtypes()
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape, reduction):
        kwargs = arguments(*shape, dtype=dtype, reduction=reduction)
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": backend}, gradient=True)

    @backends("cross_entropy")
    @pytest.mark.parametrize(
        "options",
        [{}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0}, {"reduction": "sum"}, {"ignore_index": 3}],
        ids=str,
    )
    def test_equals_torchs(self, backend, options):
        kwargs = arguments(20, 70, **options)
        got = cross_entropy(**kwargs, backend=backend)
        torch.testing.assert_close(got, F.cross_entropy(kwargs["logits"], kwargs["target"], **options))

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize(
        "options",
        [
            {"label_smoothing": 0.1},
            {"softcap": 5.0},
            {"z_loss": 1e-2},
            {"label_smoothing": 0.2, "softcap": 30.0, "z_loss": 1e-3, "reduction": "sum", "ignore_index": 2},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("shape", [(20, 70), (3, 9000)], ids=str)
    def test_options(self, dtype, options, shape):
        kwargs = arguments(*shape, dtype=dtype, **options)
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("options", [{}, {"softcap": 20.0}], ids=str)
    def test_a_vocabulary(self, options):
        kwargs = arguments(3, 66000, dtype=torch.bfloat16, **options)
        kwargs["logits"][0, :5000] = -INF  # a whole tile without a maximum
        kwargs["logits"][2, 60000] = 50.0
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.fixture(params=[1, 132], ids=["", "many multiprocessors"])
    def parts(self, request, monkeypatch):
        """Rows are cut into parts, shorter ones where there are more multiprocessors than parts."""
        monkeypatch.setattr(kernels, "sm_count", lambda device: request.param)
        monkeypatch.setattr(kernels, "forward_plan", kernels.forward_plan.__wrapped__)
        monkeypatch.setattr(kernels, "MOST_HELD", {2: 64, 4: 64})

    @dtypes()
    @pytest.mark.parametrize(
        "options", [{}, {"label_smoothing": 0.2, "softcap": 30.0, "z_loss": 1e-3, "reduction": "sum"}], ids=str
    )
    @pytest.mark.parametrize("shape", [(3, 9000), (1, 2, 12289)], ids=str)
    def test_parts(self, shape, dtype, options, parts):
        kwargs = arguments(*shape, dtype=dtype, **options)
        kwargs["logits"][..., 0, 4096:] = -40.0
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
    def test_special_values_of_parts(self, label_smoothing, parts):
        self.test_special_values(9000, label_smoothing)
        self.test_an_ignored_row_may_hold_anything("cutile", 9000, NAN)

    @dtypes()
    @pytest.mark.parametrize("n", [1, 40, 9000])
    def test_sure_predictions_cost_nothing(self, n, dtype, parts):
        """Whatever the multiples of log2(e) are rounded to that the largest logits become."""
        logits = torch.full((16, n), -1e4, dtype=dtype, device=device())
        logits[:, n // 2] = torch.linspace(-300, 300, 16)
        target = torch.full((16,), n // 2, device=device())
        assert cross_entropy(logits, target, reduction="none", backend="cutile").eq(0).all()

    @pytest.mark.parametrize("shape", [(5, 9000), (2, 11, 40), (7, 100)], ids=str)
    def test_more_rows_than_a_launch_takes(self, shape, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_BLOCKS", 2)
        kwargs = arguments(*shape)
        for reduction in ("mean", "none"):
            kwargs["reduction"] = reduction
            self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_more_columns_than_parts_fall_back(self, monkeypatch):
        monkeypatch.setattr(kernels, "MOST_PARTS", 2)
        kwargs = arguments(2, 20000)
        with pytest.warns(match="more than 8192 columns"):
            got = cross_entropy(**kwargs, backend="cutile")
        assert torch.equal(got, reference(**kwargs))

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
    def test_everything_ignored(self, reduction, label_smoothing):
        kwargs = arguments(4, 50, reduction=reduction, label_smoothing=label_smoothing)
        kwargs["target"].fill_(-100)
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @backends("cross_entropy")
    @pytest.mark.parametrize("n", [40, 5000])
    @pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
    def test_an_ignored_row_may_hold_anything(self, backend, n, value):
        kwargs = arguments(3, n, z_loss=0.1)
        kwargs["logits"][1] = value
        logits = kwargs["logits"].requires_grad_()
        with sanitized():
            loss = cross_entropy(**kwargs, backend=backend)
            loss.backward()
        assert loss.isfinite() and not logits.grad[1].any() and logits.grad[0].any()

    @pytest.mark.parametrize("n", [40, 9000])
    @pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
    def test_special_values(self, n, label_smoothing):
        kwargs = arguments(6, n, reduction="none", label_smoothing=label_smoothing)
        kwargs["target"] = torch.tensor([0, 1, 2, 3, 4, 5]).to(kwargs["target"])
        x = kwargs["logits"]
        x[0] = -INF
        x[1, 3] = NAN
        x[2, n - 1] = INF
        x[3, 3] = -INF  # the target's own
        if not label_smoothing:  # the sum of such a row overflows
            x[4] = 3e38
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("wrong", [70, -1, 2**32])
    def test_a_target_that_is_no_class(self, wrong):
        kwargs = arguments(4, 70, reduction="none")
        kwargs["target"][2] = wrong
        logits = kwargs["logits"].requires_grad_()
        with sanitized():
            losses = cross_entropy(**kwargs, backend="cutile")
            losses.sum().backward()
        assert losses[2].isnan() and logits.grad[2].isnan().all()
        assert losses[[0, 1, 3]].isfinite().all() and logits.grad[[0, 1, 3]].isfinite().all()

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that it is not fp64
    def test_gradcheck(self):
        target = torch.tensor([1, -100, 4]).to(randn(1).device)
        torch.autograd.gradcheck(
            lambda x: cross_entropy(
                x, target, label_smoothing=0.1, softcap=5.0, z_loss=0.1, reduction="none", backend="cutile"
            ),
            (randn(3, 6).requires_grad_(),), eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::2, :32], lambda x: x[:1].expand(5, 64)],
        ids=["transposed", "every_other_column", "slice", "expanded"],
    )
    def test_not_contiguous(self, view):
        x = view(randn(64, 64, dtype=torch.bfloat16))
        kwargs = {"logits": x, "target": torch.arange(2 * len(x)).to(x.device)[::2] % x.shape[1]}
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_one_row_and_int32(self):
        kwargs = {"logits": randn(8), "target": torch.tensor(3, dtype=torch.int32).to(randn(1).device)}
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
    def test_empty(self, shape, reduction):
        kwargs = arguments(*shape, reduction=reduction)
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_offsets_beyond_32_bits(self):
        """Three rows, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        x = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
        x.copy_(randn(3, 64, dtype=x.dtype))
        kwargs = {"logits": x, "target": torch.tensor([5, -100, 60])}
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_unsupported_falls_back(self):
        for kwargs, why in (
            (arguments(2, 8, dtype=torch.float64), "not fp32, fp16 or bf16"),
            (arguments(2, 8, z_loss=-1.0), "is not 0 or larger"),
            (arguments(2, 8, ignore_index=torch.iinfo(torch.int64).min), "does not fit 32 bits"),
        ):
            with use_backend("cutile"), pytest.warns(FallbackWarning, match=why):
                loss = cross_entropy(**kwargs)
            assert torch.equal(loss, reference(**kwargs))
        assert cross_entropy(**arguments(2, 8, z_loss=float("nan")), backend="cutile").isnan()

    @backends("cross_entropy")
    def test_wrong_arguments(self, backend):
        kwargs = arguments(2, 8)
        for error, message, wrong in (
            (ValueError, "logits has shape", {"logits": randn(2, 0)}),
            (ValueError, "target has shape", {"target": kwargs["target"][:1]}),
            (TypeError, "target is torch.float32", {"target": randn(2)}),
            (ValueError, "reduction is 'max'", {"reduction": "max"}),
            (ValueError, "label_smoothing is 1.5", {"label_smoothing": 1.5}),
            (ValueError, "softcap is 0.0", {"softcap": 0.0}),
        ):
            with pytest.raises(error, match=f"cross_entropy: {message}"):
                cross_entropy(**kwargs | wrong, backend=backend)

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_loss_changed_in_place(self, reduction):
        """As training loops do that accumulate gradients."""
        logits = randn(6, 11).requires_grad_()
        target = torch.arange(6, device=logits.device)
        gradients = []
        for in_place in (True, False):
            loss = cross_entropy(logits, target, reduction=reduction, backend="cutile")
            if in_place:
                loss /= 4
            gradients.append(torch.autograd.grad(loss if in_place else loss / 4, logits)[0])
        assert torch.equal(*gradients)

    def test_more_losses_than_one_block_adds(self, monkeypatch):
        logits, target = randn(6, 11), torch.arange(6, device=device())
        expected = cross_entropy(logits, target, ignore_index=3, backend="cutile")
        monkeypatch.setattr("tilegym.ops.cutile.cross_entropy.MOST_ADDED", 5)
        torch.testing.assert_close(cross_entropy(logits, target, ignore_index=3, backend="cutile"), expected)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_compiled(self, reduction):
        target = arguments(10, 48)["target"]
        self.assertCompiledEqualsEager(
            lambda x: cross_entropy(x * 2, target, label_smoothing=0.1, reduction=reduction, backend="cutile").sin(),
            randn(10, 48),
        )

    def test_operators(self):
        x, target = arguments(3, 2, 48).values()
        options = (-100, 0.0, 0.1, 0.0)
        _, lse = cross_entropy_forward(x, target, *options)
        torch.library.opcheck(cross_entropy_forward.operator, (x, target, *options))
        torch.library.opcheck(cross_entropy_backward.operator, (randn(3, 2), x, target, lse, *options))

    @pytest.mark.parametrize(("n", "cap", "smoothing"), [(1000, 0.0, 0.0), (128256, 30.0, 0.1)])
    def test_compiles_for_every_architecture(self, n, cap, smoothing):
        x, target = torch.empty(4, n, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
        scale, lse = torch.empty(4), torch.empty(4, 2)
        options = (-100, cap, smoothing, 1e-4)
        assert_launches_compile(lambda: cross_entropy_forward(x, target, *options))
        assert_launches_compile(lambda: cross_entropy_backward(scale, x, target, lse, *options))

    def test_parts_compile(self, parts):
        x, target = torch.empty(4, 128256, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
        assert_launches_compile(lambda: cross_entropy_forward(x, target, -100, 30.0, 0.1, 1e-4))

    @gpu
    def test_graph_capture(self):
        target = torch.arange(16, device="cuda")
        self.assertCaptures(
            lambda x: cross_entropy(x, target, backend="cutile"), randn(16, 128256, dtype=torch.bfloat16)
        )


class Test_LossOfCausalModels:
    """The loss of a Hugging Face model over several batches that make up one step of an optimizer.

    Each is divided by the tokens of all batches, ``num_items_in_batch``, not by its own.
    """

    HIDDEN, VOCAB = 24, 70

    def batches(self):
        """Hidden states and labels, with padding of different lengths."""
        for seed, padding in enumerate((0, 5)):
            labels = (randn(2, 9, seed=seed).abs() * 1e4).long() % self.VOCAB
            labels[:, 9 - padding :] = -100
            yield randn(2, 9, self.HIDDEN, seed=10 + seed), labels

    def step(self, loss_of_batch):
        """The losses, and what they add up to in the gradients of the output layer and of the hidden states."""
        weight = (randn(self.VOCAB, self.HIDDEN, seed=3) * 0.2).requires_grad_()
        count = sum((labels[:, 1:] != -100).sum() for _, labels in self.batches())
        results = []
        for hidden, labels in self.batches():
            hidden.requires_grad_()
            loss = loss_of_batch(hidden, weight, labels, count)
            loss.backward()
            results += [loss.detach(), hidden.grad]
        return *results, weight.grad

    @backends("cross_entropy")
    @pytest.mark.parametrize("fused", [False, True], ids=["cross_entropy", "fused_linear_cross_entropy"])
    @pytest.mark.parametrize("accumulating", [True, False])
    def test_equals_the_models(self, backend, fused, accumulating):
        loss_utils = pytest.importorskip("transformers.loss.loss_utils")

        def theirs(hidden, weight, labels, count):
            logits = torch.nn.functional.linear(hidden, weight)
            return loss_utils.ForCausalLMLoss(logits, labels, self.VOCAB, count if accumulating else None)

        def ours(hidden, weight, labels, count):
            target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            reduction = "sum" if accumulating else "mean"
            if fused:
                loss = fused_linear_cross_entropy(
                    hidden, weight, target, chunk_size=5, reduction=reduction, backend=backend
                )
            else:
                logits = torch.nn.functional.linear(hidden, weight)
                loss = cross_entropy(logits, target, reduction=reduction, backend=backend)
            return loss / count if accumulating else loss

        torch.testing.assert_close(self.step(ours), self.step(theirs))
