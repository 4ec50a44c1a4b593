"""fused_moe of one token whose experts' rows are read one by one."""

import math

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from test_fused_moe import BEYOND_INT32
from test_fused_moe import LAYOUTS
from test_fused_moe import arguments

from tilegym.backend import recording
from tilegym.ops import fused_moe
from tilegym.ops import linear
from tilegym.ops import moe_topk_routing
from tilegym.ops.cutile import moe_one_token
from tilegym.ops.pytorch.moe_experts import fused_moe as reference


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@dtypes(torch.bfloat16, torch.float16)
@pytest.mark.parametrize("layout", ["concatenated", "separate", "interleaved"])
@pytest.mark.parametrize("size", [(1, k, 5, h, i) for k, h, i in ((2, 64, 16), (3, 32, 48), (5, 96, 32), (1, 32, 16))])
def test_one_token(size, layout, dtype):
    """One turn or several, one or two ahead, an even number of them or not; some held ahead of the wait."""
    _, _, experts, width, _ = size
    kwargs = arguments(size, dtype, **({} if layout == "interleaved" else LAYOUTS[layout]))
    kwargs["interleaved"] = layout == "interleaved"
    kwargs["limit"] = 0.5 if layout == "interleaved" else None
    recording.forget()
    with recorded_launches(run=True) as recorded, sanitized():
        fused_moe(**kwargs, backend="cutile")
    found = [kernel._pyfunc for kernel, _ in recorded]
    assert found == [
        kernel._pyfunc for kernel in (moe_one_token.moe_stream_up_kernel, moe_one_token.moe_held_down_kernel)
    ]
    PyTestCase().assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})
    kwargs["shared_output"] = randn(1, width, dtype=dtype, seed=9)
    kwargs["topk_weights"] = kwargs["topk_weights"].float()
    PyTestCase().assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})
    # Of a pair that is left out nothing shows, whatever the expert holds whose weights are read in its place.
    kwargs["topk_ids"][0, -1] = experts
    for first in (kwargs["w1"], kwargs["w2"]):
        first[[e for e in range(experts) if e not in kwargs["topk_ids"][0]]] = math.nan
    PyTestCase().assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})
    for left_out in (-1, *BEYOND_INT32):
        kwargs["topk_ids"][:] = left_out
        assert torch.equal(fused_moe(**kwargs, backend="cutile"), kwargs["shared_output"])


def test_which_experts_they_are():
    """Qwen3-30B-A3B's, Qwen3-Next's, OLMoE's and DeepSeek-V2-Lite's; not Mixtral's, not Qwen3-235B-A22B's."""
    sizes = (2048, 768, 8), (2048, 512, 10), (2048, 1024, 8), (2048, 1408, 6), (4096, 14336, 2), (4096, 1536, 8)
    assert moe_one_token.plan(2048, 2048, 8, 0).down == (4, 256, 3, 4)  # no more than registers hold
    plans = [moe_one_token.plan(*size, 0) for size in sizes]
    downs = [(4, 256, 4, 4), (4, 256, 5, 4), (4, 256, 4, 4), (4, 128, 4, 4)]
    assert plans == [*(((1, 1024, 2, 4), down) for down in downs), None, None]


@gpu
def test_layers_one_behind_the_other():
    """What chooses the experts has ended when their rows are read ahead of the wait: each layer's are others, and lie
    where the last one's lay."""
    layers = [
        [randn(*s, dtype=torch.bfloat16, seed=10 * n + i) * s[-1] ** -0.5 for i, s in enumerate(sizes)]
        for n in range(6)
        for sizes in [((16, 2048), (16, 1536, 2048), (16, 2048, 768))]
    ]

    def chain(x, wait=lambda: None):
        for router, w1, w2 in layers:
            scores = linear(x, router, backend="cutile")
            wait()
            weights, ids = moe_topk_routing(scores, 8, backend="cutile")
            wait()
            x = x + fused_moe(x, w1, w2, weights.to(x.dtype), ids, backend="cutile")
            wait()
        return x

    with torch.no_grad():
        x = randn(1, 2048, dtype=torch.bfloat16)
        chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(x)
        for seed in range(20):
            x.copy_(randn(1, 2048, dtype=torch.bfloat16, seed=seed))
            expected = chain(x, torch.cuda.synchronize)
            assert torch.equal(chain(x), expected)
            graph.replay()
            assert torch.equal(y, expected)
