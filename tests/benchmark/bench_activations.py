"""GELU and ReLU over the intermediate size of an MLP."""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main


def inputs(make, tokens, intermediate):
    return {"x": make(tokens, intermediate)}


def ours_gelu(x):
    return ops.gelu(x)


def ours_relu(x):
    return ops.relu(x)


def formula_gelu(x):
    return F.gelu(x)


def formula_relu(x):
    return F.relu(x)


def forward(itemsize, tokens, intermediate):
    return Work(read=itemsize * tokens * intermediate, written=itemsize * tokens * intermediate)


def backward(itemsize, tokens, intermediate):
    """Reads x and dy, writes dx."""
    return Work(read=2 * itemsize * tokens * intermediate, written=itemsize * tokens * intermediate)


def backward_relu(itemsize, tokens, intermediate):
    """Reads dy and a bit for each element, writes dx."""
    elements = tokens * intermediate
    return Work(read=itemsize * elements + elements // 8, written=itemsize * elements)


def benchmark(op, ours, formula, backward):
    return Benchmark(
        op=op,
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula),
        differentiable=("x",),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD),
        host={"tokens": 1, "intermediate": 1024},
        shapes=sweep(lambda model, tokens: {"tokens": tokens, "intermediate": model.intermediate}),
        quick=(shape(tokens=8192, intermediate=14336),),
        small=(shape(tokens=64, intermediate=1024), shape(tokens=7, intermediate=1000)),
    )


BENCHMARKS = [
    benchmark("gelu", ours_gelu, formula_gelu, backward),
    benchmark("relu", ours_relu, formula_relu, backward_relu),
]

if __name__ == "__main__":
    main(BENCHMARKS)
