"""LayerNorm over the hidden size of models."""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import MANY_TOKENS
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main

EPS = 1e-5


def inputs(make, tokens, hidden):
    return {"x": make(tokens, hidden), "weight": make(hidden), "bias": make(hidden)}


def ours(x, weight, bias):
    return ops.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def formula(x, weight, bias):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def liger(x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, EPS)


def forward(itemsize, tokens, hidden):
    return Work(read=itemsize * (tokens + 2) * hidden, written=itemsize * tokens * hidden)


def backward(itemsize, tokens, hidden):
    """Reads x, dy and the weight, writes dx, dweight and dbias."""
    return Work(read=itemsize * (2 * tokens + 1) * hidden, written=itemsize * (tokens + 2) * hidden)


BENCHMARKS = [
    Benchmark(
        op="layer_norm",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("x", "weight", "bias"),
        activations=("x",),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD, BOTH),
        host={"tokens": 1, "hidden": 4096},
        shapes=sweep(lambda model, tokens: {"tokens": tokens, "hidden": model.hidden}, MANY_TOKENS),
        quick=(shape(tokens=8192, hidden=4096), shape(tokens=1, hidden=4096)),
        small=(shape(tokens=64, hidden=1024), shape(tokens=7, hidden=1000)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
