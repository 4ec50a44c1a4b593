import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from common import some

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import rms_norm
from tilegym.ops.cutile.rms_norm import rms_norm_forward
from tilegym.ops.cutile.rms_norm import rms_norm_forward_rstd
from tilegym.ops.cutile.row_norms_backward import backward_plan
from tilegym.ops.cutile.row_norms_backward import norm_backward
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.rms_norm import rms_norm as reference

MODES = ["static_persistent", "multi_wave_reload", "multi_wave_cached"]
# Rows and columns: one, not powers of two, several tiles of either; on a GPU real sizes too.
SHAPES = [(1, 4), (3, 5), (37, 128), (2, 7, 96), (5, 4099)]
GPU_SHAPES = [(1, 4096), (4, 2048, 4096), (4096, 128), (300, 14336), (33, 40000)]


def arguments(*shape, dtype, bias=False, eps=1e-6, **options):
    n = shape[-1]
    kwargs = dict(input=randn(*shape, dtype=dtype), normalized_shape=n, weight=randn(n, dtype=dtype, seed=1), eps=eps)
    if bias:
        kwargs["bias"] = randn(n, dtype=dtype, seed=2)
    return kwargs | options


class Test_RMSNorm(PyTestCase):
    @backends("rms_norm")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        self.assertCorrectness(rms_norm, reference, arguments(*shape, dtype=dtype), {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("casting", ["llama", "gemma"])
    @pytest.mark.parametrize("options", [{"offset": 1.0}, {"bias": True}, {"offset": 0.5, "bias": True}], ids=str)
    @pytest.mark.parametrize("shape", [(6, 80), (5, 4099)], ids=str)
    def test_options(self, casting, options, shape):
        kwargs = arguments(*shape, dtype=torch.bfloat16, casting=casting, **options)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("casting", ["llama", "gemma"])
    def test_casting_is_the_models(self, casting):
        """Rounding once more or less would change the last bit of a quarter of the values."""
        kwargs = arguments(64, 256, dtype=torch.bfloat16, casting=casting)
        same = rms_norm(**kwargs, backend="cutile") == reference(**kwargs)
        assert same.float().mean() > 0.99

    @pytest.mark.parametrize("n", some([1100, 2880, 5000], 2880))
    def test_rows_in_pieces(self, n):
        """Many rows that fill no tile of a power of two; the last of the pieces full or not."""
        kwargs = arguments(2**20 // n + 1, n, dtype=torch.bfloat16, bias=True, offset=1.0)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_without_weight(self, offset):
        kwargs = arguments(6, 80, dtype=torch.float16, offset=offset) | {"weight": None}
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize(
        "shape", [(3, 5), (40, 1000), (2, 5000), (3, 9, 300)] + ([(512, 40000)] if HAS_GPU else []), ids=str
    )
    def test_modes_agree(self, shape):
        kwargs = arguments(*shape, dtype=torch.bfloat16)
        with sanitized():
            results = [rms_norm(**kwargs, mode=mode, backend="cutile") for mode in MODES]
        for result in results:
            self.assertClose("y", result, reference(**kwargs), reference(**{k: _double(v) for k, v in kwargs.items()}))

    @dtypes()
    @pytest.mark.parametrize("wider", [False, True], ids=["", "fp32 weight"])
    def test_special_weights_touch_only_their_columns(self, dtype, wider):
        """A single block makes its row wait for the weight, by the weight's bits."""
        kwargs = arguments(1, 300, dtype=dtype, bias=True)
        kwargs["weight"] = kwargs["weight"].float() if wider else kwargs["weight"]
        kwargs["weight"][:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
        y, expected = rms_norm(**kwargs, backend="cutile"), reference(**kwargs)
        torch.testing.assert_close(y, expected, equal_nan=True, atol=2e-2, rtol=2e-2)

    @pytest.mark.parametrize("mode", MODES)
    def test_large_inputs_become_rows(self, mode, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.tiling.SMALL", 0)
        kwargs = arguments(2, 7, 96, dtype=torch.bfloat16, mode=mode)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(3, 33000), (20, 8200)], ids=str)
    def test_rows_wider_than_the_registers(self, shape):
        kwargs = arguments(*shape, dtype=torch.bfloat16, bias=True)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("n", [96, 5000])
    @pytest.mark.parametrize("total", [lambda y: y.sum(0), lambda y: y.sum()], ids=["rows", "all"])
    def test_upstream_gradients_that_repeat(self, total, n):
        kwargs = arguments(5, n, dtype=torch.float32)
        x = kwargs["input"].requires_grad_()
        results = rms_norm(**kwargs, backend="cutile"), reference(**kwargs)
        got, expected = (torch.autograd.grad(total(y).sum(), x)[0] for y in results)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
    def test_gradients_of_some(self, frozen):
        kwargs = arguments(5, 24, dtype=torch.float32, bias=True)
        wanted = tuple({"input", "weight", "bias"} - {frozen})
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=wanted)

    @pytest.mark.parametrize("shape", [(4, 1024), (3, 1100), (9, 2048), (9, 2560), (7, 4096)], ids=str)
    def test_gradients_of_few_and_of_whole_rows(self, shape):
        """In one launch up to four rows; tiles as wide as the rows, which take no checks; and neither."""
        kwargs = arguments(*shape, dtype=torch.float32, bias=True)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("odd", [0, 1])
    def test_gradients_of_rows_two_at_a_time(self, odd):
        """Many rows of 4096, if their number is even."""
        kwargs = arguments(34 * sm_count(0 if HAS_GPU else -1) + odd, 4096, dtype=torch.bfloat16)
        plan = backward_plan(len(kwargs["input"]), 4096, 0 if HAS_GPU else -1, False, False)
        assert plan[2][0] == 2 - odd
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize(
        ("n", "tile"),
        [
            *((2048, 1), (2568, 1), (1024, 2), (520, 2), (128, 16)),
            *(
                pytest.param(n, t, marks=pytest.mark.slow)
                for n, t in ((1800, 1), (1536, 1), (1288, 1), (768, 2), (640, 2))
            ),
        ],
    )
    @pytest.mark.parametrize("more", range(3))
    def test_gradients_of_rows_read_two_ahead(self, more, n, tile):
        """Many rows: blocks that take an even number of tiles, an odd one, and one more than the others."""
        kwargs = arguments(tile * (33 * sm_count(0 if HAS_GPU else -1) + more), n, dtype=torch.bfloat16)
        plan = backward_plan(len(kwargs["input"]), n, 0 if HAS_GPU else -1, False, False)
        assert plan[2][0] == tile and plan[2][3] == 2
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_gradients_of_short_rows_that_fill_no_tile(self):
        """Of many they are checked, and read one ahead."""
        kwargs = arguments(66 * sm_count(0 if HAS_GPU else -1) + 1, 1024, dtype=torch.bfloat16)
        plan = backward_plan(len(kwargs["input"]), 1024, 0 if HAS_GPU else -1, False, False)
        assert plan[2][0] == 2 and plan[2][3] == 1 and plan[2][6]
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("frozen", ["weight", "bias"])
    def test_some_gradients_of_few_rows(self, frozen):
        kwargs = arguments(3, 1024, dtype=torch.float32, bias=True, offset=1.0)
        wanted = tuple({"input", "weight", "bias"} - {frozen})
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=wanted)

    @pytest.mark.parametrize(
        ("shape", "kernels"),
        [
            ((4, 1024), ["backward_few_kernel"]),
            ((4, 1000), ["backward_kernel"]),
            ((33, 1024), ["backward_kernel", "add_blocks_kernel"]),
        ],
    )
    def test_launches_of_the_backward_pass(self, shape, kernels):
        # What is recorded are launches on the CPU.
        x, w, rstd = randn(*shape).cpu(), randn(shape[1]).cpu(), torch.ones(shape[0])
        with recorded_launches() as launches:
            norm_backward(x, x, None, w, None, rstd, 0.0, 1, True, False, torch.float32)
        assert [kernel._pyfunc.__name__ for kernel, _ in launches] == kernels

    @pytest.mark.parametrize("shape", [(300, 64), (4, 1024)], ids=str)
    def test_gradients_are_the_same_every_time(self, shape):
        kwargs = arguments(*shape, dtype=torch.bfloat16)
        kwargs["weight"].requires_grad_()
        runs = []
        for _ in range(2):
            y = rms_norm(**kwargs, backend="cutile")
            runs.append(torch.autograd.grad(y, kwargs["weight"], torch.ones_like(y))[0])
        assert torch.equal(*runs)

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    def test_gradcheck(self):
        x, w, b = randn(3, 6), randn(6, seed=1), randn(6, seed=2)
        inputs = tuple(t.requires_grad_() for t in (x, w, b))
        torch.autograd.gradcheck(
            lambda x, w, b: rms_norm(x, 6, w, 1e-5, bias=b, offset=1.0, backend="cutile"),
            inputs, eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::2, :32], lambda x: x[:1].expand(5, 64)],
        ids=["transposed", "every_other_column", "slice", "expanded"],
    )
    def test_not_contiguous(self, view):
        x = view(randn(64, 64, dtype=torch.bfloat16))
        kwargs = dict(input=x, normalized_shape=x.shape[-1], weight=randn(x.shape[-1], dtype=x.dtype), eps=1e-6)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
    def test_empty(self, shape):
        kwargs = arguments(*shape, dtype=torch.float32)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0], ids=str)
    def test_special_values(self, value):
        kwargs = arguments(4, 40, dtype=torch.bfloat16)
        kwargs["input"][1, 3] = value
        kwargs["input"][2] = value
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_weight_of_another_dtype(self):
        kwargs = arguments(4, 40, dtype=torch.bfloat16)
        kwargs["weight"] = kwargs["weight"].float()
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_offsets_beyond_32_bits(self):
        """Three rows, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        x = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
        x.copy_(randn(3, 64, dtype=x.dtype))
        kwargs = dict(input=x, normalized_shape=64, weight=None, eps=1e-6)
        self.assertCorrectness(rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_unsupported_dtype_falls_back(self):
        x = randn(2, 8, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            y = rms_norm(x, 8, None, 1e-6)
        assert torch.equal(y, reference(x, 8, None, 1e-6))

    @backends("rms_norm")
    @pytest.mark.parametrize(
        "wrong", [{"normalized_shape": 7}, {"normalized_shape": (2, 8)}, {"mode": "fast"}, {"casting": "qwen"}], ids=str
    )
    def test_wrong_arguments(self, backend, wrong):
        with pytest.raises(ValueError, match="rms_norm: " + next(iter(wrong))):
            rms_norm(**arguments(2, 8, dtype=torch.float32) | wrong, backend=backend)

    @pytest.mark.filterwarnings("ignore::tilegym.errors.FallbackWarning")
    @backends("rms_norm")
    def test_integers(self, backend):
        with pytest.raises(TypeError, match="rms_norm: input is torch.int32, it must be floating point"):
            rms_norm(torch.ones(2, 8, dtype=torch.int32), 8, None, 1e-6, backend=backend)

    @pytest.mark.parametrize("mode", [None, "multi_wave_reload"])
    def test_compiled(self, mode):
        def call(x, w):
            return rms_norm(x * 2, 48, w, 1e-6, mode=mode, backend="cutile").sin()

        self.assertCompiledEqualsEager(call, randn(10, 48), randn(48, seed=1))

    def test_operators(self):
        x, w, dy = randn(3, 2, 48), randn(48, seed=1), randn(3, 2, 48, seed=2)
        _, rstd = rms_norm_forward_rstd(x, w, None, 1e-6, None, 0.0, True)
        torch.library.opcheck(rms_norm_forward.operator, (x, w, None, 1e-6, None, 0.0, True))
        torch.library.opcheck(rms_norm_forward_rstd.operator, (x, None, w, 1e-6, None, 0.0, True))
        torch.library.opcheck(norm_backward.operator, (dy, x, None, w, None, rstd, 0.0, 1, True, False, torch.float32))

    @pytest.mark.parametrize(
        ("mode", "shape"),
        [*((mode, (64, 4096)) for mode in MODES), (None, (2, 3, 4096)), (None, (410, 2560)), (None, (9, 8192))],
    )
    def test_compiles_for_every_architecture(self, mode, shape):
        x, w = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[-1], dtype=torch.bfloat16)
        assert_launches_compile(lambda: rms_norm_forward(x, w, None, 1e-6, mode, 0.0, True))

    @pytest.mark.parametrize(
        ("m", "n"),
        [(4, 2048), (64, 512), (64, 640), (64, 768), (64, 1536), (64, 2560), (64, 4096), (64, 8192), (64, 10000)],
    )
    def test_backward_compiles_for_every_architecture(self, m, n):
        x, w, rstd = torch.empty(m, n, dtype=torch.bfloat16), torch.empty(n), torch.empty(m)
        dy = torch.empty_like(x)
        assert_launches_compile(lambda: norm_backward(dy, x, None, w, None, rstd, 0.0, 1, True, True, torch.bfloat16))

    @gpu
    def test_more_than_32_bits_of_elements(self):
        self.assertLargeInput(lambda x: rms_norm(x, 4096, None, 1e-6, backend="cutile"), 2**19 + 5, 4096)

    @gpu
    def test_graph_capture(self):
        self.assertCaptures(
            lambda x, w: rms_norm(x, 4096, w, 1e-6, backend="cutile"),
            randn(16, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16),
        )  # fmt: skip


def _double(value):
    return value.double() if isinstance(value, torch.Tensor) else value
