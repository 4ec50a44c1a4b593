from unittest import mock

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import backends
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches

from tilegym.backend import recording
from tilegym.ops import linear
from tilegym.ops.cutile import linear as linear_module
from tilegym.ops.cutile import wide_gemm
from tilegym.ops.cutile.few_rows import few_rows_kernel
from tilegym.ops.cutile.few_rows import merge_rows_kernel
from tilegym.ops.cutile.linear import at_once_gemv_kernel
from tilegym.ops.cutile.linear import gemv_kernel
from tilegym.ops.cutile.linear import held_gemv_kernel
from tilegym.ops.cutile.linear import linear_forward
from tilegym.ops.pytorch.linear import linear as reference

# x and N: one row, a few, many; K not a multiple of the tile's.
ONE_ROW = [((1, 64), 32), ((1, 1, 333), 7), ((40,), 9)]
SHAPES = [*ONE_ROW, ((5, 70), 50), ((5, 1, 70), 50), ((2, 8, 64), 96), ((3, 7, 33), 50)]
GPU_SHAPES = [((1, 4096), 14336), ((1, 14336), 4096), ((1, 4096), 128256), ((8, 4096), 6144), ((2, 512, 4096), 4096)]


def arguments(shape, n, dtype, bias):
    kwargs = dict(x=randn(*shape, dtype=dtype), weight=randn(n, shape[-1], dtype=dtype, seed=1))
    return kwargs | ({"bias": randn(n, dtype=dtype, seed=2)} if bias else {})


class Test_Linear(PyTestCase):
    @backends("linear")
    @dtypes()
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    @pytest.mark.parametrize(("shape", "n"), SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape, n, bias):
        kwargs = arguments(shape, n, dtype, bias)
        self.assertCorrectness(linear, reference, kwargs, {"backend": backend}, gradient=True)

    @backends("linear")
    @dtypes(torch.bfloat16, torch.float16)
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    @pytest.mark.parametrize(("shape", "n"), [*ONE_ROW, ((3, 70), 50)], ids=str)
    def test_results_that_are_not_rounded(self, backend, dtype, shape, n, bias):
        """As exact as in fp32; gradients come back in the inputs' dtype."""
        kwargs = arguments(shape, n, dtype, bias)
        found = linear(**kwargs, out_dtype=torch.float32, backend=backend)
        exact = reference(**{name: t.double() for name, t in kwargs.items()})
        assert found.dtype == torch.float32 and found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
        leaves = {name: t.clone().requires_grad_() for name, t in kwargs.items()}
        linear(**leaves, out_dtype=torch.float32, backend=backend).sum().backward()
        assert all(leaf.grad.dtype == dtype for leaf in leaves.values())
        assert torch.equal(linear(**kwargs, out_dtype=dtype, backend=backend), linear(**kwargs, backend=backend))
        with pytest.raises(TypeError, match="out_dtype must be .* or torch.float32, it is torch.float64"):
            linear(**kwargs, out_dtype=torch.float64, backend=backend)

    @backends("linear")
    @dtypes()
    @pytest.mark.parametrize("shape", [(1, 1, 64), (1, 128), (1, 1, 256), (1, 100), (3, 64)], ids=str)
    def test_settled(self, backend, dtype, shape):
        """By the kernels that read weights ahead, and where they do not; of a weight with other strides none does."""
        kwargs = dict(x=randn(*shape, dtype=dtype), weight=randn(128, shape[-1], dtype=dtype, seed=1), settled=True)
        self.assertCorrectness(linear, reference, kwargs, {"backend": backend})
        kwargs["weight"] = randn(shape[-1], 128, dtype=dtype, seed=1).T
        self.assertCorrectness(linear, reference, kwargs, {"backend": backend})

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    def test_settled_weights_are_read_ahead(self):
        """As those of linear_add, by the same kernels and with the same bits; others are not."""
        for k, kernel in ((64, at_once_gemv_kernel), (256, held_gemv_kernel)):
            x, weight = randn(1, 1, k, dtype=torch.bfloat16), randn(128, k, dtype=torch.bfloat16, seed=1)
            found = []
            for settled in (True, False):
                recording.forget()
                with recorded_launches(run=True) as recorded, torch.no_grad():
                    found.append(linear(x, weight, settled=settled, backend="cutile"))
                assert [launched for launched, _ in recorded] == [kernel if settled else gemv_kernel]
            assert torch.equal(*found)
            recording.forget()
            with recorded_launches() as recorded, torch.no_grad():
                linear(x, weight.T.contiguous().T, settled=True, backend="cutile")
            assert [launched for launched, _ in recorded] == [gemv_kernel]

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    def test_a_single_row_that_is_not_rounded_is_one_launch(self):
        x, weight = randn(1, 64, dtype=torch.bfloat16), randn(8, 64, dtype=torch.bfloat16)
        with recorded_launches() as recorded, torch.no_grad():
            linear(x, weight, None, torch.float32, backend="cutile")
        assert [kernel for kernel, _ in recorded] == [gemv_kernel]
        torch.library.opcheck(linear_module.wide_row_forward.operator, (x, weight, None))

    @pytest.mark.parametrize("rows", [1, 3, 20])
    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:, 3:40], lambda x: x[:1].expand(64, 64)],
        ids=["transposed", "every_other_column", "slice", "expanded"],
    )
    def test_not_contiguous(self, rows, view):
        x, weight = view(randn(64, 64, dtype=torch.bfloat16))[:rows], view(randn(64, 64, dtype=torch.bfloat16, seed=1))
        self.assertCorrectness(linear, reference, dict(x=x, weight=weight), {"backend": "cutile"}, gradient=True)

    @dtypes(torch.float16, torch.bfloat16)
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    def test_wide_tiles(self, dtype, bias):
        kwargs = arguments((150, 72), 384, dtype, bias)
        kwargs["x"], kwargs["weight"] = kwargs["x"][:, :66], kwargs["weight"][:, :66]
        with mock.patch.object(linear_module, "fits_better", lambda *_: True):
            self.assertCorrectness(linear, reference, kwargs, {"backend": "cutile"})

    def test_where_wide_tiles_fit(self):
        """132 multiprocessors: one wave of 128 blocks instead of two of 128 x 128."""
        with (
            mock.patch.object(wide_gemm, "sm_count", lambda device: 132),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        ):
            fits = wide_gemm.fits_better.__wrapped__
            assert fits(512, 6144, torch.bfloat16, 0)
            assert not fits(512, 6144, torch.float32, 0)
            assert not any(fits(m, n, torch.bfloat16, 0) for m, n in ((512, 4096), (8192, 6144), (512, 28672)))

    @pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
    def test_gradients_of_some(self, frozen):
        kwargs = arguments((20, 24), 40, torch.float32, True)
        wanted = tuple({"x", "weight", "bias"} - {frozen})
        self.assertCorrectness(linear, reference, kwargs, {"backend": "cutile"}, gradient=wanted)

    @pytest.mark.parametrize(("shape", "n"), [((0, 8), 4), ((3, 8), 0), ((3, 0), 4), ((20, 0), 4)], ids=str)
    @pytest.mark.parametrize("bias", [False, True])
    def test_empty(self, shape, n, bias):
        kwargs = arguments(shape, n, torch.float32, bias)
        self.assertCorrectness(linear, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("rows", [1, 3, 20])
    def test_nan_stays_in_its_row(self, rows):
        kwargs = arguments((rows, 50), 33, torch.bfloat16, True)
        kwargs["weight"][3, 7], kwargs["weight"][4, 1] = float("nan"), float("inf")
        self.assertCorrectness(linear, reference, kwargs, {"backend": "cutile"})

    @backends("linear")
    def test_wrong_arguments(self, backend):
        x, weight = randn(3, 4), randn(5, 4)
        with pytest.raises(ValueError, match="linear: expected x"):
            linear(x, weight.t(), backend=backend)
        with pytest.raises(ValueError, match="linear: bias must be \\[5\\]"):
            linear(x, weight, x[0], backend=backend)
        with pytest.raises(TypeError, match="linear: .* one dtype"):
            linear(x, weight.half(), backend=backend)

    @pytest.mark.parametrize("rows", [1, 3, 20])
    def test_compiled(self, rows):
        def call(x, weight, bias):
            return linear(x * 2, weight, bias, backend="cutile").relu()

        self.assertCompiledEqualsEager(call, randn(rows, 48), randn(40, 48, seed=1), randn(40, seed=2))

    @pytest.mark.parametrize("rows", [1, 3, 20])
    def test_operator(self, rows):
        torch.library.opcheck(linear_forward.operator, (randn(2, rows, 48), randn(40, 48, seed=1), None))

    def test_compiles_for_every_architecture(self):
        x, weight = torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(1024, 4096, dtype=torch.bfloat16)
        y = torch.empty(1, 1024, dtype=torch.bfloat16)
        assert_compiles(gemv_kernel, (x, weight, y[0], y, y, -1, True, True, 1.0, 4096, 4, 512, 792, 2048, False))
        assert_compiles(
            gemv_kernel,
            (x, weight, 0, 0, y, -1, False, False, 1.0, 4096, 4, 512, 792, 2048, True),
            ("sm_90", "sm_100", "sm_120"),
        )
        assert_compiles(few_rows_kernel, (x, weight, y[0], y, y, True, True, 0.5, 1, 16, 64, 256, False, False))
        rows, wide = torch.empty(512, 4096, dtype=torch.bfloat16), torch.empty(4, 192, 4096, dtype=torch.bfloat16)
        args = (rows, wide, wide[..., 0].contiguous(), rows.new_empty(512, 4, 192), 128, 128, 64, 64, 8, True)
        assert_compiles(wide_gemm.wide_gemm_kernel, args, ("sm_90",))
        x, y = x[None], y[None]
        assert_compiles(
            gemv_kernel, (x, weight, 0, 0, y, -1, False, False, 1.0, 4096, 4, 512, 792, 2048, True), ("sm_90",)
        )
        assert_compiles(
            few_rows_kernel, (x, weight, 0, 0, y, False, False, 1.0, 1, 8, 64, 128, False, False), ("sm_80",)
        )
        assert_compiles(
            few_rows_kernel, (x, weight, 0, 0, y, False, False, 1.0, 1, 8, 64, 128, False, True), ("sm_90",)
        )
        partial = torch.empty(4, 1024, 8)
        args = (x[0], weight, 0, 0, partial, False, False, 1.0, 4, 8, 64, 128, False, True)
        assert_compiles(few_rows_kernel, args, ("sm_90", "sm_100", "sm_120"))
        args = (partial, y[0, 0], y[0], y[0], True, True, 1.0, 4, 8, 32, True)
        assert_compiles(merge_rows_kernel, args, ("sm_90", "sm_100", "sm_120"))

    @gpu
    @pytest.mark.parametrize("rows", [1, 4, 100])
    def test_graph_capture(self, rows):
        x, weight = randn(rows, 1024, dtype=torch.bfloat16), randn(768, 1024, dtype=torch.bfloat16)
        self.assertCaptures(lambda x, w: linear(x, w, backend="cutile"), x, weight)

    @pytest.mark.parametrize("rows", [1, 4, 100])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_rows_that_begin_anywhere_are_loaded_at_once(self, rows, dtype):
        """What a kernel reads begins at 16 bytes, and so does each of its rows; elsewhere it would take several times
        as long."""
        x, weight = torch.randn(rows, 75, dtype=dtype), torch.randn(37, 75, dtype=dtype)
        with recorded_launches() as launches:
            linear(x, weight, backend="cutile")
        read = [t for _, args in launches for t in args if isinstance(t, torch.Tensor) and t.shape[-1:] == (75,)]
        assert len(read) == 2
        assert not any(t.stride(0) * t.element_size() % 16 or t.data_ptr() % 16 for t in read if t.shape[0] > 1)
