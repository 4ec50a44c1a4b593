import functools

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import gelu
from tilegym.ops import relu
from tilegym.ops.cutile.activations import gelu_backward
from tilegym.ops.cutile.activations import gelu_forward
from tilegym.ops.cutile.activations import relu_backward
from tilegym.ops.cutile.activations import relu_forward
from tilegym.ops.cutile.activations import relu_forward_bits
from tilegym.ops.pytorch.activations import gelu as gelu_reference
from tilegym.ops.pytorch.activations import relu as relu_reference

SHAPES = [(1,), (37, 130), (2, 3, 1000)]
GPU_SHAPES = [(1, 14336), (2048, 14336), (1234, 5001)]
OPS = {
    "gelu": (gelu, gelu_reference),
    "gelu_tanh": (functools.partial(gelu, approximate="tanh"), functools.partial(gelu_reference, approximate="tanh")),
    "relu": (relu, relu_reference),
}
each = pytest.mark.parametrize(("op", "reference"), OPS.values(), ids=OPS)
shapes = pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
VIEWS = {
    "transposed": lambda x: x.t(),
    "half_of_a_row": lambda x: x[:, :40],
    "every_other": lambda x: x[::2, 1::2],
    "expanded": lambda x: x[:1].expand(5, 80),
    "scalar": lambda x: x[0, 0],
}


class Test_Activations(PyTestCase):
    @backends("gelu")
    @dtypes()
    @shapes
    @each
    def test_op(self, backend, dtype, shape, op, reference):
        self.assertCorrectness(
            op, reference, {"x": randn(*shape, dtype=dtype) * 3}, {"backend": backend}, gradient=True
        )

    @each
    def test_both_ends_and_the_middle(self, op, reference):
        """From where the functions are 0 to where they are the identity, and the smallest ones, in small steps."""
        wide = torch.linspace(-15, 15, 6001)
        x = torch.cat((wide, wide * 1e-3, wide * 1e-20)).to(randn(1).device)
        self.assertCorrectness(op, reference, {"x": x}, {"backend": "cutile"}, gradient=True)

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that it is not fp64
    @each
    def test_gradcheck(self, op, reference):
        x = randn(3, 6).add_(0.5 * randn(3, 6).sign()).requires_grad_()  # away from relu's corner
        torch.autograd.gradcheck(lambda x: op(x, backend="cutile"), (x,), eps=1e-2, atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
    @each
    def test_not_contiguous(self, view, op, reference):
        kwargs = {"x": view(randn(6, 80, dtype=torch.bfloat16))}
        self.assertCorrectness(op, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)], ids=str)
    @each
    def test_empty(self, shape, op, reference):
        self.assertCorrectness(op, reference, {"x": randn(*shape)}, {"backend": "cutile"}, gradient=True)

    @dtypes()
    @each
    def test_special_values(self, dtype, op, reference):
        nan, inf = float("nan"), float("inf")
        x = torch.tensor([nan, inf, -inf, 0.0, -0.0, 100.0, -100.0, 1.0], dtype=dtype).to(randn(1).device)
        expected = torch.tensor([nan, inf, 0.0, 0.0, 0.0, 100.0, 0.0, 1.0])
        if op is not relu:  # -inf * 0 is NaN, in torch too
            expected[2], expected[7] = nan, 0.8413
        torch.testing.assert_close(op(x, backend="cutile").float().cpu(), expected, equal_nan=True, atol=0, rtol=5e-3)
        self.assertCorrectness(op, reference, {"x": x[[0, 3, 4, 5, 6]]}, {"backend": "cutile"}, gradient=True)

    @each
    def test_offsets_beyond_32_bits(self, op, reference):
        """Three rows, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        x = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
        x.copy_(randn(3, 64, dtype=x.dtype))
        self.assertCorrectness(op, reference, {"x": x}, {"backend": "cutile"})

    def test_relu_in_parts(self, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.activations.PART", 8192)
        self.assertCorrectness(relu, relu_reference, {"x": randn(3, 7001)}, {"backend": "cutile"}, gradient=True)

    def test_unsupported_dtype_falls_back(self):
        x = randn(2, 8, dtype=torch.float64)
        for op, reference in ((gelu, gelu_reference), (relu, relu_reference)):
            with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
                y = op(x)
            assert torch.equal(y, reference(x))

    @backends("gelu")
    def test_wrong_arguments(self, backend):
        with pytest.raises(ValueError, match="gelu: approximate is 'erf'; it must be 'tanh' or 'none'"):
            gelu(randn(3), "erf", backend=backend)

    @each
    def test_compiled(self, op, reference):
        # Halved, since compiled code may flush what is subnormal to 0.
        self.assertCompiledEqualsEager(lambda x: op(x * 0.5, backend="cutile").sin(), randn(10, 48))

    def test_operators(self):
        x, dy = randn(3, 2, 48), randn(3, 2, 48, seed=3)
        torch.library.opcheck(gelu_forward.operator, (x, True))
        torch.library.opcheck(gelu_backward.operator, (dy, x, False))
        torch.library.opcheck(relu_forward.operator, (x.movedim(0, -1),))
        torch.library.opcheck(relu_forward_bits.operator, (x.movedim(0, -1),))
        torch.library.opcheck(relu_backward.operator, (dy, relu_forward_bits(x)[1]))

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("shape", [(64, 4096), (2048, 16384)], ids=str)
    def test_compiles_for_every_architecture(self, dtype, shape):
        x, dy = (torch.empty(shape, dtype=dtype) for _ in range(2))
        tanh = dtype == torch.bfloat16
        assert_launches_compile(lambda: (gelu_forward(x, tanh), gelu_backward(dy, x, tanh)))
        assert_launches_compile(lambda: (relu_forward(x), relu_backward(dy, relu_forward_bits(x)[1])))

    @gpu
    @each
    def test_graph_capture(self, op, reference):
        self.assertCaptures(lambda x: op(x, backend="cutile"), randn(16, 14336, dtype=torch.bfloat16))
