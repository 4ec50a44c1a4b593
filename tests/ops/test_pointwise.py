"""The tiles of elementwise ops: each way to count them serves arrays that they fit and arrays that they do not."""

import pytest
import torch
from common import PyTestCase
from common import randn

from tilegym import ops
from tilegym.ops.cutile import geglu
from tilegym.ops.cutile import pointwise
from tilegym.ops.cutile import silu_and_mul
from tilegym.ops.cutile import swiglu
from tilegym.ops.pytorch.geglu import geglu as geglu_reference
from tilegym.ops.pytorch.silu_and_mul import silu_and_mul as silu_and_mul_reference


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
            monkeypatch.setattr(op, "layout", lambda shape, device: pointwise.cover(shape, 512))
        assert pointwise.cover(shape, 512)[1][2:] == (how, check)
        a, b = randn(*shape, dtype=torch.bfloat16), randn(*shape, dtype=torch.bfloat16, seed=1)
        cutile = {"backend": "cutile"}
        self.assertCorrectness(ops.geglu, geglu_reference, {"a": a, "b": b}, cutile, gradient=True)
        x = {"input": torch.cat((a, b), -1)}
        self.assertCorrectness(ops.silu_and_mul, silu_and_mul_reference, x, cutile, gradient=True)
