"""Linear layers with a weight of 8 bits, from one token to a prompt, against PyTorch's way: it is written out first."""

import torch
import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Shape
from tilegym.bench.spec import Work
from tilegym.bench.spec import plural
from tilegym.bench.spec import shape
from tilegym.bench_cli import main

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LAYERS = (
    ("Llama-3.1-8B", "q", 4096, 4096),
    ("Llama-3.1-8B", "k", 1024, 4096),
    ("Llama-3.1-8B", "up", 14336, 4096),
    ("Llama-3.1-8B", "down", 4096, 14336),
    ("Llama-3.1-70B", "q", 8192, 8192),
    ("Llama-3.1-70B", "up", 28672, 8192),
    ("Llama-3.1-70B", "down", 8192, 28672),
    ("Gemma-3-4B", "up", 10240, 2560),
    ("Gemma-3-4B", "down", 2560, 10240),
    ("DeepSeek-V2-Lite", "down", 2048, 10944),
)
TOKENS = (1, 16, 512)


def layer(make, tokens, n, k, kind):
    weight = (make(n, k) * 32).clamp(-127, 127).to(KINDS[kind])
    return {"x": make(tokens, k), "weight": weight, "scale": make(n).abs() * k**-0.5 / 32}


def ours(x, weight, scale):
    return ops.quantized_linear(x, weight, scale)


def formula(x, weight, scale):
    return F.linear(x, weight.to(x.dtype) * scale[:, None])


def scaled_behind(x, weight, scale):
    return F.linear(x, weight.to(x.dtype)) * scale


def forward(itemsize, tokens, n, k, kind):
    return Work(read=itemsize * (tokens * k + n) + n * k, written=itemsize * tokens * n, flops=2 * tokens * n * k)


def shapes():
    for kind in KINDS:
        for model, name, n, k in LAYERS:
            for tokens in TOKENS:
                label = plural(f"{model} {name}, {kind}", tokens)
                yield Shape(label, {"tokens": tokens, "n": n, "k": k, "kind": kind}, model)


def decode(kind, tokens, n, k):
    return shape(plural(f"{kind} {n}x{k}", tokens), "Llama-3.1-8B", tokens=tokens, n=n, k=k, kind=kind)


BENCHMARKS = [
    Benchmark(
        op="quantized_linear",
        inputs=layer,
        ours=ours,
        oracle=formula,
        peers={
            "torch": Provider(formula),
            "torch, scaled behind": Provider(scaled_behind),
            "torch.compile": Provider(formula, compile=True),
        },
        forward=forward,
        host={"tokens": 1, "n": 64, "k": 1024, "kind": "int8"},
        shapes=tuple(shapes()),
        quick=(
            decode("int8", 1, 14336, 4096),
            decode("fp8", 1, 14336, 4096),
            decode("int8", 1, 4096, 14336),
            decode("fp8", 1, 4096, 14336),
            decode("int8", 16, 14336, 4096),
            decode("int8", 512, 14336, 4096),
        ),
        small=(shape(tokens=1, n=256, k=256, kind="int8"), shape(tokens=16, n=256, k=256, kind="fp8")),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
