"""Tiles of the kernels in attention_backward_kernels.py, by width: the columns of queries or values, in steps.

``tile_d`` is what ``width_of`` in attention_backward.py gives.
"""

from tilegym.backend.cutile.autotuner import Config


def dq_configs(arch: str, tile_d: int) -> list[Config]:
    """Tiles of the kernel for dq, for the width ``tile_d`` (width_of), the best first.

    Three tiles of fp32 must fit the registers: dq [TILE_M, D], the scores and their gradient [TILE_M, TILE_N]. On an
    H200 the first ones reach 1106 TFLOP/s of a causal backward pass of B4 Hq32 S4096 D128 in bf16, 845 with D 64 and
    924 of B2 Hq16 with D 256, and are within 1 % of the best without a mask. For D 128 eight heads in turns gain 2 %,
    and with one loop instead of two the first falls to 767. Of causal latent attention, B4 H16 S4096 in parts of 128
    and 64, the first takes 845 us, the third 883, and 886 one of 128 queries. With 128 keys a block for dk and dv, D 80
    causal B2 Hq32 Hkv8 S4096 takes 1203 us by the first and 1251 by the second (in a single tile: 1353), D 72 full B8
    H16 S729 243 by either (285), D 96 causal B2 H32 S2048 399 by the first and 416 by the second (435).
    """
    if arch == "cpu":
        return [Config(TILE_M=32, TILE_N=16, TILE_P=32, TWO_LOOPS=True)]
    if arch.startswith(("sm_9", "sm_10")):
        if tile_d == 192:
            return [
                Config(TILE_M=64, TILE_N=64, TILE_P=128, TWO_LOOPS=True, occupancy=2),
                Config(TILE_M=64, TILE_N=64, TILE_P=128, TWO_LOOPS=True, INTERLEAVE=8, occupancy=2),
                Config(TILE_M=64, TILE_N=64, TILE_P=64, TWO_LOOPS=True, INTERLEAVE=8, occupancy=2),
            ]
        if tile_d > 128:
            return [
                Config(TILE_M=128, TILE_N=32, TWO_LOOPS=True, num_worker_warps=8),
                Config(TILE_M=64, TILE_N=64, TWO_LOOPS=True),
            ]
        turns = 8 if tile_d > 64 else 1
        tall = Config(TILE_M=128, TILE_N=64, TWO_LOOPS=True, INTERLEAVE=turns, num_worker_warps=8)
        pair = Config(TILE_M=64, TILE_N=64, TWO_LOOPS=True, occupancy=2)
        return [tall, pair] if tile_d > 80 else [pair, tall]
    tile_m, tile_n = (32, 32) if tile_d > 128 else (64, 32) if tile_d > 64 else (64, 64)
    return [Config(TILE_M=tile_m, TILE_N=tile_n, TWO_LOOPS=False, num_worker_warps=8)]


def dkdv_configs(arch: str, tile_d: int) -> list[Config]:
    """The same for the kernel for dk and dv, which has four: dk, dv [TILE_N, D] and two of [TILE_N, TILE_M].

    By the same count, with B4 Hq32 Hkv8 S4096, the first ones reach 632 TFLOP/s for D 64, 782 for D 128 and 552 for
    D 256 on an H200, and 640 and 553 for D 64 and 256 without a mask. Heads in turns gain 4 to 11 % in causal passes.
    Loading queries and keys in parts of 64 columns leaves D 128 room for 64 queries in a block that shares its
    multiprocessor with another: 1.76 ms instead of 1.95 for the second, which takes 32. Of causal latent attention,
    B4 H16 S4096, the first two take 1122 and 1182 us; of 512 tokens the third takes 22 and the first 24. D 72 full B8
    H16 S729, dq included, takes 243 us with 128 keys a block and 263 with 64, D 80 B16 S257 127 and 120, D 96 causal B2
    H32 S2048 399 and 394.
    """
    if arch == "cpu":
        return [Config(TILE_M=16, TILE_N=32, TILE_P=32, TWO_LOOPS=True)]
    if arch.startswith(("sm_9", "sm_10")):
        if tile_d == 192:
            return [
                Config(TILE_M=64, TILE_N=64, TILE_P=64, TWO_LOOPS=True, INTERLEAVE=4, occupancy=2),
                Config(TILE_M=64, TILE_N=128, TILE_P=64, TWO_LOOPS=True, INTERLEAVE=4, num_worker_warps=8),
                Config(TILE_M=64, TILE_N=64, TILE_P=64, TWO_LOOPS=False),
            ]
        if tile_d > 128:
            return [
                Config(TILE_M=64, TILE_N=64, TWO_LOOPS=True, INTERLEAVE=4, num_worker_warps=8),
                Config(TILE_M=64, TILE_N=64, TWO_LOOPS=False, INTERLEAVE=4, num_worker_warps=8),
            ]
        wide = Config(TILE_M=64, TILE_N=128, TWO_LOOPS=True, INTERLEAVE=4, num_worker_warps=8)
        if 64 < tile_d <= 96:
            pair = Config(TILE_M=64, TILE_N=64, TWO_LOOPS=True, INTERLEAVE=4, occupancy=2)
            return [wide, pair] if tile_d == 80 else [pair, wide]
        if tile_d > 64:
            return [
                Config(TILE_M=64, TILE_N=64, TILE_P=64, TWO_LOOPS=True, INTERLEAVE=4, occupancy=2),
                Config(TILE_M=32, TILE_N=64, TWO_LOOPS=True, INTERLEAVE=4, occupancy=2),
                Config(TILE_M=128, TILE_N=64, TWO_LOOPS=True, INTERLEAVE=4, num_worker_warps=8),
                wide,
            ]
        return [wide, Config(TILE_M=128, TILE_N=64, TWO_LOOPS=False, occupancy=2)]
    tile_m, tile_n = (32, 32) if tile_d > 128 else (32, 64) if tile_d > 64 else (64, 64)
    return [Config(TILE_M=tile_m, TILE_N=tile_n, TWO_LOOPS=False, num_worker_warps=8)]


def fused_configs(arch: str, tile_d: int, whole: bool = False) -> list[Config]:
    """For that kernel when it adds to dq too: one more tile of fp32, [TILE_M, TILE_DQ], by default TILE_DQ = TILE_P.

    ``whole``: no tile is masked in part, and keys are many. DV_LAST: dv is computed behind dk and the first part of dq.
    With D 128 on an H200 B4 Hq32 Hkv8 S4096 then takes 5.20 ms with all columns of dq at once, 5.60 with parts of 64
    columns, 5.45 with dv before dk; of S1024 128 us, and 125. With two loops, for a causal mask, all columns at once
    make dS wait for what is added to dq: B1 S8192 3.26 ms instead of 2.75.
    If causal, with heads of a group in turns (head_and_tile) and DV_LAST, B1 S8192 takes 2.75 ms instead of 2.80 with
    Hq32 Hkv8, 2.88 instead of 3.03 with Hkv4, S4096 1.54 instead of 1.63 with Hq64; B4 Hq32 2.92 as before. With D 64,
    where heads only take turns, Hq64 S8192 takes 3.17 ms instead of 3.31; with D 256 Hq8 Hkv4 S4096 440 us instead of
    447, and 617 if all blocks of a key head come before those of the next.
    """
    if arch == "cpu":
        if whole:
            return [Config(TILE_M=16, TILE_N=32, TWO_LOOPS=True, DV_LAST=True)]
        return [Config(TILE_M=16, TILE_N=32, TILE_P=32, TILE_DQ=16, TWO_LOOPS=True, DV_LAST=tile_d == 128)]
    if tile_d == 192:
        return [Config(TILE_M=64, TILE_N=128, TILE_P=64, TWO_LOOPS=True, num_worker_warps=8)]
    if tile_d > 128:
        return [Config(TILE_M=64, TILE_N=64, TWO_LOOPS=False, num_worker_warps=8)]
    if tile_d > 64:
        columns = {} if whole else {"TILE_DQ": 64}
        return [Config(TILE_M=64, TILE_N=128, **columns, TWO_LOOPS=True, DV_LAST=True, num_worker_warps=8)]
    return [Config(TILE_M=128, TILE_N=128, TWO_LOOPS=True, num_worker_warps=8)]


def fp32_configs(arch: str, tile_d: int) -> list[Config]:
    """For either kernel in fp32, whose tiles take twice the room."""
    if arch == "cpu":
        # In one part: scores rounded as those of the forward pass, or the gradients of sinks have six times the error.
        return [Config(TILE_M=32, TILE_N=16, TWO_LOOPS=True)]
    return [Config(TILE_M=32, TILE_N=32, TWO_LOOPS=False)]
