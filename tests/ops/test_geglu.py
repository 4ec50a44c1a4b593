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
from tilegym.ops import geglu
from tilegym.ops.cutile.geglu import geglu_backward
from tilegym.ops.cutile.geglu import geglu_forward
from tilegym.ops.pytorch.geglu import geglu as reference

SHAPES = [(1,), (3, 5), (37, 130), (2, 3, 1000), (3, 5000)]
GPU_SHAPES = [(1, 14336), (2048, 14336), (1234, 5001)]


approximations = pytest.mark.parametrize("approximate", ["tanh", "none"])


def arguments(*shape, dtype=torch.float32, approximate="tanh"):
    return {"a": randn(*shape, dtype=dtype) * 3, "b": randn(*shape, dtype=dtype, seed=1), "approximate": approximate}


def tensors(*shape, dtype=torch.float32):
    """a and b alone."""
    return tuple(arguments(*shape, dtype=dtype).values())[:2]


def spelled_out(a, b, approximate):
    """The formula where torch's fused gelu on a CPU turns infinity into NaN, depending on where in memory it is."""
    if approximate == "tanh":
        return reference(a, b, approximate)
    return (a.double() * torch.special.ndtr(a.double())).to(a.dtype) * b


class Test_GEGLU(PyTestCase):
    @backends("geglu")
    @dtypes()
    @approximations
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape, approximate):
        kwargs = arguments(*shape, dtype=dtype, approximate=approximate)
        self.assertCorrectness(geglu, reference, kwargs, {"backend": backend}, gradient=True)

    @approximations
    def test_both_ends_and_the_middle(self, approximate):
        """Gates from where gelu is 0 to where it is the identity, and the smallest ones, in small steps."""
        wide = torch.linspace(-15, 15, 6001)
        a = torch.cat((wide, wide * 1e-3, wide * 1e-20)).to(randn(1).device)
        kwargs = {"a": a, "b": torch.ones_like(a), "approximate": approximate}
        self.assertCorrectness(geglu, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("wanted", ["a", "b"])
    def test_gradient_of_one(self, wanted):
        self.assertCorrectness(geglu, reference, arguments(4, 9), {"backend": "cutile"}, gradient=(wanted,))

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    @approximations
    def test_gradcheck(self, approximate):
        inputs = tuple(t.requires_grad_() for t in tensors(3, 6))
        torch.autograd.gradcheck(
            lambda a, b: geglu(a, b, approximate, backend="cutile"), inputs, eps=1e-2, atol=1e-2, rtol=1e-2
        )

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
        kwargs = {name: view(x) for name, x in zip("ab", tensors(6, 80, dtype=dtype), strict=True)}
        self.assertCorrectness(geglu, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(geglu, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    @dtypes()
    @approximations
    def test_special_values(self, dtype, approximate):
        special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 100.0, -100.0, 1.0], dtype=dtype)
        a, b = (t.contiguous().to(randn(1).device) for t in torch.meshgrid(special, special, indexing="ij"))
        self.assertCorrectness(geglu, spelled_out, {"a": a, "b": b, "approximate": approximate}, {"backend": "cutile"})

    def test_offsets_beyond_32_bits(self):
        """Three rows, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        a = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
        a.copy_(randn(3, 64, dtype=a.dtype))
        kwargs = {"a": a, "b": randn(3, 64, dtype=a.dtype, seed=1).cpu()}
        self.assertCorrectness(geglu, reference, kwargs, {"backend": "cutile"})

    def test_unsupported_dtype_falls_back(self):
        kwargs = arguments(2, 8, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            y = geglu(**kwargs)
        assert torch.equal(y, reference(**kwargs))

    @backends("geglu")
    def test_wrong_arguments(self, backend):
        with pytest.raises(ValueError, match="geglu: a has shape"):
            geglu(randn(2, 3), randn(3), backend=backend)
        with pytest.raises(TypeError, match="geglu: a is torch.float32"):
            geglu(randn(3), randn(3, dtype=torch.float16), backend=backend)
        with pytest.raises(ValueError, match="geglu: approximate is 'erf'; it must be 'tanh' or 'none'"):
            geglu(randn(3), randn(3), "erf", backend=backend)

    @approximations
    def test_compiled(self, approximate):
        def call(a, b):
            return geglu(a * 0.5, b, approximate, backend="cutile").sin()  # inductor flushes what is subnormal to 0

        self.assertCompiledEqualsEager(call, *tensors(10, 48))

    def test_operators(self):
        a, b = tensors(3, 2, 48)
        torch.library.opcheck(geglu_forward.operator, (a, b, True))
        torch.library.opcheck(geglu_backward.operator, (randn(3, 2, 48, seed=3), a, b, False))

    @pytest.mark.parametrize(("dtype", "tanh"), [(torch.float32, False), (torch.bfloat16, True)])
    @pytest.mark.parametrize("shape", [(64, 4096), (2048, 16384)], ids=str)
    def test_compiles_for_every_architecture(self, dtype, tanh, shape):
        a, b, dy = (torch.empty(shape, dtype=dtype) for _ in range(3))
        assert_launches_compile(lambda: (geglu_forward(a, b, tanh), geglu_backward(dy, a, b, tanh)))

    @gpu
    def test_graph_capture(self):
        self.assertCaptures(lambda a, b: geglu(a, b, backend="cutile"), *tensors(16, 14336, dtype=torch.bfloat16))
