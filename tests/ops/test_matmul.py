import itertools

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

from tilegym.backend import dispatcher
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError
from tilegym.ops import matmul
from tilegym.ops.cutile.matmul import _configs
from tilegym.ops.cutile.matmul import _suits
from tilegym.ops.cutile.matmul import matmul_forward
from tilegym.ops.cutile.matmul import matmul_kernel
from tilegym.ops.pytorch.matmul import matmul as reference

# M, N, K: one, several and no whole number of tiles of each.
SHAPES = [(64, 32, 32), (1, 1, 1), (33, 65, 7), (5, 40, 1023), (100, 70, 64)]
GPU_SHAPES = [(4096, 4096, 4096), (512, 14336, 4096), (1000, 1024, 1023), (17, 128256, 2048)]
TRANSPOSES = list(itertools.product((False, True), repeat=2))


def operands(m, n, k, trans_a=False, trans_b=False, dtype=torch.float32):
    a = randn(*((k, m) if trans_a else (m, k)), dtype=dtype)
    b = randn(*((n, k) if trans_b else (k, n)), dtype=dtype, seed=1)
    return dict(a=a, b=b, trans_a=trans_a, trans_b=trans_b)


@pytest.fixture
def tf32():
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    yield
    settings.fp32_precision = before


class Test_Matmul(PyTestCase):
    @backends("matmul")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = operands(*shape, dtype=dtype)
        self.assertCorrectness(matmul, reference, kwargs, {"backend": backend}, gradient=True)

    @backends("matmul")
    @pytest.mark.parametrize("static_persistent", [None, True, False])
    @pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
    def test_transposes(self, backend, static_persistent, trans_a, trans_b):
        kwargs = operands(70, 100, 40, trans_a, trans_b, torch.bfloat16)
        extra = {"backend": backend, "static_persistent": static_persistent}
        self.assertCorrectness(matmul, reference, kwargs, extra, gradient=True)

    @pytest.mark.parametrize("use_tma", [True, False])
    def test_with_and_without_tma(self, use_tma):
        extra = {"backend": "cutile", "use_tma": use_tma}
        self.assertCorrectness(matmul, reference, operands(40, 70, 36, dtype=torch.float16), extra, gradient=True)

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::2, 5:37], lambda x: x[:1].expand(48, 64)],
        ids=["transposed", "every_other_column", "slice", "expanded"],
    )
    def test_not_contiguous(self, view):
        a = view(randn(64, 64, dtype=torch.bfloat16))
        kwargs = dict(a=a, b=view(randn(64, 64, dtype=torch.bfloat16, seed=1)), trans_b=True)
        self.assertCorrectness(matmul, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_transposed_views_are_not_copied(self):
        a, b = torch.empty(8, 40).t(), torch.empty(24, 8).t()
        with recorded_launches() as launches:
            matmul(a, b, backend="cutile")
        [(_, args)] = launches
        assert args[0].data_ptr() == a.data_ptr() and args[1].data_ptr() == b.data_ptr()

    @backends("matmul")
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
    @pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
    def test_fp8(self, backend, dtype, trans_a, trans_b):
        kwargs = operands(40, 48, 100, trans_a, trans_b)
        kwargs = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        with sanitized():
            got = matmul(**kwargs, backend=backend)
        exact = matmul(**{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})
        assert got.dtype == torch.float16
        self.assertClose("c", got, exact.half(), exact)

    def test_fp32_is_not_tf32_unless_allowed(self, tf32):
        kwargs = operands(40, 48, 100)
        exact = reference(kwargs["a"].double(), kwargs["b"].double())
        rounded = [(t.view(torch.int32) + 0x1000 & -0x2000).view(torch.float32) for t in (kwargs["a"], kwargs["b"])]
        expected = reference(*(t.double() for t in rounded))
        got = matmul(**kwargs, backend="cutile")
        error, other = ((got.double() - t).abs().max() for t in (exact, expected))
        assert error > 1e-4
        assert other < 1e-4

    @pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
    def test_empty(self, shape):
        kwargs = operands(*shape)
        self.assertCorrectness(matmul, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_nan_and_infinity_stay_in_their_rows(self):
        kwargs = operands(40, 33, 50, dtype=torch.bfloat16)
        kwargs["a"][3, 7], kwargs["a"][5, 1] = float("nan"), float("inf")
        with torch.backends.mkldnn.flags(enabled=False):  # whose products on some CPUs spread NaN to the rows beside
            self.assertCorrectness(matmul, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
    def test_second_derivative(self, trans_a, trans_b):
        results = []
        for dtype, backend in ((None, "cutile"), (None, "pytorch"), (torch.float64, "pytorch")):
            kwargs = operands(5, 6, 7, trans_a, trans_b)
            leaves = [kwargs[name].to(dtype).requires_grad_() for name in "ab"]
            c = matmul(*leaves, trans_a, trans_b, backend=backend)
            first = torch.autograd.grad(c.square().sum(), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
        for got, expected, oracle in zip(*results, strict=True):
            self.assertClose("second derivative", got, expected, oracle)

    def test_unsupported_dtype_falls_back(self):
        a = randn(3, 3, dtype=torch.float64)
        dispatcher._warned.clear()
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="float64"):
            assert torch.equal(matmul(a, a), a @ a)

    def test_no_fallback_when_disabled(self, monkeypatch):
        monkeypatch.setenv("DISABLE_FALLBACK", "1")
        a = randn(3, 3, dtype=torch.float64)
        with pytest.raises(UnsupportedError, match="op 'matmul' on backend 'cutile'"):
            matmul(a, a, backend="cutile")

    @backends("matmul")
    def test_wrong_arguments(self, backend):
        a = randn(3, 4)
        with pytest.raises(ValueError, match="matmul: op\\(a\\) has 4 columns and op\\(b\\) 3 rows"):
            matmul(a, a, backend=backend)
        with pytest.raises(ValueError, match="two dimensions"):
            matmul(a, a[0], backend=backend)
        with pytest.raises(TypeError, match="one dtype"):
            matmul(a, a.half(), trans_b=True, backend=backend)

    def test_compiled(self):
        def call(a, b):
            return matmul(a * 2, b, trans_b=True, backend="cutile").relu()

        self.assertCompiledEqualsEager(call, randn(10, 48), randn(40, 48, seed=1))

    def test_operator(self):
        a, b = randn(10, 48), randn(40, 48, seed=1)
        torch.library.opcheck(matmul_forward.operator, (a, b, False, True, None, None))
        torch.library.opcheck(matmul_forward.operator, (a.t().contiguous(), b, True, True, True, False))

    @pytest.mark.parametrize("arch", ARCHITECTURES)
    @pytest.mark.parametrize("persistent", [False, True])
    def test_compiles(self, arch, persistent):
        a, bias = torch.empty(512, 512, dtype=torch.bfloat16), torch.empty(512, dtype=torch.bfloat16)
        config = _configs(arch)[0]
        tile = (config.TILE_M, config.TILE_N, config.BYTES_K // 2, 8)
        args = (a, torch.empty_like(a), bias, torch.empty_like(a), *tile, False, True, True, False, True, persistent)
        assert_compiles(matmul_kernel.replace_hints(**config.hints), args, (arch,))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
    def test_other_dtypes_compile(self, dtype):
        a, c = torch.empty(512, 512, dtype=dtype), torch.empty(512, 512, dtype=torch.float16)
        for arch in ARCHITECTURES[1:]:  # Ampere has no fp8
            config = _configs(arch)[-1]
            tile = (config.TILE_M, config.TILE_N, config.BYTES_K // dtype.itemsize, 8)
            args = (a, torch.empty_like(a), 0, c, *tile, True, False, False, False, True, False)
            assert_compiles(matmul_kernel, args, (arch,))

    @gpu
    def test_graph_capture(self):
        a, b = randn(512, 1024, dtype=torch.bfloat16), randn(1024, 768, dtype=torch.bfloat16)
        self.assertCaptures(lambda a, b: matmul(a, b, backend="cutile"), a, b)

    @gpu
    def test_more_than_2_to_the_31_elements(self):
        a = torch.zeros((1 << 17) + 300, 1 << 14, device=device(), dtype=torch.bfloat16)
        a[-1] = 1
        b = torch.ones(8, 1 << 14, device=device(), dtype=torch.bfloat16)
        c = matmul(a, b, trans_b=True, backend="cutile")
        assert c[-1].eq(1 << 14).all() and not c[:-1].any()


class Test_Configs:
    @pytest.mark.parametrize("arch", ARCHITECTURES)
    def test_something_suits_every_size(self, arch, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.matmul.sm_count", lambda index: 132)
        for m, n, dtype in itertools.product((1, 17, 512, 8192), (1, 4096, 128256), (torch.float32, torch.bfloat16)):
            a, c = torch.empty(m, 0, dtype=dtype), torch.empty(m, n, dtype=dtype, device="meta")
            suitable = [config for config in _configs(arch) if _suits(a, c, config, arch)]
            assert suitable, (m, n, dtype)
            if m * n < 1 << 20:
                assert suitable[0].TILE_M <= 128, "few tiles must be small ones"

    def test_persistent_where_a_block_has_several_tiles(self, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.matmul.sm_count", lambda index: 132)
        a = torch.empty(1, 0, dtype=torch.bfloat16)
        for m, several in ((128, False), (512, True), (8192, True)):
            c = torch.empty(m, 8192, device="meta")
            suitable = [config for config in _configs("sm_90") if _suits(a, c, config, "sm_90")]
            assert suitable and any(config.PERSISTENT for config in suitable) == several

    def test_one_row_more_does_not_change_them(self, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.matmul.sm_count", lambda index: 132)
        a = torch.empty(1, 0, dtype=torch.bfloat16)
        choices = set()
        for m in (511, 512, 513, 600):
            c = torch.empty(m, 14336, device="meta")
            choices.add(tuple(config for config in _configs("sm_90") if _suits(a, c, config, "sm_90")))
        assert len(choices) == 1
