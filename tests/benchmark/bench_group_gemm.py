"""Many products in one launch: a list of them, and consecutive rows with a matrix for each group."""

import torch

from tilegym import ops
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main


def lists(make, groups, m, n, k):
    return {"a": make(groups, m, k), "b": make(groups, n, k) * k**-0.5}


def ours_list(a, b):
    return tuple(ops.group_gemm(list(a), list(b), transpose_b=True))


def formula_list(a, b):
    return tuple(x @ w.t() for x, w in zip(a, b, strict=True))


def list_forward(itemsize, groups, m, n, k):
    return Work(read=itemsize * groups * (m + n) * k, written=itemsize * groups * m * n, flops=2 * groups * m * n * k)


def list_backward(itemsize, groups, m, n, k):
    once = list_forward(itemsize, groups, m, n, k)
    return Work(read=once.read + once.written, written=once.read, flops=2 * once.flops)


def ragged(make, tokens, groups, n, k):
    """Groups of equal size, but for the last one; no group starts where a tile does."""
    a = make(tokens, k)
    offsets = torch.arange(groups + 1) * (tokens // groups)
    offsets[-1] = tokens
    return {"a": a, "b": make(groups, n, k) * k**-0.5, "offsets": offsets.to(a.device, torch.int32)}


def ours_ragged(a, b, offsets):
    return ops.ragged_group_gemm(a, b, offsets)


def grouped_mm(a, b, offsets):
    return torch._grouped_mm(a, b.mT, offsets[1:])


def formula_ragged(a, b, offsets):
    bounds = offsets.tolist()
    return torch.cat([a[i:j] @ w.t() for i, j, w in zip(bounds[:-1], bounds[1:], b, strict=True)])


def ragged_forward(itemsize, tokens, groups, n, k):
    read = itemsize * (tokens * k + groups * n * k) + 4 * (groups + 1)
    return Work(read=read, written=itemsize * tokens * n, flops=2 * tokens * n * k)


def ragged_backward(itemsize, tokens, groups, n, k):
    once = ragged_forward(itemsize, tokens, groups, n, k)
    written = itemsize * (tokens * k + groups * n * k)
    return Work(read=once.read + once.written, written=written, flops=2 * once.flops)


BENCHMARKS = [
    Benchmark(
        op="group_gemm",
        inputs=lists,
        ours=ours_list,
        oracle=formula_list,
        peers={"cuBLAS": Provider(formula_list), "bmm": Provider(lambda a, b: tuple(torch.bmm(a, b.mT)))},
        baseline="cuBLAS",
        differentiable=("a", "b"),
        forward=list_forward,
        backward=list_backward,
        host={"groups": 2, "m": 64, "n": 64, "k": 64},
        shapes=(
            shape("4 of 1024", groups=4, m=1024, n=1024, k=1024),
            shape("4 of 4096", groups=4, m=4096, n=4096, k=4096),
            shape("32 of 512x768x2048", groups=32, m=512, n=768, k=2048),
            shape("8 of 16x4096x4096", groups=8, m=16, n=4096, k=4096),
        ),
        quick=(shape("4 of 4096", groups=4, m=4096, n=4096, k=4096),),
        small=(shape(groups=3, m=33, n=40, k=50),),
    ),
    Benchmark(
        op="ragged_group_gemm",
        inputs=ragged,
        ours=ours_ragged,
        oracle=formula_ragged,
        peers={"grouped_mm": Provider(grouped_mm)},
        baseline="grouped_mm",
        differentiable=("a", "b"),
        forward=ragged_forward,
        backward=ragged_backward,
        host={"tokens": 16, "groups": 2, "n": 64, "k": 64},
        shapes=(
            shape("Qwen3-30B-A3B, 65500 rows", "Qwen3-30B-A3B", tokens=65500, groups=128, n=1536, k=2048),
            shape("Mixtral-8x7B, 16300 rows", "Mixtral-8x7B", tokens=16300, groups=8, n=28672, k=4096),
            shape("gpt-oss-20b, 2000 rows", "gpt-oss-20b", tokens=2000, groups=32, n=5760, k=2880),
        ),
        quick=(shape("Qwen3-30B-A3B, 65500 rows", "Qwen3-30B-A3B", tokens=65500, groups=128, n=1536, k=2048),),
        small=(shape(tokens=50, groups=4, n=40, k=48),),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)
