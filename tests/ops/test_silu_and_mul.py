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

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import silu_and_mul
from tilegym.ops.cutile.silu_and_mul import silu_and_mul_backward
from tilegym.ops.cutile.silu_and_mul import silu_and_mul_forward
from tilegym.ops.pytorch.silu_and_mul import silu_and_mul as reference

SHAPES = [(2,), (3, 10), (37, 130), (2, 3, 1000), (3, 10002)]
GPU_SHAPES = [(1, 28672), (2048, 28672), (4, 500, 2 * 5001)]


class Test_SiluAndMul(PyTestCase):
    @backends("silu_and_mul")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = {"input": randn(*shape, dtype=dtype) * 2}
        self.assertCorrectness(silu_and_mul, reference, kwargs, {"backend": backend}, gradient=True)

    @backends("silu_and_mul")
    @pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t()], ids=["contiguous", "transposed"])
    def test_out(self, backend, view):
        x, out = view(randn(12, 12)), view(torch.full((12, 12), 7.0, device=randn(1).device))[:, :6]
        with sanitized():
            returned = silu_and_mul(x.requires_grad_(), out=out, backend=backend)
        assert returned is out and not out.requires_grad
        torch.testing.assert_close(out, reference(x.detach()))

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that it is not fp64
    def test_gradcheck(self):
        x = randn(3, 6).requires_grad_()
        torch.autograd.gradcheck(lambda x: silu_and_mul(x, backend="cutile"), (x,), eps=1e-2, atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, :40], lambda x: x[::2, 1::2], lambda x: x[:1].expand(5, 80)],
        ids=["transposed", "part_of_a_row", "every_other", "expanded"],
    )
    def test_not_contiguous(self, view):
        kwargs = {"input": view(randn(6, 80, dtype=torch.bfloat16))}
        self.assertCorrectness(silu_and_mul, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(2, 3, 1000), (3, 130)], ids=str)
    def test_large_inputs_become_rows(self, shape, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.tiling.SMALL", 0)
        self.assertCorrectness(silu_and_mul, reference, {"input": randn(*shape)}, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 8)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(silu_and_mul, reference, {"input": randn(*shape)}, {"backend": "cutile"}, gradient=True)

    def test_unsupported_dtype_falls_back(self):
        x = randn(2, 8, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            y = silu_and_mul(x)
        assert torch.equal(y, reference(x))

    @backends("silu_and_mul")
    def test_wrong_arguments(self, backend):
        with pytest.raises(ValueError, match="silu_and_mul: input has shape .* must be even"):
            silu_and_mul(randn(2, 3), backend=backend)
        with pytest.raises(ValueError, match="silu_and_mul: out has shape"):
            silu_and_mul(randn(2, 4), out=randn(2, 4), backend=backend)
        with pytest.raises(TypeError, match="silu_and_mul: out is torch.float16"):
            silu_and_mul(randn(2, 4), out=randn(2, 2, dtype=torch.float16), backend=backend)

    def test_compiled(self):
        self.assertCompiledEqualsEager(lambda x: silu_and_mul(x * 2, backend="cutile").sin(), randn(10, 48))

    def test_compiled_with_out(self):
        @torch.compile(fullgraph=True, backend="aot_eager")
        def call(x, out):
            return silu_and_mul(x, out=out, backend="cutile")

        x, out = randn(4, 8), torch.empty(4, 4, device=randn(1).device)
        call(x, out)
        assert torch.equal(out, silu_and_mul(x, backend="cutile"))

    def test_operators(self):
        torch.library.opcheck(silu_and_mul_forward.operator, (randn(3, 2, 48),))
        torch.library.opcheck(silu_and_mul_backward.operator, (randn(3, 2, 24, seed=3), randn(3, 2, 48)))

    @pytest.mark.parametrize("rows", [(64,), (2, 3)], ids=str)
    def test_compiles_for_every_architecture(self, rows):
        x, dy = torch.empty(*rows, 8192, dtype=torch.bfloat16), torch.empty(*rows, 4096, dtype=torch.bfloat16)
        assert_launches_compile(lambda: (silu_and_mul_forward(x), silu_and_mul_backward(dy, x)))

    @gpu
    def test_more_than_32_bits_of_elements(self):
        self.assertLargeInput(lambda x: silu_and_mul(x, backend="cutile"), 2**19 + 5, 4096)

    @gpu
    def test_graph_capture(self):
        x = randn(16, 28672, dtype=torch.bfloat16)
        self.assertCaptures(lambda x: silu_and_mul(x, backend="cutile"), x)
