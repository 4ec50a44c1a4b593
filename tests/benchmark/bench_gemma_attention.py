"""Gemma's attention, prompt and decoding: scores capped (Gemma 2) or not (Gemma 3), layers with a window and without.

The operations are those of the keys that are seen. A window's cache holds no more than the window while decoding.
"""

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention

from tilegym import ops
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main

SCALING = 256**-0.5


def inputs(make, batch, tokens, queries, heads, kv_heads, head_dim, window, soft_cap):
    return {
        "q": make(batch, heads, queries, head_dim),
        "k": make(batch, kv_heads, tokens, head_dim),
        "v": make(batch, kv_heads, tokens, head_dim),
        "window": window,
        "soft_cap": soft_cap,
    }


def prefill(q, k, v, window, soft_cap):
    return ops.gemma_attention(q, k, v, SCALING, window, soft_cap)


def decode(q, k, v, window, soft_cap):
    return ops.gemma_attention_decode(q, k, v, SCALING, window, soft_cap)


def visible(queries, keys, window, device):
    position = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)
    seen = key <= position
    return seen if window is None else seen & (position - key < window)


def pairs(queries, keys, window):
    """Of queries and keys that see each other."""
    return sum(min(i + 1 + keys - queries, window or keys) for i in range(queries))


def formula(q, k, v, window, soft_cap):
    """As transformers' eager attention, a kv head at a time: the scores of all would not fit into memory."""
    group = q.shape[1] // k.shape[1]
    hidden = ~visible(q.shape[2], k.shape[2], window, q.device)
    outs = []
    for h in range(k.shape[1]):
        scores = q[:, h * group : (h + 1) * group] @ k[:, h : h + 1].mT * SCALING
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(hidden, float("-inf"))
        p = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        outs.append(p @ v[:, h : h + 1])
    return torch.cat(outs, 1)


@functools.cache
def block_mask(queries, keys, window, device):
    def seen(b, h, i, j):
        position = i + keys - queries
        return (j <= position) if window is None else (j <= position) & (position - j < window)

    return create_block_mask(seen, None, None, queries, keys, device=device)


@functools.cache
def compiled_flex():
    return torch.compile(flex_attention, dynamic=False)


def flex(q, k, v, window, soft_cap):
    def cap(score, b, h, i, j):
        return soft_cap * torch.tanh(score / soft_cap)

    mask = block_mask(q.shape[2], k.shape[2], window, str(q.device))
    modify = None if soft_cap is None else cap
    return compiled_flex()(q, k, v, modify, mask, scale=SCALING, enable_gqa=q.shape[1] != k.shape[1])


def forward(itemsize, batch, tokens, queries, heads, kv_heads, head_dim, window, soft_cap):
    q, kv = (itemsize * batch * count * head_dim for count in (heads * queries, 2 * kv_heads * tokens))
    seen = pairs(queries, tokens, window)
    return Work(read=q + kv, written=q, flops=4 * batch * heads * seen * head_dim)


def gemma(version, tokens, queries, local, batch=1):
    """A layer of Gemma-2-9B or Gemma-3-4B."""
    heads, kv_heads, window, soft_cap = {2: (16, 8, 4096, 50.0), 3: (8, 4, 1024, None)}[version]
    label = f"Gemma-{version} B{batch} T{tokens}{' local' if local else ''}"
    return shape(
        label,
        batch=batch,
        tokens=tokens,
        queries=queries,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        window=window if local else None,
        soft_cap=soft_cap,
    )


def tiny(queries):
    dims = dict(batch=1, tokens=70, queries=queries, heads=4, kv_heads=2, head_dim=64, window=9, soft_cap=5.0)
    return (shape("tiny", **dims),)


PROMPTS = tuple(gemma(version, t, t, local) for version in (3, 2) for t in (16, 512, 8192) for local in (False, True))
CACHES = (
    *(gemma(version, t, 1, False, batch) for version in (3, 2) for batch in (1, 8) for t in (512, 8192)),
    gemma(2, 4096, 1, True),
    gemma(3, 1024, 1, True),
)

BENCHMARKS = [
    Benchmark(
        op="gemma_attention",
        inputs=inputs,
        ours=prefill,
        oracle=formula,
        peers={"torch": Provider(formula), "flex": Provider(flex, jit=True, headline_only=True)},
        forward=forward,
        host=dict(batch=1, tokens=64, queries=64, heads=4, kv_heads=2, head_dim=128, window=None, soft_cap=50.0),
        shapes=PROMPTS,
        quick=(gemma(3, 4096, 4096, True), gemma(2, 4096, 4096, False), gemma(3, 4096, 4096, False)),
        small=tiny(70),
    ),
    Benchmark(
        op="gemma_attention_decode",
        inputs=inputs,
        ours=decode,
        oracle=formula,
        peers={"torch": Provider(formula)},
        forward=forward,
        host=dict(batch=1, tokens=640, queries=1, heads=4, kv_heads=2, head_dim=128, window=None, soft_cap=50.0),
        shapes=CACHES,
        quick=(gemma(3, 8192, 1, False), gemma(3, 1024, 1, True), gemma(2, 8192, 1, False)),
        small=tiny(1),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)
