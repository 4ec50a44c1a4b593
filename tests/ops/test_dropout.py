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
from tilegym.ops import dropout
from tilegym.ops.cutile import dropout as implementation
from tilegym.ops.cutile.dropout import dropout_forward
from tilegym.ops.pytorch.dropout import dropout as reference
from tilegym.ops.pytorch.dropout import philox

SHAPES = [(1,), (37, 130), (2, 3, 1500)]
GPU_SHAPES = [(8192, 4096), (1234, 5001)]
SEED = 0x9ABCDEF012345678


class Test_Dropout(PyTestCase):
    @backends("dropout")
    @dtypes()
    @pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, p, shape):
        kwargs = {"x": randn(*shape, dtype=dtype), "seed": SEED, "p": p}
        self.assertCorrectness(dropout, reference, kwargs, {"backend": backend}, gradient=True)
        with sanitized():
            assert torch.equal(dropout(**kwargs, backend=backend), reference(**kwargs))

    def test_generator_gives_the_published_words(self):
        """The first known answer of philox4x32-10: counter and key zero."""
        words = philox(torch.zeros(1, dtype=torch.int64), 0)
        assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_share_and_mean(self, p):
        y = reference(torch.ones(1_000_000), 3, p)
        assert abs((y == 0).double().mean() - p) < 5 * (p * (1 - p) / y.numel()) ** 0.5
        assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p)))}

    def test_masks_of_seeds_are_independent(self):
        x = torch.ones(100_000)
        masks = torch.stack([reference(x, seed).bool().float() for seed in (0, 1, 2**32, -1)])
        assert (torch.corrcoef(masks).fill_diagonal_(0).abs() < 0.02).all()
        for shift in (1, 2, 1024, 4096):
            assert abs(torch.corrcoef(torch.stack((masks[0, shift:], masks[0, :-shift])))[0, 1]) < 0.02

    @pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**40 + 7])
    def test_seeds(self, seed):
        x = randn(5000)
        with sanitized():
            assert torch.equal(dropout(x, seed, backend="cutile"), reference(x, seed))

    def test_gradient_has_the_same_mask(self):
        x = randn(9000).abs().add_(1).requires_grad_()
        y = dropout(x, SEED, 0.3, backend="cutile")
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(x.grad * x.detach(), y.detach())

    @backends("dropout")
    @pytest.mark.parametrize("options", [{"training": False}, {"p": 0.0}], ids=str)
    def test_nothing_to_do(self, backend, options):
        x = randn(10)
        assert dropout(x, 1, backend=backend, **options) is x

    @backends("dropout")
    def test_inplace(self, backend):
        leaf = randn(30, 50).requires_grad_()
        x = leaf * 2
        y = dropout(x, SEED, inplace=True, backend=backend)
        assert y is x
        expected = reference(leaf * 2, SEED)
        assert torch.equal(y, expected)
        assert torch.equal(*(torch.autograd.grad(out.sum(), leaf)[0] for out in (y, expected)))

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(5, 80), lambda x: x[0, 0]],
        ids=["transposed", "every_other_column", "expanded", "scalar"],
    )
    def test_not_contiguous(self, view):
        kwargs = {"x": view(randn(64, 80, dtype=torch.bfloat16)), "seed": 5}
        self.assertCorrectness(dropout, reference, kwargs, {"backend": "cutile"}, gradient=True)
        assert torch.equal(dropout(**kwargs, backend="cutile"), reference(kwargs["x"].contiguous(), 5))

    @pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(
            dropout, reference, {"x": randn(*shape), "seed": 5}, {"backend": "cutile"}, gradient=True
        )

    @pytest.mark.parametrize("p", [0.5, 1.0])
    def test_special_values(self, p):
        x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0] * 8).to(randn(1).device)
        self.assertCorrectness(dropout, reference, {"x": x, "seed": 5, "p": p}, {"backend": "cutile"})

    def test_launches_of_parts(self, monkeypatch):
        """What is split among launches has the mask that it has in one."""
        x = randn(3, 9000)
        monkeypatch.setattr(implementation, "PART", 8192)
        with sanitized():
            assert torch.equal(dropout(x, SEED, backend="cutile"), reference(x, SEED))

    def test_unsupported_dtype_falls_back(self):
        x = randn(2, 8, dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            y = dropout(x, 1)
        assert torch.equal(y, reference(x, 1))

    @backends("dropout")
    @pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
    def test_wrong_arguments(self, backend, p):
        with pytest.raises(ValueError, match="dropout: p is"):
            dropout(randn(3), 1, p, backend=backend)
        with pytest.raises(TypeError, match="dropout: x is torch.int64"):
            dropout(torch.arange(3), 1, backend=backend)

    def test_compiled(self):
        self.assertCompiledEqualsEager(lambda x: dropout(x * 2, SEED, 0.25, backend="cutile").sin(), randn(10, 48))

    def test_operators(self):
        torch.library.opcheck(dropout_forward.operator, (randn(3, 2, 48), SEED - 2**64, 0.5))

    def test_compiles_for_every_architecture(self):
        x = torch.empty(64, 4096, dtype=torch.bfloat16)
        assert_launches_compile(lambda: dropout_forward(x, SEED, 0.9))

    @gpu
    def test_graph_capture(self):
        self.assertCaptures(lambda x: dropout(x, SEED, backend="cutile"), randn(16, 4096, dtype=torch.bfloat16))
