"""Tries tiles, compiler hints and kernel variants of GEMM, GEMV and attention on one GPU: a tool for authors.

    export CUDA_TILE_CACHE_DIR=/tmp/tile-cache
    for i in $(seq 0 13); do python sweep_gemm_attention.py warm $i 14 & done; wait
    python sweep_gemm_attention.py run [start of a group's name ...]

``warm i n`` compiles every n-th variant (compiling is CPU work: do it from many processes first); ``run`` checks each
variant against torch and prints a table a group, fastest first, beside torch's own kernels and the copy bandwidth of
the same run. ``compile i n`` compiles ahead of time for sm_90 without a GPU and names the variants that fail.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sweep_common import BF16
from sweep_common import GROUPS
from sweep_common import VARIANTS
from sweep_common import Group
from sweep_common import Variant
from sweep_common import empty_or_random
from sweep_common import hints
from sweep_common import main
from sweep_common import p2
from sweep_kernels import attention_experiment
from sweep_kernels import gemm_experiment

from tilegym.ops.cutile.attention import attention_kernel
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.few_rows import few_rows_kernel
from tilegym.ops.cutile.linear import gemv_kernel
from tilegym.ops.cutile.matmul import matmul_kernel

# GEMM: C[M, N] = A[M, K] W[N, K]^T


def gemm_group(m: int, n: int, k: int) -> str:
    name = f"gemm {m}x{n}x{k}"
    GROUPS[name] = Group(
        lambda d: {
            "a": empty_or_random(d, m, k),
            "b": empty_or_random(d, n, k, scale=0.02),
            "c": torch.empty(m, n, device=d, dtype=BF16),
        },
        lambda t: t["c"],
        {"cuBLAS": lambda t: F.linear(t["a"], t["b"])},
        2 * m * n * k / 1e12,
        "TFLOP/s",
    )
    return name


def gemm(group, m, n, tile, h, persistent=False, rows=8, sms=132):
    tm, tn, tk = tile
    blocks = -(-m // tm) * -(-n // tn)
    if persistent:
        blocks = min(blocks, sms // h.get("num_ctas", 1))
    label = f"{tm}x{tn}x{tk}{f' persistent{sms}' * persistent}{f' rows{rows}' * (rows != 8)}"
    args = (tm, tn, tk, rows, False, True, False, False, True, persistent)
    VARIANTS.append(
        Variant(group, label, h, lambda t: [((blocks,), matmul_kernel, (t["a"], t["b"], 0, t["c"], *args))])
    )


def gemm_latency(group, m, n, tile, h, latency):
    tm, tn, tk = tile
    blocks = -(-m // tm) * -(-n // tn)
    label = f"{tm}x{tn}x{tk} latency{latency}"
    args = (tm, tn, tk, 8, latency)
    VARIANTS.append(Variant(group, label, h, lambda t: [((blocks,), gemm_experiment, (t["a"], t["b"], t["c"], *args))]))


for size in (4096, 8192):
    g = gemm_group(size, size, size)
    for persistent in (False, True):
        gemm(g, size, size, (128, 256, 64), hints(8), persistent)
        gemm(g, size, size, (128, 128, 64), hints(), persistent)
        gemm(g, size, size, (128, 256, 64), hints(8), persistent, rows=16)
        gemm(g, size, size, (128, 256, 64), hints(8), persistent, rows=4)
    gemm(g, size, size, (128, 128, 64), hints(), True, sms=264)
    gemm(g, size, size, (128, 128, 64), hints(None, 2), True, sms=264)
    gemm(g, size, size, (256, 128, 64), hints(8), True)
    gemm(g, size, size, (256, 256, 64), hints(8, None, 2))
    gemm(g, size, size, (128, 128, 64), hints(8))
    for latency in (5, 10):
        gemm_latency(g, size, size, (128, 256, 64), hints(8), latency)
g = gemm_group(512, 14336, 4096)
for tile, h in (
    ((128, 256, 64), hints(8)),
    ((256, 128, 64), hints(8)),
    ((128, 128, 64), hints()),
    ((128, 128, 128), hints()),
    ((64, 128, 64), hints()),
    ((64, 256, 64), hints()),
    ((64, 128, 128), hints(None, 2)),
    ((128, 64, 64), hints()),
    ((256, 64, 64), hints()),
):
    gemm(g, 512, 14336, tile, h)
for n, k in ((4096, 14336), (4096, 4096)):
    g = gemm_group(128, n, k)
    for tm, tn, tk in ((128, 128, 64), (64, 128, 64), (128, 64, 64), (64, 64, 64), (64, 64, 128), (128, 32, 128)):
        gemm(g, 128, n, (tm, tn, tk), hints())


# GEMV and few rows: y[M, N] = x[M, K] W[N, K]^T


def gemv_group(m: int, n: int, k: int) -> str:
    name = f"gemv {m}x{n}x{k}"
    GROUPS[name] = Group(
        lambda d: {
            "x": empty_or_random(d, m, k),
            "w": empty_or_random(d, n, k, scale=0.02),
            "y": torch.empty(m, n, device=d, dtype=BF16),
        },
        lambda t: t["y"],
        {"cuBLAS": lambda t: F.linear(t["x"], t["w"])},
        2 * (n * k + m * k + m * n) / 1e9,
        "GB/s",
    )
    return name


def gemv(group, n, tile, occ):
    tn, tk = tile

    def launches(t):
        k = t["w"].shape[1]
        return [((-(-n // tn),), gemv_kernel, (t["x"], t["w"], 0, 0, t["y"], -1, False, False, k, tn, tk, 0, 0, False))]

    VARIANTS.append(Variant(group, f"sum {tn}x{tk}", hints(None, occ), launches))


def few(group, n, tile, h):
    tn, tk = tile
    args = (False, False, 1.0, 1, 16, tn, tk, False, False)
    VARIANTS.append(
        Variant(
            group,
            f"mma {tn}x{tk}",
            h,
            lambda t: [((-(-n // tn),), few_rows_kernel, (t["x"], t["w"], 0, 0, t["y"], *args))],
        )
    )


for n, k in ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (128256, 4096), (28672, 4096)):
    g = gemv_group(1, n, k)
    for tile, occ in (((4, 512), 4), ((4, 256), 4), ((8, 512), 2), ((8, 1024), 2)):
        gemv(g, n, tile, occ)
    for tile, occ in (((128, 128), 2), ((64, 128), 2), ((64, 256), 2), ((32, 256), 4)):
        few(g, n, tile, hints(None, occ))
for m, n, k in ((4, 14336, 4096), (4, 4096, 4096), (16, 14336, 4096), (16, 4096, 14336), (8, 128256, 4096)):
    g = gemv_group(m, n, k)
    for tile, h in (
        ((128, 128), hints(None, 2)),
        ((128, 64), hints(None, 2)),
        ((64, 128), hints(None, 2)),
        ((64, 256), hints(None, 2)),
        ((64, 128), hints(None, 4)),
        ((32, 256), hints(None, 4)),
        ((64, 256), hints()),
    ):
        few(g, n, tile, h)


# Attention


def sdpa(backend: str, causal: bool) -> Callable[[dict], torch.Tensor]:
    from torch.nn.attention import SDPBackend
    from torch.nn.attention import sdpa_kernel

    def run(t):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], is_causal=causal, enable_gqa=True)

    return run


def attention_group_of(shape: tuple[int, ...], causal: bool) -> str:
    b, hq, hkv, s, d = shape
    name = f"attention B{b} H{hq}/{hkv} S{s} D{d} {'causal' if causal else 'full'}"
    if name in GROUPS:
        return name
    GROUPS[name] = Group(
        lambda dev: {
            "q": empty_or_random(dev, b, hq, s, d),
            "k": empty_or_random(dev, b, hkv, s, d),
            "v": empty_or_random(dev, b, hkv, s, d),
            "o": torch.empty(b, hq, s, d, device=dev, dtype=BF16),
            "mask": torch.ones(b, 1, 1, s, device=dev, dtype=torch.uint8),
            "kv_len": torch.full((b,), s, device=dev, dtype=torch.int32),
        },
        lambda t: t["o"],
        {"flash": sdpa("FLASH_ATTENTION", causal), "cuDNN": sdpa("CUDNN_ATTENTION", causal)},
        4 * b * hq * s * s * d * (0.5 if causal else 1) / 1e12,
        "TFLOP/s",
    )
    return name


def attention(shape, causal, tile, h, two_loops=False, experiment=None, mask=False, kv_len=False, interleave=1):
    b, hq, _, s, d = shape
    group = attention_group_of(shape, causal)
    tm, tn = tile
    grid = (-(-s // tm) * b * hq,)
    scaling = d**-0.5

    def production(t):
        arrays = (t["q"], t["k"], t["v"], t["o"], t["mask"] if mask else 0, 0, t["kv_len"] if kv_len else 0, 0)
        numbers = (scaling, 1.0, 0, tm, tn, p2(d), p2(d))
        bounded = causal or kv_len or mask
        flags = (
            causal,
            False,
            False,
            KEY_MASK if mask else 0,
            1,
            False,
            kv_len,
            False,
            bounded,
            two_loops,
            False,
            False,
            interleave,
        )
        return [(grid, attention_kernel, (*arrays, *numbers, *flags))]

    def trial(t):
        arrays = (t["q"], t["k"], t["v"], t["o"])
        return [(grid, attention_experiment, (*arrays, scaling, tm, tn, d, causal, *experiment[1]))]

    turns = f" {interleave or 'all'} heads" * (interleave != 1)
    label = f"{tm}x{tn}{' two loops' * two_loops}{' mask' * mask}{' kv_len' * kv_len}{turns}"
    if experiment:
        label = f"{tm}x{tn} {experiment[0]}"
    VARIANTS.append(Variant(group, label, h, trial if experiment else production))


# (name, (SPLIT loop, K latency, V latency, split D, V before softmax))
EARLY_V = ("two loops, early v", (True, 0, 0, False, True))
SPLIT_D = ("split d", (False, 0, 0, True, False))
SPLIT_D2 = ("two loops, split d", (True, 0, 0, True, False))

llama = (4, 32, 8, 4096, 128)
for two_loops in (False, True):
    for tile, h in (
        ((128, 256), hints(8)),
        ((128, 128), hints(8)),
        ((64, 128), hints(None, 2)),
        ((64, 64), hints(4, 3)),
    ):
        attention(llama, True, tile, h, two_loops)
    attention(llama, True, (128, 256), hints(8), two_loops, mask=True)
    attention(llama, True, (64, 128), hints(None, 2), two_loops, mask=True)
    attention(llama, True, (64, 128), hints(None, 2), two_loops, kv_len=True)
attention(llama, True, (128, 128), hints(8), True, kv_len=True)
attention(llama, True, (64, 256), hints(), True)
attention(llama, True, (64, 128), hints(None, 2), experiment=EARLY_V)
for tile, h in (
    ((64, 128), hints(None, 2)),
    ((64, 128), hints(8, 2)),
    ((64, 256), hints()),
    ((128, 256), hints(8)),
    ((128, 128), hints(8)),
    ((64, 64), hints(4, 3)),
):
    attention(llama, False, tile, h)
attention(llama, False, (64, 128), hints(None, 2), True, kv_len=True)
attention(llama, False, (64, 128), hints(None, 2), experiment=EARLY_V)
for causal in (True, False):
    small = (4, 32, 8, 4096, 64)
    for occ in (3, 4, 5):
        attention(small, causal, (64, 64), hints(None, occ))
    attention(small, causal, (64, 64), hints(None, 4), True)
    attention(small, causal, (64, 128), hints(None, 3), True)
    attention(small, causal, (64, 128), hints(None, 2), True)
half, big = (4, 32, 8, 4096, 64), (4, 32, 8, 4096, 256)
for interleave in (8, 32, 0):
    for shape, tile, h in (
        (llama, (128, 256), hints(8)),
        (llama, (64, 128), hints(None, 2)),
        (half, (64, 128), hints(None, 2)),
        (half, (64, 64), hints(None, 4)),
        (big, (128, 128), hints(8)),
    ):
        attention(shape, True, tile, h, interleave=interleave)
        attention(shape, True, tile, h, True, interleave=interleave)
for causal in (True, False):
    attention(big, causal, (128, 128), hints(8))
    attention(big, causal, (128, 128), hints(8), True)
    attention(big, causal, (64, 128), hints(4))
odd = (4, 32, 8, 4096, 96)
attention(odd, True, (64, 128), hints(None, 2))
attention(odd, True, (64, 128), hints(None, 2), True)
attention(odd, True, (64, 128), hints(None, 2), experiment=SPLIT_D)
attention(odd, True, (64, 128), hints(None, 2), experiment=SPLIT_D2)
short = (1, 32, 8, 512, 128)
for two_loops in (False, True):
    for tile, h in (((128, 128), hints(8)), ((64, 128), hints(None, 2)), ((64, 64), hints(None, 3))):
        attention(short, True, tile, h, two_loops)


if __name__ == "__main__":
    main(__doc__)
