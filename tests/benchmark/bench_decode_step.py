"""What a decoding step of a dense model consists of beside attention: a single row against a layer's weights.

The norm in front of a linear layer and the activation or the residual behind it run in the launch that reads the
weights; rotation and the write to the cache are one launch.
"""

import torch
import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import ATTENDING
from tilegym.bench.spec import MODELS
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import plural
from tilegym.bench.spec import shape
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main

EPS = 1e-6


def qkv_inputs(make, tokens, hidden, queries, keys):
    x, norm = make(tokens, hidden), make(hidden)
    q, k, v = (make(rows, hidden) * hidden**-0.5 for rows in (queries, keys, keys))
    return {"x": x, "norm": norm, "q": q, "k": k, "v": v}


def ours_qkv(x, norm, q, k, v):
    return tuple(ops.rms_norm_linear(x, norm, EPS, [q, k, v]))


def formula_qkv(x, norm, q, k, v):
    y = F.rms_norm(x, (x.shape[-1],), norm, EPS)
    return F.linear(y, q), F.linear(y, k), F.linear(y, v)


def qkv_work(itemsize, tokens, hidden, queries, keys):
    rows = queries + 2 * keys
    read = itemsize * hidden * (tokens + 1 + rows)
    return Work(read=read, written=itemsize * tokens * rows, flops=2 * tokens * rows * hidden)


def mlp_inputs(make, tokens, hidden, intermediate):
    x, norm = make(tokens, hidden), make(hidden)
    gate, up = (make(intermediate, hidden) * hidden**-0.5 for _ in range(2))
    return {"x": x, "norm": norm, "gate": gate, "up": up}


def ours_mlp(x, norm, gate, up):
    return ops.rms_norm_swiglu(x, norm, EPS, gate, up)


def formula_mlp(x, norm, gate, up):
    y = F.rms_norm(x, (x.shape[-1],), norm, EPS)
    return F.silu(F.linear(y, gate)) * F.linear(y, up)


def mlp_work(itemsize, tokens, hidden, intermediate):
    read = itemsize * hidden * (tokens + 1 + 2 * intermediate)
    return Work(read=read, written=itemsize * tokens * intermediate, flops=4 * tokens * intermediate * hidden)


def add_inputs(make, tokens, n, k):
    return {"x": make(tokens, k), "weight": make(n, k) * k**-0.5, "residual": make(tokens, n)}


def ours_add(x, weight, residual):
    return ops.linear_add(x, weight, residual)


def formula_add(x, weight, residual):
    return residual + F.linear(x, weight)


def add_work(itemsize, tokens, n, k):
    read = itemsize * (tokens * (k + n) + n * k)
    return Work(read=read, written=itemsize * tokens * n, flops=2 * tokens * n * k)


def norm_add_inputs(make, tokens, hidden):
    return {"x": make(tokens, hidden), "weight": make(hidden), "residual": make(tokens, hidden)}


def ours_norm_add(x, weight, residual):
    return ops.rms_norm_add(x, weight, EPS, residual)


def formula_norm_add(x, weight, residual):
    return residual + F.rms_norm(x, (x.shape[-1],), weight, EPS)


def norm_add_work(itemsize, tokens, hidden):
    return Work(read=itemsize * hidden * (2 * tokens + 1), written=itemsize * tokens * hidden)


def cache_inputs(make, batch, heads, kv_heads, head_dim, capacity):
    q = make(batch, heads, 1, head_dim)
    k, v = (make(batch, kv_heads, 1, head_dim) for _ in range(2))
    angles = make(1, 1, head_dim // 2).repeat(1, 1, 2)
    cache = [make(batch, kv_heads, capacity, head_dim) for _ in range(2)]
    position = torch.full((1,), capacity - 1, device=q.device)
    names = ("q", "k", "v", "cos", "sin", "keys", "values", "position")
    return dict(zip(names, (q, k, v, angles.cos(), angles.sin(), *cache, position), strict=True))


def ours_cache(q, k, v, cos, sin, keys, values, position):
    rotated = ops.rope_and_cache(q, k, v, cos, sin, keys, values, position)
    return rotated, keys[:, :, -1], values[:, :, -1]


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def formula_cache(q, k, v, cos, sin, keys, values, position):
    """As transformers' models with a static cache."""
    keys.index_copy_(2, position, rotate(k, cos, sin))
    values.index_copy_(2, position, v)
    return rotate(q, cos, sin), keys[:, :, -1], values[:, :, -1]


def cache_work(itemsize, batch, heads, kv_heads, head_dim, capacity):
    written = itemsize * batch * (heads + 2 * kv_heads) * head_dim
    return Work(read=written + 2 * itemsize * head_dim + 8, written=written)


def ours_attention(q, k, v, cos, sin, keys, values, position):
    out = ops.rope_fmha_decode(q, k, v, cos, sin, keys, values, position)
    return out, keys[:, :, -1], values[:, :, -1]


def formula_attention(q, k, v, cos, sin, keys, values, position):
    """As transformers' models with a static cache, which is full with this token."""
    keys.index_copy_(2, position, rotate(k, cos, sin))
    values.index_copy_(2, position, v)
    out = F.scaled_dot_product_attention(rotate(q, cos, sin), keys, values, enable_gqa=True)
    return out, keys[:, :, -1], values[:, :, -1]


def attention_work(itemsize, batch, heads, kv_heads, head_dim, capacity):
    token = itemsize * batch * (heads + 2 * kv_heads) * head_dim
    cache = 2 * itemsize * batch * kv_heads * (capacity - 1) * head_dim
    written = itemsize * batch * (heads + 2 * kv_heads) * head_dim
    flops = 4 * batch * heads * capacity * head_dim
    return Work(read=token + cache + 2 * itemsize * head_dim + 8, written=written, flops=flops)


def logits_inputs(make, tokens, vocabulary):
    return {"x": make(tokens, vocabulary)}


def ours_argmax(x):
    return ops.argmax(x)


def formula_argmax(x):
    return x.argmax(-1)


def argmax_work(itemsize, tokens, vocabulary):
    return Work(read=itemsize * tokens * vocabulary, written=8 * tokens)


def of_models(sizes, models):
    """One shape of each model for a single token; those that two share appear once."""
    found = {}
    for model in models:
        dims = sizes(model)
        found.setdefault(tuple(dims.items()), shape(plural(model.name, 1), model.name, **dims))
    return tuple(found.values())


def benchmark(op, inputs, ours, formula, work, shapes, host, small, **more):
    peers = usual_peers(formula)
    return Benchmark(op, inputs, ours, formula, peers, work, host, shapes, shapes[:1], small, **more)


def qkv_sizes(model):
    queries, keys = (count * model.head_dim for count in (model.heads, model.kv_heads))
    return {"tokens": 1, "hidden": model.hidden, "queries": queries, "keys": keys}


def cache_sizes(model):
    heads = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    return {"batch": 1, **heads, "capacity": 4096}


DENSE = tuple(model for model in MODELS if not model.experts)

BENCHMARKS = [
    benchmark(
        "rms_norm_linear",
        qkv_inputs,
        ours_qkv,
        formula_qkv,
        qkv_work,
        of_models(qkv_sizes, ATTENDING),
        host={"tokens": 1, "hidden": 1024, "queries": 64, "keys": 64},
        small=(shape(tokens=1, hidden=128, queries=64, keys=32), shape(tokens=3, hidden=72, queries=40, keys=24)),
    ),
    benchmark(
        "rms_norm_swiglu",
        mlp_inputs,
        ours_mlp,
        formula_mlp,
        mlp_work,
        of_models(lambda m: {"tokens": 1, "hidden": m.hidden, "intermediate": m.intermediate}, DENSE),
        host={"tokens": 1, "hidden": 1024, "intermediate": 64},
        small=(shape(tokens=1, hidden=128, intermediate=96),),
    ),
    benchmark(
        "linear_add",
        add_inputs,
        ours_add,
        formula_add,
        add_work,
        of_models(lambda m: {"tokens": 1, "n": m.hidden, "k": m.intermediate}, DENSE),
        host={"tokens": 1, "n": 64, "k": 1024},
        small=(shape(tokens=1, n=96, k=128),),
    ),
    benchmark(
        "rms_norm_add",
        norm_add_inputs,
        ours_norm_add,
        formula_norm_add,
        norm_add_work,
        of_models(lambda m: {"tokens": 1, "hidden": m.hidden}, DENSE),
        host={"tokens": 1, "hidden": 1024},
        small=(shape(tokens=1, hidden=128), shape(tokens=3, hidden=72)),
    ),
    benchmark(
        "rope_and_cache",
        cache_inputs,
        ours_cache,
        formula_cache,
        cache_work,
        of_models(cache_sizes, ATTENDING),
        host={"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "capacity": 16},
        small=(shape(batch=2, heads=4, kv_heads=2, head_dim=16, capacity=5),),
        reads_all=False,
    ),
    benchmark(
        "rope_fmha_decode",
        cache_inputs,
        ours_attention,
        formula_attention,
        attention_work,
        of_models(cache_sizes, ATTENDING),
        host={"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "capacity": 16},
        small=(shape(batch=2, heads=4, kv_heads=2, head_dim=32, capacity=5),),
        reads_all=False,
    ),
    benchmark(
        "argmax",
        logits_inputs,
        ours_argmax,
        formula_argmax,
        argmax_work,
        of_models(lambda m: {"tokens": 1, "vocabulary": m.vocab}, DENSE),
        host={"tokens": 1, "vocabulary": 1024},
        small=(shape(tokens=2, vocabulary=3000),),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)
