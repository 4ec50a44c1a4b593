"""The output gate of Qwen3-Next's attention: 16 heads of 256."""

import torch

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import TOKENS
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main

WIDTH = 4096


def inputs(make, tokens, width):
    return {"x": make(tokens, width), "gate": make(tokens, width)}


def ours(x, gate):
    return ops.sigmoid_mul(x, gate)


def formula(x, gate):
    return x * torch.sigmoid(gate)


def forward(itemsize, tokens, width):
    return Work(read=itemsize * 2 * tokens * width, written=itemsize * tokens * width)


def backward(itemsize, tokens, width):
    return Work(read=itemsize * 3 * tokens * width, written=itemsize * 2 * tokens * width)


BENCHMARKS = [
    Benchmark(
        op="sigmoid_mul",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula),
        differentiable=("x", "gate"),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD),
        host={"tokens": 1, "width": WIDTH},
        shapes=tuple(
            shape(f"Qwen3-Next, {t} token{'s' if t > 1 else ''}", "Qwen3-Next", tokens=t, width=WIDTH) for t in TOKENS
        ),
        quick=(shape(tokens=8192, width=WIDTH),),
        small=(shape(tokens=9, width=1000),),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
