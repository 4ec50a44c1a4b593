"""Attention of one new token over its cache."""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from tilegym import ops
from tilegym.bench.spec import ATTENDING
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench_cli import main


def inputs(make, batch, tokens, heads, kv_heads, head_dim):
    return {
        "q": make(batch, heads, 1, head_dim),
        "k": make(batch, kv_heads, tokens, head_dim),
        "v": make(batch, kv_heads, tokens, head_dim),
    }


def ours(q, k, v):
    return ops.fmha_decode(q, k, v)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def formula(q, k, v):
    """The queries of a group [B, Hkv, G, D] against the keys that they share."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    weights = (grouped @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).reshape(*q.shape[:-1], v.shape[-1])


def forward(itemsize, batch, tokens, heads, kv_heads, head_dim):
    cache = 2 * itemsize * batch * kv_heads * tokens * head_dim
    q = itemsize * batch * heads * head_dim
    return Work(read=cache + q, written=q, flops=4 * batch * heads * tokens * head_dim)


def by(backend):
    return lambda: sdpa_kernel(backend)


def cached(batch, tokens, heads=32, kv_heads=8, head_dim=128):
    name = f"B{batch} H{heads}/{kv_heads} T{tokens} D{head_dim}"
    return shape(name, batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


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
        op="fmha_decode",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers={
            "torch": Provider(sdpa),
            "cuDNN": Provider(sdpa, context=by(SDPBackend.CUDNN_ATTENTION)),
            "flash": Provider(sdpa, context=by(SDPBackend.FLASH_ATTENTION)),
        },
        forward=forward,
        host={"batch": 1, "tokens": 640, "heads": 8, "kv_heads": 2, "head_dim": 128},
        shapes=(
            *(cached(batch, tokens) for batch in (1, 8, 64) for tokens in (512, 2048, 8192, 32768)),
            *(cached(batch, 2048) for batch in (16, 20, 24)),
            cached(5, 2048, 32, 32),
            cached(40, 2048, 8, 4, 256),
            *(cached(batch, 2048, 71, 1, 64) for batch in (1, 6)),
            *sweep(dims, tokens=(512, 8192), models=ATTENDING),
        ),
        quick=(cached(8, 8192), cached(1, 8192), cached(1, 640)),
        small=(cached(1, 128, 4, 2, 64), cached(2, 65, 2, 2, 64)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
