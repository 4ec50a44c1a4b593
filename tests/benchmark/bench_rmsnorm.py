"""RMSNorm over the hidden size of models, and over single heads as Qwen3 normalises q and k."""

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

EPS = 1e-6


def inputs(make, tokens, hidden):
    return {"x": make(tokens, hidden), "weight": make(hidden)}


def ours(x, weight):
    return ops.rms_norm(x, (x.shape[-1],), weight, EPS)


def formula(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def liger(x, weight):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, EPS)


def forward(itemsize, tokens, hidden):
    return Work(read=itemsize * (tokens + 1) * hidden, written=itemsize * tokens * hidden)


def backward(itemsize, tokens, hidden):
    """Reads x and dy, writes dx and dweight."""
    return Work(read=itemsize * (2 * tokens + 1) * hidden, written=itemsize * (tokens + 1) * hidden)


BENCHMARKS = [
    Benchmark(
        op="rms_norm",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("x", "weight"),
        activations=("x",),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD, BOTH),
        host={"tokens": 1, "hidden": 4096},
        shapes=(
            *sweep(lambda model, tokens: {"tokens": tokens, "hidden": model.hidden}, MANY_TOKENS),
            shape("Qwen3-8B q heads, 8192 tokens", "Qwen3-8B", tokens=8192 * 32, hidden=128),
        ),
        quick=(shape(tokens=32768, hidden=4096), shape(tokens=8192, hidden=4096), shape(tokens=1, hidden=4096)),
        small=(shape(tokens=64, hidden=1024), shape(tokens=7, hidden=1000)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
