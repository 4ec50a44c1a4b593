"""Attention over a prompt: causal and full, grouped queries. Causal attention counts half the operations."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tilegym import ops
from tilegym.bench.spec import ATTENDING
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench_cli import main


def inputs(make, batch, tokens, heads, kv_heads, head_dim, causal):
    return {
        "q": make(batch, heads, tokens, head_dim),
        "k": make(batch, kv_heads, tokens, head_dim),
        "v": make(batch, kv_heads, tokens, head_dim),
        "causal": causal,
    }


def ours(q, k, v, causal):
    return ops.fmha(q, k, v, is_causal=causal)


def sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def one_group(q, k, v, causal):
    """Queries [G, S, D] that share keys and values [S, D]."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    return scores.softmax(-1) @ v


def formula(q, k, v, causal):
    """The definition, one group of queries at a time: the scores of all heads would not fit into memory."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for b in range(q.shape[0]):
        heads = [
            checkpoint(one_group, q[b, h * group : (h + 1) * group], k[b, h], v[b, h], causal, use_reentrant=False)
            for h in range(k.shape[1])
        ]
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def forward(itemsize, batch, tokens, heads, kv_heads, head_dim, causal):
    q, kv = (itemsize * batch * tokens * count * head_dim for count in (heads, kv_heads))
    flops = 4 * batch * heads * tokens * tokens * head_dim
    return Work(read=q + 2 * kv, written=q, flops=flops // 2 if causal else flops)


def backward(itemsize, batch, tokens, heads, kv_heads, head_dim, causal):
    """Five products instead of two, what is computed twice counted once; reads q, k, v, o and do, writes gradients."""
    once = forward(itemsize, batch, tokens, heads, kv_heads, head_dim, causal)
    q, kv = (itemsize * batch * tokens * count * head_dim for count in (heads, kv_heads))
    return Work(read=3 * q + 2 * kv, written=q + 2 * kv, flops=5 * once.flops // 2)


def by(backend):
    return lambda: sdpa_kernel(backend)


def llama(causal, head_dim=128):
    name = f"B4 H32/8 T4096 D{head_dim} {'causal' if causal else 'full'}"
    return shape(name, batch=4, tokens=4096, heads=32, kv_heads=8, head_dim=head_dim, causal=causal)


def dims(model, tokens):
    return {
        "batch": 1,
        "tokens": tokens,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "causal": True,
    }


def encoder(model, batch, tokens, heads, head_dim=64):
    """Attention that sees all tokens, as encoders of text, images and sound have it."""
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "kv_heads": heads, "head_dim": head_dim}
    return shape(f"{model}, {batch} x {tokens} tokens", model, **sizes, causal=False)


ENCODERS = (
    encoder("BERT-large", 16, 512, 16),
    encoder("MiniLM", 32, 128, 12, 32),
    encoder("ViT-L/16", 32, 197, 16),
    encoder("CLIP-ViT-L/14", 32, 257, 16),
    encoder("Whisper-medium", 8, 1500, 16),
    encoder("ViT-H/14", 16, 257, 16, 80),
    encoder("SigLIP-so400m", 8, 729, 16, 72),
    encoder("SigLIP of Gemma-3", 4, 4096, 16, 72),
)
GEMMA3_1B = {"batch": 1, "tokens": 2048, "heads": 4, "kv_heads": 1, "head_dim": 256, "causal": True}
PHI3 = {"batch": 1, "tokens": 4096, "heads": 32, "kv_heads": 32, "head_dim": 96, "causal": True}

BENCHMARKS = [
    Benchmark(
        op="fmha",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers={
            "torch": Provider(sdpa),
            "cuDNN": Provider(sdpa, context=by(SDPBackend.CUDNN_ATTENTION)),
            "flash": Provider(sdpa, context=by(SDPBackend.FLASH_ATTENTION)),
        },
        differentiable=("q", "k", "v"),
        forward=forward,
        backward=backward,
        host={"batch": 1, "tokens": 64, "heads": 2, "kv_heads": 2, "head_dim": 64, "causal": True},
        shapes=(
            *(llama(causal, head_dim) for head_dim in (64, 128, 256) for causal in (True, False)),
            *sweep(dims, tokens=(16, 512, 8192), models=ATTENDING),
            shape("Phi-3-mini, 4096 tokens", "Phi-3-mini", **PHI3),
            shape("Gemma-3-1B, 2048 tokens", "Gemma-3-1B", **GEMMA3_1B),
            *ENCODERS,
        ),
        quick=(llama(True), llama(False), llama(True, 64), llama(False, 64), llama(True, 256), llama(False, 256)),
        small=(
            shape("B1 H4/2 T128 D64", batch=1, tokens=128, heads=4, kv_heads=2, head_dim=64, causal=True),
            shape("B2 H2/2 T65 D64", batch=2, tokens=65, heads=2, kv_heads=2, head_dim=64, causal=False),
        ),
        quick_modes=(FORWARD, BACKWARD),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
