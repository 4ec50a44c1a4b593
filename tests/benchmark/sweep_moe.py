"""Tries tiles and compiler hints for the kernels of ``fused_moe`` on one GPU: a tool for authors.

    export CUDA_TILE_CACHE_DIR=/tmp/tile-cache
    for i in $(seq 0 13); do python sweep_moe.py warm $i 14 & done; wait
    python sweep_moe.py run [start of a group's name ...]

Commands as in ``sweep_gemm_attention.py``. A group is one GEMM of one model at one number of tokens: ``up`` with the
activation, ``down``, or the two without sorting, ``gemv up`` and ``gemv down``. Its reference is PyTorch's grouped GEMM
(for ``up`` with the activation behind it), its unit GB/s of the experts touched up to 64 tokens, beyond it TFLOP/s.
"""

import functools

import torch
import torch.nn.functional as F
from bench_fused_moe import MODELS
from bench_fused_moe import chosen
from sweep_common import BF16
from sweep_common import GROUPS
from sweep_common import VARIANTS
from sweep_common import Group
from sweep_common import Variant
from sweep_common import empty_or_random
from sweep_common import hints
from sweep_common import main

from tilegym.ops.cutile.moe_activation import GPT_OSS
from tilegym.ops.cutile.moe_activation import SILU
from tilegym.ops.cutile.moe_decode import moe_gemv_down_kernel
from tilegym.ops.cutile.moe_decode import moe_gemv_up_kernel
from tilegym.ops.cutile.moe_experts import up_of
from tilegym.ops.cutile.moe_gemm import grouped_gemm_kernel
from tilegym.ops.cutile.moe_gemm import moe_combine_kernel
from tilegym.ops.cutile.moe_gemm import moe_up_kernel
from tilegym.ops.pytorch.moe_align import moe_align_block_size
from tilegym.ops.pytorch.moe_experts import activate

FEW = 64  # tokens up to which the time is that of reading weights
ALPHA, LIMIT = 1.702, 7.0


@functools.cache
def aligned(model: str, tokens: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair of each row and the expert of each block, on the CPU."""
    experts, top_k, *_ = MODELS[model]
    sorted_ids, expert_of, _ = moe_align_block_size(chosen(tokens, experts, top_k), rows, experts)
    return sorted_ids, expert_of


def sorted_pairs(model: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs by expert without rows that fill, and the end of each expert's: what PyTorch's grouped GEMM takes."""
    experts, top_k, *_ = MODELS[model]
    ids, order = chosen(tokens, experts, top_k).reshape(-1).sort(stable=True)
    return order, torch.bincount(ids, minlength=experts).cumsum(0).int()


def tensors(device: str, model: str, tokens: int, up: bool) -> dict:
    experts, top_k, hidden, inner, oss = MODELS[model]
    columns, depth = (2 * inner, hidden) if up else (hidden, inner)
    shape = (experts, depth, columns) if oss else (experts, columns, depth)
    pairs = tokens * top_k
    order, ends = sorted_pairs(model, tokens)
    t = {"w": empty_or_random(device, *shape, scale=depth**-0.5)}
    t |= {"x": empty_or_random(device, tokens if up else pairs, depth), "ends": ends.to(device)}
    t["sorted_x"] = t["x"][(order // top_k if up else order).to(device)]
    t |= {"ids": chosen(tokens, experts, top_k).reshape(-1).to(device), "order": order.to(device)}
    t["out"] = torch.empty(pairs, inner if up else hidden, device=device, dtype=BF16)
    t["weights"] = torch.ones(pairs, device=device)
    t["products"] = torch.empty(pairs, hidden, device=device)
    t["sum"] = torch.empty(tokens, hidden, device=device, dtype=BF16)
    return t


def padded(t: dict, model: str, tokens: int, rows: int, up: bool) -> dict:
    """x and out with rows for whole blocks, made when a variant needs them."""
    if t.get("rows") != (rows, up):
        _, top_k, *_ = MODELS[model]
        sorted_ids, expert_of = aligned(model, tokens, rows)
        device = t["w"].device
        # Rows that only fill repeat the last pair.
        pair = sorted_ids.clamp(max=tokens * top_k - 1).to(device)
        t["rows"], t["padded_x"] = (rows, up), t["x"][pair // top_k if up else pair]
        t["padded_out"] = torch.empty(len(sorted_ids), t["out"].shape[1], device=device, dtype=BF16)
        t["expert_of"] = expert_of.to(device)
        t["real"] = (sorted_ids < tokens * top_k).nonzero().squeeze(1).to(device)
    return t


def group(model: str, tokens: int, up: bool, gemv: bool) -> str:
    experts, top_k, hidden, inner, oss = MODELS[model]
    name = f"{'gemv ' * gemv}{'up' if up else 'down'} {model} {tokens}"
    if name in GROUPS:
        return name
    pairs, size = tokens * top_k, (2 if up else 1) * hidden * inner
    touched = chosen(tokens, experts, top_k).unique().numel()
    work = (touched * size * 2 / 1e9, "GB/s") if tokens <= FEW else (2 * pairs * size / 1e12, "TFLOP/s")

    def reference(t: dict) -> torch.Tensor:
        y = torch._grouped_mm(t["sorted_x"], t["w"] if oss else t["w"].mT, t["ends"])
        if not up:
            return y
        if oss:
            return activate(y[:, ::2], y[:, 1::2], "gpt_oss", ALPHA, LIMIT)
        gate, value = y.chunk(2, dim=-1)
        return F.silu(gate) * value

    def in_order(t: dict) -> torch.Tensor:
        """The same in the order in which the kernels of the group write."""
        y = torch.empty_like(t["out"])
        y[t["order"]] = reference(t)
        return y.view(tokens, top_k, -1).sum(1) if gemv and not up else y

    def result(t: dict) -> torch.Tensor:
        if gemv:
            return t["out"] if up else t["sum"]
        return t["padded_out"][t["real"]] if "padded_out" in t else t["out"]

    GROUPS[name] = Group(
        lambda d: tensors(d, model, tokens, up),
        result,
        {"grouped_mm": in_order if gemv else reference},
        *work,
    )
    return name


def weights_of(t: dict, model: str) -> tuple:
    """w_gate, w_up, b_gate, b_up, whether they are transposed, and how gate and up lie."""
    *_, inner, oss = MODELS[model]
    found = up_of(t["w"], None, None, inner, oss, oss)
    return found.arrays, (found.transposed, found.gate, False, GPT_OSS if oss else SILU, oss)


def gemm(
    model: str, tokens: int, up: bool, rows: int, n: int, k: int, h: dict, left: bool, together: int = 8,
    persistent: bool = False,
):  # fmt: skip
    *_, hidden, inner, oss = MODELS[model]
    _, expert_of = aligned(model, tokens, rows)
    columns = inner if up else hidden
    tiles = len(expert_of) * -(-columns // n)
    grid = (min(tiles, 132) if persistent else tiles,)

    def launches(t: dict) -> list[tuple]:
        padded(t, model, tokens, rows, up)
        arrays, tiles = (t["padded_x"], t["expert_of"], t["padded_out"]), (rows, n, k, together)
        if up:
            w, options = weights_of(t, model)
            args = (arrays[0], *w, *arrays[1:], ALPHA, LIMIT, *tiles, *options, left, False, False, False)
            return [(grid, moe_up_kernel, args)]
        args = (arrays[0], t["w"], 0, *arrays[1:], *tiles, oss, False, left, False, persistent, False)
        return [(grid, grouped_gemm_kernel, args)]

    label = f"rows{rows} {n}x{k}{' weight left' * left}{f' group{together}' * (together != 8)}"
    label += " persistent" * persistent
    VARIANTS.append(Variant(group(model, tokens, up, False), label, h, launches))


def gemv(model: str, tokens: int, up: bool, n: int, k: int, h: dict, pairwise: bool = False):
    _, top_k, hidden, inner, oss = MODELS[model]

    def launches(t: dict) -> list[tuple]:
        if up:
            w, options = weights_of(t, model)
            args = (t["x"], *w, t["ids"], t["out"], ALPHA, LIMIT, top_k, n, k, *options, False)
            return [((tokens * top_k * -(-inner // n),), moe_gemv_up_kernel, args)]
        out = t["products"] if pairwise else t["sum"]
        args = (t["x"], t["w"], 0, t["ids"], t["weights"], 0, out, top_k, n, k, oss, False, False, pairwise, False)
        first = ((len(out) * -(-hidden // n),), moe_gemv_down_kernel, args)
        if not pairwise:
            return [first]
        args = (out, 0, 0, 0, t["sum"], top_k, 1024, False, False, False, False)
        return [first, ((tokens * -(-hidden // 1024),), moe_combine_kernel, args)]

    VARIANTS.append(Variant(group(model, tokens, up, True), f"{n}x{k}{' pairwise' * pairwise}", h, launches))


for model, (*_, oss) in MODELS.items():
    for up in (True, False):
        for tokens in (1, 4):
            tiles = (
                ((16, 128), (32, 128), (16, 64), (64, 32), (32, 64))
                if oss
                else ((4, 512), (4, 256), (8, 256), (2, 1024))
            )
            for n, k in tiles:
                if not up:
                    gemv(model, tokens, up, n, k, hints(None, 4), pairwise=True)
                for occupancy in (4, 6) if n * k < 2048 or not up else (4, 3):
                    gemv(model, tokens, up, n, k, hints(None, occupancy))
        for tokens in (1, 4, 16, 64):
            for rows in (16,) if tokens < 64 else (16, 32):
                for n, k in ((64, 128), (64, 256), (128, 64), (128, 128), (32, 256)):
                    for occupancy in (2, 3):
                        gemm(model, tokens, up, rows, n, k, hints(None, occupancy), True)
        for rows, n, k, h, left in (
            (16, 64, 128, hints(None, 2), True),
            (32, 64, 128, hints(None, 2), True),
            (64, 64, 128, hints(None, 2), True),
            (64, 128, 64, hints(None, 2), True),
            (64, 64, 64, hints(None, 2), False),
            (64, 64, 64, hints(), False),
            (64, 128, 64, hints(), False),
            (64, 128, 64, hints(None, 2), False),
            (64, 128, 64, hints(8), False),
            (128, 64, 64, hints(), False),
            (128, 128, 64, hints(8), False),
        ):
            gemm(model, 512, up, rows, n, k, h, left)
        wide = (128, 256, 64, hints(8), False)
        for rows, n, k, h, left in (
            (128, 128, 64, hints(8), False),
            (128, 64, 64, hints(), False),
            (128, 64, 64, hints(None, 2), False),
            (64, 128, 64, hints(), False),
            (64, 128, 64, hints(8), False),
            (128, 128, 128, hints(8), False),
            (128, 128, 64, hints(), False) if not up else (128, 64, 128, hints(), False),
            *(() if up else (wide,)),
        ):
            gemm(model, 8192, up, rows, n, k, h, left)
        gemm(model, 8192, up, 128, 128, 64, hints(8), False, together=4)
        gemm(model, 8192, up, 128, 128, 64, hints(8), False, together=16)
        if not up:
            gemm(model, 8192, up, 128, 256, 64, hints(8), False, persistent=True)

if __name__ == "__main__":
    main(__doc__)
