"""Rotary position embedding of q and k in one launch: ``[x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest]``.

A rotation's gradient is the rotation by the opposite angle: backward is the same kernel with sin negated.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import in_place
from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.rope import check_rope
from tilegym.ops.pytorch.rope import rotary_dim
from tilegym.ops.pytorch.rope import tables_of_tokens


def _rotate(x, y, cos, sin, block, HALF: Int, REST: Int, TILE_H: Int, TILE_S: Int, BATCHED: Bool, INVERSE: Bool):
    """Rotates TILE_H heads of TILE_S tokens of x into y; both are [B, H, S, D]."""
    token_tiles = ct.cdiv(x.shape[2], TILE_S)
    head_tiles = ct.cdiv(x.shape[1], TILE_H)
    b = block // (token_tiles * head_tiles)
    heads = span(block // token_tiles % head_tiles, TILE_H)[:, None, None]
    tokens = span(block % token_tiles, TILE_S)[None, :, None]

    TILE_D = ct.static_eval(next_power_of_2(HALF))
    cols = ct.arange(TILE_D, dtype=ct.int32)[None, None, :]
    # Columns beyond the half would be those of the other one.
    own = None if TILE_D == HALF else cols < HALF
    x1 = ct.gather(x, (b, heads, tokens, cols), mask=own).astype(ct.float32)
    x2 = ct.gather(x, (b, heads, tokens, cols + HALF), mask=own).astype(ct.float32)
    # Read once for each head, from the cache: spreading a row over the heads' threads would take shared memory.
    of_token = (b if BATCHED else 0, tokens + 0 * heads, cols)
    c = ct.gather(cos, of_token, mask=own).astype(ct.float32)
    s = ct.gather(sin, of_token, mask=own).astype(ct.float32)
    if INVERSE:
        s = -s
    ct.scatter(y, (b, heads, tokens, cols), (x1 * c - x2 * s).astype(y.dtype), mask=own)
    ct.scatter(y, (b, heads, tokens, cols + HALF), (x2 * c + x1 * s).astype(y.dtype), mask=own)
    if REST:
        cols = ct.arange(ct.static_eval(next_power_of_2(REST)), dtype=ct.int32)[None, None, :] + 2 * HALF
        ct.scatter(y, (b, heads, tokens, cols), ct.gather(x, (b, heads, tokens, cols)))


@ct.kernel
def rope_kernel(
    q, k, cos, sin, q_out, k_out, q_blocks, HALF: Int, REST: Int, Q_HEADS: Int, Q_TOKENS: Int, K_HEADS: Int,
    K_TOKENS: Int, BATCHED: Bool, INVERSE: Bool, INPLACE: Bool,
):  # fmt: skip
    """The first q_blocks blocks rotate q, the others k. HALF: dimensions in a rotated half; REST: those copied besides.
    INPLACE: q and k themselves, and q_out and k_out stand for nothing."""
    block = ct.bid(0)
    if block < q_blocks:
        out = q if INPLACE else q_out
        _rotate(q, out, cos, sin, block, HALF, REST, Q_HEADS, Q_TOKENS, BATCHED, INVERSE)
    else:
        out = k if INPLACE else k_out
        _rotate(k, out, cos, sin, block - q_blocks, HALF, REST, K_HEADS, K_TOKENS, BATCHED, INVERSE)


def _tile(heads: int, tokens: int, rows: int, heads_inside: bool) -> tuple[int, int]:
    """(heads, tokens) of a tile of about ``rows`` rows: as many as there are of those that lie closer in memory."""
    if heads_inside:
        tile_h = min(rows, next_power_of_2(heads))
        return tile_h, min(rows // tile_h, next_power_of_2(tokens))
    tile_s = min(rows, next_power_of_2(tokens))
    return min(rows // tile_s, next_power_of_2(heads)), tile_s


@functools.lru_cache(maxsize=1024)
def plan(
    batch: int, q_heads: int, k_heads: int, tokens: int, half: int, heads_inside: bool
) -> tuple[tuple[int], int, tuple[int, int, int, int]]:
    """(grid, blocks for q, tile constants). heads_inside: neighbouring heads are closer in memory than tokens."""
    # A decoding step has too few rows to fill a GPU with large tiles.
    elements = 2048 if batch * tokens * (q_heads + k_heads) * half > 2**18 else 512
    rows = max(1, elements // next_power_of_2(half))
    q_tile, k_tile = _tile(q_heads, tokens, rows, heads_inside), _tile(k_heads, tokens, rows, heads_inside)
    q_blocks = batch * ct.cdiv(q_heads, q_tile[0]) * ct.cdiv(tokens, q_tile[1])
    k_blocks = batch * ct.cdiv(k_heads, k_tile[0]) * ct.cdiv(tokens, k_tile[1])
    return (q_blocks + k_blocks,), q_blocks, (*q_tile, *k_tile)


def _launch(q, k, cos, sin, q_out, k_out, rotary, inverse, in_place) -> None:
    batch, q_heads, tokens, dim = q.shape
    half, strides = rotary // 2, q.stride()
    grid, q_blocks, tiles = plan(batch, q_heads, k.shape[1], tokens, half, strides[1] < strides[2])
    if max(*strides, *k.stride()) > INT32_MAX:
        q, k = q.contiguous(), k.contiguous()
    constants = (half, 0 if in_place else dim - rotary, *tiles, cos.shape[0] > 1, inverse, in_place)
    launch(q, grid, rope_kernel, (q, k, cos, sin, q_out, k_out, q_blocks, *constants))


@compilable(fake=lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)))
def rope_forward(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [B, H, S, D] with the first ``rotary`` dimensions rotated, backwards if ``inverse``."""
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _launch(q, k, cos, sin, q_out, k_out, rotary, inverse, False)
    return q_out, k_out


@compilable(fake=lambda q, k, *_: None, mutates=("q", "k"))
def rope_in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> None:
    """As :func:`rope_forward`, where q and k are; their strides fit 32 bits."""
    _launch(q, k, cos, sin, 0, 0, rotary, False, True)


class RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, rotary):
        ctx.save_for_backward(cos, sin)
        ctx.rotary = rotary
        # Under hooks q and k may be what checkpointing rotates once more in the backward pass.
        if in_place.wanted() == in_place.ALWAYS and in_place.are_activations(q, k):
            if max(*q.stride(), *k.stride()) <= INT32_MAX:
                rope_in_place(q, k, cos, sin, rotary)
                return in_place.overwritten(q, k)
        return rope_forward(q, k, cos, sin, rotary, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk):
        return *rope_forward(dq, dk, *ctx.saved_tensors, ctx.rotary, True), None, None, None


@register_impl("apply_rope_base", "cutile")
def apply_rope_base(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    partial_rotary_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = rotary_dim(q, partial_rotary_factor)
    check_rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary)
    if q.dtype not in FLOATS:
        check_floating("apply_rope_base", q=q)
        raise UnsupportedError("q and k are not fp32, fp16 or bf16")
    gradients = torch.is_grad_enabled()
    if gradients and (cos.requires_grad or sin.requires_grad):
        raise UnsupportedError("cos or sin requires a gradient")
    cos, sin = tables_of_tokens(cos, sin, position_ids)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if gradients and (q.requires_grad or k.requires_grad):
        q, k = RoPE.apply(q, k, cos, sin, rotary)
    else:
        q, k = rope_forward(q, k, cos, sin, rotary, False)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)
