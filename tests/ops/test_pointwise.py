"""The tiles of elementwise ops, each way to count them, and launches that begin while their predecessors end."""

from collections.abc import Callable

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import gpu
from common import randn
from common import recorded_launches

from tilegym import ops
from tilegym.ops.cutile import geglu
from tilegym.ops.cutile import pointwise
from tilegym.ops.cutile import silu_and_mul
from tilegym.ops.cutile import swiglu
from tilegym.ops.pytorch.geglu import geglu as geglu_reference
from tilegym.ops.pytorch.silu_and_mul import silu_and_mul as silu_and_mul_reference

# Of a, b [M, 256] and a table [1, M, 64]; forward and backward are a launch each.
OVERLAPPING: dict[str, Callable] = {
    "geglu": lambda a, b, table: ops.geglu(a, b, backend="cutile"),
    "gelu": lambda a, b, table: ops.gelu(a, backend="cutile"),
    "relu": lambda a, b, table: ops.relu(a, backend="cutile"),
    "sigmoid_mul": lambda a, b, table: ops.sigmoid_mul(a, b, backend="cutile"),
    "silu_and_mul": lambda a, b, table: ops.silu_and_mul(a, backend="cutile"),
    "swiglu": lambda a, b, table: ops.swiglu(a, b, backend="cutile"),
    "apply_rope_base": lambda a, b, table: ops.apply_rope_base(
        *(x.view(1, -1, 4, 64).transpose(1, 2) for x in (a, b)), table, table, backend="cutile"
    )[0],
}


def gradient(name: str, a: torch.Tensor, wait: Callable = lambda: None) -> torch.Tensor:
    """Of ``a``, after a forward and a backward pass."""
    a, b = a.detach().requires_grad_(), randn(*a.shape, dtype=a.dtype, seed=1)
    y = OVERLAPPING[name](a, b, randn(1, len(a), 64, dtype=a.dtype, seed=2))
    wait()
    (grad,) = torch.autograd.grad(y, a, randn(*y.shape, dtype=a.dtype, seed=3))
    wait()
    return grad


class Test_Pointwise(PyTestCase):
    @pytest.mark.parametrize(
        "shape, most, how, check",
        [
            ((6, 256), 65535, pointwise.AXES, False),
            ((7, 256), 65535, pointwise.AXES, True),
            ((2, 3, 256), 65535, pointwise.AXES, False),
            ((2, 3, 300), 65535, pointwise.AXES, True),
            ((1, 6, 256), 65535, pointwise.ONE_SEQUENCE, False),
            ((1, 7, 300), 65535, pointwise.ONE_SEQUENCE, True),
            ((6, 256), 2, pointwise.LINEAR, False),
            ((1, 7, 300), 2, pointwise.LINEAR, True),
        ],
        ids=str,
    )
    def test_ways_to_count(self, shape, most, how, check, monkeypatch):
        """MAX_BLOCKS is what the second and third axis of a grid take."""
        monkeypatch.setattr(pointwise, "MAX_BLOCKS", most)
        for op in (geglu, silu_and_mul, swiglu):
            monkeypatch.setattr(op, "layout", lambda kernel, shape, device: (kernel, *pointwise.cover(shape, 512)))
        assert pointwise.cover(shape, 512)[1][2:] == (how, check)
        a, b = randn(*shape, dtype=torch.bfloat16), randn(*shape, dtype=torch.bfloat16, seed=1)
        cutile = {"backend": "cutile"}
        self.assertCorrectness(ops.geglu, geglu_reference, {"a": a, "b": b}, cutile, gradient=True)
        x = {"input": torch.cat((a, b), -1)}
        self.assertCorrectness(ops.silu_and_mul, silu_and_mul_reference, x, cutile, gradient=True)

    def test_tiles_of_one_row_are_wide(self):
        """A block of 1024 columns of 768 has a quarter idle; blocks of other rows would have to wait for it."""
        assert pointwise.cover((1, 768), 1024) == ((1, 1, 1), (1, 1024, pointwise.AXES, True))
        assert pointwise.cover((4, 768), 1024) == ((1, 3, 1), (4, 256, pointwise.AXES, False))

    @pytest.mark.parametrize(
        "shape, inputs, warps, tile",
        [
            ((1, 2048), 2, None, (1, 512)),
            ((16, 2880), 2, 8, (1, 1024)),
            ((2, 8, 768), 2, 8, (1, 1024)),
            ((16, 640), 2, 8, (4, 256)),
            ((16, 2880), 1, None, (4, 128)),
            ((1, 2048 * 132), 2, 8, (1, 1024)),
            ((1024, 3072), 2, None, (1, 1024)),
            ((8192, 4096), 2, None, (1, 2048)),
        ],
        ids=str,
    )
    def test_threads_of_few_elements(self, shape, inputs, warps, tile, monkeypatch):
        """Twice as many, from more than one input and row, in tiles of which a quarter may be idle."""
        monkeypatch.setattr(pointwise, "sm_count", lambda device: 132)
        plain = swiglu.swiglu_kernel
        kernel, _, tiles = pointwise.layout.__wrapped__(plain, shape, 0, inputs)
        assert kernel is (pointwise.hinted(plain, num_worker_warps=warps) if warps else plain)
        assert tiles[:2] == tile

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    @pytest.mark.parametrize("name", OVERLAPPING)
    def test_overlapping_launches_compile(self, name):
        """OVERLAP, every kernel's last argument, needs compute capability 9.0."""
        with recorded_launches(run=True) as launches:
            gradient(name, randn(4, 256, dtype=torch.bfloat16))
        assert len(launches) == 2
        for kernel, args in launches:
            assert args[-1] is False
            assert_compiles(kernel, (*args[:-1], True), ("sm_90",))

    @gpu
    @pytest.mark.parametrize("name", OVERLAPPING)
    def test_overlapping_launches(self, name):
        """A chain of them gives what it gives with the device idle between them."""
        results = []
        for wait in (lambda: None, torch.cuda.synchronize):
            a = randn(8192, 256, dtype=torch.bfloat16)
            for _ in range(8):
                a = gradient(name, a, wait)
            results.append(a)
        assert torch.equal(*results)
