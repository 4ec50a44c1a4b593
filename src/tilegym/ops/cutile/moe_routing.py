"""``moe_topk_routing`` in cuTile: scores, choice and weights of a few tokens in one block, without sorting.

The k largest are found one after the other. Backward: the weights' gradients go to the chosen experts' scores, and from
there through the softmax or the sigmoid.
"""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.moe_routing import SCORINGS
from tilegym.ops.pytorch.moe_routing import check_routing

SOFTMAX, TOPK_SOFTMAX, SIGMOID = range(len(SCORINGS))
TINY = 1e-20  # as DeepSeek-V3's router adds
MAX_EXPERTS = 1024


def scores_of(logits, valid, SCORING: Int):
    """In a kernel: the scores of fp32 logits [M, E]; 0, or -inf with TOPK_SOFTMAX, where there is no expert."""
    if SCORING == SOFTMAX:
        logits = ct.where(valid, logits, -float("inf"))
        # As in PyTorch a NaN makes its row NaN: the difference to it does.
        powers = ct.exp(logits - ct.max(logits, axis=1, keepdims=True))
        scores = powers / ct.sum(powers, axis=1, keepdims=True)
    elif SCORING == SIGMOID:
        scores = ct.where(valid, 1.0 / (1.0 + ct.exp(-logits)), 0.0)
    else:
        scores = ct.where(valid, logits, -float("inf"))
    return scores


def first_largest(keys, open_, columns, LAST: Int):
    """In a kernel: in each row the column of the first largest key among the open ones, NaN above all, [M, 1]."""
    keys = ct.where(keys != keys, float("inf"), keys)
    largest = ct.max(ct.where(open_, keys, -float("inf")), axis=1, keepdims=True)
    return ct.min(ct.where(open_ & (keys == largest), columns, LAST), axis=1, keepdims=True)


@ct.kernel
def moe_topk_kernel(
    logits,  # [T, E]
    correction,  # [E] if CORRECTED, else 0
    weights,  # [T, K]
    ids,  # [T, K]
    scaling,
    TILE_M: Int,
    EXPERTS: Int,
    TOP_K: Int,
    TILE_K: Int,
    SCORING: Int,
    RENORMALIZE: Bool,
    CORRECTED: Bool,
    GROUPS: Int,
    TILE_G: Int,
    CHOSEN_GROUPS: Int,
    OVERLAP: Bool,
):
    begin(OVERLAP)
    tokens, columns = span(ct.bid(0), TILE_M), ct.arange(EXPERTS, dtype=ct.int32)[None, :]
    experts = logits.shape[1]
    valid = columns < experts
    x = ct.gather(logits, (tokens[:, None], columns)).astype(ct.float32)
    scores = scores_of(x, valid, SCORING)
    choice = scores
    if CORRECTED:
        choice = choice + ct.gather(correction, columns).astype(ct.float32)
    unused = valid & (tokens[:, None] >= 0)
    if GROUPS > 1:
        # A group's score: its largest, or the sum of its two largest.
        size = experts // GROUPS
        names = ct.arange(TILE_G, dtype=ct.int32)[None, :]
        best = ct.full((TILE_M, TILE_G), -float("inf"), dtype=ct.float32)
        for group in range(GROUPS):
            inside = (columns >= group * size) & (columns < (group + 1) * size)
            inside = inside & (tokens[:, None] >= 0)
            first = first_largest(choice, inside, columns, EXPERTS)
            score = ct.sum(ct.where(columns == first, choice, 0.0), axis=1, keepdims=True)
            if SCORING == SIGMOID:
                second = first_largest(choice, inside & (columns != first), columns, EXPERTS)
                score = score + ct.sum(ct.where(columns == second, choice, 0.0), axis=1, keepdims=True)
            best = ct.where(names == group, score, best)
        left = (names < GROUPS) & (tokens[:, None] >= 0)
        allowed = unused & (columns < 0)
        for _ in range(CHOSEN_GROUPS):
            group = first_largest(best, left, names, GROUPS)
            left = left & (names != group)
            allowed = allowed | (columns // size == group)
        unused = unused & allowed
    slots = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    chosen = ct.zeros((TILE_M, TILE_K), dtype=ct.int32)
    # -inf: what stands for no expert in a softmax.
    values = ct.full((TILE_M, TILE_K), -float("inf") if SCORING == TOPK_SOFTMAX else 0.0, dtype=ct.float32)
    for i in range(TOP_K):
        expert = first_largest(choice, unused, columns, EXPERTS)
        unused = unused & (columns != expert)
        value = ct.sum(ct.where(columns == expert, scores, 0.0), axis=1, keepdims=True)
        chosen = ct.where(slots == i, expert, chosen)
        values = ct.where(slots == i, value, values)
    if SCORING == TOPK_SOFTMAX:
        values = scores_of(values, slots < TOP_K, SOFTMAX)
    if RENORMALIZE:
        total = ct.sum(values, axis=1, keepdims=True)
        values = values / (total + TINY if SCORING == SIGMOID else total)
    at = (tokens[:, None], slots)
    ct.scatter(weights, at, (values * scaling).astype(weights.dtype))
    ct.scatter(ids, at, chosen.astype(ids.dtype))


@ct.kernel
def moe_topk_backward_kernel(
    dweights,  # [T, K]
    logits,  # [T, E]
    ids,  # [T, K]
    dlogits,  # [T, E]
    scaling,
    TILE_M: Int,
    EXPERTS: Int,
    TOP_K: Int,
    TILE_K: Int,
    SCORING: Int,
    RENORMALIZE: Bool,
):
    tokens, columns = span(ct.bid(0), TILE_M)[:, None], ct.arange(EXPERTS, dtype=ct.int32)[None, :]
    x = ct.gather(logits, (tokens, columns)).astype(ct.float32)
    picked = ct.zeros((TILE_M, EXPERTS), dtype=ct.int32)
    upstream = ct.zeros((TILE_M, EXPERTS), dtype=ct.float32)
    for i in range(TOP_K):
        here = ct.gather(ids, (tokens, ct.full((1, 1), i, dtype=ct.int32))).astype(ct.int32) == columns
        grad = ct.gather(dweights, (tokens, ct.full((1, 1), i, dtype=ct.int32))).astype(ct.float32)
        picked = ct.where(here, 1, picked)
        upstream = upstream + ct.where(here, grad * scaling, 0.0)
    among = picked == 1
    valid = columns < logits.shape[1]
    if SCORING == TOPK_SOFTMAX:
        scores = scores_of(x, among, SOFTMAX)
    else:
        scores = scores_of(x, valid, SCORING)
    if RENORMALIZE:
        # w = s / S: ds = (dw - sum(dw * w)) / S.
        total = ct.sum(ct.where(among, scores, 0.0), axis=1, keepdims=True)
        if SCORING == SIGMOID:
            total = total + TINY
        inner = ct.sum(upstream * ct.where(among, scores, 0.0), axis=1, keepdims=True) / total
        upstream = ct.where(among, (upstream - inner) / total, 0.0)
    if SCORING == SIGMOID:
        gradient = upstream * scores * (1.0 - scores)
    else:
        gradient = scores * (upstream - ct.sum(upstream * scores, axis=1, keepdims=True))
    if SCORING == TOPK_SOFTMAX:
        gradient = ct.where(among, gradient, 0.0)  # a sum that is NaN is none of the others'
    ct.scatter(dlogits, (tokens, columns), gradient.astype(dlogits.dtype))


def _sizes(tokens: int, experts: int, top_k: int) -> tuple[tuple[int], int, int, int, int]:
    """(grid, TILE_M, EXPERTS, TOP_K, TILE_K)"""
    width = next_power_of_2(experts)
    tile = max(1, min(8, 1024 // width))
    return (-(-tokens // tile),), tile, width, top_k, next_power_of_2(top_k)


def _fake(logits, correction, top_k, scoring, renormalize, groups, chosen_groups, scaling, dtype):
    tokens = logits.shape[0]
    return logits.new_empty(tokens, top_k, dtype=dtype), logits.new_empty(tokens, top_k, dtype=torch.int64)


@compilable(fake=_fake)
def moe_topk_forward(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    scoring: int,
    renormalize: bool,
    groups: int,
    chosen_groups: int,
    scaling: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = _fake(logits, correction, top_k, scoring, renormalize, groups, chosen_groups, scaling, dtype)
    grid, *sizes = _sizes(*logits.shape, top_k)
    arrays = (logits, 0 if correction is None else correction, weights, ids, scaling)
    options = (scoring, renormalize, correction is not None, groups, next_power_of_2(groups), chosen_groups)
    overlap = overlaps(logits.get_device())
    launch(logits, grid, moe_topk_kernel, (*arrays, *sizes, *options, overlap), overlap)
    return weights, ids


@compilable(fake=lambda dweights, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format))
def moe_topk_backward(
    dweights: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, scoring: int, renormalize: bool, scaling: float
) -> torch.Tensor:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    grid, *sizes = _sizes(*logits.shape, ids.shape[1])
    args = (dweights, logits, ids, dlogits, scaling, *sizes, scoring, renormalize)
    launch(logits, grid, moe_topk_backward_kernel, args)
    return dlogits


class TopK(Function):
    @staticmethod
    def forward(ctx, logits, correction, top_k, scoring, renormalize, groups, chosen_groups, scaling, dtype):
        weights, ids = moe_topk_forward(
            logits, correction, top_k, scoring, renormalize, groups, chosen_groups, scaling, dtype
        )
        ctx.save_for_backward(logits, ids)
        ctx.options = scoring, renormalize, scaling
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx, dweights, _):
        logits, ids = ctx.saved_tensors
        return moe_topk_backward(dweights, logits, ids, *ctx.options), *[None] * 8


@register_impl("moe_topk_routing", "cutile")
def moe_topk_routing(
    router_logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scaling_factor: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_routing(router_logits, top_k, scoring, correction_bias, num_groups, topk_groups, out_dtype)
    if router_logits.dtype not in FLOATS or (out_dtype is not None and out_dtype not in FLOATS):
        raise UnsupportedError("the logits or the weights are not fp32, fp16 or bf16")
    if router_logits.shape[1] > MAX_EXPERTS:
        raise UnsupportedError("there are more than 1024 experts")
    kind = SCORINGS.index(scoring)
    dtype = out_dtype or (router_logits.dtype if kind == TOPK_SOFTMAX else torch.float32)
    options = (top_k, kind, renormalize, num_groups, topk_groups, float(scaling_factor), dtype)
    if torch.is_grad_enabled() and router_logits.requires_grad:
        return TopK.apply(router_logits, correction_bias, *options)
    return moe_topk_forward(router_logits, correction_bias, *options)
