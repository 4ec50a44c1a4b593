"""``splitk_reduce`` in cuTile: merges what the blocks of a split attention found."""

import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.pytorch.splitk_reduce import check_arguments

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TILE_S = 16  # splits whose outputs are in registers at a time
PART = 8  # products of fp32 that are summed one after the other; with 32 kernels also spill more registers
# How splits are merged: TILE_S at a time; all at once, as a tile; all, one after the other.
IN_TURNS, AT_ONCE, IN_ORDER = 0, 1, 2
STATE_COLUMNS = 4  # two for a split's largest score and sum; four keep the rows of fp32 on 16 bytes


def product_in_parts(a, b):
    """``a @ b`` in fp32, for tiles of fp32: sums of PART products, then sums of two sums each until one is left. One
    long sum, which is how they are compiled, loses digits at each step."""
    rows, width, columns = a.shape[0], a.shape[1], b.shape[1]
    if width <= PART:
        return ct.mma(a, b, ct.zeros((rows, columns), dtype=ct.float32))
    left = ct.permute(a.reshape((rows, width // PART, PART)), (1, 0, 2))
    right = b.reshape((width // PART, PART, columns))
    sums = ct.mma(left, right, ct.zeros((width // PART, rows, columns), dtype=ct.float32))
    for level in ct.static_iter(range((width // PART).bit_length() - 1)):
        sums = ct.sum(sums.reshape((width // PART >> level + 1, 2, rows, columns)), axis=1)
    return sums.reshape((rows, columns))


def add_in_order(
    partial, lse, where, first, splits, state, unit, TILE_S: Int, TILE_D: Int, EMPTY: Bool, WHOLE: Bool, LSE: Bool
):
    """In a kernel: adds up to TILE_S splits from ``first`` on to ``state``: the largest scores, [TILE_H, 1], the sums
    relative to them, and the weighted sums, [TILE_H, TILE_D]; EMPTY: there is no state yet.

    partial [B, H, splits, DV + STATE_COLUMNS] holds each split's sum of values, weighted by ``exp(unit * (score -
    top))``, in column DV top, its largest score, and then the sum of the weights. With LSE it is [B, H, splits, DV] and
    normalised, and ``unit`` times lse [B, H, splits] the logarithm of the sum of exponentials. ``where`` is a batch
    entry, heads, [TILE_H, 1], the number of the first split, columns, [1, TILE_D], and DV; WHOLE: no column is behind.

    The splits are added up in their order, so that the result has the same bits for every TILE_H. All loads come before
    the first use, and those of what is known to lie in the array without a mask: splits that are none are read as the
    last one, and weigh nothing.
    """
    batch, heads, begin, columns, width = where
    tops, totals, parts = (), (), ()
    for i in ct.static_iter(range(TILE_S)):
        split = begin + min(first + i, splits - 1)
        if LSE:
            tops = (*tops, ct.gather(lse, (batch, heads, split), check_bounds=False))
        else:
            tops = (*tops, ct.gather(partial, (batch, heads, split, width), check_bounds=False))
            totals = (*totals, ct.gather(partial, (batch, heads, split, width + 1), check_bounds=False))
        if WHOLE:
            parts = (*parts, ct.gather(partial, (batch, heads, split, columns), check_bounds=False))
        else:
            parts = (*parts, ct.gather(partial, (batch, heads, split, columns), mask=columns < width))
    top = tops[0] if EMPTY else ct.maximum(state[0], tops[0])
    for i in ct.static_iter(range(1, TILE_S)):
        top = ct.maximum(top, tops[i])
    base = ct.where(top == -math.inf, 0.0, top)
    if EMPTY:
        total = ct.zeros(top.shape, dtype=ct.float32)
        acc = ct.zeros((top.shape[0], TILE_D), dtype=ct.float32)
    else:
        shrink = ct.exp((state[0] - base) * unit)
        total, acc = state[1] * shrink, state[2] * shrink
    for i in ct.static_iter(range(TILE_S)):
        weight = ct.where(first + i < splits, ct.exp((tops[i] - base) * unit), 0.0)
        if LSE:
            # A split that saw no key weighs nothing, whatever its output holds.
            total = total + weight
            acc = acc + ct.where(weight == 0.0, 0.0, weight * parts[i])
        else:
            total = total + weight * totals[i]
            acc = acc + weight * parts[i]
    return top, total, acc


def add_in_turns(
    partial, lse, where, splits, state, unit, TILE_S: Int, TILE_D: Int, WHOLE: Bool, LSE: Bool
):  # fmt: skip
    """In a kernel: :func:`add_in_order` of all splits, however many, TILE_S at a time."""
    for turn in range(ct.cdiv(splits, TILE_S)):
        first = turn * TILE_S
        state = add_in_order(partial, lse, where, first, splits, state, unit, TILE_S, TILE_D, False, WHOLE, LSE)
    return state


def no_state(TILE_H: Int, TILE_D: Int):
    """In a kernel: the state of no split."""
    row = (TILE_H, 1)
    nothing = ct.zeros(row, dtype=ct.float32), ct.zeros((TILE_H, TILE_D), dtype=ct.float32)
    return ct.full(row, -math.inf, dtype=ct.float32), *nothing


def normalised(state):
    """In a kernel: the weighted sums over the sum of the weights; zeros where no key was seen."""
    return state[2] * (1.0 / ct.where(state[1] == 0.0, 1.0, state[1]))


def merge_in_order(partial, batch, heads, splits, unit, TILE_S: Int, TILE_D: Int, DV: Int):
    """In a kernel: up to TILE_S splits merged, for ``heads``, [TILE_H, 1]: see :func:`add_in_order`."""
    where = (batch, heads, 0, ct.arange(TILE_D, dtype=ct.int32)[None, :], DV)
    whole = TILE_D == DV
    return normalised(add_in_order(partial, 0, where, 0, splits, (0, 0, 0), unit, TILE_S, TILE_D, True, whole, False))


@ct.kernel
def splitk_reduce_kernel(
    partial,  # [B, Hq, splits, Dv]
    lse,  # [B, Hq, splits]
    sinks,  # [Hq] if SINKS, else 0
    out,  # [B, Hq, 1, Dv]
    TILE_S: Int,
    TILE_D: Int,
    LOOP: Bool,  # there are more splits than TILE_S
    WHOLE: Bool,  # TILE_D is Dv
    SINKS: Bool,
):
    # One block a row of the output.
    batch, head = ct.bid(0) // partial.shape[1], ct.bid(0) % partial.shape[1]
    state = no_state(1, TILE_D)
    if SINKS:
        sink = ct.load(sinks, (head,), (1,)).astype(ct.float32).reshape((1, 1))
        state = (sink, ct.ones((1, 1), dtype=ct.float32), state[2])
    heads, columns = head + ct.zeros((1, 1), dtype=ct.int32), ct.arange(TILE_D, dtype=ct.int32)[None, :]
    where, splits = (batch, heads, 0, columns, partial.shape[3]), partial.shape[2]
    if LOOP:
        state = add_in_turns(partial, lse, where, splits, state, 1.0, TILE_S, TILE_D, WHOLE, True)
    else:
        state = add_in_order(partial, lse, where, 0, splits, state, 1.0, TILE_S, TILE_D, not SINKS, WHOLE, True)
    acc = normalised(state)
    ct.store(out, (batch, head, 0, 0), acc.reshape((1, 1, 1, TILE_D)).astype(out.dtype))


@ct.kernel
def merge_kernel(partial, out, unit: float, TILE_S: Int, TILE_D: Int, DV: Int, HOW: Int, OVERLAP: Bool):
    """All splits of [B, Hq, splits, DV + STATE_COLUMNS] merged, with one block a row of ``out``, [B, Hq, 1, Dv].
    TILE_S: all splits, unless IN_TURNS."""
    begin(OVERLAP)
    batch, head = ct.bid(0) // partial.shape[1], ct.bid(0) % partial.shape[1]
    columns = ct.arange(TILE_D, dtype=ct.int32)
    heads = head + ct.zeros((1, 1), dtype=ct.int32)
    if HOW == IN_ORDER:
        acc = merge_in_order(partial, batch, heads, partial.shape[2], unit, TILE_S, TILE_D, DV).reshape((TILE_D,))
    elif HOW == AT_ONCE:
        # All loads before the first use, and no loop: on an H200 B8 Hq32 Hkv8 T8192 takes 72.6 us instead of 74.6.
        splits = ct.arange(TILE_S, dtype=ct.int32)
        real = splits < partial.shape[2]
        top = ct.gather(partial, (batch, head, splits, DV), mask=real, padding_value=-math.inf)
        total = ct.gather(partial, (batch, head, splits, DV + 1), mask=real)
        wanted = real[:, None] & (columns < DV)[None, :]
        tile = ct.gather(partial, (batch, head, splits[:, None], columns[None, :]), mask=wanted)
        base = ct.max(top, axis=0, keepdims=True)
        weight = ct.exp((top - ct.where(base == -math.inf, 0.0, base)) * unit)
        total = ct.sum(weight * total, axis=0, keepdims=True)
        acc = ct.sum(weight.reshape((TILE_S, 1)) * tile, axis=0) * (1.0 / ct.where(total == 0.0, 1.0, total))
    else:
        where = (batch, heads, 0, columns[None, :], DV)
        state, splits = no_state(1, TILE_D), partial.shape[2]
        state = add_in_turns(partial, 0, where, splits, state, unit, TILE_S, TILE_D, TILE_D == DV, False)
        acc = normalised(state).reshape((TILE_D,))
    ct.scatter(out, (batch, head, 0, columns), acc.astype(out.dtype), mask=columns < DV)


def _fake(partial, lse, dtype, sinks):
    batch, heads, _, head_dim = partial.shape
    return partial.new_empty(batch, heads, 1, head_dim, dtype=dtype)


@compilable(_fake)
def splitk_reduce_forward(
    partial: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, sinks: torch.Tensor | None
) -> torch.Tensor:
    out = _fake(partial, lse, dtype, sinks)
    batch, heads, splits, head_dim = partial.shape
    if splits == 0 or out.numel() == 0:
        return out.zero_()
    arrays = (partial, lse, 0 if sinks is None else sinks, out)
    tile_s, tile_d = min(TILE_S, next_power_of_2(splits)), tile_of(head_dim)
    constants = (tile_s, tile_d, splits > tile_s, tile_d == head_dim, sinks is not None)
    launch(out, (batch * heads,), splitk_reduce_kernel, (*arrays, *constants))
    return out


@register_impl("splitk_reduce", "cutile")
def splitk_reduce(
    partial: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    check_arguments(partial, lse, sinks)
    if dtype not in DTYPES or partial.dtype != torch.float32:
        raise UnsupportedError("it merges fp32 into fp32, fp16 or bf16")
    if torch.is_grad_enabled() and (
        partial.requires_grad or lse.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        raise UnsupportedError("it has no backward kernel")
    return splitk_reduce_forward(partial, lse, dtype, sinks)
