"""``y = exp(x - max) / sum(exp(x - max))`` over rows; backward: ``dx = y * (dy - sum(y * dy))``.

A row that fits is held in the registers of one block. A longer one is cut into parts, which as many blocks take: each
computes its part's maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867), passes them on, and needs those of
the row's other parts before it writes. Many rows take one launch, in which a block holds its part while it waits, so
that memory is read once; few rows take two, which keep all multiprocessors busy, and the second finds its parts in the
cache.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.parts import bits
from tilegym.ops.cutile.parts import clear_others
from tilegym.ops.cutile.parts import exchange
from tilegym.ops.cutile.parts import forward_tile
from tilegym.ops.cutile.parts import high
from tilegym.ops.cutile.parts import launch_parts
from tilegym.ops.cutile.parts import look
from tilegym.ops.cutile.parts import low
from tilegym.ops.cutile.parts import parts_of
from tilegym.ops.cutile.parts import publish
from tilegym.ops.cutile.parts import turn_of
from tilegym.ops.cutile.row_groups import group_size
from tilegym.ops.cutile.row_groups import load_edges
from tilegym.ops.cutile.row_groups import load_groups
from tilegym.ops.cutile.row_groups import store_edges
from tilegym.ops.cutile.row_groups import store_groups
from tilegym.ops.cutile.softmax_joint import MAX_ROWS
from tilegym.ops.cutile.softmax_joint import base_of
from tilegym.ops.cutile.softmax_joint import exp_of
from tilegym.ops.cutile.softmax_joint import joint_plan
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import small_or_rows
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating


def _load(x, rows, cols, padding):
    return ct.gather(x, at(x, rows[:, None], cols[None, :]), padding_value=padding)


def _store(y, rows, cols, out):
    ct.scatter(y, at(y, rows[:, None], cols[None, :]), out.astype(y.dtype))


def _again(row, TWICE: Bool):
    """``row`` in fp32. TWICE: converted anew, in another way than by astype, of which the compiler would keep the first
    result: so what is held until then are 16 bits a value."""
    if TWICE and row.dtype == ct.bfloat16:
        return ct.bitcast(ct.bitcast(row, ct.uint16).astype(ct.uint32) << 16, ct.float32)
    if TWICE and row.dtype == ct.float16:
        # The same bits, which the compiler does not know: there is one block along 0 or 1.
        row = ct.bitcast(ct.bitcast(row, ct.uint16) | (ct.bid(0) * ct.bid(1)).astype(ct.uint16), ct.float16)
    return row.astype(ct.float32)


@ct.kernel
def softmax_kernel(x, y, TILE_M: Int, TILE_N: Int, TWICE: Bool):
    """Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    row = _load(x, rows, cols, -math.inf)
    # In the dtype of x: were values converted as they arrive, registers would be reused while others are on their way.
    top = ct.max(row, axis=1, keepdims=True).astype(ct.float32)
    total = ct.sum(exp_of(row.astype(ct.float32) - top, x.dtype), axis=1, keepdims=True)
    _store(y, rows, cols, exp_of(_again(row, TWICE) - top, x.dtype) * (1.0 / total))


@ct.kernel
def softmax_backward_kernel(dy, y, dx, TILE_M: Int, TILE_N: Int, TWICE: Bool):
    rows, cols = span(ct.bid(0), TILE_M), span(0, TILE_N)
    out, up = _load(y, rows, cols, 0), _load(dy, rows, cols, 0)
    total = ct.sum(out.astype(ct.float32) * up.astype(ct.float32), axis=1, keepdims=True)
    _store(dx, rows, cols, _again(out, TWICE) * (_again(up, TWICE) - total))


def _written(states, first, parts, PARTS: Int):
    """The states of a row's parts, [PARTS], which an earlier launch wrote."""
    index = ct.arange(PARTS, dtype=ct.int32)
    return ct.gather(states, ct.where(index < parts, first + index, -1))


def _part(x, row, n, number, TILE_N: Int, V: Int, padding):
    if V:
        part = load_groups(x, row, n, n, number, TILE_N, V, padding)
    else:
        part = ct.gather(x, at(x, row, span(number, TILE_N)), padding_value=padding)
    return part


def _store_part(y, row, n, number, out, TILE_N: Int, V: Int):
    if V:
        store_groups(y, row, n, number, out, TILE_N, V)
    else:
        ct.scatter(y, at(y, row, span(number, TILE_N)), out.astype(y.dtype))


def _rest_columns(parts, wanted, TILE_N: Int, EXTRA: Int):
    return ct.where(wanted, parts * TILE_N + ct.arange(EXTRA, dtype=ct.int32), -1)


def _rest(x, row, n, parts, wanted, TILE_N: Int, EXTRA: Int, V: Int, padding):
    """What a row has beside its parts, up to EXTRA numbers, if that is ``wanted``."""
    if V:
        rest = load_edges(x, row, n, wanted, V, padding)
    else:
        rest = ct.gather(x, at(x, row, _rest_columns(parts, wanted, TILE_N, EXTRA)), padding_value=padding)
    return rest


def _store_rest(y, row, n, parts, wanted, out, TILE_N: Int, EXTRA: Int, V: Int):
    if V:
        store_edges(y, row, n, wanted, out, V)
    else:
        ct.scatter(y, at(y, row, _rest_columns(parts, wanted, TILE_N, EXTRA)), out.astype(y.dtype))


def _part_and_rest(x, row, n, number, parts, TILE_N: Int, EXTRA: Int, V: Int):
    """A part as one tile, or two: the last one takes what its row has beside the parts, too."""
    part = (_part(x, row, n, number, TILE_N, V, 0),)
    if EXTRA:
        part = (*part, _rest(x, row, n, parts, number == parts - 1, TILE_N, EXTRA, V, 0))
    return part


def _exps(part, base, dtype):
    """exp of a part's values, in fp32, less ``base``; if they had 16 bits, a fused multiplication and addition each."""
    if dtype == ct.float32:
        return ct.exp(part - base)
    # From 2^15 on values of bf16 differ by 128 or more: of what is not 0 the base of the power does not matter.
    factor = ct.where(ct.abs(base) < 32768.0, 1.4426950408889634, 1.0)
    return ct.exp2(part * factor - base * factor, flush_to_zero=True)


def _state(part):
    """The maximum and the sum of a part's row, 32 bits each, which together are never 0."""
    top = ct.max(part).astype(ct.float32)
    total = ct.sum(_exps(part.astype(ct.float32), base_of(top), part.dtype))
    return (bits(top) << 32) | bits(total)


def _backward_state(out, up, EXTRA: Int):
    """The sum of y * dy of a part, and a bit that says that it is there."""
    total = ct.sum(out[0].astype(ct.float32) * up[0].astype(ct.float32))
    if EXTRA:
        total = total + ct.sum(out[1].astype(ct.float32) * up[1].astype(ct.float32))
    return bits(total) | (1 << 32)


@ct.kernel
def softmax_wide_kernel(
    x, y, n, states, patience, TILE_N: Int, PARTS: Int, EXTRA: Int, V: Int, PUBLISH: Bool, FINISH: Bool, TWICE: Bool,
    OVERLAP: Bool, TURNS: Int,
):  # fmt: skip
    """Each block takes a part, TILE_N columns, of a row of n that has at most PARTS of them.

    PUBLISH: it writes the part's maximum and sum to ``states``, int64, [parts of all rows]. FINISH: it writes the part
    of y, from the states of all parts of the row. With both, states are zeros before, and the block waits for those of
    others; if it has looked ``patience`` times in vain, it computes them itself. EXTRA: the row has up to so many
    numbers more, a part which its first block takes, too, and reads twice: it has no registers to keep it in. V: arrays
    are of groups of so many numbers, and these are the row's edges (``row_groups.py``); else those behind its parts.
    """
    if OVERLAP and not FINISH:
        ct.grid_dependency_control_launch_dependents()
    number, row, blocks = ct.bid(1), ct.bid(2), ct.num_blocks(1)
    parts = blocks + 1 if EXTRA else blocks
    first = row * parts
    part = _part(x, row, n, number, TILE_N, V, -math.inf)
    count = parts * ct.num_blocks(2)
    turn = turn_of(states, count, TURNS)
    if OVERLAP and FINISH:
        ct.grid_dependency_control_wait()  # for what is written to states
    if EXTRA and PUBLISH:
        if number == 0:
            # While the part is on its way.
            state = _state(_rest(x, row, n, blocks, True, TILE_N, EXTRA, V, -math.inf))
            if FINISH:
                publish(states, first + turn * count + blocks, state)
            else:
                ct.scatter(states, first + blocks, state)
    if PUBLISH:
        state = _state(part)
        if not FINISH:
            ct.scatter(states, first + number, state)
    if FINISH:
        if PUBLISH:
            first = first + turn * count
            found, missing = exchange(states, first, number, parts, state, patience, PARTS)
            if missing > 0:
                for i in range(blocks):
                    publish(states, first + i, _state(_part(x, row, n, i, TILE_N, V, -math.inf)))
                if EXTRA:
                    rest = _rest(x, row, n, blocks, True, TILE_N, EXTRA, V, -math.inf)
                    publish(states, first + blocks, _state(rest))
                while missing > 0:
                    found, missing = look(states, first, parts, PARTS)
                part = _part(x, row, n, number, TILE_N, V, -math.inf)  # which takes no registers until now
        else:
            found = _written(states, first, parts, PARTS)
        there = ct.arange(PARTS, dtype=ct.int32) < parts
        tops = ct.where(there, high(found), -math.inf)
        base = base_of(ct.max(tops))
        total = ct.sum(ct.where(there, low(found) * exp_of(tops - base, x.dtype), 0.0))
        out = _exps(_again(part, TWICE), base, x.dtype) * (1.0 / total)
        _store_part(y, row, n, number, out, TILE_N, V)
        clear_others(states, turn, row * parts + number, count, TURNS)
        if EXTRA:
            if number == 0:
                rest = _rest(x, row, n, blocks, True, TILE_N, EXTRA, V, -math.inf).astype(ct.float32)
                out = _exps(rest, base, x.dtype) * (1.0 / total)
                _store_rest(y, row, n, blocks, True, out, TILE_N, EXTRA, V)
                clear_others(states, turn, row * parts + blocks, count, TURNS)


@ct.kernel
def softmax_backward_wide_kernel(
    dy, y, dx, n, states, patience, TILE_N: Int, PARTS: Int, EXTRA: Int, V: Int, PUBLISH: Bool, FINISH: Bool,
    TWICE: Bool, OVERLAP: Bool, TURNS: Int,
):  # fmt: skip
    """As :func:`softmax_wide_kernel`; the state of a part is its sum of y * dy. The last part has up to EXTRA numbers
    more."""
    if OVERLAP and not FINISH:
        ct.grid_dependency_control_launch_dependents()
    number, row, parts = ct.bid(1), ct.bid(2), ct.num_blocks(1)
    first = row * parts
    out = _part_and_rest(y, row, n, number, parts, TILE_N, EXTRA, V)
    up = _part_and_rest(dy, row, n, number, parts, TILE_N, EXTRA, V)
    count = parts * ct.num_blocks(2)
    turn = turn_of(states, count, TURNS)
    if OVERLAP and FINISH:
        ct.grid_dependency_control_wait()
    if PUBLISH:
        state = _backward_state(out, up, EXTRA)
        if not FINISH:
            ct.scatter(states, first + number, state)
    if FINISH:
        if PUBLISH:
            first = first + turn * count
            found, missing = exchange(states, first, number, parts, state, patience, PARTS)
            if missing > 0:
                for i in range(parts):
                    y_part = _part_and_rest(y, row, n, i, parts, TILE_N, EXTRA, V)
                    dy_part = _part_and_rest(dy, row, n, i, parts, TILE_N, EXTRA, V)
                    publish(states, first + i, _backward_state(y_part, dy_part, EXTRA))
                while missing > 0:
                    found, missing = look(states, first, parts, PARTS)
                out = _part_and_rest(y, row, n, number, parts, TILE_N, EXTRA, V)
                up = _part_and_rest(dy, row, n, number, parts, TILE_N, EXTRA, V)
        else:
            found = _written(states, first, parts, PARTS)
        there = ct.arange(PARTS, dtype=ct.int32) < parts
        total = ct.sum(ct.where(there, low(found), 0.0))
        grad = _again(out[0], TWICE) * (_again(up[0], TWICE) - total)
        if EXTRA:
            more = _again(out[1], TWICE) * (_again(up[1], TWICE) - total)
        _store_part(dx, row, n, number, grad, TILE_N, V)
        if EXTRA:
            _store_rest(dx, row, n, parts, number == parts - 1, more, TILE_N, EXTRA, V)
        clear_others(states, turn, row * parts + number, count, TURNS)


# Longer rows do not fit into the registers of one block, or are slower there: forward, backward, by bytes a value.
MAX_HELD = ({2: 32768, 4: 16384}, {2: 16384, 4: 16384})
# How many blocks a multiprocessor has for 16-bit rows, by their columns, if their values are converted TWICE: forward,
# backward. The fastest for 8192 rows on an H200, where shorter ones are as fast without.
TWICE = ({16384: 3, 32768: 2}, {8192: 3, 16384: 2})
# Columns of a part of longer rows, warps, blocks a multiprocessor, in the backward pass, by bytes a value: the fastest
# for 512 rows of 128256 and more. In fp32 2048x262208 takes an H200 1572 us, with 4 warps to half the columns 1776.
BACKWARD = {2: (8192, 4, 4), 4: (8192, 8, 2)}
FEW = (4096, 4, None)
# Forward, so many rows of up to so many parts are faster by four blocks a multiprocessor than by five: on an H200 in
# bf16 8192x128256 1016 us instead of 1044, 4096x151936 617 instead of 639. But 2048x128256 262 instead of 259.
MANY_ROWS, MOST_PARTS = 4096, 24
MAX_COLUMNS = 2**25  # of more parts no block could hold the states


@functools.lru_cache(maxsize=1024)
def plan(m: int, n: int, device: int, backward: bool, size: int) -> tuple[ct.kernel, tuple[int], tuple[int, ...]]:
    """(kernel, grid, tile constants) for rows [m, n] that a block holds, on CUDA device ``device`` (-1: CPU)."""
    m = m if n else 0  # without columns there is nothing to launch
    tile_n = next_power_of_2(n)
    # Short rows share a block, as long as there are blocks for every multiprocessor.
    shared = 4096 if backward or tile_n < 1024 else 2048
    tile_m = max(1, min(shared // tile_n, next_power_of_2(m // (4 * sm_count(device)))))
    elements = tile_m * tile_n
    occupancy = TWICE[backward].get(tile_n) if size == 2 else None
    twice = occupancy is not None
    if backward:
        kernel, warps = softmax_backward_kernel, 8
        occupancy = occupancy or max(1, min(4, 16384 // elements))
    else:
        kernel, warps = softmax_kernel, 8 if tile_n > 4096 else 4
        occupancy = occupancy or min(8, 32768 // elements)
    grid = (ct.cdiv(m, tile_m),)
    return hinted(kernel, num_worker_warps=warps, occupancy=occupancy), grid, (tile_m, tile_n, twice)


@functools.lru_cache(maxsize=1024)
def wide_plan(
    m: int, n: int, device: int, backward: bool, size: int, v: int
) -> tuple[ct.kernel, int, int, bool, tuple[int, ...], bool]:
    """(kernel, parts of a row, states of a row, whether one launch takes them, tile constants, TWICE) for longer rows
    [m, n], in groups of ``v`` numbers if that is not 0."""
    tile_n, warps, occupancy = BACKWARD[size] if backward else forward_tile(n, size)
    if not backward and occupancy == 5 and m >= MANY_ROWS and n <= MOST_PARTS * tile_n:
        occupancy = 4
    few = m * ct.cdiv(n, tile_n) < 2 * sm_count(device)
    if few:
        tile_n, warps, occupancy = FEW
    # Blocks do not wait for others of which it is not sure that they run at the same time.
    at_once = not few and ct.cdiv(n, tile_n) <= sm_count(device)
    parts, extra = parts_of(n, tile_n) if at_once else (ct.cdiv(n, tile_n), 0)
    if v:
        parts, extra = ct.cdiv(n // v * v, tile_n), 2 * v
    kernel = softmax_backward_wide_kernel if backward else softmax_wide_kernel
    kernel = hinted(kernel, num_worker_warps=warps, occupancy=occupancy)
    states = parts + 1 if extra and not backward else parts
    return kernel, parts, states, at_once, (tile_n, next_power_of_2(states), extra, v), size == 2


def _launch(like, arrays, rows, backward):
    """Launches what computes the last of ``arrays`` from the others, all shaped as ``rows``."""
    (m, n), device, size = size_of(rows), like.get_device(), rows.element_size()
    joint = joint_plan(m, n, device, backward, size)
    if joint is not None:
        kernel, tiles = joint
        launch(like, (1, m), kernel, (*arrays, *tiles))
        return
    # Half of the multiprocessors or fewer would hold rows of more than 16384 columns alone.
    if next_power_of_2(n) <= (MAX_HELD[backward][size] if 2 * m >= sm_count(device) else 16384):
        kernel, grid, tiles = plan(m, n, device, backward, size)
        launch(like, grid, kernel, (*arrays, *tiles))
        return
    if m > MAX_ROWS:
        for some in zip(*(array.split(MAX_ROWS) for array in arrays), strict=True):
            _launch(like, some, some[-1], backward)
        return
    v = group_size(n, *arrays)
    kernel, parts, states, at_once, tiles, twice = wide_plan(m, n, device, backward, size, v)
    grid, arrays = (1, parts, m), (*(x.view(-1) if v else x for x in arrays), n)
    if at_once:
        launch_parts(like, grid, kernel, arrays, (*tiles, True, True, twice), more=(states - parts) * m)
        return
    overlap = overlaps(device)
    states = torch.empty(states * m, dtype=torch.int64, device=like.device)
    args = (*arrays, states, 0, *tiles)
    launch(like, grid, kernel, (*args, True, False, twice, overlap, 1))
    launch(like, grid, kernel, (*args, False, True, twice, overlap, 1), overlap=overlap)


def _rows_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` as [M, N], or as it is if it is a small [B, S, N], with dimension ``dim`` as N."""
    return small_or_rows(x) if dim == -1 else rows_of(x.movedim(dim, -1))


def _like(rows: torch.Tensor, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the result of ``rows`` is written to, and the same memory, empty, in the shape of ``x``."""
    if dim == -1:  # no view: what is one could not be written over in training
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        return (y if rows is x else y.view(rows.shape)), y
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return out, out.view(x.movedim(dim, -1).shape).movedim(-1, dim)


def _fake(x, dim):
    # As _like lays it out, without a look at the size: traced code shall serve all.
    moved = x.movedim(dim, -1)
    return torch.empty_like(moved, memory_format=torch.contiguous_format).movedim(-1, dim)


@compilable(fake=_fake)
def softmax_forward(x: torch.Tensor, dim: int) -> torch.Tensor:
    rows = _rows_along(x, dim)
    out, y = _like(rows, x, dim)
    _launch(x, (rows, out), rows, False)
    return y


@compilable(fake=lambda dy, y, dim: _fake(y, dim))
def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    rows = _rows_along(y, dim)
    out, dx = _like(rows, y, dim)
    _launch(y, (_rows_along(dy, dim), rows, out), rows, True)
    return dx


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        y = softmax_forward(x, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return softmax_backward(dy, *ctx.saved_tensors, ctx.dim), None


@register_impl("softmax", "cutile")
def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    if x.dtype not in FLOATS:
        check_floating("softmax", x=x)
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    if x.dim() == 0:
        raise UnsupportedError("x has no dimensions")
    if x.size(dim) > MAX_COLUMNS:
        raise UnsupportedError(f"rows have more than {MAX_COLUMNS} columns")
    if torch.is_grad_enabled() and x.requires_grad:
        return Softmax.apply(x, dim)
    return softmax_forward(x, dim)
