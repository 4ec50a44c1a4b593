"""Gradients of ``fused_moe``: grouped GEMMs over the rows of the forward pass, without atomics.

With x, g = x W1 + b1, h = act(g) and y = h W2 + b2 for the rows of an expert, w the routing weights and dout spread to
the rows: ``dh = dout W2^T`` (not times w yet), ``dw = h . dh + b2 . dout``, ``dg = w act'(g) dh``, ``dx = dg W1^T``,
``dW1 = dg^T x``, ``dW2 = dout^T (w h)``. Of the forward pass only g is kept; x and h are made again.
"""

import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.ops.cutile.moe_activation import moe_activation_backward_kernel
from tilegym.ops.cutile.moe_activation import moe_activation_kernel
from tilegym.ops.cutile.moe_align import launch_align
from tilegym.ops.cutile.moe_align import max_blocks
from tilegym.ops.cutile.moe_experts import MAX_ROWS
from tilegym.ops.cutile.moe_experts import Plan
from tilegym.ops.cutile.moe_experts import as_stored
from tilegym.ops.cutile.moe_experts import choose
from tilegym.ops.cutile.moe_experts import combine
from tilegym.ops.cutile.moe_experts import grouped
from tilegym.ops.cutile.moe_gemm import moe_gather_kernel
from tilegym.ops.cutile.ragged_group_gemm import launch_outer
from tilegym.ops.cutile.ragged_group_gemm import ragged_sum
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps


def aligned(
    hidden: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, transposed: bool
) -> tuple[Plan, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The plan, each pair's row, each row's pair, each block's expert and where the experts' rows begin."""
    (tokens, top_k), experts, device = ids.shape, w2.shape[0], hidden.get_device()
    plan = choose(tokens, top_k, experts, hidden.element_size(), transposed, device, as_vectors=False)
    size = max_blocks(tokens * top_k, plan.rows, experts) * plan.rows
    sorted_ids = torch.full((size,), tokens * top_k, dtype=torch.int32, device=ids.device)
    rows, expert_of, offsets = launch_align(ids, plan.rows, experts, sorted_ids)
    return plan, rows, sorted_ids, expert_of, offsets


def gathered(x: torch.Tensor, ids: torch.Tensor, sorted_ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` [T, H] sorted by expert, 0 where a row has no pair."""
    width = x.shape[1]
    out, tile = x.new_empty(len(sorted_ids), width), min(2048, next_power_of_2(width))
    overlap = overlaps(x.get_device())
    args = (x, sorted_ids, out, ids.shape[1], tile, overlap)
    launch(x, (out.shape[0] * -(-width // tile),), moe_gather_kernel, args, overlap)
    return out


def halves(g: torch.Tensor, inner: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of gate and up; twice the same without a gate."""
    if g.shape[1] == inner:
        return g, g
    return (g[:, ::2], g[:, 1::2]) if interleaved else (g[:, :inner], g[:, inner:])


def first_matrices(w1: torch.Tensor, w1_up: torch.Tensor | None, g: torch.Tensor, transposed: bool) -> list[tuple]:
    """(matrix, whether it is [E, H, N], its columns of ``g``) for each matrix of the first GEMM."""
    if w1_up is None:
        return [(*as_stored(w1, transposed), g)]
    inner = g.shape[1] // 2
    return [(*as_stored(w1, transposed), g[:, :inner]), (*as_stored(w1_up, transposed), g[:, inner:])]


def _fake_forward(hidden, w1, w2, weights, ids, kind, w1_up, b1, b2, interleaved, transposed, alpha, limit, shared):
    # Enough rows for blocks of any height, so that the size follows from the shapes alone.
    rows = ids.shape[0] * ids.shape[1] + MAX_ROWS * w2.shape[0]
    wide = w1.shape[2 if transposed else 1] * (1 if w1_up is None else 2)
    return torch.empty_like(hidden, memory_format=torch.contiguous_format), hidden.new_empty(rows, wide)


@compilable(_fake_forward)
def moe_forward_for_gradients(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    kind: int,
    w1_up: torch.Tensor | None,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float | None,
    shared: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and g [R, 2I] or longer, in w1's order of columns."""
    inner = w2.shape[1 if transposed else 2]
    out, g = _fake_forward(
        hidden, w1, w2, weights, ids, kind, w1_up, b1, b2, interleaved, transposed, alpha, limit, shared
    )
    if hidden.numel() == 0 or ids.numel() == 0:
        return out.zero_() if shared is None else out.copy_(shared), g
    # Rows without a pair are computed with the others: the same in every run.
    g.zero_()
    plan, rows, sorted_ids, expert_of, _ = aligned(hidden, w2, ids, transposed)
    x, h = gathered(hidden, ids, sorted_ids), hidden.new_empty(len(sorted_ids), inner)
    for w, stored, columns in first_matrices(w1, w1_up, g, transposed):
        grouped(plan, x, w, b1, expert_of, columns, stored)
    gate, up = halves(g, inner, interleaved)
    tile = min(1024, next_power_of_2(inner))
    bound, limited, gated = 0.0 if limit is None else limit, limit is not None, g.shape[1] != inner
    grid = (h.shape[0] * -(-inner // tile),)
    launch(out, grid, moe_activation_kernel, (gate, up, h, alpha, bound, tile, kind, gated, limited))
    w2, stored = as_stored(w2, transposed)
    y = x  # which is not needed any more
    grouped(plan, h, w2, b2, expert_of, y, stored)
    combine(y, rows, weights.reshape(-1), shared, out)
    return out, g


def _fake_backward(dout, hidden, w1, w2, weights, ids, g, kind, w1_up, b1, b2, interleaved,
                   transposed, alpha, limit, wanted):  # fmt: skip
    def like(t, which):
        empty = t is None or not wanted[which]
        return dout.new_empty(0) if empty else torch.empty_like(t, memory_format=torch.contiguous_format)

    return tuple(like(t, i) for i, t in enumerate((hidden, w1, w2, weights, w1_up, b1, b2)))


@compilable(_fake_backward)
def moe_backward(
    dout: torch.Tensor,
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    g: torch.Tensor,
    kind: int,
    w1_up: torch.Tensor | None,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float | None,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of hidden, w1, w2, weights, w1_up, b1 and b2; those not ``wanted``, or not there, are empty."""
    results = _fake_backward(dout, hidden, w1, w2, weights, ids, g, kind, w1_up, b1, b2,
                             interleaved, transposed, alpha, limit, wanted)  # fmt: skip
    dhidden, dw1, dw2, dweights, dw1_up, db1, db2 = results
    if hidden.numel() == 0 or ids.numel() == 0:
        for result in results:
            result.zero_()
        return results
    inner, experts = w2.shape[1 if transposed else 2], w2.shape[0]
    plan, rows, sorted_ids, expert_of, offsets = aligned(hidden, w2, ids, transposed)
    total = len(sorted_ids)
    g = g[:total]
    # Rows that only fill must add nothing to the sums over rows: they are 0 in both factors.
    dy = gathered(dout, ids, sorted_ids)
    stored_w2, stored = as_stored(w2, transposed)
    dh = g.new_empty(total, inner)
    grouped(plan, dy, stored_w2, None, expert_of, dh, not stored)
    dg, weighted_h = torch.empty_like(g), g.new_empty(total, inner)
    row_weights = g.new_empty(total, dtype=torch.float32)
    # What has no row has no gradient.
    dots = g.new_zeros(ids.numel(), dtype=torch.float32)
    gated, tile = g.shape[1] != inner, min(1024, next_power_of_2(inner))
    inputs = (dh, *halves(g, inner, interleaved), sorted_ids, weights.reshape(-1))
    outputs = (*halves(dg, inner, interleaved), weighted_h, dots, row_weights)
    options = (alpha, 0.0 if limit is None else limit, tile, kind, gated, limit is not None)
    launch(dout, (total,), moe_activation_backward_kernel, (*inputs, *outputs, *options))
    if wanted[3]:
        dots = dots.view(ids.shape)
        if b2 is not None:
            with torch.autocast(dout.device.type, enabled=False):
                products = (dout.float() @ b2.float().t()).gather(1, ids.long().clamp(0, experts - 1))
            dots = dots + products.masked_fill((rows < 0).view(ids.shape), 0)
        dweights.copy_(dots)
    step = min(plan.rows, 64)
    if wanted[2]:
        launch_outer(*((weighted_h, dy) if transposed else (dy, weighted_h)), offsets, dw2, True, step)
    if b2 is not None and wanted[6]:
        db2.copy_(ragged_sum(dy, row_weights, offsets))
    if b1 is not None and wanted[5]:
        db1.copy_(ragged_sum(dg, None, offsets))
    if wanted[1] or wanted[4]:
        x = gathered(hidden, ids, sorted_ids)
        parts = [(dw1, dg)] if w1_up is None else [(dw1, dg[:, :inner]), (dw1_up, dg[:, inner:])]
        for dw, columns in parts:
            if dw.numel():
                launch_outer(*((x, columns) if transposed else (columns, x)), offsets, dw, True, step)
    if wanted[0]:
        dx = dy  # which is not needed any more
        for i, (w, is_stored, columns) in enumerate(first_matrices(w1, w1_up, dg, transposed)):
            part = dx if i == 0 else torch.empty_like(dx)
            grouped(plan, columns, w, None, expert_of, part, not is_stored)
            if i:
                dx += part
        combine(dx, rows, None, None, dhidden)
    return results


class FusedMoE(Function):
    @staticmethod
    def forward(ctx, hidden, w1, w2, weights, ids, kind, w1_up, b1, b2, interleaved, transposed, alpha, limit, shared):
        out, g = moe_forward_for_gradients(
            hidden, w1, w2, weights, ids, kind, w1_up, b1, b2, interleaved, transposed, alpha, limit, shared
        )
        ctx.save_for_backward(hidden, w1, w2, weights, ids, g, w1_up, b1, b2)
        ctx.kind, ctx.options = kind, (interleaved, transposed, alpha, limit)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        *tensors, w1_up, b1, b2 = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = [needs[i] for i in (0, 1, 2, 3, 6, 7, 8)]
        results = moe_backward(dout, *tensors, ctx.kind, w1_up, b1, b2, *ctx.options, wanted)
        grads = [result if want else None for result, want in zip(results, wanted, strict=True)]
        dshared = dout if needs[13] else None
        return *grads[:4], None, None, *grads[4:], None, None, None, None, dshared
