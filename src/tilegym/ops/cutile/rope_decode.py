"""``rope_fmha_decode`` in cuTile: rotation, the write to the cache and the split attention in one launch, with the keys
and values of the former tokens on their way before the launch in front has ended.

A block holds one tile of keys and values in registers, gathered ahead of the wait, since loads by tensor map are not
moved across it. The new token's key is the one that this launch itself rotates: it is put into the tile, and into the
cache by the block whose tile it is in.

In a graph of a model's layers on an H200 a layer of Llama-3.1-8B takes 110.5 us so with a cache of 768 tokens and 112.5
by ``rope_and_cache`` and ``fmha_decode``, with 2048 114.0 and 114.8; of Qwen3-0.6B 21.2 and 22.5. Longer caches are for
those two: a block with a loop over several tiles keeps the next launch's from beginning early, and takes 123.1 us
instead of 116.8 for 4096 tokens, as many blocks as tiles 119.5. So are wide heads, whose tiles take all registers: a
layer of Gemma-3-4B takes 67.2 us so and 64.0 by the two.

Of a window only the tiles that it may reach have blocks, which must know the token before they load: so the position
is read ahead of the wait, too. From norm to residual gpt-oss-20b's attention takes 22.1 us so and 23.7 by the two, of
layers that see 128 keys of 8192 and all of them in turn 24.5 and 25.9.
"""

import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import update_softmax
from tilegym.ops.cutile.flash_decode import fmha_decode
from tilegym.ops.cutile.flash_decode_plan import MAX_TILE_N
from tilegym.ops.cutile.flash_decode_plan import TILE_BYTES
from tilegym.ops.cutile.rope_cache import rope_and_cache
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import scaled
from tilegym.ops.cutile.splitk_reduce import IN_ORDER
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.splitk_reduce import merge_kernel
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.pytorch.checks import wants_gradient
from tilegym.ops.pytorch.rope_decode import check_rope_decode

MAX_GROUP = 16  # query heads that share a kv head: the columns of one tile
DIMS = (32, 64, 128)
MAX_SPLITS = 16
MAX_BLOCKS = 264  # which run at once on an H200


@ct.kernel
def rope_decode_kernel(
    q,  # [B, Hq, 1, D], not rotated yet
    k,  # [B, Hkv, 1, D], likewise
    v,  # [B, Hkv, 1, D]
    cos,  # [1 or B, 1, ROTARY], or the first half of it
    sin,
    keys,  # [B, Hkv, capacity, D]
    values,
    position,  # [1]
    q_norm,  # [D] if NORMED, else 0
    k_norm,
    sinks,  # [Hq] if SINKS, else 0
    out,  # [B, Hq, 1, D]
    partial,  # [B, Hq, splits, D + STATE_COLUMNS], as merge_kernel takes it; 0 if ONE
    scaling: float,
    eps: float,
    window: int,
    TILE_M: Int,  # at least as many as query heads in a group
    TILE_N: Int,
    HALF: Int,
    ROTARY: Int,  # how many of the 2 * HALF dimensions are rotated
    PAIRS: Bool,  # neighbours together, instead of elements of the two halves
    GROUP: Int,
    BATCHED: Bool,  # cos and sin are
    NORMED: Bool,
    OFFSET: Float,
    ROUND: Bool,
    SINKS: Bool,
    WINDOW: Bool,
    ONE: Bool,  # there is one split
    SETTLED: Bool,
    OVERLAP: Bool,
):
    let_next_begin(OVERLAP)
    if OVERLAP and not SETTLED:
        ct.grid_dependency_control_wait()
    batch, kv_head, split = ct.bid(0) // keys.shape[1], ct.bid(0) % keys.shape[1], ct.bid(1)
    nth_tile, head = split, kv_head * GROUP
    if WINDOW:  # there are splits only for the tiles that it may reach, from that of the first key that is seen
        nth_tile = split + max(token_of(position, keys) + 1 - window, 0) // TILE_N
    D = ct.static_eval(2 * HALF)
    half, dims = ct.arange(HALF, dtype=ct.int32)[None, :], ct.arange(D, dtype=ct.int32)
    rows = nth_tile * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None]
    # Behind the end of the cache there is nothing to read.
    k1 = ct.gather(keys, (batch, kv_head, rows, half))
    k2 = ct.gather(keys, (batch, kv_head, rows, HALF + half))
    tile = ct.gather(values, (batch, kv_head, rows, dims[None, :]))
    nth = ct.arange(TILE_M, dtype=ct.int32)
    real = nth < GROUP
    own_norm = query_norm = None
    if NORMED:
        query_norm, own_norm = (q_norm, *halves(q_norm, (), half, HALF)), (k_norm, *halves(k_norm, (), half, HALF))
    col_max, col_sum = ct.full((1, TILE_M), -math.inf, dtype=ct.float32), ct.zeros((1, TILE_M), dtype=ct.float32)
    if SINKS and split == 0:
        # A sink is one more key, with a score of its own and the value zero.
        sink = ct.gather(sinks, head + nth, mask=real).astype(ct.float32)
        col_max, col_sum = sink.reshape((1, TILE_M)) / scaling, ct.ones((1, TILE_M), dtype=ct.float32)
    if OVERLAP and SETTLED:
        ct.grid_dependency_control_wait()

    token = token_of(position, keys)
    table = cos, sin, batch if BATCHED else 0
    at, form, way = (batch, head + nth[:, None], 0), (OFFSET, ROUND), (HALF, ROTARY, PAIRS)
    q1, q2 = rotated(q, at, half, query_norm, eps, table, form, *way, real[:, None])
    own1, own2 = rotated(k, (batch, kv_head, 0), half, own_norm, eps, table, form, *way, True)
    own = ct.gather(v, (batch, kv_head, 0, dims[None, :]))

    k1, k2 = ct.where(rows == token, own1, k1), ct.where(rows == token, own2, k2)
    tile = ct.where(rows == token, own, tile)
    # What a cache holds behind its last key may be NaN, which times zero would be NaN.
    tile = ct.where(rows <= token, tile, ct.zeros((TILE_N, D), dtype=values.dtype))
    visible = (rows <= token) & (rows > token - window) if WINDOW else rows <= token
    scores = ct.mma(k1, ct.transpose(q1), ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
    scores = ct.where(visible, ct.mma(k2, ct.transpose(q2), scores), -math.inf)
    acc = ct.zeros((D, TILE_M), dtype=ct.float32)
    p, col_max, col_sum, acc = update_softmax(scores, col_max, col_sum, acc, scaling, 0, False)
    acc = ct.mma(ct.transpose(tile), p.astype(tile.dtype), acc)

    if ONE:
        acc = acc * (1.0 / col_sum)
        at = (batch, head + nth[None, :], 0, dims[:, None])
        ct.scatter(out, at, acc.astype(out.dtype), mask=real[None, :])
    else:
        ct.scatter(partial, (batch, head + nth[None, :], split, dims[:, None]), acc, mask=real[None, :])
        ct.scatter(partial, (batch, head + nth, split, D), col_max.reshape((TILE_M,)), mask=real)
        ct.scatter(partial, (batch, head + nth, split, D + 1), col_sum.reshape((TILE_M,)), mask=real)
    if token // TILE_N == nth_tile:
        ct.scatter(keys, (batch, kv_head, token, half), own1)
        ct.scatter(keys, (batch, kv_head, token, HALF + half), own2)
        ct.scatter(values, (batch, kv_head, token, dims[None, :]), own)


def token_of(position, keys):
    """In a kernel: where the new token is, within the cache, as memory must be."""
    return min(max(ct.load(position, (0,), (1,)).item(), 0), keys.shape[2] - 1).astype(ct.int32)


def halves(x, at, half, HALF: Int, mask=True):
    """In a kernel: the two halves of rows of x."""
    return ct.gather(x, (*at, half), mask=mask), ct.gather(x, (*at, HALF + half), mask=mask)


def rotated(x, at, half, norm, eps, table, form, HALF: Int, ROTARY: Int, PAIRS: Bool, mask):
    """In a kernel: the two halves of rows of x, normalised if there is a ``norm``, rotated and rounded.

    ``norm``: a weight and its two halves; ``table``: cos, sin and the row of theirs; ``form``: the norm's."""
    x1, x2 = halves(x, at, half, HALF, mask)
    x1, x2, rstd = x1.astype(ct.float32), x2.astype(ct.float32), None
    if norm is not None:
        rstd = rstd_of(x1 * x1 + x2 * x2, eps, ct.static_eval(2 * HALF))
        x1, x2 = normed(x1, rstd, norm[1], x.dtype, form), normed(x2, rstd, norm[2], x.dtype, form)
    if ROTARY == 2 * HALF and not PAIRS:
        c, s = angles(table, half, True)
        y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    else:
        weight = None if norm is None else norm[0]
        y1 = turned(x1, x, at, half, weight, rstd, table, form, ROTARY, PAIRS, mask)
        y2 = turned(x2, x, at, HALF + half, weight, rstd, table, form, ROTARY, PAIRS, mask)
    return y1.astype(x.dtype), y2.astype(x.dtype)


def normed(x, rstd, weight, dtype, form):
    return scaled(x * rstd, weight, None, dtype, *form).astype(dtype).astype(ct.float32)


def angles(table, nth, mask):
    at = table[2], 0, nth
    return ct.gather(table[0], at, mask=mask).astype(ct.float32), ct.gather(table[1], at, mask=mask).astype(ct.float32)


def turned(y, x, at, dims, weight, rstd, table, form, ROTARY: Int, PAIRS: Bool, mask):
    """In a kernel: ``y``, the elements ``dims`` of rows of x, rotated with those that they go with, up to ROTARY."""
    own = dims < ROTARY
    first = dims % 2 == 0 if PAIRS else dims < ROTARY // 2
    step, nth = (1, dims // 2) if PAIRS else (ROTARY // 2, dims % (ROTARY // 2))
    others = ct.where(first, dims + step, dims - step)
    other = ct.gather(x, (*at, others), mask=mask & own).astype(ct.float32)
    if rstd is not None:
        other = normed(other, rstd, ct.gather(weight, others, mask=own), x.dtype, form)
    c, s = angles(table, nth, own)
    return ct.where(own, y * c + ct.where(first, -other, other) * s, y)


def tile_n_of(dim: int, device_index: int) -> int:
    """How many keys a tile holds, as in ``fmha_decode``."""
    return 16 if device_index < 0 else min(MAX_TILE_N, TILE_BYTES // (2 * dim))


def splits_of(capacity: int, tile_n: int, window: int | None) -> int:
    """How many tiles of keys the new token may see."""
    tiles = -(-capacity // tile_n)
    return tiles if window is None else min(tiles, (window + tile_n - 2) // tile_n + 1)


def fits(
    q: torch.Tensor, pairs: str, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> bool:
    """Whether the kernel takes these arguments, which have been checked."""
    (batch, kv_heads, capacity, dim), device = keys.shape, q.get_device()
    splits = splits_of(capacity, tile_n_of(dim, device), window)
    return (
        q.dtype.itemsize == 2
        and dim in DIMS
        and pairs in ("", "kept")
        and splits <= MAX_SPLITS
        and batch * kv_heads * splits <= MAX_BLOCKS
        and q.shape[1] <= MAX_GROUP * kv_heads
        and scaling > 0  # as for fmha_decode: else the largest score would become the smallest
        and keys.stride(3) == values.stride(3) == 1
    )


@compilable(fake=lambda q, *_: q.new_empty(q.shape), mutates=("keys", "values"))
def rope_decode_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    scaling: float,
    settled: bool,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    offset: float,
    rounded: bool,
    one_half: bool,
    pairs: bool,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, _, dim = q.shape
    kv_heads, capacity = keys.shape[1:3]
    group, tile_n, overlap = heads // kv_heads, tile_n_of(dim, q.get_device()), overlaps(q.get_device())
    splits = splits_of(capacity, tile_n, window)
    out = q.new_empty(q.shape)
    partial = 0 if splits == 1 else q.new_empty((batch, heads, splits, dim + STATE_COLUMNS), dtype=torch.float32)
    rotary = cos.shape[2] * (2 if one_half else 1)
    sizes = (max(8, next_power_of_2(group)), tile_n, dim // 2, rotary, pairs, group)
    flags = (
        cos.shape[0] > 1,
        q_norm is not None,
        offset,
        rounded,
        sinks is not None,
        window is not None,
        splits == 1,
        settled,
        overlap,
    )
    weights = (*((0, 0) if q_norm is None else (q_norm, k_norm)), 0 if sinks is None else sinks)
    kernel = hinted(rope_decode_kernel, num_worker_warps=8 if tile_n * dim > 8192 else 4)
    numbers = (scaling, eps, 0 if window is None else window)
    args = (q, k, v, cos, sin, keys, values, position, *weights, out, partial, *numbers, *sizes, *flags)
    launch(out, (batch * kv_heads, splits), kernel, args, overlap)
    if splits > 1:
        how = (next_power_of_2(splits), dim, dim, IN_ORDER, overlap)
        launch(out, (batch * heads,), merge_kernel, (partial, out, scaling, *how), overlap)
    return out


@ct.kernel
def filled_kernel(position, filled, TILE: Int):
    """filled: [B] int32, how many keys there are with the one at ``position`` [1]."""
    ct.scatter(filled, ct.arange(TILE, dtype=ct.int32), (ct.gather(position, 0) + 1).astype(ct.int32))


@compilable(fake=lambda position, like: position.new_empty(like.shape[0], dtype=torch.int32))
def filled_to(position: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    filled = position.new_empty(like.shape[0], dtype=torch.int32)
    launch(filled, (1,), filled_kernel, (position, filled, next_power_of_2(like.shape[0])))
    return filled


@register_impl("rope_fmha_decode", "cutile")
def rope_fmha_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    sm_scale: float | None = None,
    settled: bool = False,
    kv_len: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
    one_half: bool = False,
    pairs: str = "",
    window_size: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if wants_gradient(q, k, v, cos, sin, keys, values, q_norm, k_norm, sinks):
        raise UnsupportedError("it has no backward kernel")
    rotation = one_half, pairs
    check_rope_decode(
        q, k, v, cos, sin, keys, values, position, kv_len, q_norm, k_norm, casting, *rotation, window_size, sinks
    )
    if q.dtype not in FLOATS:
        raise UnsupportedError("q is not fp32, fp16 or bf16")
    scaling = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    if window_size is not None and window_size >= keys.shape[2]:
        window_size = None  # it ends before no key, and may be no number of 32 bits
    position = position.view(1)
    norms = (q_norm, k_norm, float(eps), float(offset))
    if fits(q, pairs, keys, values, scaling, window_size):
        how = (float(scaling), settled, *norms, casting == "llama", one_half, pairs != "", window_size, sinks)
        return rope_decode_forward(q, k, v, cos, sin, keys, values, position, *how)
    q = rope_and_cache(q, k, v, cos, sin, keys, values, position, *rotation, *norms, casting)
    kv_len = filled_to(position, q) if kv_len is None else kv_len
    return fmha_decode(q, keys, values, scaling, None, kv_len, window_size, None, sinks)
