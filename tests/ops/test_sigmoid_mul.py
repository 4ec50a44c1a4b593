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
from tilegym.ops import sigmoid_mul
from tilegym.ops.cutile.sigmoid_mul import sigmoid_mul_backward
from tilegym.ops.cutile.sigmoid_mul import sigmoid_mul_forward
from tilegym.ops.pytorch.sigmoid_mul import sigmoid_mul as reference

SHAPES = [(1,), (3, 5), (37, 130), (2, 3, 1000), (3, 5000)]
GPU_SHAPES = [(1, 4096), (8192, 4096), (1234, 5001)]


def arguments(*shape, dtype=torch.float32, one_gate_a_row=False):
    gate = (*shape[:-1], 1) if one_gate_a_row else shape
    return {"x": randn(*shape, dtype=dtype), "gate": randn(*gate, dtype=dtype, seed=1) * 3}


class Test_SigmoidMul(PyTestCase):
    @backends("sigmoid_mul")
    @dtypes()
    @pytest.mark.parametrize("one_gate_a_row", [False, True])
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape, one_gate_a_row):
        kwargs = arguments(*shape, dtype=dtype, one_gate_a_row=one_gate_a_row)
        self.assertCorrectness(sigmoid_mul, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("wanted", ["x", "gate"])
    def test_gradient_of_one(self, wanted):
        self.assertCorrectness(sigmoid_mul, reference, arguments(4, 9), {"backend": "cutile"}, gradient=(wanted,))

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, :40], lambda x: x[::2, 1::2], lambda x: x[:1].expand(5, 80)],
        ids=["transposed", "half_of_a_row", "every_other", "expanded"],
    )
    def test_not_contiguous(self, view):
        kwargs = {name: view(x) for name, x in arguments(6, 80, dtype=torch.bfloat16).items()}
        self.assertCorrectness(sigmoid_mul, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("one_gate_a_row", [False, True])
    def test_large_inputs_become_one_row(self, one_gate_a_row, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.tiling.SMALL", 0)
        kwargs = arguments(2, 3, 130, one_gate_a_row=one_gate_a_row)
        self.assertCorrectness(sigmoid_mul, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 8)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(sigmoid_mul, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    @dtypes()
    def test_special_values(self, dtype):
        special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 100.0, -100.0, 1.0], dtype=dtype)
        x, gate = (t.contiguous().to(randn(1).device) for t in torch.meshgrid(special, special, indexing="ij"))
        self.assertCorrectness(sigmoid_mul, reference, {"x": x, "gate": gate}, {"backend": "cutile"})

    def test_unsupported_dtype_falls_back(self):
        kwargs = arguments(2, 8, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            y = sigmoid_mul(**kwargs)
        assert torch.equal(y, reference(**kwargs))

    @backends("sigmoid_mul")
    def test_wrong_arguments(self, backend):
        for gate in (randn(3), randn(3, 1), randn(2, 2)):
            with pytest.raises(ValueError, match="sigmoid_mul: gate has shape"):
                sigmoid_mul(randn(2, 3), gate, backend=backend)
        with pytest.raises(TypeError, match="sigmoid_mul: x is torch.float32, gate is torch.float16"):
            sigmoid_mul(randn(3), randn(3, dtype=torch.float16), backend=backend)
        with pytest.raises(TypeError, match="sigmoid_mul: x is torch.int64, it must be floating point"):
            sigmoid_mul(torch.ones(3).long(), torch.ones(3).long(), backend=backend)

    def test_compiles_for_every_architecture(self):
        x, gate, dy = (torch.empty(64, 4096, dtype=torch.bfloat16) for _ in range(3))
        assert_launches_compile(lambda: (sigmoid_mul_forward(x, gate), sigmoid_mul_backward(dy, x, gate)))
        assert_launches_compile(lambda: sigmoid_mul_forward(x, gate[:, :1].expand_as(x)))

    @gpu
    def test_more_than_32_bits_of_elements(self):
        row = randn(1, 4096, dtype=torch.bfloat16)
        self.assertLargeInput(lambda x: sigmoid_mul(x, row.expand_as(x), backend="cutile"), 2**19 + 5, 4096)
