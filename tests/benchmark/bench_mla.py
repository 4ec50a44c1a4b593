"""Latent attention over a prompt, in DeepSeek's sizes: queries and keys 128 + 64 wide, values 128.

The peers join the two parts of queries and keys first, as transformers' models do. Operations are counted for the pairs
of queries and keys that see each other.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main

DIM, ROPE_DIM = 128, 64


def inputs(make, batch, heads, tokens, keys, causal):
    return {
        "q": make(batch, heads, tokens, DIM),
        "k": make(batch, heads, keys, DIM),
        "v": make(batch, heads, keys, DIM),
        "qpe": make(batch, heads, tokens, ROPE_DIM),
        "kpe": make(batch, 1, keys, ROPE_DIM),
        "causal": causal,
    }


def ours(q, k, v, qpe, kpe, causal):
    return ops.mla(q, k, v, qpe, kpe, causal)


def joined(q, k, qpe, kpe):
    return torch.cat((q, qpe), -1), torch.cat((k, kpe.expand(-1, k.shape[1], -1, -1)), -1)


def causal_mask(queries, keys, device):
    """Aligned bottom-right; torch's own flag aligns top-left."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def sdpa(q, k, v, qpe, kpe, causal):
    q, k = joined(q, k, qpe, kpe)
    chunk = causal and q.shape[2] != k.shape[2]
    mask = causal_mask(q.shape[2], k.shape[2], q.device) if chunk else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and not chunk)


def padded_sdpa(q, k, v, qpe, kpe, causal):
    """For the backends that want values as wide as keys."""
    width = v.shape[3]
    return sdpa(q, k, F.pad(v, (0, ROPE_DIM)), qpe, kpe, causal)[..., :width]


def one_head(q, k, v, causal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~causal_mask(*scores.shape, q.device), float("-inf"))
    return scores.softmax(-1) @ v


def formula(q, k, v, qpe, kpe, causal):
    """The definition, one head at a time: the scores of all would not fit into memory."""
    q, k = joined(q, k, qpe, kpe)
    rows = [
        torch.stack([checkpoint(one_head, *head, causal, use_reentrant=False) for head in zip(*row, strict=True)])
        for row in zip(q, k, v, strict=True)
    ]
    return torch.stack(rows)


def pairs(batch, heads, tokens, keys, causal):
    """Of queries and keys that see each other."""
    hidden = (tokens * tokens - tokens) // 2 if causal else 0
    return batch * heads * (tokens * keys - hidden)


def forward(itemsize, batch, heads, tokens, keys, causal):
    out = itemsize * batch * heads * tokens * DIM
    qpe, kpe = (itemsize * batch * n * ROPE_DIM for n in (heads * tokens, keys))
    kv = 2 * itemsize * batch * heads * keys * DIM
    flops = 2 * pairs(batch, heads, tokens, keys, causal) * (2 * DIM + ROPE_DIM)
    return Work(read=out + qpe + kv + kpe, written=out, flops=flops)


def backward(itemsize, batch, heads, tokens, keys, causal):
    """Three products over keys and two over values; reads the inputs, out and its gradient."""
    once = forward(itemsize, batch, heads, tokens, keys, causal)
    flops = 2 * pairs(batch, heads, tokens, keys, causal) * (3 * (DIM + ROPE_DIM) + 2 * DIM)
    return Work(read=once.read + 2 * once.written, written=once.read, flops=flops)


def by(backend):
    return lambda: sdpa_kernel(backend)


def prompt(batch, heads, tokens, causal=True, keys=None, model=""):
    chunk = "" if keys is None else f" after {keys - tokens}"
    name = f"B{batch} H{heads} T{tokens}{chunk} {'causal' if causal else 'full'}"
    return shape(name, model, batch=batch, heads=heads, tokens=tokens, keys=keys or tokens, causal=causal)


LITE, V3 = ("DeepSeek-V2-Lite", 16), ("DeepSeek-V3", 128)

BENCHMARKS = [
    Benchmark(
        op="mla",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers={
            "torch": Provider(sdpa),
            "cuDNN": Provider(sdpa, context=by(SDPBackend.CUDNN_ATTENTION)),
            "flash, padded": Provider(padded_sdpa, context=by(SDPBackend.FLASH_ATTENTION)),
        },
        differentiable=("q", "k", "v", "qpe", "kpe"),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD),
        host={"batch": 1, "heads": 2, "tokens": 64, "keys": 64, "causal": True},
        shapes=(
            *(prompt(1, heads, tokens, model=model) for model, heads in (LITE, V3) for tokens in (1, 16, 512, 8192)),
            *(prompt(4, 16, 4096, causal) for causal in (True, False)),
            prompt(1, 16, 1024, keys=8192, model=LITE[0]),
        ),
        quick=(prompt(4, 16, 4096), prompt(1, 16, 512), prompt(4, 16, 4096, False), prompt(1, 128, 2048)),
        small=(prompt(1, 2, 100), prompt(2, 2, 33, False), prompt(1, 2, 20, keys=65)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
