"""``mla`` in cuTile: attention as in :mod:`tilegym.ops.cutile.attention`, with scores that are the sum of two products.

Nothing is joined in memory: a tile of scores is one product over the part of queries and keys that has no position, and
one over the part that has, whose keys are one head for all.
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
from tilegym.backend.cutile.tuning_key import bucket
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_backward import launch_backward
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import MAX_HEAD_DIM
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.attention_common import check_supported
from tilegym.ops.cutile.attention_common import load_columns
from tilegym.ops.cutile.attention_common import load_rows
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import prepare_mask
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.attention_scores import store_lse
from tilegym.ops.cutile.attention_scores import take_scores
from tilegym.ops.cutile.attention_tiles import key_tiles
from tilegym.ops.cutile.attention_tiles import mask_of_rows
from tilegym.ops.cutile.attention_tiles import partial_tile
from tilegym.ops.cutile.attention_tiles import valid_keys
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.pytorch.mla import check_mla


def attend(
    queries,
    keys_values,
    mask,
    place,
    j,
    partial,
    limits,
    state,
    scaling,
    TILE_N: Int,
    TILE_D: Int,
    TILE_R: Int,
    TILE_DV: Int,
    CAUSAL: Bool,
    MASK: Int,
    MASK_ROWS: Int,
    KV_LEN: Bool,
    EXACT: Bool,
    TF32: Bool,
):
    """Takes tile ``j`` of the keys and values into ``state``; ``partial``: some query must not see some key of it."""
    batch, _, kv_head, _ = place
    (q_tile, qpe_tile), (k, kpe, v) = queries, keys_values
    s = ct.zeros((q_tile.shape[0], TILE_N), dtype=ct.float32)
    s = ct.mma(q_tile, load_columns(k, batch, kv_head, j, TILE_N, TILE_D, TF32), s)
    s = ct.mma(qpe_tile, load_columns(kpe, batch, 0, j, TILE_N, TILE_R, TF32), s)
    options = (TILE_N, TILE_DV, CAUSAL, False, False, MASK, MASK_ROWS, KV_LEN, EXACT, TF32)
    return take_scores(s, v, mask, place, j, partial, limits, state, scaling, 1.0, *options)


@ct.kernel
def mla_kernel(
    q,  # [B, H, Sq, D]
    k,  # [B, Hkv, Skv, D]
    v,  # [B, Hkv, Skv, Dv]
    qpe,  # [B, H, Sq, Dr]
    kpe,  # [B, 1, Skv, Dr]
    out,  # [B, H, Sq, Dv]
    mask,  # [B or 1, H or 1, Sq or 1, Skv] if MASK, of booleans or numbers; else 0
    kv_len,  # [B] if KV_LEN, else 0
    lse,  # [2 if EXACT else 1, B, H, Sq] if LSE, else 0: what store_lse writes
    scaling: float,
    TILE_M: Int,
    TILE_N: Int,
    TILE_D: Int,
    TILE_R: Int,
    TILE_DV: Int,
    CAUSAL: Bool,
    MASK: Int,
    MASK_ROWS: Int,  # TILE_M, or 1 for a mask that all queries share
    KV_LEN: Bool,
    EXACT: Bool,
    BOUNDED: Bool,  # whether some tile of keys has a key that some query must not see
    TWO_LOOPS: Bool,  # one over the tiles that are seen as a whole, one over the others; else one with a branch
    TF32: Bool,
    LSE: Bool,
):
    # Neighbouring blocks share a head, whose keys stay in the L2 cache. The last queries see the most keys: they go
    # first, so that no long block is left over at the end.
    q_tiles = ct.cdiv(q.shape[2], TILE_M)
    i = q_tiles - 1 - ct.bid(0) % q_tiles
    batch, head = ct.bid(0) // q_tiles // q.shape[1], ct.bid(0) // q_tiles % q.shape[1]
    kv_head = head // (q.shape[1] // k.shape[1])
    keys = valid_keys(k, kv_len, batch, KV_LEN)
    start = keys - q.shape[2] + i * TILE_M
    positions = start + ct.arange(TILE_M, dtype=ct.int32)[:, None]  # of the queries among the keys
    first, full_first, full_last, last = key_tiles(
        mask, batch, head, start, keys, 0, TILE_M, TILE_N, CAUSAL, False, MASK
    )

    queries = (
        load_rows(q, batch, head, i, TILE_M, TILE_D, TF32),
        load_rows(qpe, batch, head, i, TILE_M, TILE_R, TF32),
    )
    row_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    row_sum = ct.zeros((TILE_M, 1), dtype=ct.float32)
    state = (row_max, row_sum, ct.zeros((TILE_M, TILE_DV), dtype=ct.float32))

    place, limits, keys_values = (batch, head, kv_head, i), (positions, keys, 0), (k, kpe, v)
    options = (TILE_N, TILE_D, TILE_R, TILE_DV, CAUSAL, MASK, MASK_ROWS, KV_LEN, EXACT, TF32)
    if not BOUNDED:
        for j in range(first, last):
            state = attend(queries, keys_values, mask, place, j, False, limits, state, scaling, *options)
    elif TWO_LOOPS:
        for j in range(full_first, full_last):
            state = attend(queries, keys_values, mask, place, j, False, limits, state, scaling, *options)
        for n in range(full_first - first + last - full_last):
            j = partial_tile(n, first, full_first, full_last)
            state = attend(queries, keys_values, mask, place, j, True, limits, state, scaling, *options)
    else:
        for j in range(first, last):
            partial = j < full_first or j >= full_last
            state = attend(queries, keys_values, mask, place, j, partial, limits, state, scaling, *options)

    row_max, row_sum, acc = state
    if LSE:
        store_lse(lse, batch, head, i, row_max, row_sum, scaling, TILE_M, EXACT)
    acc = acc * (1.0 / ct.where(row_sum == 0.0, 1.0, row_sum))  # no key seen: zeros
    ct.store(out, (batch, head, i, 0), acc.reshape((1, 1, TILE_M, TILE_DV)).astype(out.dtype))


def _configs(arch: str, tile_d: int, bounded: bool = True) -> list[Config]:
    """Tiles, loops and hints for head dimensions padded to ``tile_d``, the best for most sizes first.

    Those of fmha for D = 128 that still fit into shared memory with the positional part of the keys beside them. On an
    H200 B4 H16 T4096 with parts of 128 + 64 takes with the first ones 611 us if causal (563 TFLOP/s; one loop: 670 us),
    and, not ``bounded``, where all queries see all keys, 1081 us (636 TFLOP/s). Up to 2048 queries the tiles of 64 are
    up to 6 % faster for causal masks too.
    """
    if arch == "cpu":
        return [Config(TILE_M=32, TILE_N=16, TWO_LOOPS=True)]
    if tile_d > 128:
        return [
            Config(TILE_M=64, TILE_N=64, TWO_LOOPS=False, num_worker_warps=8),
            Config(TILE_M=64, TILE_N=32, TWO_LOOPS=False),
        ]
    if arch.startswith("sm_9") or arch.startswith("sm_10"):
        tall = Config(TILE_M=128, TILE_N=128, TWO_LOOPS=True, num_worker_warps=8)
        pair = Config(TILE_M=64, TILE_N=128, TWO_LOOPS=False, occupancy=2)
        return [tall, pair] if bounded else [pair, tall]
    return [
        Config(TILE_M=128, TILE_N=32, TWO_LOOPS=False, num_worker_warps=8),
        Config(TILE_M=64, TILE_N=32, TWO_LOOPS=True),
    ]


def _configs_fp32(arch: str, tile_d: int, bounded: bool = True) -> list[Config]:
    """The same for fp32, whose tiles take twice the registers."""
    if arch == "cpu":
        return _configs(arch, tile_d, bounded)
    return [Config(TILE_M=32, TILE_N=32, TWO_LOOPS=False)]


def _suits(q: torch.Tensor, cfg: Config) -> bool:
    """Few queries do not need tall tiles; sizes rounded as for the keys of the tuning results."""
    return cfg.TILE_M <= max(64, bucket(q.shape[2]))


@functools.cache
def _autotuner(tile_d: int, fp32: bool, bounded: bool) -> Autotuner:
    configs = functools.partial(_configs_fp32 if fp32 else _configs, tile_d=tile_d, bounded=bounded)
    return Autotuner(SearchSpace(configs, _suits))


def _launch_forward(
    q, k, v, qpe, kpe, scaling, is_causal, attention_mask, kv_len, with_lse
) -> tuple[torch.Tensor, torch.Tensor | int]:
    batch, heads, queries, head_dim = q.shape
    _, kv_heads, keys, v_dim = v.shape
    dtype = q.dtype
    out, lse = _fake(q, k, v), 0
    mask_kind, mask, one_row = mask_of_rows(attention_mask, keys)
    exact = needs_exact(dtype, mask_kind)
    if with_lse:
        lse = q.new_empty(2 if exact else 1, batch, heads, queries, dtype=torch.float32)
    if keys == 0:
        return out.zero_(), lse
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    qpe, kpe = with_unit_stride(qpe), with_unit_stride(kpe)
    tile_d, tile_r, tile_dv = tile_of(head_dim), tile_of(qpe.shape[3]), tile_of(v_dim)
    has_kv_len = kv_len is not None
    bounded = is_causal or has_kv_len or mask_kind == KEY_MASK
    tf32 = uses_tf32(dtype)

    def grid(args, cfg: Config) -> tuple[int]:
        return (-(-queries // cfg.TILE_M) * batch * heads,)

    def arguments(cfg: Config) -> tuple:
        return (
            q,
            k,
            v,
            qpe,
            kpe,
            out,
            mask,
            0 if kv_len is None else kv_len,
            lse,
            scaling,
            cfg.TILE_M,
            cfg.TILE_N,
            tile_d,
            tile_r,
            tile_dv,
            is_causal,
            mask_kind,
            1 if one_row else cfg.TILE_M,
            has_kv_len,
            exact,
            bounded or keys % cfg.TILE_N != 0,
            cfg.TWO_LOOPS or has_kv_len,
            tf32,
            with_lse,
        )

    sizes = (batch, heads, kv_heads, queries, keys, head_dim, tile_r, tile_dv)
    mask_shape = None if mask_kind == NO_MASK else mask.shape
    _autotuner(max(tile_d, tile_dv), dtype == torch.float32, bounded)(
        None,
        grid_fn=grid,
        kernel=mla_kernel,
        args_fn=arguments,
        key=(*sizes, mask_shape, mask_kind, is_causal, has_kv_len, dtype, tf32, with_lse, q.get_device()),
    )
    return out, lse


def _fake(q, k, v, *_):
    # [B, Sq, H, Dv] in memory: to join a token's heads then takes no copy.
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)


def _fake_lse(q, k, v, *options):
    mask_kind, _ = prepare_mask(options[-2], k.shape[2])
    parts = 2 if needs_exact(q.dtype, mask_kind) else 1
    return _fake(q, k, v), q.new_empty(parts, *q.shape[:3], dtype=torch.float32)


@compilable(_fake)
def mla_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qpe: torch.Tensor,
    kpe: torch.Tensor,
    scaling: float,
    is_causal: bool,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> torch.Tensor:
    return _launch_forward(q, k, v, qpe, kpe, scaling, is_causal, attention_mask, kv_len, False)[0]


@compilable(_fake_lse)
def mla_forward_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qpe: torch.Tensor,
    kpe: torch.Tensor,
    scaling: float,
    is_causal: bool,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass of a training step: the output, and lse as fmha's backward pass takes it."""
    return _launch_forward(q, k, v, qpe, kpe, scaling, is_causal, attention_mask, kv_len, True)


def _fake_gradients(do, q, k, v, qpe, kpe, *_):
    dq, dk, dv, dqpe = (torch.empty_like(with_unit_stride(x)) for x in (q, k, v, qpe))
    return dq, dk, dv, dqpe, kpe.new_empty(*k.shape[:3], kpe.shape[3])


@compilable(_fake_gradients)
def mla_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qpe: torch.Tensor,
    kpe: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scaling: float,
    is_causal: bool,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv and dqpe laid out as the inputs, and of each head of the keys what it adds to the gradient of kpe."""
    options = (scaling, is_causal, None, None, None, attention_mask, kv_len)
    return launch_backward(do, q, k, v, qpe, kpe, out, lse, *options)[:5]


class LatentAttention(Function):
    @staticmethod
    def forward(ctx, q, k, v, qpe, kpe, scaling, is_causal, attention_mask, kv_len):
        out, lse = mla_forward_lse(q, k, v, qpe, kpe, scaling, is_causal, attention_mask, kv_len)
        ctx.save_for_backward(q, k, v, qpe, kpe, attention_mask, kv_len, out, lse)
        ctx.options = (scaling, is_causal)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, qpe, kpe, attention_mask, kv_len, out, lse = ctx.saved_tensors
        grads = mla_backward(do, q, k, v, qpe, kpe, out, lse, *ctx.options, attention_mask, kv_len)
        dq, dk, dv, dqpe, dkpe = grads
        return dq, dk, dv, dqpe, dkpe.sum(1, keepdim=True), None, None, None, None


@register_impl("mla", "cutile")
def mla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qpe: torch.Tensor,
    kpe: torch.Tensor,
    is_causal: bool = True,
    scaling: float | None = None,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
) -> torch.Tensor:
    check_mla(q, k, v, qpe, kpe, attention_mask, kv_len)
    if scaling is None:
        scaling = (q.shape[3] + qpe.shape[3]) ** -0.5
    check_supported(q, k, v, scaling, None, attention_mask, True)
    if qpe.shape[3] > MAX_HEAD_DIM:
        raise UnsupportedError(f"it takes head dimensions up to {MAX_HEAD_DIM}")
    if torch.is_grad_enabled():
        if attention_mask is not None and attention_mask.requires_grad:
            raise UnsupportedError("it has no gradient for attention_mask")
        if q.requires_grad or k.requires_grad or v.requires_grad or qpe.requires_grad or kpe.requires_grad:
            if q.shape[3] + qpe.shape[3] > MAX_HEAD_DIM:
                raise UnsupportedError(f"its backward pass takes queries up to {MAX_HEAD_DIM} wide in all")
            return LatentAttention.apply(q, k, v, qpe, kpe, scaling, is_causal, attention_mask, kv_len)
    return mla_forward(q, k, v, qpe, kpe, scaling, is_causal, attention_mask, kv_len)
