"""Matrix products: square and transposed ones, and a model's linear layers from one token to a long prompt."""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import MODELS
from tilegym.bench.spec import TOKENS
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Shape
from tilegym.bench.spec import Work
from tilegym.bench.spec import plural
from tilegym.bench.spec import shape
from tilegym.bench_cli import main


def matrices(make, m, n, k, trans_a=False, trans_b=False):
    a = make(k, m) if trans_a else make(m, k)
    b = make(n, k) if trans_b else make(k, n)
    return {"a": a, "b": b, "trans_a": trans_a, "trans_b": trans_b}


def ours_matmul(a, b, trans_a, trans_b):
    return ops.matmul(a, b, trans_a=trans_a, trans_b=trans_b)


def formula_matmul(a, b, trans_a, trans_b):
    return (a.mT if trans_a else a) @ (b.mT if trans_b else b)


def matmul_forward(itemsize, m, n, k, trans_a=False, trans_b=False):
    return Work(read=itemsize * (m * k + k * n), written=itemsize * m * n, flops=2 * m * n * k)


def matmul_backward(itemsize, m, n, k, trans_a=False, trans_b=False):
    """Two products; reads a, b and the upstream gradient, writes two gradients."""
    operands = itemsize * (m * k + k * n)
    return Work(read=operands + itemsize * m * n, written=operands, flops=4 * m * n * k)


def layer(make, tokens, n, k):
    return {"x": make(tokens, k), "weight": make(n, k) * k**-0.5}


def ours_linear(x, weight):
    return ops.linear(x, weight)


def formula_linear(x, weight):
    return F.linear(x, weight)


def linear_forward(itemsize, tokens, n, k):
    return matmul_forward(itemsize, tokens, n, k)


def linear_backward(itemsize, tokens, n, k):
    return matmul_backward(itemsize, tokens, n, k)


def layers(model):
    """The linear layers of a decoder, as (name, n, k); routed experts are none."""
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    if model.latent:  # DeepSeek-V2-Lite's: 128 + 64 wide queries, latents of 512 + 64, values of 128
        yield from (("q", 16 * 192, model.hidden), ("kv_a", 512 + 64, model.hidden), ("kv_b", 16 * 256, 512))
        yield "o", model.hidden, 16 * 128
    else:
        yield from (("qkv", heads, model.hidden), ("o", model.hidden, model.heads * model.head_dim))
    if not model.experts:
        yield from (("gate_up", 2 * model.intermediate, model.hidden), ("down", model.hidden, model.intermediate))


# Layers with rows that do not begin at 16 bytes: model, layer, n, k, tokens (or patches of an image).
UNALIGNED = (
    ("GPT-2", "lm_head", 50257, 768, (1, 16, 2048)),
    ("BERT", "lm_head", 30522, 768, (4096,)),
    ("Qwen2.5-VL", "gate of images", 3420, 1280, (256, 4096)),
    ("Qwen2.5-VL", "down of images", 1280, 3420, (1, 16, 256, 4096)),
)


def model_layers():
    sizes = {}
    for model in MODELS:
        named = [(name, n, k, TOKENS) for name, n, k in layers(model)]
        for name, n, k, counts in (*named, ("lm_head", model.vocab, model.hidden, (1, 16))):
            for tokens in counts:
                label = plural(f"{model.name} {name}", tokens)
                sizes.setdefault((tokens, n, k), Shape(label, {"tokens": tokens, "n": n, "k": k}, model.name))
    return *sizes.values(), *unaligned_layers()


def unaligned_layers():
    for model, name, n, k, counts in UNALIGNED:
        for tokens in counts:
            yield Shape(plural(f"{model} {name}", tokens), {"tokens": tokens, "n": n, "k": k}, model)


def decode(name, n, k):
    return shape(f"{name} {n}x{k}, 1 token", "Llama-3.1-8B", tokens=1, n=n, k=k)


BENCHMARKS = [
    Benchmark(
        op="matmul",
        inputs=matrices,
        ours=ours_matmul,
        oracle=formula_matmul,
        peers={"cuBLAS": Provider(formula_matmul)},
        baseline="cuBLAS",
        differentiable=("a", "b"),
        forward=matmul_forward,
        backward=matmul_backward,
        host={"m": 64, "n": 64, "k": 64},
        shapes=(
            *(shape(str(size), m=size, n=size, k=size) for size in (1024, 2048, 4096, 8192, 16384)),
            shape("8192x8192x1023", m=8192, n=8192, k=1023),
            shape("8192, a transposed", m=8192, n=8192, k=8192, trans_a=True),
            shape("8192, b transposed", m=8192, n=8192, k=8192, trans_b=True),
        ),
        quick=tuple(shape(str(size), m=size, n=size, k=size) for size in (4096, 8192)),
        small=(shape(m=128, n=128, k=128), shape(m=65, n=97, k=127)),
    ),
    Benchmark(
        op="linear",
        inputs=layer,
        ours=ours_linear,
        oracle=formula_linear,
        peers={"cuBLAS": Provider(formula_linear)},
        baseline="cuBLAS",
        differentiable=("x", "weight"),
        forward=linear_forward,
        backward=linear_backward,
        host={"tokens": 1, "n": 64, "k": 1024},
        shapes=model_layers(),
        quick=(
            decode("gate_up", 28672, 4096),
            shape("gate_up 28672x4096, 8192 tokens", "Llama-3.1-8B", tokens=8192, n=28672, k=4096),
            decode("qkv", 6144, 4096),
            decode("o", 4096, 4096),
            decode("down", 4096, 14336),
            decode("lm_head", 128256, 4096),
            shape("gate_up 28672x4096, 16 tokens", "Llama-3.1-8B", tokens=16, n=28672, k=4096),
            shape("gate_up 28672x4096, 512 tokens", "Llama-3.1-8B", tokens=512, n=28672, k=4096),
        ),
        small=(shape(tokens=1, n=512, k=512), shape(tokens=64, n=512, k=512)),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)
