"""``fmha`` in cuTile: attention that never holds a row of scores (online softmax, arXiv:2205.14135).

A block takes TILE_M queries of one head and walks along the keys, TILE_N at a time. For each query it keeps the largest
score so far (``row_max``), the sum of exponentials relative to it (``row_sum``) and the weighted sum of values
(``acc``); whenever the largest score grows, the other two are scaled down to it.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.autotuner import Autotuner
from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import SearchSpace
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_backward import attention_backward
from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import LONGEST_WINDOW
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import check_supported
from tilegym.ops.cutile.attention_common import load_columns
from tilegym.ops.cutile.attention_common import load_rows
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import parts_of
from tilegym.ops.cutile.attention_common import prepare_mask
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.attention_scores import attend_all
from tilegym.ops.cutile.attention_scores import store_lse
from tilegym.ops.cutile.attention_scores import take_scores
from tilegym.ops.cutile.attention_tiles import interleave_of
from tilegym.ops.cutile.attention_tiles import interleaved_block
from tilegym.ops.cutile.attention_tiles import key_tiles
from tilegym.ops.cutile.attention_tiles import mask_of_rows
from tilegym.ops.cutile.attention_tiles import may_keep_first_maximum
from tilegym.ops.cutile.attention_tiles import tallest_tile
from tilegym.ops.cutile.attention_tiles import valid_keys
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.checks import wants_gradient


def attend(
    queries,
    k,
    v,
    mask,
    place,
    j,
    partial,
    limits,
    state,
    scaling,
    soft_cap,
    TILE_N: Int,
    TILE_D: Int,
    TILE_R: Int,
    TILE_DV: Int,
    TILE_RV: Int,
    CAUSAL: Bool,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    MASK: Int,
    MASK_ROWS: Int,
    KV_LEN: Bool,
    EXACT: Bool,
    TF32: Bool,
    FIXED: Bool = False,
):
    """Takes tile ``j`` of the keys and values into ``state``; ``partial``: some query must not see some key of it."""
    batch, _, kv_head, _ = place
    k_tile = load_columns(k, batch, kv_head, j, TILE_N, TILE_D, TF32)
    s = ct.mma(queries[0], k_tile, ct.zeros((queries[0].shape[0], TILE_N), dtype=ct.float32))
    if TILE_R:
        rest = load_columns(k, batch, kv_head, j, TILE_N, TILE_R, TF32, TILE_D // TILE_R)
        s = ct.mma(queries[1], rest, s)
    options = (TILE_N, TILE_DV, CAUSAL, WINDOW, SOFT_CAP, MASK, MASK_ROWS, KV_LEN, EXACT, TF32, TILE_RV, FIXED)
    return take_scores(s, v, mask, place, j, partial, limits, state, scaling, soft_cap, *options)


@ct.kernel
def attention_kernel(
    q,  # [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]
    v,  # [B, Hkv, Skv, Dv]
    out,  # [B, Hq, Sq, Dv]
    mask,  # [B or 1, Hq or 1, Sq or 1, Skv] if MASK, of booleans or numbers; else 0
    sinks,  # [Hq] if SINKS, else 0
    kv_len,  # [B] if KV_LEN, else 0
    lse,  # [2 if EXACT else 1, B, Hq, Sq] if LSE, else 0
    scaling: float,
    soft_cap: float,
    window: int,
    TILE_M: Int,
    TILE_N: Int,
    TILE_D: Int,
    TILE_R: Int,  # columns of queries and keys behind TILE_D, or 0
    TILE_DV: Int,
    TILE_RV: Int,  # columns of values behind TILE_DV, or 0
    CAUSAL: Bool,
    WINDOW: Bool,
    SOFT_CAP: Bool,
    MASK: Int,
    MASK_ROWS: Int,  # TILE_M, or 1 for a mask that all queries share
    SINKS: Bool,
    KV_LEN: Bool,
    EXACT: Bool,
    BOUNDED: Bool,  # whether some tile of keys has a key that some query must not see
    TWO_LOOPS: Bool,  # one over the tiles that are seen as a whole, one over the others; else one with a branch
    TF32: Bool,
    LSE: Bool,
    FIXED: Bool,  # see attend_all
    INTERLEAVE: Int,  # heads
):
    # Neighbouring blocks share a head, whose keys stay in the L2 cache. The last queries see the most keys: they go
    # first, so that no long block is left over at the end.
    q_tiles = ct.cdiv(q.shape[2], TILE_M)
    n, batch, head = interleaved_block(ct.bid(0), q_tiles, q, INTERLEAVE)
    i = q_tiles - 1 - n
    kv_head = head // (q.shape[1] // k.shape[1])
    keys = valid_keys(k, kv_len, batch, KV_LEN)
    start = keys - q.shape[2] + i * TILE_M
    positions = start + ct.arange(TILE_M, dtype=ct.int32)[:, None]  # of the queries among the keys
    tiles = key_tiles(mask, batch, head, start, keys, window, TILE_M, TILE_N, CAUSAL, WINDOW, MASK)

    queries = (load_rows(q, batch, head, i, TILE_M, TILE_D, TF32),)
    if TILE_R:
        queries = (*queries, load_rows(q, batch, head, i, TILE_M, TILE_R, TF32, TILE_D // TILE_R))
    row_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    row_sum = ct.zeros((TILE_M, 1), dtype=ct.float32)
    if SINKS:
        # A sink is one more key, with a score of its own and the value zero.
        sink = ct.load(sinks, (head,), (1,)).astype(ct.float32).item()
        sink = sink if SOFT_CAP or MASK == ADDITIVE_MASK else sink / scaling
        row_max = ct.full((TILE_M, 1), sink, dtype=ct.float32)
        row_sum = ct.ones((TILE_M, 1), dtype=ct.float32)
    state = (row_max, row_sum, ct.zeros((TILE_M, TILE_DV), dtype=ct.float32))
    if TILE_RV:
        state = (*state, ct.zeros((TILE_M, TILE_RV), dtype=ct.float32))
    place, limits = (batch, head, kv_head, i), (positions, keys, window)
    options = (
        TILE_D, TILE_R, TILE_DV, TILE_RV, CAUSAL, WINDOW, SOFT_CAP, MASK, MASK_ROWS, KV_LEN, EXACT, TF32,
    )  # fmt: skip

    def online(state, j, partial):
        how = (*options, False)
        return attend(queries, k, v, mask, place, j, partial, limits, state, scaling, soft_cap, TILE_N, *how)

    def fixed(state, j, partial):
        how = (*options, True)
        return attend(queries, k, v, mask, place, j, partial, limits, state, scaling, soft_cap, TILE_N, *how)

    # A single comparison is for wide rows only: on an H100, causal, 4 x 4096 tokens, D 256 gains 1 %, but D 128 takes
    # 959 us instead of 933 and D 64 626 instead of 607.
    partial_head = WINDOW or MASK == KEY_MASK or TILE_D + TILE_R <= 128
    state = attend_all(online, fixed, state, tiles, FIXED, BOUNDED, TWO_LOOPS, partial_head)
    row_max, row_sum = state[0], state[1]
    if LSE:
        store_lse(lse, batch, head, i, row_max, row_sum, 1.0 if SOFT_CAP else scaling, TILE_M, EXACT)
    # A division is a dozen instructions: one for each number would be a quarter of the kernel.
    inverse = 1.0 / ct.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: zeros
    ct.store(out, (batch, head, i, 0), (state[2] * inverse).reshape((1, 1, TILE_M, TILE_DV)).astype(out.dtype))
    if TILE_RV:
        rest = (state[3] * inverse).reshape((1, 1, TILE_M, TILE_RV)).astype(out.dtype)
        ct.store(out, (batch, head, i, TILE_DV // TILE_RV), rest)


def _configs(arch: str, tile_d: int) -> list[Config]:
    """Tiles, loops and hints for head dimensions padded to ``tile_d``, the best for most sizes first.

    Those for sm_90 were measured on an H100 at 4 x 4096 tokens of 32 heads, causal and full (cuDNN in the same run):
    D 64 607 and 1153 us (637, 1168), D 128 933 and 1835 (919, 1751); D 256 of 2 x 16 heads causal 418 (452). With 4
    warps a 128 x 128 tile reaches a third of that: its accumulators spill. Heads in turns gain 3 to 4 % if causal. To
    compute the scores of the next keys before the softmax of these, which tileiras overlaps, gains nothing. In two
    tiles (parts_of), full: B8 H16 S1024 D80 126 (117), S729 D72 83 (80); B2 H32 S2048 D96 causal 138 (147).

    FIXED (see attend_all) gains where the exponentials are the bottleneck. On an H200, beside the same without: D 64
    causal 526 and 600, full 965 and 1138, 16 x 512 tokens of 16 heads 48.2 and 50.4; 4 x 4096 of 16 heads D 72 711 and
    825; 4096 of 32 heads D 96 211 and 224; 2 x 4096 of 16 heads D 160 308 and 328. But D 128 causal 938 and 922, full
    1819 and 1748, and few keys, for the sake of the first tile: 32 x 257 tokens of 16 heads D 64 49.9 and 46.1.
    """
    if arch == "cpu":
        return [Config(TILE_M=32, TILE_N=32, TWO_LOOPS=True, FIXED=fixed) for fixed in (True, False)]
    if arch.startswith("sm_9"):
        wide = Config(TILE_M=64, TILE_N=128, TWO_LOOPS=False, INTERLEAVE=8, occupancy=2)
        if tile_d > 128:
            tall = Config(TILE_M=128, TILE_N=128, TWO_LOOPS=False, INTERLEAVE=8, num_worker_warps=8)
            if tile_d > 160:
                return [tall, Config(TILE_M=64, TILE_N=64, TWO_LOOPS=False)]
            return [tall, wide, _fixed(tall)]
        tall = Config(TILE_M=128, TILE_N=128, TWO_LOOPS=False, num_worker_warps=8)
        if tile_d > 96:
            return [wide, tall]
        if tile_d > 64:
            small = Config(TILE_M=64, TILE_N=64, TWO_LOOPS=False, INTERLEAVE=8, occupancy=3)
            if tile_d > 80:
                return [wide, small, tall, _fixed(small)]
            high = Config(TILE_M=128, TILE_N=64, TWO_LOOPS=False, occupancy=2)
            return [high, wide, small, tall, _fixed(high)]
        small = Config(TILE_M=64, TILE_N=64, TWO_LOOPS=False, INTERLEAVE=32, occupancy=4)
        return [_fixed(small), small, Config(TILE_M=64, TILE_N=128, TWO_LOOPS=True, INTERLEAVE=8, occupancy=2)]
    if arch.startswith("sm_10") and tile_d <= 128:
        return [
            Config(TILE_M=128, TILE_N=128, TWO_LOOPS=False),
            Config(TILE_M=128, TILE_N=64, TWO_LOOPS=False),
            Config(TILE_M=64, TILE_N=64, TWO_LOOPS=True, occupancy=2),
        ]
    if tile_d > 128:
        return [
            Config(TILE_M=64, TILE_N=64, TWO_LOOPS=False, num_worker_warps=8),
            Config(TILE_M=64, TILE_N=32, TWO_LOOPS=False),
        ]
    return [
        Config(TILE_M=128, TILE_N=64, TWO_LOOPS=False, num_worker_warps=8),
        Config(TILE_M=64, TILE_N=64, TWO_LOOPS=True, occupancy=2),
    ]


def _configs_fp32(arch: str, tile_d: int) -> list[Config]:
    """The same for fp32, whose tiles take twice the registers."""
    if arch == "cpu":  # sums of fewer keys at a time are nearer to the exact ones
        return [Config(TILE_M=32, TILE_N=16, TWO_LOOPS=True)]
    tall = [Config(TILE_M=64, TILE_N=32, TWO_LOOPS=False)] if tile_d <= 128 else []
    return [*tall, Config(TILE_M=32, TILE_N=32, TWO_LOOPS=False)]


def _fixed(config: Config) -> Config:
    """``config`` with the softmax relative to the first tile's maximum."""
    return Config(**config.options, FIXED=True)


def _suits(q: torch.Tensor, k: torch.Tensor, WINDOW: bool, MASK: int, cfg: Config) -> bool:
    if vars(cfg).get("FIXED", False) and not may_keep_first_maximum(q.dtype, k.shape[2], MASK, WINDOW, q.get_device()):
        return False
    return cfg.TILE_M <= tallest_tile(q)


@functools.cache
def _autotuner(tile_d: int, fp32: bool) -> Autotuner:
    configs = functools.partial(_configs_fp32 if fp32 else _configs, tile_d=tile_d)
    return Autotuner(SearchSpace(configs, _suits))


def _launch_forward(
    q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len, with_lse
) -> tuple[torch.Tensor, torch.Tensor | int]:
    batch, heads, queries, head_dim = q.shape
    _, kv_heads, keys, v_dim = v.shape
    out = q.new_empty(batch, queries, heads, v_dim).transpose(1, 2)  # as _fake says
    lse = 0
    mask_kind, mask, one_row = mask_of_rows(attention_mask, keys)
    exact = needs_exact(q.dtype, mask_kind)
    if with_lse:
        lse = q.new_empty(2 if exact else 1, batch, heads, queries, dtype=torch.float32)
    if keys == 0:
        return out.zero_(), lse
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    tiles_d, tiles_dv = parts_of(head_dim, q.dtype), parts_of(v_dim, q.dtype)
    mask_shape = None if mask_kind == NO_MASK else mask.shape
    windowed, has_kv_len = window_size is not None, kv_len is not None
    options = (is_causal, windowed, soft_cap is not None, mask_kind)
    extras = (sinks is not None, has_kv_len)
    bounded = is_causal or windowed or has_kv_len or mask_kind == KEY_MASK
    dtype = q.dtype
    tf32 = uses_tf32(dtype)
    flags = (*options, *extras, tf32, with_lse)

    def grid(args, cfg: Config) -> tuple[int]:
        return (-(-queries // cfg.TILE_M) * batch * heads,)

    def arguments(cfg: Config) -> tuple:
        return (
            q,
            k,
            v,
            out,
            mask,
            0 if sinks is None else sinks,
            0 if kv_len is None else kv_len,
            lse,
            scaling,
            1.0 if soft_cap is None else soft_cap,
            0 if window_size is None else window_size,
            cfg.TILE_M,
            cfg.TILE_N,
            *tiles_d,
            *tiles_dv,
            *options,
            1 if one_row else cfg.TILE_M,
            *extras,
            exact,
            bounded or keys % cfg.TILE_N != 0,
            cfg.TWO_LOOPS or has_kv_len,
            tf32,
            with_lse,
            vars(cfg).get("FIXED", False),
            interleave_of(cfg, is_causal),
        )

    tuner = _autotuner(max(sum(tiles_d), sum(tiles_dv)), dtype == torch.float32)
    key = (batch, heads, kv_heads, queries, keys, head_dim, sum(tiles_dv), mask_shape, dtype, q.get_device(), *flags)
    tuner(None, grid_fn=grid, kernel=attention_kernel, args_fn=arguments, key=key)
    return out, lse


def _fake(q, k, v, *_):
    # [B, Sq, Hq, Dv] in memory: to join a token's heads then takes no copy.
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)


def _fake_lse(q, k, v, *options):
    mask_kind, _ = prepare_mask(options[-2], k.shape[2])
    parts = 2 if needs_exact(q.dtype, mask_kind) else 1
    return _fake(q, k, v), q.new_empty(parts, *q.shape[:3], dtype=torch.float32)


@compilable(_fake)
def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    is_causal: bool,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> torch.Tensor:
    return _launch_forward(q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len, False)[0]


@compilable(_fake_lse)
def attention_forward_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    is_causal: bool,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass of a training step: the output, and lse as attention_kernel writes it."""
    return _launch_forward(q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len, True)


class Attention(Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, scaling, is_causal, window_size, soft_cap, attention_mask, kv_len):
        out, lse = attention_forward_lse(
            q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len
        )
        ctx.save_for_backward(q, k, v, sinks, attention_mask, kv_len, out, lse)
        ctx.options = (scaling, is_causal, window_size, soft_cap)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, sinks, attention_mask, kv_len, out, lse = ctx.saved_tensors
        dsinks = sinks if ctx.needs_input_grad[3] else None
        dq, dk, dv, dsinks = attention_backward(do, q, k, v, out, lse, *ctx.options, dsinks, attention_mask, kv_len)
        dsinks = dsinks.to(sinks.dtype) if ctx.needs_input_grad[3] else None
        return dq, dk, dv, dsinks, None, None, None, None, None, None


@register_impl("fmha", "cutile")
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None = None,
    is_causal: bool = True,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
) -> torch.Tensor:
    check_arguments("fmha", q, k, v, window_size, soft_cap, sinks, attention_mask, kv_len)
    if scaling is None:
        scaling = q.shape[3] ** -0.5
    check_supported(q, k, v, scaling, sinks, attention_mask, True)
    if window_size is not None:
        window_size = min(window_size, LONGEST_WINDOW)
    options = (scaling, is_causal, window_size, soft_cap)
    if wants_gradient(q, k, v, sinks, attention_mask):
        if attention_mask is not None and attention_mask.requires_grad:
            raise UnsupportedError("it has no gradient for attention_mask")
        return Attention.apply(q, k, v, sinks, *options, attention_mask, kv_len)
    return attention_forward(q, k, v, *options, sinks, attention_mask, kv_len)
