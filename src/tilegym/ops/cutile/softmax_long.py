"""Softmax of rows that no block holds alone: they are cut into parts, which as many blocks take.

Each computes its part's maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867), passes them on, and needs
those of the row's other parts before it writes. Many rows take one launch, in which a block holds its part while it
waits, so that memory is read once; few rows take two, which keep all multiprocessors busy, and the second finds its
parts in the cache.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
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
from tilegym.ops.cutile.pointwise import block
from tilegym.ops.cutile.row_groups import group_size
from tilegym.ops.cutile.row_groups import load_groups
from tilegym.ops.cutile.row_groups import load_rest
from tilegym.ops.cutile.row_groups import parts_of_groups
from tilegym.ops.cutile.row_groups import store_part
from tilegym.ops.cutile.row_groups import store_rest
from tilegym.ops.cutile.softmax_joint import base_of
from tilegym.ops.cutile.softmax_joint import exp_of
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span


def again(row, TWICE: Bool):
    """``row`` in fp32. TWICE: converted anew, in another way than by astype, of which the compiler would keep the first
    result: so what is held until then are 16 bits a value."""
    if TWICE and row.dtype == ct.bfloat16:
        return ct.bitcast(ct.bitcast(row, ct.uint16).astype(ct.uint32) << 16, ct.float32)
    if TWICE and row.dtype == ct.float16:
        # The same bits, which the compiler does not know: there is one block along 0 or 1.
        row = ct.bitcast(ct.bitcast(row, ct.uint16) | (ct.bid(0) * ct.bid(1)).astype(ct.uint16), ct.float16)
    return row.astype(ct.float32)


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


def _part_and_rest(x, row, n, number, parts, TILE_N: Int, EXTRA: Int, V: Int):
    """A part as one tile, or two: the last one takes what its row has beside the parts, too."""
    part = (_part(x, row, n, number, TILE_N, V, 0),)
    if EXTRA:
        part = (*part, load_rest(x, row, n, parts, number == parts - 1, TILE_N, EXTRA, V, 0))
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
            state = _state(load_rest(x, row, n, blocks, True, TILE_N, EXTRA, V, -math.inf))
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
                    rest = load_rest(x, row, n, blocks, True, TILE_N, EXTRA, V, -math.inf)
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
        out = _exps(again(part, TWICE), base, x.dtype) * (1.0 / total)
        store_part(y, row, n, number, out, TILE_N, V)
        clear_others(states, turn, row * parts + number, count, TURNS)
        if EXTRA:
            if number == 0:
                rest = load_rest(x, row, n, blocks, True, TILE_N, EXTRA, V, -math.inf).astype(ct.float32)
                out = _exps(rest, base, x.dtype) * (1.0 / total)
                store_rest(y, row, n, blocks, True, out, TILE_N, EXTRA, V)
                clear_others(states, turn, row * parts + blocks, count, TURNS)


@ct.kernel
def softmax_backward_wide_kernel(
    dy, y, dx, n, states, patience, TILE_N: Int, PARTS: Int, EXTRA: Int, V: Int, PUBLISH: Bool, FINISH: Bool,
    TWICE: Bool, OVERLAP: Bool, TURNS: Int,
):  # fmt: skip
    """As :func:`softmax_wide_kernel`; the state of a part is its sum of y * dy. The last part has up to EXTRA numbers
    more. The last rows come first."""
    if OVERLAP and not FINISH:
        ct.grid_dependency_control_launch_dependents()
    number, row, parts = ct.bid(1), block(2, True), ct.num_blocks(1)
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
        grad = again(out[0], TWICE) * (again(up[0], TWICE) - total)
        if EXTRA:
            more = again(out[1], TWICE) * (again(up[1], TWICE) - total)
        store_part(dx, row, n, number, grad, TILE_N, V)
        if EXTRA:
            store_rest(dx, row, n, parts, number == parts - 1, more, TILE_N, EXTRA, V)
        clear_others(states, turn, row * parts + number, count, TURNS)


# Columns of a part of longer rows, warps, blocks a multiprocessor, in the backward pass, by bytes a value: the fastest
# for 512 rows of 128256 and more. In fp32 2048x262208 takes an H200 1572 us, with 4 warps to half the columns 1776.
BACKWARD = {2: (8192, 4, 4), 4: (8192, 8, 2)}
FEW = (4096, 4, None)
# Forward, so many rows of up to so many parts are faster by four blocks a multiprocessor than by five: on an H200 in
# bf16 8192x128256 1016 us instead of 1044, 4096x151936 617 instead of 639. But 2048x128256 262 instead of 259.
MANY_ROWS, MOST_PARTS = 4096, 24
MAX_COLUMNS = 2**25  # of more parts no block could hold the states


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
        parts, extra = parts_of_groups(n, tile_n, v)
    kernel = softmax_backward_wide_kernel if backward else softmax_wide_kernel
    kernel = hinted(kernel, num_worker_warps=warps, occupancy=occupancy)
    states = parts + 1 if extra and not backward else parts
    return kernel, parts, states, at_once, (tile_n, next_power_of_2(states), extra, v), size == 2


def launch_long_rows(like: torch.Tensor, arrays: tuple[torch.Tensor, ...], m: int, n: int, backward: bool) -> None:
    """Launches what computes the last of ``arrays``, all of ``m`` rows of ``n``, from the others."""
    device, size = like.get_device(), arrays[0].element_size()
    v = group_size(n, *arrays)
    kernel, parts, of_row, at_once, tiles, twice = wide_plan(m, n, device, backward, size, v)
    grid, arrays = (1, parts, m), (*(x.view(-1) if v else x for x in arrays), n)
    if at_once:
        launch_parts(like, grid, kernel, arrays, (*tiles, True, True, twice), more=(of_row - parts) * m)
        return
    overlap = overlaps(device)
    states = torch.empty(of_row * m, dtype=torch.int64, device=like.device)
    args = (*arrays, states, 0, *tiles)
    launch(like, grid, kernel, (*args, True, False, twice, overlap, 1))
    launch(like, grid, kernel, (*args, False, True, twice, overlap, 1), overlap=overlap)
