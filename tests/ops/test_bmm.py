import itertools

import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import OVERLAPS
from common import PyTestCase
from common import assert_compiles
from common import backends
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import bmm
from tilegym.ops.cutile.bmm import _suits
from tilegym.ops.cutile.bmm import bmm_forward
from tilegym.ops.cutile.bmm import bmm_kernel
from tilegym.ops.cutile.bmm import bmm_row_kernel
from tilegym.ops.cutile.bmm import row_plan
from tilegym.ops.cutile.bmm import with_unit_stride
from tilegym.ops.cutile.matmul import _configs
from tilegym.ops.pytorch.bmm import bmm as reference

# batch, M, N, K: one, several and no whole number of tiles of each.
SHAPES = [(2, 64, 32, 32), (1, 1, 1, 1), (3, 33, 65, 7), (2, 5, 40, 1023)]
GPU_SHAPES = [(32, 1024, 1024, 128), (64, 128, 4096, 512), (5, 1000, 1024, 1023)]
TRANSPOSES = list(itertools.product((False, True), repeat=2))


def operands(batch, m, n, k, transpose_a=False, transpose_b=False, dtype=torch.float32):
    a = randn(batch, *((k, m) if transpose_a else (m, k)), dtype=dtype)
    b = randn(batch, *((n, k) if transpose_b else (k, n)), dtype=dtype, seed=1)
    return dict(a=a, b=b, transpose_a=transpose_a, transpose_b=transpose_b)


class Test_BMM(PyTestCase):
    @backends("bmm")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        self.assertCorrectness(bmm, reference, operands(*shape, dtype=dtype), {"backend": backend}, gradient=True)

    @backends("bmm")
    @pytest.mark.parametrize("static_persistent", [None, True, False])
    @pytest.mark.parametrize(("transpose_a", "transpose_b"), TRANSPOSES)
    def test_transposes(self, backend, static_persistent, transpose_a, transpose_b):
        kwargs = operands(3, 40, 70, 37, transpose_a, transpose_b, torch.bfloat16)
        extra = {"backend": backend, "static_persistent": static_persistent}
        self.assertCorrectness(bmm, reference, kwargs, extra, gradient=True)

    @backends("bmm")
    @dtypes()
    @pytest.mark.parametrize(("n", "k"), [(70, 37), (512, 128), (128, 512), (9, 700)])
    @pytest.mark.parametrize(("transpose_a", "transpose_b"), TRANSPOSES)
    def test_a_row_of_each(self, backend, dtype, n, k, transpose_a, transpose_b):
        kwargs = operands(3, 1, n, k, transpose_a, transpose_b, dtype)
        with sanitized():
            self.assertCorrectness(bmm, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    def test_a_row_of_each_is_read_where_it_lies(self):
        """Heads of queries and parts of a weight, as absorbed in latent attention: one launch, no copy."""
        q, weight = randn(1, 4, 1, 48)[:, :, 0, :32].transpose(0, 1), randn(4, 32 + 24, 40, seed=1)
        with recorded_launches() as launches, torch.no_grad():
            bmm(q, weight[:, :32], backend="cutile")
            bmm(randn(4, 1, 40), weight[:, 32:], transpose_b=True, backend="cutile")
        assert [kernel for kernel, _ in launches] == [bmm_row_kernel] * 2
        (_, absorbed), (_, out) = launches
        assert absorbed[0].data_ptr() == q.data_ptr() and absorbed[1].data_ptr() == weight.data_ptr()
        assert out[1].data_ptr() == weight[:, 32:].data_ptr()

    def test_the_same_row_of_all(self):
        kwargs = dict(a=randn(1, 1, 40).expand(3, 1, 40), b=randn(40, 24, seed=1).expand(3, 40, 24))
        self.assertCorrectness(bmm, reference, kwargs, {"backend": "cutile"})

    def test_a_row_of_each_compiles(self):
        for overlap, architectures in OVERLAPS:
            for n, k, transposed in ((512, 128, False), (128, 512, True)):
                a, c = (torch.empty(16, 1, size, dtype=torch.bfloat16) for size in (k, n))
                b = torch.empty(16, 256, 512, dtype=torch.bfloat16)[:, :128]
                tiles = row_plan(n, k, 16, transposed)
                assert_compiles(bmm_row_kernel, (a, b, c, *tiles, transposed, overlap), architectures)

    @backends("bmm")
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_fp8(self, backend, dtype):
        a, b = (randn(2, 33, 64, seed=i).to(dtype) for i in range(2))
        got = bmm(a, b, transpose_b=True, backend=backend)
        assert got.dtype == torch.float16
        exact = torch.bmm(a.double(), b.double().mT)
        self.assertClose("c", got, exact.half(), exact)

    @pytest.mark.parametrize("wanted", ["a", "b"])
    def test_gradient_of_one(self, wanted):
        self.assertCorrectness(bmm, reference, operands(2, 5, 6, 7), {"backend": "cutile"}, gradient=(wanted,))

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    @pytest.mark.parametrize(("transpose_a", "transpose_b"), TRANSPOSES)
    def test_gradcheck(self, transpose_a, transpose_b):
        a, b, *_ = operands(2, 3, 4, 5, transpose_a, transpose_b).values()
        torch.autograd.gradcheck(
            lambda a, b: bmm(a, b, transpose_a, transpose_b, backend="cutile"),
            (a.requires_grad_(), b.requires_grad_()), eps=1e-2, atol=1e-2, rtol=1e-2,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("view", "copies"),
        [
            (lambda x: x.transpose(0, 1), False),
            (lambda x: x.mT, False),
            (lambda x: x[:, :, :24], False),
            (lambda x: x[:, :, ::2], True),
            (lambda x: x[:1].expand(24, 24, 32), True),
            (lambda x: x.permute(2, 0, 1), True),
        ],
        ids=["batch_inside", "transposed", "slice", "every_other", "expanded", "permuted"],
    )
    def test_not_contiguous(self, view, copies):
        x = randn(24, 24, 32, dtype=torch.bfloat16)
        a, b = view(x), view(randn(24, 24, 32, dtype=torch.bfloat16, seed=1))
        assert (with_unit_stride(a)[0].data_ptr() != a.data_ptr()) == copies
        self.assertCorrectness(bmm, reference, {"a": a, "b": b, "transpose_b": True}, {"backend": "cutile"}, True)

    @backends("bmm")
    @pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)], ids=str)
    def test_empty(self, backend, shape):
        self.assertCorrectness(bmm, reference, operands(*shape), {"backend": backend}, gradient=True)

    def test_special_values(self):
        kwargs = operands(2, 40, 40, 40)
        kwargs["a"][0, 3, 5] = float("nan")
        kwargs["b"][1, 7, 2] = float("inf")
        self.assertCorrectness(bmm, reference, kwargs, {"backend": "cutile"})

    def test_offsets_beyond_32_bits(self):
        """Three matrices, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        a = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 8, 8), (stride, 8, 1))
        a.copy_(randn(3, 8, 8, dtype=a.dtype))
        with sanitized():
            got = bmm(a, a, transpose_b=True, backend="cutile")
        torch.testing.assert_close(got, reference(a, a, transpose_b=True))

    def test_unsupported_dtype_falls_back(self):
        kwargs = operands(2, 3, 4, 5, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="float64"):
            c = bmm(**kwargs)
        assert torch.equal(c, reference(**kwargs))

    @backends("bmm")
    def test_wrong_arguments(self, backend):
        for error, message, a, b in (
            (ValueError, "three dimensions", randn(2, 3), randn(2, 3, 4)),
            (ValueError, "one batch size", randn(2, 3, 4), randn(3, 4, 5)),
            (ValueError, "op.a. has 4 columns and op.b. 5", randn(2, 3, 4), randn(2, 5, 4)),
            (TypeError, "one dtype", randn(2, 3, 4), randn(2, 4, 5, dtype=torch.float16)),
        ):
            with pytest.raises(error, match=f"bmm: .*{message}"):
                bmm(a, b, backend=backend)

    def test_compiled(self):
        a, b, *_ = operands(2, 10, 12, 9).values()
        self.assertCompiledEqualsEager(lambda a, b: bmm(a * 2, b, backend="cutile").sin(), a, b)

    @pytest.mark.parametrize(("transpose_a", "transpose_b"), TRANSPOSES)
    def test_operator(self, transpose_a, transpose_b):
        arguments = tuple(operands(2, 3, 4, 5, transpose_a, transpose_b).values())
        torch.library.opcheck(bmm_forward.operator, (*arguments, None))

    @pytest.mark.parametrize("arch", ARCHITECTURES)
    def test_compiles_for_every_architecture(self, arch):
        """The first configuration of each; matmul's tests compile the others' tiles."""
        cfg = _configs(arch)[0]
        a, b = (torch.empty(8, 512, 512, dtype=torch.bfloat16) for _ in range(2))
        with recorded_launches() as launches:
            bmm_forward(a, b, False, True, None)
        ((_, (*arrays, _, _, _, group, trans_a, trans_b, tf32, _)),) = launches
        tile = (cfg.TILE_M, cfg.TILE_N, cfg.BYTES_K // 2, group)
        kernel = bmm_kernel.replace_hints(**cfg.hints)
        assert_compiles(kernel, (*arrays, *tile, trans_a, trans_b, tf32, cfg.PERSISTENT), (arch,))

    @pytest.mark.parametrize("shape", [(1, 4096, 4096), (64, 128, 128), (512, 16, 16)], ids=str)
    def test_some_configuration_suits(self, shape, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.bmm.sm_count", lambda device: 132)
        a = c = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        suitable = [cfg for cfg in _configs("sm_90") if _suits(a, c, cfg, "sm_90")]
        assert suitable
        if shape[1] == 16:
            assert all(cfg.TILE_M * cfg.TILE_N <= 64 * 128 for cfg in suitable)

    def test_what_was_measured_to_be_fastest_suits(self, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.bmm.sm_count", lambda device: 132)
        for shape, tile, persistent in (
            ((32, 4096, 4096), (128, 256), True),
            ((16, 2048, 2048), (128, 256), True),
            ((32, 512, 128), (128, 128), False),
            ((16, 256, 256), (64, 128), False),
        ):
            a = c = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            suitable = [cfg for cfg in _configs("sm_90") if _suits(a, c, cfg, "sm_90")]
            assert {(cfg.TILE_M, cfg.TILE_N) for cfg in suitable} == {tile}
            assert suitable[0].PERSISTENT == persistent

    @gpu
    def test_graph_capture(self):
        a, b, *_ = operands(4, 128, 128, 128, dtype=torch.bfloat16).values()
        self.assertCaptures(lambda a, b: bmm(a, b, backend="cutile"), a, b)
