"""In what order the blocks of ``fmha``'s kernels take tiles: the results are the same."""

import math

import pytest
import torch
from common import recorded_launches
from common import some
from test_attention import SHAPES
from test_attention import tensors
from test_attention_backward import gradients
from test_attention_backward import named

from tilegym import interpreter
from tilegym.ops import fmha
from tilegym.ops.cutile import attention
from tilegym.ops.cutile.attention import attention_kernel
from tilegym.ops.cutile.attention_backward import attention_dq_kernel


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")


def launches_of(options, dtype=torch.bfloat16):
    """What a forward and a backward pass launched on the CPU: kernel, its grid and arguments, and what it wrote."""
    kwargs = tensors(*SHAPES[1], dtype=dtype) | options
    kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    with recorded_launches(run=True) as launches:
        gradients(kwargs, backend="cutile")
    for kernel, values in launches:
        args = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in named(kernel, values).items()}
        by_queries = kernel in (attention_kernel, attention_dq_kernel)
        blocks = -(-17 // args["TILE_M"]) * 8 if by_queries else -(-50 // args["TILE_N"]) * 4
        names = ("out", "lse") if kernel is attention_kernel else ("dq", "delta") if by_queries else ("dk", "dv")
        yield kernel, (blocks,), args, [args[name] for name in names]


def relaunched(kernel, grid, args, written):
    expected = [t.clone() for t in written]
    for t in written:
        t.fill_(math.nan)
    with interpreter.sanitize():
        interpreter.launch(grid, kernel, (*args.values(),))
    return zip(written, expected, strict=True)


class Test_Blocks:
    @pytest.mark.parametrize("heads", some([0, 2, 3, 8, 100], 0, 3))
    def test_heads_in_turns(self, heads):
        for kernel, grid, args, written in launches_of({}):
            for got, want in relaunched(kernel, grid, args | {"INTERLEAVE": heads}, written):
                assert torch.equal(got, want)

    def test_configuration(self, monkeypatch):
        """It reaches the kernel."""
        configs = [attention.Config(TILE_M=16, TILE_N=32, TWO_LOOPS=True, INTERLEAVE=0)]
        monkeypatch.setattr(attention, "_configs_fp32", lambda arch, tile_d: configs)
        attention._autotuner.cache_clear()
        grids, real = [], interpreter.launch
        monkeypatch.setattr(
            interpreter, "launch", lambda grid, kernel, args: (grids.append((grid, args)), real(grid, kernel, args))
        )
        kwargs = {k: v.cpu() for k, v in tensors(1, 4, 2, 48, 50, 16, 16).items()}
        got = fmha(**kwargs, backend="cutile")
        attention._autotuner.cache_clear()
        [(grid, args)] = grids
        assert grid == (12,) and args[-1] == 0
        torch.testing.assert_close(got, fmha(**kwargs, backend="pytorch"))
