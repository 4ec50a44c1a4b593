"""gpt-oss's attention with sinks, prompt and decoding: layers with a window of 128 keys and without.

The operations are those of the keys that are seen. A window's cache holds no more than the window while decoding.
"""

import functools

import torch
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention

from tilegym import ops
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main

SCALING = 64**-0.5


def inputs(make, batch, tokens, queries, kv_heads, group, head_dim, window):
    return {
        "query": make(batch, queries, kv_heads, group, head_dim),
        "key": make(batch, tokens, kv_heads, head_dim),
        "value": make(batch, tokens, kv_heads, head_dim),
        "sinks": make(kv_heads * group),
        "window": window,
    }


def prefill(query, key, value, sinks, window):
    return ops.attention_sink(query, key, value, sinks, SCALING, window)


def decode(query, key, value, sinks, window):
    return ops.attention_sink_decode(query, key, value, sinks, SCALING, window)


def visible(queries, keys, window, device):
    position = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)
    seen = key <= position
    return seen if window is None else seen & (position - key < window)


def pairs(queries, keys, window):
    """Of queries and keys that see each other."""
    return sum(min(i + 1 + keys - queries, window or keys) for i in range(queries))


def formula(query, key, value, sinks, window):
    """As transformers' eager attention, a kv head at a time: the scores of all would not fit into memory."""
    hidden = ~visible(query.shape[1], key.shape[1], window, query.device)
    outs = []
    for h, sink in enumerate(sinks.view(key.shape[2], -1, 1, 1)):
        q, k, v = query[:, :, h].transpose(1, 2), key[:, None, :, h], value[:, None, :, h]
        scores = (q @ k.mT * SCALING).masked_fill(hidden, float("-inf"))  # [B, G, Sq, Skv]
        scores = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1)
        p = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., :-1].to(q.dtype)
        outs.append(p @ v)
    return torch.cat(outs, 1).transpose(1, 2).flatten(2)


@functools.cache
def block_mask(queries, keys, window, device):
    def seen(b, h, i, j):
        position = i + keys - queries
        return (j <= position) if window is None else (j <= position) & (position - j < window)

    return create_block_mask(seen, None, None, queries, keys, device=device)


@functools.cache
def compiled_flex():
    return torch.compile(flex_attention, dynamic=False)


def flex(query, key, value, sinks, window):
    """What remains of the softmax beside the sink follows from the sum of exponentials without it."""
    q, k, v = query.flatten(2, 3).transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask = block_mask(q.shape[2], k.shape[2], window, str(q.device))
    options = dict(block_mask=mask, scale=SCALING, enable_gqa=True, return_aux=AuxRequest(lse=True))
    out, aux = compiled_flex()(q, k, v, **options)
    out = out * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(out.dtype)
    return out.transpose(1, 2).flatten(2)


def forward(itemsize, batch, tokens, queries, kv_heads, group, head_dim, window):
    heads = kv_heads * group
    q, kv = (itemsize * batch * count * head_dim for count in (heads * queries, 2 * kv_heads * tokens))
    seen = pairs(queries, tokens, window)
    return Work(read=q + kv + itemsize * heads, written=q, flops=4 * batch * heads * seen * head_dim)


def gpt_oss(tokens, queries, local, batch=1):
    label = f"gpt-oss B{batch} T{tokens}{' local' if local else ''}"
    dims = dict(batch=batch, tokens=tokens, queries=queries, kv_heads=8, group=8, head_dim=64)
    return shape(label, **dims, window=128 if local else None)


def tiny(queries):
    return (shape("tiny", batch=1, tokens=70, queries=queries, kv_heads=2, group=2, head_dim=64, window=9),)


PROMPTS = tuple(gpt_oss(t, t, local) for t in (16, 512, 8192) for local in (False, True))
CACHES = (*(gpt_oss(t, 1, False, batch) for batch in (1, 8) for t in (512, 8192)), gpt_oss(128, 1, True))

BENCHMARKS = [
    Benchmark(
        op="attention_sink",
        inputs=inputs,
        ours=prefill,
        oracle=formula,
        peers={"torch": Provider(formula), "flex": Provider(flex, jit=True, headline_only=True)},
        forward=forward,
        host=dict(batch=1, tokens=64, queries=64, kv_heads=2, group=2, head_dim=64, window=None),
        shapes=PROMPTS,
        quick=(gpt_oss(4096, 4096, False), gpt_oss(4096, 4096, True)),
        small=tiny(70),
    ),
    Benchmark(
        op="attention_sink_decode",
        inputs=inputs,
        ours=decode,
        oracle=formula,
        peers={"torch": Provider(formula)},
        forward=forward,
        host=dict(batch=1, tokens=640, queries=1, kv_heads=2, group=2, head_dim=64, window=None),
        shapes=CACHES,
        quick=(gpt_oss(8192, 1, False), gpt_oss(128, 1, True)),
        small=tiny(1),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)
