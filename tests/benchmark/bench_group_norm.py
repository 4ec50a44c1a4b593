"""GroupNorm over the images of a diffusion model's network, 32 groups of channels."""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main

EPS = 1e-5


def inputs(make, batch, channels, size):
    return {"x": make(batch, channels, size, size), "weight": make(channels), "bias": make(channels)}


def groups(channels):
    return 32 if channels % 32 == 0 else 4


def ours(x, weight, bias):
    return ops.group_norm(x, groups(x.shape[1]), weight, bias, EPS)


def formula(x, weight, bias):
    return F.group_norm(x, groups(x.shape[1]), weight, bias, EPS)


def liger(x, weight, bias):
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    batch, channels, *image = x.shape
    count = groups(channels)
    # Its function takes [B, C, positions] and the number of channels in all.
    y = LigerGroupNormFunction.apply(x.view(batch, channels, -1), weight, bias, channels, count, EPS)
    return y.view(batch, channels, *image)


def forward(itemsize, batch, channels, size):
    elements = batch * channels * size * size
    return Work(read=itemsize * (elements + 2 * channels), written=itemsize * elements)


def backward(itemsize, batch, channels, size):
    """Reads x, dy and the weight, writes dx, dweight and dbias."""
    elements = batch * channels * size * size
    return Work(read=itemsize * (2 * elements + channels), written=itemsize * (elements + 2 * channels))


BENCHMARKS = [
    Benchmark(
        op="group_norm",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("x", "weight", "bias"),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD, BOTH),
        host={"batch": 1, "channels": 320, "size": 4},
        shapes=(
            shape(batch=2, channels=320, size=128),
            shape(batch=2, channels=640, size=64),
            shape(batch=2, channels=1280, size=32),
            shape(batch=16, channels=320, size=128),
        ),
        quick=(shape(batch=16, channels=320, size=128), shape(batch=2, channels=1280, size=32)),
        small=(shape(batch=2, channels=12, size=9),),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
