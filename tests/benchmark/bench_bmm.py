"""Batched matrix products: of one size, and those of attention written out, a matrix for each head."""

import torch

from tilegym import ops
from tilegym.bench.spec import ATTENDING
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main


def inputs(make, batch, m, n, k, transpose_b=False):
    return {"a": make(batch, m, k), "b": make(batch, *((n, k) if transpose_b else (k, n))), "transpose_b": transpose_b}


def ours(a, b, transpose_b):
    return ops.bmm(a, b, transpose_b=transpose_b)


def formula(a, b, transpose_b):
    return torch.bmm(a, b.mT if transpose_b else b)


def forward(itemsize, batch, m, n, k, transpose_b=False):
    return Work(read=itemsize * batch * (m * k + k * n), written=itemsize * batch * m * n, flops=2 * batch * m * n * k)


def backward(itemsize, batch, m, n, k, transpose_b=False):
    """Two products; reads a, b and the upstream gradient, writes two gradients."""
    operands = itemsize * batch * (m * k + k * n)
    return Work(read=operands + itemsize * batch * m * n, written=operands, flops=4 * batch * m * n * k)


def heads():
    """Scores and their products with the values, for one sequence."""
    sizes = {(model.heads, model.head_dim): model.name for model in reversed(ATTENDING)}
    for (count, dim), name in sizes.items():
        for tokens in (512, 4096):
            yield shape(
                f"{name} scores, {tokens} tokens", name, batch=count, m=tokens, n=tokens, k=dim, transpose_b=True
            )
            yield shape(f"{name} values, {tokens} tokens", name, batch=count, m=tokens, n=dim, k=tokens)


BENCHMARKS = [
    Benchmark(
        op="bmm",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers={"cuBLAS": Provider(formula)},
        baseline="cuBLAS",
        differentiable=("a", "b"),
        forward=forward,
        backward=backward,
        host={"batch": 2, "m": 64, "n": 64, "k": 64},
        shapes=(*(shape(f"16 of {size}", batch=16, m=size, n=size, k=size) for size in (256, 1024, 2048)), *heads()),
        quick=(shape("16 of 2048", batch=16, m=2048, n=2048, k=2048),),
        small=(shape(batch=2, m=64, n=64, k=64), shape(batch=3, m=65, n=37, k=47, transpose_b=True)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
