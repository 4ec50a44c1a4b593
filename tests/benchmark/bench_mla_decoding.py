"""Latent attention of one new token with the expansion absorbed: DeepSeek's latents, 512 + 64 wide."""

from tilegym import ops
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main

DIM, ROPE_DIM = 512, 64
SCALE = (128 + 64) ** -0.5


def inputs(make, batch, heads, tokens):
    return {
        # As wide as what a model's W_uk gives: scores of unit variance.
        "q": make(batch, heads, DIM) * (128 / DIM) ** 0.5,
        "qpe": make(batch, heads, ROPE_DIM),
        "kv": make(batch, tokens, DIM),
        "kpe": make(batch, tokens, ROPE_DIM),
    }


def ours(q, qpe, kv, kpe):
    return ops.mla_decoding(q, qpe, kv, kpe, SCALE)[0]


def formula(q, qpe, kv, kpe):
    return ((q @ kv.mT + qpe @ kpe.mT) * SCALE).softmax(-1) @ kv


def forward(itemsize, batch, heads, tokens):
    cache, queries = (itemsize * batch * n * (DIM + ROPE_DIM) for n in (tokens, heads))
    out = itemsize * batch * heads * DIM
    return Work(read=cache + queries, written=out, flops=2 * batch * heads * tokens * (2 * DIM + ROPE_DIM))


def cached(batch, heads, tokens, model=""):
    return shape(f"B{batch} H{heads} T{tokens}", model, batch=batch, heads=heads, tokens=tokens)


LITE, V3 = ("DeepSeek-V2-Lite", 16), ("DeepSeek-V3", 128)

BENCHMARKS = [
    Benchmark(
        op="mla_decoding",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers={"torch": Provider(formula)},
        forward=forward,
        host={"batch": 1, "heads": 16, "tokens": 64},
        shapes=tuple(
            cached(batch, heads, tokens, model)
            for model, heads in (LITE, V3)
            for batch in (1, 16, 128)
            for tokens in (512, 2048, 8192, 32768)
        ),
        quick=(cached(1, 16, 8192), cached(64, 16, 8192), cached(64, 128, 8192), cached(1, 128, 640)),
        small=(cached(1, 4, 100), cached(2, 20, 65)),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)
