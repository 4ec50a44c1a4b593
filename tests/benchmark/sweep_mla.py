"""Tries tiles, layouts, splits and compiler hints of latent attention on one GPU: a tool for authors.

Used as ``sweep_gemm_attention.py``, whose docstring says how. SDPA is given queries and keys that are joined already.
"""

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
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.mla import mla_kernel
from tilegym.ops.cutile.mla_decoding_kernels import merge_kernel
from tilegym.ops.cutile.mla_decoding_kernels import mla_decoding_kernel
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.tiling import next_power_of_2

D, R = 128, 64
LATENT = 512
SCALE = (D + R) ** -0.5
MOST_ROWS = 132 * 128 * 2  # of what splits leave to be merged

# Prefill


def sdpa(backend, causal, padded=False):
    def run(t):
        v = t["wide_v"] if padded else t["v"]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(t["whole_q"], t["whole_k"], v, is_causal=causal)[..., :D]

    return run


def prefill_group(batch, heads, tokens, causal):
    name = f"mla B{batch} H{heads} T{tokens} {'causal' if causal else 'full'}"

    def tensors(device):
        t = {name: empty_or_random(device, batch, heads, tokens, D) for name in ("q", "k", "v")}
        t["qpe"] = empty_or_random(device, batch, heads, tokens, R)
        t["kpe"] = empty_or_random(device, batch, 1, tokens, R)
        t["o"] = torch.empty(batch, tokens, heads, D, device=device, dtype=BF16).transpose(1, 2)
        t["lse"] = torch.empty(1, batch, heads, tokens, device=device)
        t["mask"] = torch.ones(batch, 1, 1, tokens, device=device, dtype=torch.bool)
        t["kv_len"] = torch.full((batch,), tokens, device=device, dtype=torch.int32)
        t["whole_q"] = torch.cat((t["q"], t["qpe"]), -1)
        t["whole_k"] = torch.cat((t["k"], t["kpe"].expand(-1, heads, -1, -1)), -1)
        t["wide_v"] = F.pad(t["v"], (0, R))
        return t

    GROUPS[name] = Group(
        tensors,
        lambda t: t["o"],
        {
            "efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION, causal),
            "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, causal),
            "flash, padded": sdpa(SDPBackend.FLASH_ATTENTION, causal, padded=True),
        },
        2 * batch * heads * tokens**2 * (2 * D + R) * (0.5 if causal else 1) / 1e12,
        "TFLOP/s",
    )
    return name


def prefill(group, sizes, tile, h, two_loops=False, mask=False, kv_len=False, lse=False):
    batch, heads, tokens, causal = sizes
    tile_m, tile_n = tile
    grid = (-(-tokens // tile_m) * batch * heads,)

    def launches(t):
        arrays = (t["q"], t["k"], t["v"], t["qpe"], t["kpe"], t["o"])
        extras = (t["mask"] if mask else 0, t["kv_len"] if kv_len else 0, t["lse"] if lse else 0)
        bounded = causal or mask or kv_len
        flags = (causal, KEY_MASK if mask else 0, 1, kv_len, False, bounded, two_loops, False, lse)
        return [(grid, mla_kernel, (*arrays, *extras, SCALE, tile_m, tile_n, D, R, D, *flags))]

    asked = f"{' mask' * mask}{' kv_len' * kv_len}{' lse' * lse}"
    VARIANTS.append(Variant(group, f"{tile_m}x{tile_n}{' two loops' * two_loops}{asked}", h, launches))


TILES = (
    ((128, 128), hints(8)),
    ((128, 64), hints(8)),
    ((128, 256), hints(8)),
    ((64, 128), hints(None, 2)),
    ((64, 128), hints()),
    ((64, 64), hints(None, 2)),
)
for sizes in ((4, 16, 4096, True), (4, 16, 4096, False), (1, 128, 2048, True), (1, 16, 8192, True), (1, 16, 512, True)):
    g = prefill_group(*sizes)
    for tile, h in TILES:
        for two_loops in (False, True) if sizes[3] else (False,):
            prefill(g, sizes, tile, h, two_loops)
    if sizes == (4, 16, 4096, True):
        for option in ("mask", "kv_len", "lse"):
            for tile, h in TILES[:1] + TILES[3:4]:
                prefill(g, sizes, tile, h, option == "kv_len", **{option: True})


# Decoding


def formula(t):
    return ((t["q"] @ t["kv"].mT + t["qpe"] @ t["kpe"].mT) * SCALE).softmax(-1) @ t["kv"]


def decode_group(batch, heads, keys):
    name = f"mla decode B{batch} H{heads} S{keys}"

    def tensors(device):
        return {
            "q": empty_or_random(device, batch, heads, LATENT, scale=0.5),
            "qpe": empty_or_random(device, batch, heads, R),
            "kv": empty_or_random(device, batch, keys, LATENT),
            "kpe": empty_or_random(device, batch, keys, R),
            "o": torch.empty(batch, heads, LATENT, device=device, dtype=BF16),
            "lse": torch.empty(batch, heads, device=device),
            "partial": torch.empty(MOST_ROWS * (LATENT + STATE_COLUMNS), device=device),
            "kv_len": torch.full((batch,), keys, device=device, dtype=torch.int32),
        }

    work = 2 * batch * (keys * (LATENT + R) + heads * (2 * LATENT + R)) / 1e9
    GROUPS[name] = Group(tensors, lambda t: t["o"], {"torch": formula}, work, "GB/s")
    return name


def decode(group, batch, heads, tiles, parts, splits, h, keys_left, kv_len=False, merge=(16, 512)):
    tile_h, tile_n = tiles

    def launches(t):
        final = splits == 1
        width = LATENT + STATE_COLUMNS
        partial = t["o"] if final else t["partial"][: batch * heads * splits * width].view(batch, heads, splits, width)
        arrays = (t["q"], t["qpe"], t["kv"], t["kpe"], partial, t["lse"] if final else 0, 0)
        sizes = (t["kv_len"] if kv_len else 0, SCALE, tile_h, tile_n, LATENT // parts, parts, R, keys_left)
        grid = (batch * -(-heads // tile_h), splits)
        first = (grid, mla_decoding_kernel, (*arrays, *sizes, 0, 1, kv_len, False, final, False))
        if final:
            return [first]
        at_once, columns = min(next_power_of_2(splits), merge[0]), merge[1]
        options = (at_once, columns, splits > at_once, True, False)
        merging = (batch * heads, LATENT // columns)
        return [first, (merging, merge_kernel, (partial, t["o"], t["lse"], SCALE, *options))]

    layout = "keys left" if keys_left else "heads left"
    merged = "" if splits == 1 else f" merge{merge[0]}x{merge[1]}"
    label = f"{tile_h}x{tile_n} parts{parts} {layout} splits{splits}{merged}{' kv_len' * kv_len}"
    VARIANTS.append(Variant(group, label, h, launches))


FEW_HEADS = ((1, 512, (4, 8)), (1, 8192, (32, 64)), (16, 8192, (4, 8)), (64, 8192, (1, 2)))
for batch, keys, chosen in FEW_HEADS:
    g = decode_group(batch, 16, keys)
    for splits in chosen:
        for tile_n, h in ((64, hints()), (64, hints(8)), (128, hints()), (128, hints(8))):
            for parts in (1, 2, 4):
                decode(g, batch, 16, (16, tile_n), parts, splits, h, True)
    decode(g, batch, 16, (16, 128), 4, chosen[1], hints(8), True, kv_len=True)
    for merge in ((8, 512), (16, 256), (16, 128)):
        decode(g, batch, 16, (16, 128), 4, chosen[1], hints(8), True, merge=merge)
MANY_HEADS = ((1, 8192, (32, 64)), (16, 512, (1, 2, 4)), (16, 8192, (2, 4)), (64, 8192, (1, 2)))
for batch, keys, chosen in MANY_HEADS:
    g = decode_group(batch, 128, keys)
    for splits in chosen:
        for parts in (1, 2, 4, 8):
            decode(g, batch, 128, (64, 64), parts, splits, hints(8), False)
            decode(g, batch, 128, (64, 64), parts, splits, hints(8), True)
            decode(g, batch, 128, (32, 128), parts, splits, hints(8), True)
        decode(g, batch, 128, (16, 128), 4, splits, hints(8), True)
    decode(g, batch, 128, (64, 64), 4, chosen[1], hints(8), False, kv_len=True)


if __name__ == "__main__":
    main(__doc__)
