"""Rotary position embedding of queries and keys, laid out as Hugging Face models lay them out."""

import torch

from tilegym import ops
from tilegym.bench.spec import ATTENDING
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main

BASE = 500000.0


def inputs(make, batch, tokens, heads, kv_heads, head_dim):
    # The projections give [B, S, H * D]; the model then views them as [B, H, S, D].
    q = make(batch, tokens, heads, head_dim).transpose(1, 2)
    k = make(batch, tokens, kv_heads, head_dim).transpose(1, 2)
    inverse = BASE ** (-torch.arange(0, head_dim, 2, device=q.device, dtype=torch.float32) / head_dim)
    angles = torch.arange(tokens, device=q.device, dtype=torch.float32)[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)[None]  # [1, S, D]
    return {"q": q, "k": k, "cos": angles.cos().to(q.dtype), "sin": angles.sin().to(q.dtype)}


def ours(q, k, cos, sin):
    return ops.apply_rope_base(q, k, cos, sin)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def formula(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def liger(q, k, cos, sin):
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


def work(itemsize, batch, tokens, heads, kv_heads, head_dim):
    rotated = itemsize * batch * tokens * (heads + kv_heads) * head_dim
    return Work(read=rotated + 2 * itemsize * tokens * head_dim, written=rotated)


def dims(model, tokens):
    return {
        "batch": 1,
        "tokens": tokens,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }


BENCHMARKS = [
    Benchmark(
        op="apply_rope_base",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("q", "k"),
        activations=("q", "k"),
        forward=work,
        backward=work,
        quick_modes=(FORWARD, BACKWARD, BOTH),
        host={"batch": 1, "tokens": 1, "heads": 32, "kv_heads": 8, "head_dim": 128},
        shapes=sweep(dims, models=ATTENDING),
        quick=(shape("B4 H32/8 S4096 D128", batch=4, tokens=4096, heads=32, kv_heads=8, head_dim=128),),
        small=(
            shape("B2 H4/2 S33 D64", batch=2, tokens=33, heads=4, kv_heads=2, head_dim=64),
            shape("B1 H8/8 S128 D128", batch=1, tokens=128, heads=8, kv_heads=8, head_dim=128),
        ),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
