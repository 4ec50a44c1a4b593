"""rms_norm_add."""

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import distinct
from common import dtypes
from common import randn
from common import recorded_launches
from common import sanitized

from tilegym.backend import recording
from tilegym.interpreter import compile_kernel
from tilegym.ops import rms_norm_add
from tilegym.ops.cutile.rms_norm_add import rms_norm_add_forward
from tilegym.ops.pytorch.fused_gemv import rms_norm_add as reference

SHAPES = [(1, 64), (1, 1, 200), (77,), (64, 40), (65, 40), (2, 3, 33), (1, 4096), (1, 16385)]


class Test_RMSNormAdd(PyTestCase):
    @backends("rms_norm_add")
    @dtypes()
    @pytest.mark.parametrize("casting", ["llama", "gemma"])
    @pytest.mark.parametrize(
        "shape", [(1, 64), (1, 1, 200), (77,), (64, 40), (65, 40), (2, 3, 33), (1, 4096), (1, 16385)]
    )
    def test_op(self, backend, dtype, shape, casting):
        """In one launch, and as separate ops where there are too many rows or columns."""
        kwargs = dict(x=randn(*shape, dtype=dtype) * 3, weight=randn(shape[-1], dtype=dtype, seed=2))
        kwargs |= dict(residual=randn(*shape, dtype=dtype, seed=3), eps=0.5, offset=1.0, casting=casting)
        extra = {"backend": backend}
        self.assertCorrectness(rms_norm_add, reference, kwargs, extra)
        if shape[-1] < 1000:
            self.assertCorrectness(rms_norm_add, reference, kwargs, extra, gradient=True)

    @backends("rms_norm_add")
    def test_strides_and_a_weight_of_another_dtype(self, backend):
        x, residual = (randn(5, 96, dtype=torch.bfloat16, seed=s)[:, ::2] for s in (0, 1))
        kwargs = dict(x=x, weight=randn(96)[::2], residual=residual, eps=1e-6)
        self.assertCorrectness(rms_norm_add, reference, kwargs, {"backend": backend})

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    @pytest.mark.parametrize(("shape", "count"), [((64, 40), 1), ((1, 1, 2560), 1), ((65, 40), 2), ((1, 16385), 2)])
    def test_launches(self, shape, count):
        x, weight = randn(*shape, dtype=torch.bfloat16), randn(shape[-1], dtype=torch.bfloat16)
        recording.forget()
        with recorded_launches() as recorded, torch.no_grad():
            rms_norm_add(x, weight, 1e-6, x, backend="cutile")
        assert len(recorded) == count

    @backends("rms_norm_add")
    def test_wrong_arguments(self, backend):
        x, weight = randn(2, 8), randn(8)
        with pytest.raises(ValueError, match=r"rms_norm_add: residual has shape \(1, 8\), x has \(2, 8\)"):
            rms_norm_add(x, weight, 1e-6, x[:1], backend=backend)
        with pytest.raises(TypeError, match="rms_norm_add: residual is torch.float16, x is"):
            rms_norm_add(x, weight, 1e-6, x.half(), backend=backend)
        with pytest.raises(ValueError, match="weight|normalized_shape"):
            rms_norm_add(x, randn(7), 1e-6, x, backend=backend)
        with pytest.raises(ValueError, match="casting is 'qwen'"):
            rms_norm_add(x, weight, 1e-6, x, casting="qwen", backend=backend)


def launches():
    for n in (1024, 2560, 16384):
        x = torch.zeros(1, 1, n, dtype=torch.bfloat16)
        rms_norm_add_forward(x, x[0, 0], 1e-6, x, 1.0, False)
    rms_norm_add_forward(x.float(), x[0, 0].float(), 1e-6, x.float(), 0.0, True)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_compiles_for_every_architecture():
    assert_launches_compile(launches)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_overlapping_launches_compile():
    """OVERLAP, the kernel's last argument, needs compute capability 9.0."""
    with recorded_launches() as recorded:
        launches()
    for kernel, args in distinct(recorded):
        assert args[-1] is False
        assert compile_kernel(kernel, (*args[:-1], True), "sm_90")[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator(dtype):
    x, weight = randn(2, 24, dtype=dtype), randn(24, dtype=dtype)
    torch.library.opcheck(rms_norm_add_forward.operator, (x, weight, 1e-5, x.clone(), 0.0, True))


def test_compiled():
    x, weight, residual = randn(2, 24), randn(24, seed=1), randn(2, 24, seed=2)

    def call(x):
        return rms_norm_add(x, weight, 1e-6, residual, backend="cutile") * 2

    torch.compiler.reset()
    with torch.no_grad(), sanitized():
        compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")(x)
        torch.testing.assert_close(compiled, call(x), rtol=0, atol=0)
