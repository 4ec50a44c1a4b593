"""The gate of a GEGLU MLP, with the tanh form of GELU, as Gemma has it."""

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


def inputs(make, tokens, intermediate):
    return {"a": make(tokens, intermediate), "b": make(tokens, intermediate)}


def ours(a, b):
    return ops.geglu(a, b, approximate="tanh")


def formula(a, b):
    return F.gelu(a, approximate="tanh") * b


def liger(a, b):
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(a, b)


def forward(itemsize, tokens, intermediate):
    return Work(read=2 * itemsize * tokens * intermediate, written=itemsize * tokens * intermediate)


def backward(itemsize, tokens, intermediate):
    """Reads a, b and the upstream gradient, writes two gradients."""
    return Work(read=3 * itemsize * tokens * intermediate, written=2 * itemsize * tokens * intermediate)


BENCHMARKS = [
    Benchmark(
        op="geglu",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("a", "b"),
        activations=("a", "b"),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD, BOTH),
        host={"tokens": 1, "intermediate": 1024},
        shapes=sweep(lambda model, tokens: {"tokens": tokens, "intermediate": model.intermediate}),
        quick=(shape(tokens=8192, intermediate=14336),),
        small=(shape(tokens=64, intermediate=1024), shape(tokens=7, intermediate=1000)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
