import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import device
from common import distinct
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.interpreter import compile_kernel
from tilegym.ops import argmax
from tilegym.ops.cutile import argmax as kernels

SHAPES = [(1, 256), (3, 512), (2, 1024 * 3), (1, 96), (2, 7), (65, 64), (5,), (1, 1, 1030), (2, 3, 40), (0, 8), (4, 1)]
GPU_SHAPES = [(1, 128256), (16, 151936), (70, 50257)] if HAS_GPU else []


def kinds(shape, dtype):
    """Rows in which the largest is there several times, or is one of the special numbers."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-4, 1, shape, generator=generator).to(device(), dtype)
    yield scores
    yield scores - 1  # none is positive
    yield scores + 9
    for number in (torch.nan, torch.inf, -torch.inf):
        special = scores.clone()
        special[..., shape[-1] // 3 :: 2] = number
        yield special
        yield -special
    yield torch.full_like(scores, -torch.inf)
    zeros = torch.zeros_like(scores)
    zeros[..., : shape[-1] // 2] = -0.0
    yield zeros
    yield -zeros


class Test_Argmax(PyTestCase):
    @backends("argmax")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + GPU_SHAPES, ids=str)
    def test_op(self, backend, dtype, shape):
        for x in (*kinds(shape, dtype), randn(*shape, dtype=dtype)):
            with sanitized():
                got = argmax(x, backend=backend)
            assert got.dtype is torch.int64 and got.device == x.device
            assert torch.equal(got.cpu(), x.cpu().argmax(-1))

    @backends("argmax")
    @pytest.mark.parametrize("shape", [(2, 1030), (3, 1, 40), (5,), (0, 8)], ids=str)
    def test_into_a_tensor(self, backend, shape):
        """Call behind call, into the tensor that is given each time."""
        for seed in range(3):
            x, out = randn(*shape, dtype=torch.bfloat16, seed=seed), torch.full(shape[:-1], -1, device=device())
            with sanitized():
                assert argmax(x, out, backend=backend) is out
            assert torch.equal(out, x.argmax(-1))

    @backends("argmax")
    def test_wrong_tensors_to_write_to(self, backend):
        x = randn(2, 3, 40)
        whole = torch.zeros(2, 6, dtype=torch.int64, device=device())
        for wrong in (whole, whole[0], whole[:, ::2], whole[:, :3].expand(1, 2, 3)):
            with pytest.raises(ValueError, match="argmax: out must be contiguous"):
                argmax(x, wrong, backend=backend)
        with pytest.raises(TypeError, match="argmax: out is torch.int32, it must be torch.int64"):
            argmax(x, whole[:, :3].int(), backend=backend)
        assert not whole.any()

    @backends("argmax")
    def test_strides(self, backend):
        x = randn(40, 6, 2, dtype=torch.bfloat16)
        for view in (x.permute(2, 1, 0), x[:, :, 1], x[::3, -1].T, x[:1].expand(3, 6, 2)):
            assert torch.equal(argmax(view, backend=backend), view.argmax(-1))

    @backends("argmax")
    def test_wrong_arguments(self, backend):
        for x in (randn(3, 0), torch.zeros((), device=device())):
            with pytest.raises(ValueError, match="argmax: x must be"):
                argmax(x, backend=backend)
        with pytest.raises(TypeError, match="argmax: x is torch.int32"):
            argmax(randn(3).int(), backend=backend)

    def test_many_tiles(self, monkeypatch):
        """More than a launch takes at once: longer ones."""
        monkeypatch.setattr(kernels, "TILE", 16)
        monkeypatch.setattr(kernels, "MAX_BLOCKS", 8)
        x = randn(2, 1000)
        with sanitized():
            assert torch.equal(kernels.argmax_forward.__wrapped__(x), x.argmax(-1))

    def test_more_rows_than_a_launch_takes(self):
        x = randn(65536, 3)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="more than 65535 rows"):
            assert torch.equal(argmax(x), x.argmax(-1))

    def test_operator(self):
        torch.library.opcheck(kernels.argmax_forward.operator, (randn(3, 40),))
        out = torch.zeros(3, dtype=torch.int64, device=device())
        torch.library.opcheck(kernels.argmax_into.operator, (randn(3, 40), out))

    @gpu
    def test_capture(self):
        self.assertCaptures(lambda x: argmax(x, backend="cutile"), randn(1, 128256, dtype=torch.bfloat16))


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_compiles_for_every_architecture():
    def launches():
        for dtype in (torch.float32, torch.bfloat16):
            kernels.argmax_forward(torch.zeros(1, 128256, dtype=dtype))

    assert_launches_compile(launches)
    with recorded_launches() as recorded:
        launches()
    for kernel, args in distinct(recorded):  # the last argument is OVERLAP
        assert compile_kernel(kernel, (*args[:-1], True), "sm_90")[:4] == b"\x7fELF"
