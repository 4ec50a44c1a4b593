import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import swiglu
from tilegym.ops.cutile.swiglu import swiglu_backward
from tilegym.ops.cutile.swiglu import swiglu_forward
from tilegym.ops.pytorch.swiglu import swiglu as reference

SHAPES = [(1,), (3, 5), (37, 130), (2, 3, 1000), (3, 5000)]
GPU_SHAPES = [(1, 14336), (2048, 14336), (1234, 5001)]


def arguments(*shape, dtype=torch.float32):
    return {"a": randn(*shape, dtype=dtype) * 3, "b": randn(*shape, dtype=dtype, seed=1)}


class Test_SwiGLU(PyTestCase):
    @backends("swiglu")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        self.assertCorrectness(swiglu, reference, arguments(*shape, dtype=dtype), {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("wanted", ["a", "b"])
    def test_gradient_of_one(self, wanted):
        self.assertCorrectness(swiglu, reference, arguments(4, 9), {"backend": "cutile"}, gradient=(wanted,))

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    def test_gradcheck(self):
        inputs = tuple(t.requires_grad_() for t in arguments(3, 6).values())
        torch.autograd.gradcheck(lambda a, b: swiglu(a, b, backend="cutile"), inputs, eps=1e-2, atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.t(),
            lambda x: x[:, :40],
            lambda x: x[::2, 1::2],
            lambda x: x[:1].expand(5, 80),
            lambda x: x[0, 0],
        ],
        ids=["transposed", "half_of_a_row", "every_other", "expanded", "scalar"],
    )
    @dtypes(torch.bfloat16)
    def test_not_contiguous(self, view, dtype):
        kwargs = {name: view(x) for name, x in arguments(6, 80, dtype=dtype).items()}
        self.assertCorrectness(swiglu, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(2, 3, 1000), (3, 130)], ids=str)
    def test_large_inputs_become_one_row(self, shape, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.tiling.SMALL", 0)
        self.assertCorrectness(swiglu, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 8)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(swiglu, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    @dtypes()
    def test_special_values(self, dtype):
        special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 100.0, -100.0, 1.0], dtype=dtype)
        a, b = (t.contiguous().to(randn(1).device) for t in torch.meshgrid(special, special, indexing="ij"))
        self.assertCorrectness(swiglu, reference, {"a": a, "b": b}, {"backend": "cutile"})

    def test_offsets_beyond_32_bits(self):
        """Three rows, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        a = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
        a.copy_(randn(3, 64, dtype=a.dtype))
        kwargs = {"a": a, "b": randn(3, 64, dtype=a.dtype, seed=1).cpu()}
        self.assertCorrectness(swiglu, reference, kwargs, {"backend": "cutile"})

    def test_unsupported_dtype_falls_back(self):
        kwargs = arguments(2, 8, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            y = swiglu(**kwargs)
        assert torch.equal(y, reference(**kwargs))

    @backends("swiglu")
    def test_wrong_arguments(self, backend):
        with pytest.raises(ValueError, match="swiglu: a has shape"):
            swiglu(randn(2, 3), randn(3), backend=backend)
        with pytest.raises(TypeError, match="swiglu: a is torch.float32"):
            swiglu(randn(3), randn(3, dtype=torch.float16), backend=backend)

    def test_compiled(self):
        def call(a, b):
            return swiglu(a * 2, b, backend="cutile").sin()

        self.assertCompiledEqualsEager(call, *arguments(10, 48).values())

    def test_operators(self):
        a, b = arguments(3, 2, 48).values()
        torch.library.opcheck(swiglu_forward.operator, (a, b))
        torch.library.opcheck(swiglu_backward.operator, (randn(3, 2, 48, seed=3), a, b))

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("rows", [(64,), (2, 3)], ids=str)
    def test_compiles_for_every_architecture(self, dtype, rows):
        a, b, dy = (torch.empty(*rows, 4096, dtype=dtype) for _ in range(3))
        architectures = ARCHITECTURES if dtype == torch.bfloat16 else ("sm_90",)
        assert_launches_compile(lambda: (swiglu_forward(a, b), swiglu_backward(dy, a, b)), architectures)

    @gpu
    def test_more_than_32_bits_of_elements(self):
        row = randn(1, 4096, dtype=torch.bfloat16)
        self.assertLargeInput(lambda x: swiglu(x, row.expand_as(x), backend="cutile"), 2**19 + 5, 4096)

    @gpu
    def test_graph_capture(self):
        kwargs = arguments(16, 14336, dtype=torch.bfloat16)
        self.assertCaptures(lambda a, b: swiglu(a, b, backend="cutile"), *kwargs.values())
