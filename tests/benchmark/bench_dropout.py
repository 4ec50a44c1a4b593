"""Dropout over the hidden size of models.

torch's own dropout draws another mask in every call, so that there is nothing to compare its values with: the peer is
the same mask made of PyTorch's operations. torch.compile fails on them on a GPU (torch 2.11).
"""

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench_cli import main

SEED, P = 1234, 0.1


def inputs(make, tokens, hidden):
    return {"x": make(tokens, hidden)}


def ours(x):
    return ops.dropout(x, SEED, P)


def formula(x):
    return ops.dropout(x, SEED, P, backend="pytorch")


def forward(itemsize, tokens, hidden):
    return Work(read=itemsize * tokens * hidden, written=itemsize * tokens * hidden)


BENCHMARKS = [
    Benchmark(
        op="dropout",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers={PYTORCH: Provider(formula)},
        baseline=PYTORCH,
        differentiable=("x",),
        forward=forward,
        backward=forward,
        quick_modes=(FORWARD, BACKWARD),
        host={"tokens": 1, "hidden": 4096},
        shapes=sweep(lambda model, tokens: {"tokens": tokens, "hidden": model.hidden}),
        quick=(shape(tokens=8192, hidden=4096),),
        small=(shape(tokens=64, hidden=1024), shape(tokens=7, hidden=1000)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
