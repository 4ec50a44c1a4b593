import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn
from common import sanitized
from common import some

from tilegym.backend import recording
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import fused_add_rms_norm
from tilegym.ops import rms_norm
from tilegym.ops.cutile import row_norms_backward
from tilegym.ops.cutile.fused_add_rms_norm import add_rms_norm_forward
from tilegym.ops.cutile.fused_add_rms_norm import add_rms_norm_forward_rstd
from tilegym.ops.cutile.fused_add_rms_norm import forward_plan
from tilegym.ops.cutile.row_norms_backward import norm_backward
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.fused_add_rms_norm import fused_add_rms_norm as reference

SHAPES = [(1, 4), (37, 128), (2, 7, 96), (3, 4099)]
GPU_SHAPES = [(1, 4096), (4, 2048, 4096), (4096, 128), (300, 14336), (33, 40000)]


def arguments(*shape, dtype=torch.float32, eps=1e-6, **options):
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=2)
    return dict(x=x, residual=residual, weight=randn(shape[-1], dtype=dtype, seed=1), eps=eps) | options


class Test_FusedAddRMSNorm(PyTestCase):
    @backends("fused_add_rms_norm")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = arguments(*shape, dtype=dtype)
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("casting", ["llama", "gemma"])
    @pytest.mark.parametrize("shape", [(6, 80), (2, 8200), (2, 17000)], ids=str)
    def test_options(self, casting, shape):
        kwargs = arguments(*shape, dtype=torch.bfloat16, casting=casting, offset=1.0)
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @dtypes()
    @pytest.mark.parametrize("n", [1500, 2048])
    def test_what_is_added_to_rows_in_two_tiles(self, n, dtype):
        kwargs = arguments(600 if HAS_GPU else 9, n, dtype=dtype)
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("n, pieces", [(7168, 7), (8192, 4)])
    def test_long_rows_that_run_at_once(self, n, pieces):
        device = 0 if HAS_GPU else -1
        rows = 4 * sm_count(device)
        assert forward_plan(rows, n, device)[2][2] == pieces
        assert forward_plan(rows + 1, n, device)[2][2] == 1
        kwargs = arguments(rows, n, dtype=torch.bfloat16)
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize(("more", "n"), [(0, 512), (1, 512), (0, 1536), (1, 1536)])
    def test_gradients_of_many_rows(self, more, n):
        """Of 512 columns four rows a tile, without checks where they fill all tiles; of 1536 two ahead."""
        kwargs = arguments(132 * sm_count(0 if HAS_GPU else -1) + more, n, dtype=torch.bfloat16)
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @dtypes(torch.bfloat16)
    def test_equals_the_two_ops(self, dtype):
        kwargs = arguments(40, 256, dtype=dtype)
        with sanitized():
            y, total = fused_add_rms_norm(**kwargs, backend="cutile")
            expected = kwargs["x"] + kwargs["residual"]
            assert torch.equal(total, expected)
            assert torch.equal(y, rms_norm(expected, 256, kwargs["weight"], 1e-6, backend="cutile"))

    def test_without_weight(self):
        kwargs = arguments(6, 80, offset=0.5) | {"weight": None}
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("n", some([1800, 2048, 2600, 5000], 2600))
    @dtypes(*some((torch.float32, torch.float16, torch.bfloat16), torch.bfloat16))
    def test_rows_in_pieces(self, dtype, n):
        """Many rows that fill no tile of a power of two, or half of one."""
        kwargs = arguments(2**20 // n + 1, n, dtype=dtype)
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"})

    @dtypes()
    def test_special_weights_touch_only_their_columns(self, dtype):
        """A single block makes its row wait for the weight, by the weight's bits."""
        kwargs = arguments(1, 300, dtype=dtype)
        kwargs["weight"][:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
        y, expected = fused_add_rms_norm(**kwargs, backend="cutile")[0], reference(**kwargs)[0]
        torch.testing.assert_close(y, expected, equal_nan=True, atol=2e-2, rtol=2e-2)

    @pytest.mark.parametrize("shape", [(4, 1024), (3, 1100)], ids=str)
    def test_gradients_of_few_rows(self, shape):
        """In one launch up to four rows."""
        self.assertCorrectness(fused_add_rms_norm, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    def test_gradients_of_few_wide_rows(self, monkeypatch):
        """More columns than blocks that sum up one slice each would leave multiprocessors for the rows."""
        monkeypatch.setattr(row_norms_backward, "sm_count", lambda device: 33)
        grids, real = [], row_norms_backward.launch
        monkeypatch.setattr(
            row_norms_backward, "launch", lambda like, grid, *args: (grids.append(grid), real(like, grid, *args))
        )
        recording.forget()
        kwargs = arguments(130, 1100)
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)
        assert grids[0] == (1, 18 + 130)

    @pytest.mark.parametrize("wanted", ["x", "residual", "weight"])
    def test_gradient_of_one(self, wanted):
        self.assertCorrectness(
            fused_add_rms_norm, reference, arguments(5, 24), {"backend": "cutile"}, gradient=(wanted,)
        )

    @pytest.mark.parametrize("output", [0, 1])
    def test_gradient_through_one_output(self, output):
        self.assertCorrectness(
            lambda **kwargs: fused_add_rms_norm(**kwargs)[output],
            lambda **kwargs: reference(**kwargs)[output] + 0 * kwargs["weight"],
            arguments(5, 24), {"backend": "cutile"}, gradient=("x", "residual", "weight"),
        )  # fmt: skip

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    def test_gradcheck(self):
        inputs = tuple(randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(((3, 6), (3, 6), (6,))))
        torch.autograd.gradcheck(
            lambda x, r, w: fused_add_rms_norm(x, r, w, 1e-5, 1.0, backend="cutile"),
            inputs, eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::2, :32], lambda x: x[:1].expand(5, 64)],
        ids=["transposed", "every_other_column", "slice", "expanded"],
    )
    def test_not_contiguous(self, view):
        kwargs = arguments(64, 64, dtype=torch.bfloat16)
        kwargs |= {name: view(kwargs[name]) for name in ("x", "residual")}
        kwargs["weight"] = kwargs["weight"][: kwargs["x"].shape[-1]]
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(fused_add_rms_norm, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0], ids=str)
    def test_special_values(self, value):
        kwargs = arguments(4, 40, dtype=torch.bfloat16)
        kwargs["x"][1, 3] = value
        kwargs["x"][2] = kwargs["residual"][2] = value
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_offsets_beyond_32_bits(self):
        """Three rows, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        x = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
        x.copy_(randn(3, 64, dtype=x.dtype))
        kwargs = dict(x=x, residual=torch.ones_like(x), weight=None, eps=1e-6)
        self.assertCorrectness(fused_add_rms_norm, reference, kwargs, {"backend": "cutile"})

    def test_unsupported_dtype_falls_back(self):
        kwargs = arguments(2, 8, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            outputs = fused_add_rms_norm(**kwargs)
        assert all(map(torch.equal, outputs, reference(**kwargs)))

    @backends("fused_add_rms_norm")
    def test_wrong_arguments(self, backend):
        kwargs = arguments(2, 8)
        for error, name, wrong in (
            (ValueError, "x has shape", {"residual": randn(8)}),
            (ValueError, "x has no dimensions", {"x": randn(1)[0], "residual": randn(1)[0]}),
            (TypeError, "x is torch.float32", {"residual": randn(2, 8, dtype=torch.float16)}),
            (ValueError, "weight has shape", {"weight": randn(7)}),
            (ValueError, "casting is 'qwen'", {"casting": "qwen"}),
        ):
            with pytest.raises(error, match=f"fused_add_rms_norm: {name}"):
                fused_add_rms_norm(**kwargs | wrong, backend=backend)

    def test_compiled(self):
        def call(x, residual, w):
            y, total = fused_add_rms_norm(x * 2, residual, w, 1e-6, backend="cutile")
            return y.sin() + total

        self.assertCompiledEqualsEager(call, randn(10, 48), randn(10, 48, seed=1), randn(48, seed=2))

    def test_operators(self):
        x, residual, dy, dtotal = (randn(3, 2, 48, seed=i) for i in range(4))
        w, options = randn(48), (1e-6, 0.0, True)
        _, total, rstd = add_rms_norm_forward_rstd(x, residual, w, *options)
        torch.library.opcheck(add_rms_norm_forward.operator, (x, residual, None, *options))
        torch.library.opcheck(add_rms_norm_forward_rstd.operator, (x, residual, w, *options))
        torch.library.opcheck(
            norm_backward.operator, (dy, total, dtotal, w, None, rstd, 0.0, 1, True, False, torch.float32)
        )

    @pytest.mark.parametrize("n", [512, 1536, 2048, 4096, 20000])
    def test_compiles_for_every_architecture(self, n):
        x, residual, dy = (torch.empty(128, n, dtype=torch.bfloat16) for _ in range(3))
        w, rstd = torch.empty(n, dtype=torch.bfloat16), torch.empty(128)
        assert_launches_compile(lambda: add_rms_norm_forward_rstd(x, residual, w, 1e-6, 0.0, True))
        assert_launches_compile(
            lambda: norm_backward(dy, x, residual, w, None, rstd, 1.0, 1, True, False, torch.bfloat16)
        )

    @gpu
    def test_graph_capture(self):
        self.assertCaptures(
            lambda x, r, w: fused_add_rms_norm(x, r, w, 1e-6, backend="cutile"),
            *(randn(16, 4096, dtype=torch.bfloat16, seed=i) for i in range(2)), randn(4096, dtype=torch.bfloat16),
        )  # fmt: skip
