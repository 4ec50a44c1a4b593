"""Softmax over rows of attention scores, and over a vocabulary."""

import torch

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


def inputs(make, tokens, columns):
    return {"x": make(tokens, columns)}


def ours(x):
    return ops.softmax(x)


def formula(x):
    return torch.softmax(x, -1)


def liger(x):
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def forward(itemsize, tokens, columns):
    return Work(read=itemsize * tokens * columns, written=itemsize * tokens * columns)


def backward(itemsize, tokens, columns):
    """Reads y and dy, writes dx."""
    return Work(read=2 * itemsize * tokens * columns, written=itemsize * tokens * columns)


BENCHMARKS = [
    Benchmark(
        op="softmax",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("x",),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD, BOTH),
        host={"tokens": 1, "columns": 1024},
        shapes=(
            *(shape(tokens=8192, columns=columns) for columns in (512, 1024, 2048, 4096, 8192, 16384, 32768)),
            *sweep(lambda model, tokens: {"tokens": tokens, "columns": model.vocab}, tokens=(1, 16, 512, 4096)),
        ),
        quick=(shape(tokens=32768, columns=4096), shape(tokens=8192, columns=4096)),
        small=(shape(tokens=64, columns=1024), shape(tokens=7, columns=1000)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
