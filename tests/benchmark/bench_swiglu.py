"""The gate of a SwiGLU MLP: on one packed tensor (silu_and_mul) and on two (swiglu)."""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main


def packed(make, tokens, intermediate):
    return {"x": make(tokens, 2 * intermediate)}


def pair(make, tokens, intermediate):
    return {"a": make(tokens, intermediate), "b": make(tokens, intermediate)}


def ours_packed(x):
    return ops.silu_and_mul(x)


def ours_pair(a, b):
    return ops.swiglu(a, b)


def formula_packed(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def formula_pair(a, b):
    return F.silu(a) * b


def liger_packed(x):
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(x)


def liger_pair(a, b):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(a, b)


def forward(itemsize, tokens, intermediate):
    return Work(read=2 * itemsize * tokens * intermediate, written=itemsize * tokens * intermediate)


def backward(itemsize, tokens, intermediate):
    """Reads gate, up and the upstream gradient, writes two gradients."""
    return Work(read=3 * itemsize * tokens * intermediate, written=2 * itemsize * tokens * intermediate)


def benchmark(op, inputs, ours, formula, liger, differentiable):
    return Benchmark(
        op=op,
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=differentiable,
        activations=differentiable,
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD, BOTH),
        host={"tokens": 1, "intermediate": 1024},
        shapes=sweep(lambda model, tokens: {"tokens": tokens, "intermediate": model.intermediate}),
        quick=(shape(tokens=8192, intermediate=14336),),
        small=(shape(tokens=64, intermediate=1024), shape(tokens=7, intermediate=1000)),
    )


BENCHMARKS = [
    benchmark("silu_and_mul", packed, ours_packed, formula_packed, liger_packed, ("x",)),
    benchmark("swiglu", pair, ours_pair, formula_pair, liger_pair, ("a", "b")),
]

if __name__ == "__main__":
    main(BENCHMARKS)
