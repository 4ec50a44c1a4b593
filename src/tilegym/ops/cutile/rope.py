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
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.rope import check_rope
from tilegym.ops.pytorch.rope import rotary_dim
from tilegym.ops.pytorch.rope import tables_of_tokens

MAX_BLOCKS = 65535  # along the second and third axis of a grid
# Axes of the grid for tiles of heads, of tokens, and sequences. Blocks follow each other along the first axis, so that
# neighbouring heads come first. One sequence leaves that one out: sm_90 gets a block's number along the others in a
# third of the instructions, and, with no division either, issues its first load after 50 instead of 150.
ORDERS = ((0, 1, 2), (1, 2, 0), (1, 0, 2))


def _rotate(
    x, y, cos, sin, b, tile, token_tile, HALF: Int, REST: Int, TILE_H: Int, TILE_S: Int, BATCHED: Bool, INVERSE: Bool
):  # fmt: skip
    """Rotates TILE_H heads of TILE_S tokens of x into y; both are [B, H, S, D], TILE_H divides H."""
    heads = span(tile, TILE_H)[:, None, None]
    tokens = span(token_tile, TILE_S)[None, :, None]

    TILE_D = ct.static_eval(next_power_of_2(HALF))
    cols = ct.arange(TILE_D, dtype=ct.int32)[None, None, :]
    # A mask instead of checked bounds: a fifth fewer instructions on sm_90. Where tiles fit it has the compiler issue
    # the loads of x before it computes the others' addresses.
    own = tokens < x.shape[2]
    if TILE_D > HALF:
        own = (cols < HALF) & own  # columns beyond the half would be those of the other one
    x1 = ct.gather(x, (b, heads, tokens, cols), mask=own, check_bounds=False).astype(ct.float32)
    x2 = ct.gather(x, (b, heads, tokens, cols + HALF), mask=own, check_bounds=False).astype(ct.float32)
    # Read once for each head, from the cache: spreading a row over the heads' threads would take shared memory.
    of_token = (b if BATCHED else 0, tokens + 0 * heads, cols)
    c = ct.gather(cos, of_token, mask=own, check_bounds=False).astype(ct.float32)
    s = ct.gather(sin, of_token, mask=own, check_bounds=False).astype(ct.float32)
    if INVERSE:
        s = -s
    ct.scatter(y, (b, heads, tokens, cols), (x1 * c - x2 * s).astype(y.dtype), mask=own, check_bounds=False)
    ct.scatter(y, (b, heads, tokens, cols + HALF), (x2 * c + x1 * s).astype(y.dtype), mask=own, check_bounds=False)
    if REST:
        cols = ct.arange(ct.static_eval(next_power_of_2(REST)), dtype=ct.int32)[None, None, :] + 2 * HALF
        ct.scatter(y, (b, heads, tokens, cols), ct.gather(x, (b, heads, tokens, cols)))


@ct.kernel
def rope_kernel(
    q, k, cos, sin, q_out, k_out, HALF: Int, REST: Int, Q_TILES: Int, Q_HEADS: Int, K_HEADS: Int, TOKENS: Int,
    HEAD_AXIS: Int, TOKEN_AXIS: Int, BATCH_AXIS: Int, BATCHED: Bool, INVERSE: Bool, INPLACE: Bool, OVERLAP: Bool,
):  # fmt: skip
    """A block takes TOKENS tokens of Q_HEADS heads of q, or of K_HEADS of k: these come behind the Q_TILES tiles of q.

    HALF: dimensions in a rotated half; REST: those copied besides. HEAD_AXIS and so on: along which axis of the grid
    the tiles are counted, -1 if there is one sequence only. INPLACE: q and k themselves, and q_out and k_out stand for
    nothing. OVERLAP: a backward pass begins while its predecessor ends, which may be a forward pass."""
    begin(OVERLAP and INVERSE)
    let_next_begin(OVERLAP and not INVERSE)
    tile, token_tile = ct.bid(HEAD_AXIS), ct.bid(TOKEN_AXIS)
    b = 0 if BATCH_AXIS < 0 else ct.bid(BATCH_AXIS)
    if tile < Q_TILES:
        out = q if INPLACE else q_out
        _rotate(q, out, cos, sin, b, tile, token_tile, HALF, REST, Q_HEADS, TOKENS, BATCHED, INVERSE)
    else:
        tile = tile - Q_TILES
        out = k if INPLACE else k_out
        _rotate(k, out, cos, sin, b, tile, token_tile, HALF, REST, K_HEADS, TOKENS, BATCHED, INVERSE)


def _power_in(n: int) -> int:
    """The largest power of two that divides n (1 for 0)."""
    return n & -n or 1


def layout(
    batch: int, q_heads: int, k_heads: int, tokens: int, rows: int, heads_inside: bool
) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """(grid, constants from Q_TILES to BATCH_AXIS) for blocks of at most ``rows`` (a power of two) heads of tokens.

    heads_inside: neighbouring heads are closer in memory than tokens. Raises UnsupportedError if a grid cannot have
    as many blocks.
    """
    # Heads fill their tiles, so that no block has some beside them.
    tile_s = min(rows // min(rows, _power_in(k_heads)) if heads_inside else rows, next_power_of_2(tokens))
    q_tile, k_tile = (min(rows // tile_s, _power_in(heads)) for heads in (q_heads, k_heads))
    q_tiles, tiles = q_heads // q_tile, (q_heads // q_tile + k_heads // k_tile, ct.cdiv(tokens, tile_s), batch)
    for axes in ORDERS[batch == 1 :]:
        grid = [1, 1, 1]
        for axis, number in zip(axes, tiles, strict=True):
            grid[axis] = number
        if max(grid[1:]) <= MAX_BLOCKS:
            axes = axes if batch > 1 else (*axes[:2], -1)
            return tuple(grid), (q_tiles, q_tile, k_tile, tile_s, *axes)
    raise UnsupportedError(f"a grid cannot have {' x '.join(map(str, tiles))} blocks")


@functools.lru_cache(maxsize=1024)
def plan(
    batch: int, q_heads: int, k_heads: int, tokens: int, half: int, heads_inside: bool
) -> tuple[tuple[int, int, int], tuple[int, ...], ct.kernel]:
    """The :func:`layout` of q and k whose heads have two halves of ``half`` dimensions, and the kernel for it."""
    # On an H200 in bf16 512 tokens of 32 + 8 heads of 128 dimensions take 7.55 us with 2048 elements and 8 warps and
    # 7.62 with 1024 and 4, 8192 tokens 47.5 and 47.1.
    size, kernel, elements = batch * tokens * (q_heads + k_heads) * half, rope_kernel, 512
    if size > 2**22:
        elements = 1024
    elif size > 2**18:
        kernel, elements = hinted(kernel, num_worker_warps=8), 2048
    rows = max(1, elements // next_power_of_2(half))
    return *layout(batch, q_heads, k_heads, tokens, rows, heads_inside), kernel


def _launch(q, k, cos, sin, q_out, k_out, rotary, inverse, in_place, overlap) -> None:
    batch, q_heads, tokens, dim = q.shape
    half, strides = rotary // 2, q.stride()
    grid, tiles, kernel = plan(batch, q_heads, k.shape[1], tokens, half, strides[1] < strides[2])
    if max(*strides, *k.stride()) > INT32_MAX:
        q, k = q.contiguous(), k.contiguous()
    overlap = overlap and overlaps(q.get_device())
    constants = (half, 0 if in_place else dim - rotary, *tiles, cos.shape[0] > 1, inverse, in_place, overlap)
    launch(q, grid, kernel, (q, k, cos, sin, q_out, k_out, *constants), overlap=overlap and inverse)


@compilable(fake=lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)))
def rope_forward(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int, inverse: bool, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [B, H, S, D] with the first ``rotary`` dimensions rotated, backwards if ``inverse``.

    training: a pass of a training step. What lets a backward pass begin early takes a forward pass 0.05 us.
    """
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _launch(q, k, cos, sin, q_out, k_out, rotary, inverse, False, training)
    return q_out, k_out


@compilable(fake=lambda q, k, *_: None, mutates=("q", "k"))
def rope_in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> None:
    """As :func:`rope_forward`, where q and k are; their strides fit 32 bits."""
    _launch(q, k, cos, sin, 0, 0, rotary, False, True, True)


class RoPE(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, rotary):
        ctx.save_for_backward(cos, sin)
        ctx.rotary = rotary
        # Under hooks q and k may be what checkpointing rotates once more in the backward pass.
        if in_place.wanted() == in_place.ALWAYS and in_place.are_activations(q, k):
            if max(*q.stride(), *k.stride()) <= INT32_MAX:
                rope_in_place(q, k, cos, sin, rotary)
                return in_place.overwritten(q, k)
        return rope_forward(q, k, cos, sin, rotary, False, True)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        return *rope_forward(dq, dk, *ctx.saved_tensors, ctx.rotary, True, True), None, None, None


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
        q, k = rope_forward(q, k, cos, sin, rotary, False, False)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 2 else (q, k)
