import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn
from common import some

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import layer_norm
from tilegym.ops.cutile.layer_norm import forward_plan
from tilegym.ops.cutile.layer_norm import layer_norm_forward
from tilegym.ops.cutile.layer_norm import layer_norm_forward_save
from tilegym.ops.cutile.row_norms_backward import norm_backward
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.layer_norm import layer_norm as reference

SHAPES = [(1, 4), (37, 128), (2, 7, 96), (3, 4099)]
GPU_SHAPES = [(1, 4096), (4, 2048, 4096), (4096, 128), (300, 14336), (33, 40000)]


def arguments(*shape, dtype=torch.float32, dims=1, **options):
    normalized = shape[-dims:]
    return dict(
        input=randn(*shape, dtype=dtype),
        normalized_shape=normalized,
        weight=randn(*normalized, dtype=dtype, seed=1),
        bias=randn(*normalized, dtype=dtype, seed=2),
    ) | options  # fmt: skip


class Test_LayerNorm(PyTestCase):
    @backends("layer_norm")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = arguments(*shape, dtype=dtype)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("shape", [(3, 17000), (11, 8200)], ids=str)
    def test_rows_wider_than_the_registers(self, shape):
        kwargs = arguments(*shape, dtype=torch.bfloat16)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(5, 80), (2, 20000)], ids=str)
    def test_a_large_mean_does_not_cancel(self, shape):
        kwargs = arguments(*shape)
        kwargs["input"] += 1000.0
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("n", some([2048, 2880, 4000, 5000], 2880))
    def test_rows_in_pieces(self, n):
        """Where there are more than a few rows; the last of the pieces full or not."""
        kwargs = arguments(2**20 // n + 1, n, dtype=torch.bfloat16)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("n, pieces", [(7000, 7), (8192, 8)])
    def test_long_rows_that_run_at_once(self, n, pieces):
        device = 0 if HAS_GPU else -1
        rows = 4 * sm_count(device)
        assert forward_plan(rows, n, device)[2][2] == pieces
        assert forward_plan(rows + 1, n, device)[2][2] == forward_plan(rows, n, device, wide=True)[2][2] == 1
        kwargs = arguments(rows, n, dtype=torch.bfloat16)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("missing", [("bias",), ("weight",), ("weight", "bias")], ids="_".join)
    @pytest.mark.parametrize("shape", [(5, 24), (2, 9000)], ids=str)
    def test_without(self, missing, shape):
        kwargs = arguments(*shape) | dict.fromkeys(missing)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @dtypes()
    def test_special_weights_touch_only_their_columns(self, dtype):
        """A single block makes its row wait for the weight, by the weight's bits."""
        kwargs = arguments(1, 300, dtype=dtype)
        kwargs["weight"][:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
        y, expected = layer_norm(**kwargs, backend="cutile"), reference(**kwargs)
        torch.testing.assert_close(y, expected, equal_nan=True, atol=2e-2, rtol=2e-2)

    @pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
    def test_gradients_of_some(self, frozen):
        wanted = tuple({"input", "weight", "bias"} - {frozen})
        self.assertCorrectness(layer_norm, reference, arguments(5, 24), {"backend": "cutile"}, gradient=wanted)

    def test_several_dimensions(self):
        kwargs = arguments(2, 3, 5, 7, dims=2)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)
        kwargs["input"] = kwargs["input"].transpose(0, 1)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @backends("layer_norm")
    def test_weight_of_another_dtype(self, backend):
        kwargs = arguments(4, 40, dtype=torch.bfloat16)
        kwargs["weight"] = kwargs["weight"].float()
        self.assertCorrectness(
            layer_norm,
            lambda input, normalized_shape, weight, bias: torch.nn.functional.layer_norm(
                input, normalized_shape, weight.to(input.dtype), bias.to(input.dtype)
            ),
            kwargs, {"backend": backend}, gradient=True,
        )  # fmt: skip

    def test_fp64_beside_another_dtype(self):
        kwargs = arguments(4, 40, dtype=torch.float64)
        for name in ("weight", "bias"):
            given = kwargs | {name: kwargs[name].float()}
            exact = reference(**kwargs | {name: given[name].double()})
            torch.testing.assert_close(reference(**given), exact, rtol=1e-14, atol=1e-14)

    @pytest.mark.parametrize("shape", [(4, 1024), (3, 1100), (9, 2048), (600 if HAS_GPU else 9, 2560)], ids=str)
    def test_gradients_of_few_rows(self, shape):
        """In one launch up to four rows."""
        self.assertCorrectness(layer_norm, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("n", some([640, 768, 1288, 1536, 1608, 2048, 2560, 2568, 4096], 768, 2568, 4096))
    def test_gradients_of_many_rows(self, n):
        """Two ahead, without checks or with them, or one in four pieces."""
        kwargs = arguments(35 * sm_count(0 if HAS_GPU else -1), n, dtype=torch.bfloat16)
        kwargs["input"] = kwargs["input"] * 3 + 2
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_gradients_are_the_same_every_time(self):
        kwargs = arguments(300, 64, dtype=torch.bfloat16)
        kwargs["weight"].requires_grad_()
        runs = []
        for _ in range(2):
            y = layer_norm(**kwargs, backend="cutile")
            runs.append(torch.autograd.grad(y, kwargs["weight"], torch.ones_like(y))[0])
        assert torch.equal(*runs)

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    def test_gradcheck(self):
        inputs = tuple(t.requires_grad_() for t in (randn(3, 6), randn(6, seed=1), randn(6, seed=2)))
        torch.autograd.gradcheck(
            lambda x, w, b: layer_norm(x, 6, w, b, backend="cutile"),
            inputs, eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::2, :32], lambda x: x[:1].expand(5, 64)],
        ids=["transposed", "every_other_column", "slice", "expanded"],
    )
    def test_not_contiguous(self, view):
        kwargs = arguments(64, 64, dtype=torch.bfloat16)
        x = view(kwargs["input"])
        kwargs |= dict(input=x, normalized_shape=x.shape[-1], weight=kwargs["weight"][: x.shape[-1]], bias=None)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(3, 8), (2, 3, 2, 8)], ids=str)
    def test_written_over(self, shape):
        """As XLM and FlauBERT do with their embeddings' norm."""
        grads = []
        for backend in ("cutile", "pytorch"):
            kwargs = arguments(*shape)
            y = layer_norm(**{n: t.requires_grad_() if n == "input" else t for n, t in kwargs.items()}, backend=backend)
            y *= 2
            grads.append(torch.autograd.grad(y.square().sum(), kwargs["input"])[0])
        torch.testing.assert_close(*grads)

    @pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(layer_norm, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0], ids=str)
    def test_special_values(self, value):
        kwargs = arguments(4, 40, dtype=torch.bfloat16)
        kwargs["input"][1, 3] = value
        kwargs["input"][2] = value
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_offsets_beyond_32_bits(self):
        """Three rows, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        x = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
        x.copy_(randn(3, 64, dtype=x.dtype))
        kwargs = dict(input=x, normalized_shape=64)
        self.assertCorrectness(layer_norm, reference, kwargs, {"backend": "cutile"})

    def test_unsupported_dtype_falls_back(self):
        kwargs = arguments(2, 8, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            y = layer_norm(**kwargs)
        assert torch.equal(y, reference(**kwargs))

    @backends("layer_norm")
    @pytest.mark.parametrize(
        "wrong",
        [{"normalized_shape": 7}, {"normalized_shape": ()}, {"weight": randn(7)}, {"bias": randn(2, 8)}],
        ids=["normalized_shape", "no_shape", "weight", "bias"],
    )
    def test_wrong_arguments(self, backend, wrong):
        with pytest.raises(ValueError, match="layer_norm: " + next(iter(wrong))):
            layer_norm(**arguments(2, 8) | wrong, backend=backend)

    def test_compiled(self):
        def call(x, w, b):
            return layer_norm(x * 2, 48, w, b, backend="cutile").sin()

        self.assertCompiledEqualsEager(call, randn(10, 48), randn(48, seed=1), randn(48, seed=2))

    def test_operators(self):
        x, dy, w = randn(3, 2, 48), randn(3, 2, 48, seed=2), randn(2, 48, seed=1)
        _, mean, rstd = layer_norm_forward_save(x, w, None, 1e-5, 2)
        torch.library.opcheck(layer_norm_forward.operator, (x, w, None, 1e-5, 2))
        torch.library.opcheck(layer_norm_forward_save.operator, (x, None, w, 1e-5, 2))
        torch.library.opcheck(norm_backward.operator, (dy, x, None, w, mean, rstd, 0.0, 2, True, False, torch.float32))

    @pytest.mark.parametrize(("m", "n"), [(64, 2048), (30, 2560), (64, 2560), (64, 4096), (64, 20000)])
    def test_compiles_for_every_architecture(self, m, n):
        x, dy = (torch.empty(m, n, dtype=torch.bfloat16) for _ in range(2))
        w, b, mean, rstd = (torch.empty(size) for size in (n, n, m, m))
        assert_launches_compile(lambda: layer_norm_forward_save(x, w, b, 1e-5, 1))
        assert_launches_compile(lambda: norm_backward(dy, x, None, w, mean, rstd, 0.0, 1, True, True, torch.float32))

    @gpu
    def test_more_than_32_bits_of_elements(self):
        self.assertLargeInput(lambda x: layer_norm(x, 4096, backend="cutile"), 2**19 + 5, 4096)

    @gpu
    def test_graph_capture(self):
        self.assertCaptures(
            lambda x, w: layer_norm(x, 4096, w, backend="cutile"),
            randn(16, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16),
        )  # fmt: skip
