"""The norms of the heads of q and k, as in Qwen3 and Gemma 3."""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import ATTENDING
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import MANY_TOKENS
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main

EPS = 1e-6


def inputs(make, tokens, heads, kv_heads, dim):
    return {
        "q": make(tokens, heads, dim),
        "k": make(tokens, kv_heads, dim),
        "q_weight": make(dim),
        "k_weight": make(dim),
    }


def ours(q, k, q_weight, k_weight):
    return ops.dual_rms_norm(q, k, q_weight, k_weight, EPS)


def formula(q, k, q_weight, k_weight):
    shape = (q.shape[-1],)
    return F.rms_norm(q, shape, q_weight, EPS), F.rms_norm(k, shape, k_weight, EPS)


def forward(itemsize, tokens, heads, kv_heads, dim):
    rows = tokens * (heads + kv_heads)
    return Work(read=itemsize * (rows + 2) * dim, written=itemsize * rows * dim)


def backward(itemsize, tokens, heads, kv_heads, dim):
    """Reads q, k, their upstream gradients and the weights, writes the gradients of all four."""
    rows = tokens * (heads + kv_heads)
    return Work(read=itemsize * (2 * rows + 2) * dim, written=itemsize * (rows + 2) * dim)


BENCHMARKS = [
    Benchmark(
        op="dual_rms_norm",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula),
        differentiable=("q", "k", "q_weight", "k_weight"),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD),
        host={"tokens": 1, "heads": 32, "kv_heads": 8, "dim": 128},
        shapes=sweep(
            lambda model, tokens: {
                "tokens": tokens, "heads": model.heads, "kv_heads": model.kv_heads, "dim": model.head_dim
            },
            MANY_TOKENS,
            ATTENDING,
        ),
        quick=(
            shape(tokens=8192, heads=32, kv_heads=8, dim=128),
            shape(tokens=1, heads=32, kv_heads=8, dim=128),
        ),
        small=(shape(tokens=9, heads=4, kv_heads=2, dim=80),),
    )
]  # fmt: skip

if __name__ == "__main__":
    main(BENCHMARKS)
