"""Tries tiles and compiler hints of the two kernels of attention's backward pass on one GPU: a tool for authors.

    export CUDA_TILE_CACHE_DIR=/tmp/tile-cache
    for i in $(seq 0 13); do python sweep_attention_backward.py warm $i 14 & done; wait
    python sweep_attention_backward.py run [start of a group's name ...]

What the commands do stands in sweep_gemm_attention.py. Both kernels' TFLOP/s are those of the whole backward pass (five
products, half of them where it is causal), so that their times add up: the two best together take ``1 / (1/a + 1/b)``.
"""

import os

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
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from tilegym.ops.cutile.attention import attention_forward_lse
from tilegym.ops.cutile.attention_backward_kernels import attention_dkdv_kernel
from tilegym.ops.cutile.attention_backward_kernels import attention_dq_kernel

os.environ.setdefault("TILEGYM_DISABLE_AUTOTUNE", "1")  # the forward pass only prepares what is measured


def tensors_of(device: str, shape: tuple[int, ...], causal: bool) -> dict:
    b, hq, hkv, s, d = shape
    t = {
        "q": empty_or_random(device, b, hq, s, d),
        "k": empty_or_random(device, b, hkv, s, d),
        "v": empty_or_random(device, b, hkv, s, d),
        "do": empty_or_random(device, b, hq, s, d),
        "out": torch.empty(b, hq, s, d, device=device, dtype=BF16),
        "lse": torch.empty(1, b, hq, s, device=device),
        "delta": torch.empty(1, b, hq, s, device=device),
    }
    if device != "cpu":
        t["out"], t["lse"] = attention_forward_lse(
            t["q"], t["k"], t["v"], d**-0.5, causal, None, None, None, None, None
        )
        t["delta"] = (t["do"].float() * t["out"].float()).sum(-1)[None]
    return t | {"dq": torch.empty_like(t["q"]), "dk": torch.empty_like(t["k"]), "dv": torch.empty_like(t["v"])}


def sdpa_backward(backend: SDPBackend, causal: bool, which: int):
    def run(t):
        if backend not in t:
            leaves = [t[name].detach().requires_grad_() for name in "qkv"]
            with sdpa_kernel(backend):
                t[backend] = leaves, F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        leaves, out = t[backend]
        return torch.autograd.grad(out, leaves, t["do"], retain_graph=True)[which]

    return run


def group_of(kernel: str, shape: tuple[int, ...], causal: bool) -> str:
    b, hq, hkv, s, d = shape
    name = f"{kernel} B{b} H{hq}/{hkv} S{s} D{d} {'causal' if causal else 'full'}"
    if name not in GROUPS:
        which = 0 if kernel == "dq" else 1
        GROUPS[name] = Group(
            lambda device: tensors_of(device, shape, causal),
            lambda t: t["dq" if kernel == "dq" else "dk"],
            {
                "cuDNN, all": sdpa_backward(SDPBackend.CUDNN_ATTENTION, causal, which),
                "flash, all": sdpa_backward(SDPBackend.FLASH_ATTENTION, causal, which),
            },
            10 * b * hq * s * s * d * (0.5 if causal else 1) / 1e12,
            "TFLOP/s",
        )
    return name


def constants(d, causal, tile, two_loops):
    return (*tile, p2(d), p2(d), causal, False, False, 0, 1, False, False, causal, two_loops, False)


def dq(shape, causal, tile, h, two_loops=False):
    b, hq, _, s, d = shape
    grid = (-(-s // tile[0]) * b * hq,)
    more = (d**-0.5, 1.0, 0, *constants(d, causal, tile, two_loops), False)

    def launches(t):
        arrays = (t["q"], t["k"], t["v"], t["out"], t["do"], t["lse"], 0, 0, t["dq"], t["delta"])
        return [(grid, attention_dq_kernel, (*arrays, *more))]

    label = f"{tile[0]} queries x {tile[1]} keys{' two loops' * two_loops}"
    VARIANTS.append(Variant(group_of("dq", shape, causal), label, h, launches))


def dkdv(shape, causal, tile, h, two_loops=False):
    b, _, hkv, s, d = shape
    grid = (-(-s // tile[1]) * b * hkv,)
    more = (d**-0.5, 1.0, 0, *constants(d, causal, tile, two_loops))

    def launches(t):
        arrays = (t["q"], t["k"], t["v"], t["do"], t["lse"], t["delta"], 0, 0, t["dk"], t["dv"])
        return [(grid, attention_dkdv_kernel, (*arrays, *more))]

    label = f"{tile[0]} queries x {tile[1]} keys{' two loops' * two_loops}"
    VARIANTS.append(Variant(group_of("dkdv", shape, causal), label, h, launches))


for causal in (True, False):
    for two_loops in (False, True) if causal else (False,):
        for shape in ((4, 32, 8, 4096, 128), (1, 32, 8, 2048, 128)):
            for tile, h in (
                ((128, 64), hints(8)),
                ((128, 128), hints(8)),
                ((128, 32), hints(8)),
                ((64, 64), hints(None, 2)),
                ((64, 128), hints()),
                ((64, 128), hints(8)),
                ((64, 64), hints(4, 3)),
            ):
                dq(shape, causal, tile, h, two_loops)
            for tile, h in (
                ((64, 128), hints(8)),
                ((32, 128), hints(8)),
                ((128, 64), hints(8)),
                ((64, 64), hints(8)),
                ((32, 64), hints()),
                ((32, 64), hints(None, 2)),
                # Twice the queries of the last for each tile of keys in registers: half the barriers and statistics.
                ((64, 64), hints(None, 2)),
                ((64, 64), hints(4, 2)),
                ((32, 64), hints(4, 2)),
                ((64, 128), hints(8, 1)),
            ):
                dkdv(shape, causal, tile, h, two_loops)
        small = (4, 32, 8, 4096, 64)
        for tile, h in (
            ((128, 128), hints(8)),
            ((128, 64), hints(8)),
            ((64, 128), hints(None, 2)),
            ((64, 64), hints(None, 2)),
            ((64, 64), hints(None, 3)),
        ):
            dq(small, causal, tile, h, two_loops)
        for tile, h in (
            ((128, 128), hints(8)),
            ((64, 128), hints(8)),
            ((64, 64), hints(None, 2)),
            ((128, 64), hints(None, 2)),
            ((32, 128), hints(None, 2)),
            ((64, 64), hints(8, 2)),
        ):
            dkdv(small, causal, tile, h, two_loops)
        big = (2, 16, 8, 4096, 256)
        for tile, h in (
            ((64, 64), hints()),
            ((64, 64), hints(8)),
            ((128, 32), hints(8)),
            ((64, 32), hints()),
        ):
            dq(big, causal, tile, h, two_loops)
        for tile, h in (
            ((64, 64), hints(8)),
            ((32, 64), hints(8)),
            ((64, 32), hints(8)),
            ((64, 32), hints()),
        ):
            dkdv(big, causal, tile, h, two_loops)


if __name__ == "__main__":
    main(__doc__)
