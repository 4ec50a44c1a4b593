"""Tries tiles and compiler hints of the kernels of attention's backward pass on one GPU: a tool for authors.

    export CUDA_TILE_CACHE_DIR=/tmp/tile-cache
    for i in $(seq 0 13); do python sweep_attention_backward.py warm $i 14 & done; wait
    python sweep_attention_backward.py run [start of a group's name ...]

What the commands do stands in sweep_gemm_attention.py. All TFLOP/s are those of the whole backward pass (five products,
half of them where it is causal), so that the times of the groups "dq" and "dkdv" add up: the two best together take
``1 / (1/a + 1/b)``. The group "fused" has the whole pass by one kernel, with what comes before and behind it.
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
from sweep_common import hinted
from sweep_common import hints
from sweep_common import hints_text
from sweep_common import main
from sweep_common import p2
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from tilegym.ops.cutile.attention import attention_forward_lse
from tilegym.ops.cutile.attention_backward_kernels import attention_dkdv_kernel
from tilegym.ops.cutile.attention_backward_kernels import attention_dq_kernel
from tilegym.ops.cutile.attention_backward_rows import finish_fused_kernel
from tilegym.ops.cutile.attention_backward_rows import prepare_fused_kernel
from tilegym.ops.cutile.mla import mla_forward_lse
from tilegym.ops.pytorch.mla import join_parts

os.environ.setdefault("TILEGYM_DISABLE_AUTOTUNE", "1")  # the forward pass only prepares what is measured


def tensors_of(device: str, shape: tuple[int, ...], causal: bool) -> dict:
    b, hq, hkv, s, d, r = shape
    t = {
        "q": empty_or_random(device, b, hq, s, d),
        "k": empty_or_random(device, b, hkv, s, d),
        "v": empty_or_random(device, b, hkv, s, d),
        "qpe": empty_or_random(device, b, hq, s, r) if r else 0,
        "kpe": empty_or_random(device, b, 1, s, r) if r else 0,
        "do": empty_or_random(device, b, hq, s, d),
        "out": torch.empty(b, hq, s, d, device=device, dtype=BF16),
        "lse": torch.empty(1, b, hq, s, device=device),
        "delta": torch.empty(1, b, hq, s, device=device),
        "total": torch.empty(b, hq, s, d, device=device),
        "total_pe": torch.empty(b, hq, s, r, device=device) if r else 0,
        "dqpe": torch.empty(b, hq, s, r, device=device, dtype=BF16) if r else 0,
        "dkpe": torch.empty(b, hkv, s, r, device=device, dtype=BF16) if r else 0,
    }
    if device != "cpu":
        qkv, scaling = (t["q"], t["k"], t["v"]), (d + r) ** -0.5
        if r:
            t["out"], t["lse"] = mla_forward_lse(*qkv, t["qpe"], t["kpe"], scaling, causal, None, None)
        else:
            t["out"], t["lse"] = attention_forward_lse(*qkv, scaling, causal, None, None, None, None, None)
        t["delta"] = (t["do"].float() * t["out"].float()).sum(-1)[None]
    return t | {"dq": torch.empty_like(t["q"]), "dk": torch.empty_like(t["k"]), "dv": torch.empty_like(t["v"])}


def sdpa_backward(backend: SDPBackend, causal: bool, which: int):
    def run(t):
        if backend not in t:
            given = (t[name] for name in ("q", "k", "v", "qpe", "kpe"))
            leaves = [x.detach().requires_grad_() for x in given if isinstance(x, torch.Tensor)]
            q, k, v, *pe = leaves
            if pe:
                q, k = join_parts(q, k, *pe)
            with sdpa_kernel(backend):
                t[backend] = leaves, F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        leaves, out = t[backend]
        return torch.autograd.grad(out, leaves, t["do"], retain_graph=True)[which]

    return run


def group_of(kernel: str, shape: tuple[int, ...], causal: bool) -> str:
    b, hq, hkv, s, d, r = shape
    width = f"D{d} and {r}" if r else f"D{d}"
    name = f"{kernel} B{b} H{hq}/{hkv} S{s} {width} {'causal' if causal else 'full'}"
    if name not in GROUPS:
        which = 1 if kernel == "dkdv" else 0
        GROUPS[name] = Group(
            lambda device: tensors_of(device, shape, causal),
            lambda t: t["dk" if kernel == "dkdv" else "dq"],
            {
                "cuDNN, all": sdpa_backward(SDPBackend.CUDNN_ATTENTION, causal, which),
                "flash, all": sdpa_backward(SDPBackend.FLASH_ATTENTION, causal, which),
            },
            2 * b * hq * s * s * (5 * d + 3 * r) * (0.5 if causal else 1) / 1e12,
            "TFLOP/s",
        )
    return name


def constants(shape, causal, tile, two_loops, interleave):
    *_, d, r = shape
    columns = tile[2] if len(tile) > 2 else p2(d)
    parts = (columns, -(-d // columns), r)
    options = (causal, False, False, 0, 1, False, False, causal, two_loops, False)
    return (*tile[:2], *parts, p2(d), 0, *options, interleave)


def label(tile, two_loops, interleave):
    loops, turns = " two loops" * two_loops, f" {interleave} heads" * (interleave > 1)
    parts = f" parts of {tile[2]}" if len(tile) > 2 else ""
    parts += f", dq in parts of {tile[3]}" if len(tile) > 3 else ""
    return f"{tile[0]} queries x {tile[1]} keys{parts}{loops}{turns}"


def dq(shape, causal, tile, h, two_loops=False, interleave=1):
    b, hq, _, s, d, r = shape
    grid = (-(-s // tile[0]) * b * hq,)
    more = ((d + r) ** -0.5, 1.0, 0, *constants(shape, causal, tile, two_loops, interleave), False)

    def launches(t):
        arrays = (t["q"], t["k"], t["v"], t["out"], t["do"], t["lse"], 0, 0, t["dq"], t["delta"])
        return [(grid, attention_dq_kernel, (*arrays, t["qpe"], t["kpe"], t["dqpe"], *more))]

    VARIANTS.append(Variant(group_of("dq", shape, causal), label(tile, two_loops, interleave), h, launches))


def dkdv_launch(t, shape, causal, tile, two_loops, interleave, total, shares=1):
    b, _, hkv, s, d, r = shape
    grid = (-(-s // tile[1]) * b * hkv * shares,)
    fused = isinstance(total, torch.Tensor)
    arrays = (t["q"], t["k"], t["v"], t["do"], t["lse"], t["delta"], 0, 0, *sums_of(t, shares), total)
    parts = (t["qpe"], t["kpe"], t["dkpe"], t["total_pe"] if fused else 0)
    columns = (tile[-1] if len(tile) > 2 else p2(d)) if fused else 0
    parts_of_dq = (columns, -(-d // columns) if fused else 0, 0, False)
    numbers = ((d + r) ** -0.5, 1.0, 0, *constants(shape, causal, tile, two_loops, interleave), *parts_of_dq)
    return grid, attention_dkdv_kernel, (*arrays, *parts, *numbers)


def dkdv(shape, causal, tile, h, two_loops=False, interleave=1):
    def launches(t):
        return [dkdv_launch(t, shape, causal, tile, two_loops, interleave, 0)]

    VARIANTS.append(Variant(group_of("dkdv", shape, causal), label(tile, two_loops, interleave), h, launches))


def sums_of(t, shares):
    """Where the sums of dk and dv go that have some heads of a group each."""
    if shares == 1:
        return t["dk"], t["dv"]
    b, h, s, d = t["dk"].shape
    if ("sums", shares) not in t:
        t["sums", shares] = [torch.empty(b, h * shares, s, d, device=t["dk"].device) for _ in range(2)]
    return t["sums", shares]


def around(t, shape, launch, rows=32, shares=1):
    """What comes before and behind the launch that adds to dq."""
    b, hq, hkv, s, d, r = shape
    grid = (-(-s // rows) * b * hq,)
    prepare = (t["out"], t["do"], t["delta"], t["total"], t["total_pe"], rows, p2(d), r, p2(d))
    sums, last = (0, 0, 0, 0), grid
    if shares > 1:
        sums, last = (*sums_of(t, shares), t["dk"], t["dv"]), (grid[0] + -(-s // 16) * b * hkv,)
    finish = (t["total"], t["dq"], t["total_pe"], t["dqpe"], *sums, (d + r) ** -0.5, rows, p2(d), r, 16, p2(d), shares)
    return [(grid, prepare_fused_kernel, prepare), launch, (last, finish_fused_kernel, finish)]


def fused(shape, causal, tile, h, two_loops=False, interleave=1, rows=32, which=None, shares=1):
    """The whole backward pass, or with ``which`` the first, second or third of its launches.

    ``shares``: into so many parts the blocks divide the heads of a group.
    """

    def launches(t):
        grid, kernel, args = dkdv_launch(t, shape, causal, tile, two_loops, interleave, t["total"], shares)
        steps = around(t, shape, (grid, hinted(kernel, tuple(h.items())), args), rows, shares)
        return steps if which is None else steps[which : which + 1]

    parts = f" {shares} parts of a group" if shares > 1 else ""
    name = f"{label(tile, two_loops, interleave)}{parts} {rows} rows {hints_text(h)}"
    if which is not None:
        name = f"launch {which} of {name}"
    VARIANTS.append(Variant(group_of("fused" if which is None else "part", shape, causal), name, {}, launches))


PAIR, TALL = hints(None, 2), hints(8)
# The tiles (queries, keys and, if not all in one, columns of a part, and of one of dq) that were the fastest of many in
# an earlier sweep: for dq, for dkdv and, of those that compile without spilling, for the fused kernel.
TILES = {
    64: (
        [((64, 64), PAIR), ((128, 64), TALL)],
        [((64, 128), TALL), ((128, 64), PAIR)],
        [((128, 128), TALL), ((64, 128), TALL), ((64, 64), hints())],
    ),
    128: (
        [((128, 64), TALL), ((64, 64), PAIR)],
        [((64, 64, 64), PAIR), ((32, 64), PAIR), ((64, 128), TALL)],
        [((64, 128, 128, 64), TALL), ((64, 128, 64), TALL), ((64, 64, 64), PAIR), ((64, 64), hints())],
    ),
    256: (
        [((128, 32), TALL), ((64, 64), hints())],
        [((64, 64), TALL), ((32, 64), TALL)],
        [((64, 64), TALL)],
    ),
}
for d, (dq_tiles, dkdv_tiles, fused_tiles) in TILES.items():
    shape = (4, 32, 8, 4096, d, 0)
    for causal in (True, False):
        for kernel, tiles, heads in (
            (dq, dq_tiles, (1, 8, 32, 128)),
            (dkdv, dkdv_tiles, (1, 4, 8, 32)),
            (fused, fused_tiles, (1, 8, 32)),
        ):
            for n, (tile, h) in enumerate(tiles):
                for two_loops in (True, False) if causal else (False,):
                    for interleave in heads if n == 0 else heads[1:2]:
                        kernel(shape, causal, tile, h, two_loops, interleave)
for shape in ((1, 32, 8, 2048, 128, 0), (1, 32, 8, 1024, 128, 0), (1, 64, 8, 2048, 64, 0)):  # few keys
    for causal in (True, False):
        for shares in (1, 2, 4):
            for tile, h in TILES[shape[4]][2][:1]:
                fused(shape, causal, tile, h, causal, 8, shares=shares)
for causal in (True, False):  # latent attention
    shape = (4, 16, 16, 4096, 128, 64)
    for tile, h in (((128, 64, 64), TALL), ((64, 64, 64), PAIR), ((64, 64), PAIR)):
        dq(shape, causal, tile, h, causal, 8)
    for tile, h in (((64, 128, 64), TALL), ((64, 128), TALL), ((64, 64, 64), PAIR), ((32, 64, 64), PAIR)):
        dkdv(shape, causal, tile, h, causal, 4)
    for tile, h in (((64, 128, 64), TALL), ((64, 128), TALL), ((128, 64), TALL)):
        fused(shape, causal, tile, h, causal, 8)
for rows in (16, 32, 64, 128):
    for which in (0, 2):
        fused((4, 32, 8, 4096, 128, 0), True, (64, 128, 64), TALL, True, 8, rows, which)
fused((4, 32, 8, 4096, 128, 0), True, (64, 128, 64), TALL, True, 8, 32, 1)


if __name__ == "__main__":
    main(__doc__)
