"""Tries tiles, splits and ways to merge them for decode attention on one GPU: a tool for authors.

    export CUDA_TILE_CACHE_DIR=/tmp/tile-cache
    for i in $(seq 0 13); do python sweep_decode.py warm $i 14 & done; wait
    python sweep_decode.py run [start of a group's name ...]

As in ``sweep_gemm_attention.py``: ``warm i n`` compiles every n-th variant, ``run`` checks and times them, and
``compile i n`` compiles ahead of time for sm_90 without a GPU.
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
from sweep_common import p2
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from tilegym.ops.cutile.flash_decode import decode_kernel
from tilegym.ops.cutile.flash_decode_plan import MERGED_IN_ORDER
from tilegym.ops.cutile.flash_decode_plan import NEXT_LAUNCH
from tilegym.ops.cutile.flash_decode_plan import ONE_SPLIT
from tilegym.ops.cutile.splitk_reduce import AT_ONCE
from tilegym.ops.cutile.splitk_reduce import IN_ORDER
from tilegym.ops.cutile.splitk_reduce import IN_TURNS
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.splitk_reduce import TILE_S
from tilegym.ops.cutile.splitk_reduce import merge_kernel


def sdpa(backend):
    def run(t):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], enable_gqa=t["q"].shape[1] != t["k"].shape[1])

    return run


def decode_group(b: int, hq: int, hkv: int, s: int, d: int) -> str:
    name = f"decode B{b} H{hq}/{hkv} S{s} D{d}"

    def tensors(dev):
        return {
            "q": empty_or_random(dev, b, hq, 1, d),
            "k": empty_or_random(dev, b, hkv, s, d),
            "v": empty_or_random(dev, b, hkv, s, d),
            "o": torch.empty(b, hq, 1, d, device=dev, dtype=BF16),
            "partial": torch.empty(b * hq * 256 * (d + STATE_COLUMNS), device=dev),
            "kv_len": torch.full((b,), s, device=dev, dtype=torch.int32),
        }

    references = {"flash": sdpa(SDPBackend.FLASH_ATTENTION), "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION)}
    GROUPS[name] = Group(tensors, lambda t: t["o"], references, 2 * 2 * b * hkv * s * d / 1e9, "GB/s")
    return name


def decode(group, b, hq, hkv, s, d, tile_n, splits, tile_s, h, kv_len=True, columns=8):
    final, parts = splits == 1, -(-hq // (hkv * columns))

    def launches(t):
        partial = t["partial"][: b * hq * splits * (d + STATE_COLUMNS)].view(b, hq, splits, d + STATE_COLUMNS)
        arrays = (
            t["q"],
            t["k"],
            t["v"],
            t["o"],
            0 if final else partial,
            0,
            0,
            0,
            t["kv_len"] if kv_len else 0,
        )
        numbers = (d**-0.5, 1.0, 0, columns, tile_n, d, d, d, hq // hkv)
        flags = (False, False, 0, 1, False, kv_len, False)
        end = (ONE_SPLIT if final else NEXT_LAUNCH, 1, False)
        first = ((b * hkv, splits, parts), decode_kernel, (*arrays, *numbers, *flags, *end))
        if final:
            return [first]
        how = IN_TURNS if splits > tile_s else IN_ORDER if splits <= MERGED_IN_ORDER else AT_ONCE
        return [first, ((b * hq,), merge_kernel, (partial, t["o"], d**-0.5, tile_s, d, d, how, False))]

    how = "" if final else f"merged {tile_s} at a time"
    label = f"keys{tile_n} splits{splits} {how} columns{columns} {'' if kv_len else ' no kv_len'}"
    VARIANTS.append(Variant(group, label, h, launches))


SHAPES = (
    ((8, 32, 8, 8192, 128), (2, 4, 8)),
    ((1, 32, 8, 640, 128), (1, 5)),
    ((1, 32, 8, 1024, 128), (1, 4, 8)),
    ((1, 32, 8, 8192, 128), (8, 16, 32)),
    ((1, 64, 8, 8192, 128), (16, 32)),
    ((1, 32, 4, 8192, 128), (16, 33, 64)),
    ((1, 8, 4, 8192, 256), (16, 33, 64)),
    ((1, 64, 8, 8192, 64), (16, 32)),
    ((1, 32, 2, 8192, 128), (33, 64)),
    ((1, 71, 1, 8192, 64), (8, 16, 33)),
    ((6, 71, 1, 2048, 64), (5, 8, 16)),
    ((4, 48, 1, 2048, 128), (8, 16)),
    # Kv heads that two blocks a multiprocessor share unevenly, and one for each.
    ((16, 32, 8, 2048, 128), (1, 2, 4)),
    ((20, 32, 8, 2048, 128), (1, 2, 4)),
    ((24, 32, 8, 2048, 128), (1, 2, 4)),
    ((5, 32, 32, 2048, 128), (1, 2, 4)),
    ((40, 8, 4, 2048, 256), (1, 2, 4)),
)
for shape, chosen in SHAPES:
    g = decode_group(*shape)
    group, width = p2(shape[1] // shape[2]), shape[4]
    for splits in chosen:
        for tile_s in (1,) if splits == 1 else {p2(splits), TILE_S}:
            for tile_n, occupancy in ((128, 2), (64, 4), (64, 3), (64, 2)):
                if tile_n * width * 2 <= 32768:
                    for columns in (8, 16) if group <= 16 else (8, 16, 32):
                        if group > 16 or columns >= group:
                            decode(g, *shape, tile_n, splits, tile_s, hints(None, occupancy), columns=columns)

if __name__ == "__main__":
    main(__doc__)
