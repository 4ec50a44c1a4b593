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

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import dual_rms_norm
from tilegym.ops import rms_norm
from tilegym.ops.cutile.dual_rms_norm import backward_plan
from tilegym.ops.cutile.dual_rms_norm import dual_rms_norm_backward
from tilegym.ops.cutile.dual_rms_norm import dual_rms_norm_forward
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.dual_rms_norm import dual_rms_norm as reference

# Dimensions before the heads, heads of q and of k, dimensions of a head.
SHAPES = [((), 1, 1, 4), ((37,), 4, 2, 128), ((2, 7), 3, 1, 80), ((1,), 32, 8, 256)]
GPU_SHAPES = [((4, 2048), 32, 8, 128), ((1, 1), 32, 8, 128), ((1, 1000), 8, 4, 256)]


def arguments(lead=(2, 5), q_heads=4, k_heads=2, dim=32, dtype=torch.float32, **options):
    return dict(
        q=randn(*lead, q_heads, dim, dtype=dtype),
        k=randn(*lead, k_heads, dim, dtype=dtype, seed=1),
        q_weight=randn(dim, dtype=dtype, seed=2),
        k_weight=randn(dim, dtype=dtype, seed=3),
        eps=1e-6,
    ) | options  # fmt: skip


class Test_DualRMSNorm(PyTestCase):
    @backends("dual_rms_norm")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = arguments(*shape, dtype=dtype)
        self.assertCorrectness(dual_rms_norm, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("casting", ["llama", "gemma"])
    def test_options(self, casting):
        kwargs = arguments(dtype=torch.bfloat16, casting=casting, offset=1.0)
        self.assertCorrectness(dual_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @dtypes(torch.bfloat16)
    def test_equals_two_norms_in_one_launch(self, dtype):
        kwargs = arguments((40,), dim=128, dtype=dtype)
        with sanitized(), recorded_launches(run=True) as launches:
            results = dual_rms_norm(**kwargs, backend="cutile")
        if not HAS_GPU:
            assert len(launches) == 1
        for name, result in zip("qk", results, strict=True):
            x, weight = kwargs[name], kwargs[f"{name}_weight"]
            assert torch.equal(result, rms_norm(x, x.shape[-1], weight, 1e-6, backend="cutile"))

    def test_heads_of_one_projection(self):
        """q, k and v side by side in memory, as one GEMM leaves them, and with the heads before the tokens."""
        qkv = randn(2, 5, 8 * 32, dtype=torch.bfloat16)
        q, k, _ = qkv.unflatten(-1, (8, 32)).split((4, 2, 2), dim=-2)
        kwargs = arguments(dtype=torch.bfloat16)
        for views in ({"q": q, "k": k}, {"q": q.transpose(1, 2), "k": k.transpose(1, 2)}, {"q": q[0], "k": k}):
            self.assertCorrectness(dual_rms_norm, reference, kwargs | views, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("wanted", ["q", "k", "q_weight", "k_weight"])
    def test_gradient_of_one(self, wanted):
        # Through both outputs: else autograd has nothing to differentiate the other one in.
        self.assertCorrectness(
            lambda **kwargs: sum(y.sum((0, 1, 2)) for y in dual_rms_norm(**kwargs)),
            lambda **kwargs: sum(y.sum((0, 1, 2)) for y in reference(**kwargs)),
            arguments(), {"backend": "cutile"}, gradient=(wanted,),
        )  # fmt: skip

    @pytest.mark.parametrize("missing", [("q_weight",), ("k_weight",), ("q_weight", "k_weight")], ids="+".join)
    def test_without_weight(self, missing):
        kwargs = arguments(offset=0.5) | dict.fromkeys(missing)
        self.assertCorrectness(dual_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize(("more", "dim", "check"), [(0, 24, True), (1, 64, True), (0, 64, False)])
    def test_many_rows_share_blocks(self, more, dim, check):
        """Of which those that fill tiles are read without checks."""
        device = 0 if HAS_GPU else -1
        tokens = 72 * sm_count(device) + more
        kwargs = arguments((tokens,), 6, 2, dim, dtype=torch.bfloat16)
        assert backward_plan(6 * tokens, 2 * tokens, dim, device)[3][2] == check
        self.assertCorrectness(dual_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_without_eps(self):
        """Tiles that are not full have rows of zeros besides, of which rstd is infinite."""
        device = 0 if HAS_GPU else -1
        kwargs = arguments((24 * sm_count(device) + 1,), 3, 1, 24, eps=0.0)
        assert backward_plan(3 * len(kwargs["q"]), len(kwargs["q"]), 24, device)[3][0] > 1
        self.assertCorrectness(dual_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("lead", [(0,), (2, 0)], ids=str)
    def test_empty(self, lead):
        self.assertCorrectness(dual_rms_norm, reference, arguments(lead), {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0], ids=str)
    def test_special_values(self, value):
        kwargs = arguments(dtype=torch.bfloat16)
        kwargs["q"][0, 1, 2] = value
        kwargs["k"][1, 0, 0, 3] = value
        self.assertCorrectness(dual_rms_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_unsupported_dtype_falls_back(self):
        kwargs = arguments(dtype=torch.float64)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            results = dual_rms_norm(**kwargs)
        assert all(map(torch.equal, results, reference(**kwargs)))

    @backends("dual_rms_norm")
    def test_wrong_arguments(self, backend):
        for error, message, wrong in (
            (ValueError, "q has shape", {"k": randn(2, 5, 2, 16)}),
            (ValueError, "q has shape", {"q": randn(32)}),
            (TypeError, "q is torch.float32, k is torch.float16", {"k": randn(2, 5, 2, 32, dtype=torch.float16)}),
            (ValueError, "k_weight has shape", {"k_weight": randn(7)}),
            (ValueError, "casting is 'qwen'", {"casting": "qwen"}),
        ):
            with pytest.raises(error, match=f"dual_rms_norm: {message}"):
                dual_rms_norm(**arguments() | wrong, backend=backend)

    def test_compiles_for_every_architecture(self):
        q, k, *weights = list(arguments((64,), 32, 8, 128, dtype=torch.bfloat16).values())[:4]
        q, k, *weights = (t.cpu() for t in (q, k, *weights))
        assert_launches_compile(lambda: dual_rms_norm_forward(q, k, *weights, 1e-6, 0.0, True))
        dy = torch.empty_like(q), torch.empty_like(k)
        assert_launches_compile(lambda: dual_rms_norm_backward(*dy, q, k, *weights, 1e-6, 0.0, True, True))

    @gpu
    def test_more_than_32_bits_of_elements(self):
        k = randn(1, 1, 128, dtype=torch.bfloat16)
        self.assertLargeInput(lambda q: dual_rms_norm(q, k, None, None, 1e-6, backend="cutile")[0], 2**19 + 5, 32, 128)
