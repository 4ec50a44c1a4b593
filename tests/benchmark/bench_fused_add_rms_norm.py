"""The residual addition of a decoder layer with the RMSNorm behind it."""

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
    return {"x": make(tokens, hidden), "residual": make(tokens, hidden), "weight": make(hidden)}


def ours(x, residual, weight):
    return ops.fused_add_rms_norm(x, residual, weight, EPS)


def formula(x, residual, weight):
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, EPS), total


def liger(x, residual, weight):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "llama", False)


def forward(itemsize, tokens, hidden):
    return Work(read=itemsize * (2 * tokens + 1) * hidden, written=itemsize * 2 * tokens * hidden)


def backward(itemsize, tokens, hidden):
    """Reads the sum and two upstream gradients, writes those of x, residual and weight."""
    return Work(read=itemsize * (3 * tokens + 1) * hidden, written=itemsize * (2 * tokens + 1) * hidden)


BENCHMARKS = [
    Benchmark(
        op="fused_add_rms_norm",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("x", "residual", "weight"),
        activations=("x", "residual"),
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
