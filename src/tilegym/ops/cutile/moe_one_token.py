"""A token's experts in two launches that read their weights row by row: up with the activation, and down with the sum.

Each expert's rows up are taken in turn by some of the blocks that run beside each other, the next ones on their way
while one is multiplied, as in ``stream_gemv.py``. Down, each block has a few columns of the output, and with them rows
of every chosen expert; those of the first experts are on their way, into registers, while the launch in front runs.
"""

import functools
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.ops.cutile.early_weights import row_at_once
from tilegym.ops.cutile.moe_activation import activated
from tilegym.ops.cutile.stream_gemv import sums_of
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin_alone
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count

MAX_WIDTH, MAX_INNER, MAX_PAIRS = 2048, 2048, 16


class Plan(NamedTuple):
    """Rows of gate and up a turn, columns of their tile, turns ahead, blocks a multiprocessor; rows and columns of a
    tile of the second matrix, experts whose rows are held ahead of the wait, blocks a multiprocessor."""

    up: tuple[int, int, int, int]
    down: tuple[int, int, int, int]


def chosen(ids, pair, experts):
    """In a kernel: the expert of a pair, or the first one, and whether there is such an expert."""
    expert = ct.gather(ids, pair)
    there = (expert >= 0) & (expert < experts)
    return ct.where(there, expert, 0).astype(ct.int32), there


def rows_of(w, expert, n, K: Int, TILE_N: Int, TILE_K: Int):
    """In a kernel: rows n * TILE_N to (n + 1) * TILE_N of an expert's matrix [N, K], as tiles [TILE_N, TILE_K]."""
    rows = (n * TILE_N + ct.arange(TILE_N, dtype=ct.int32))[:, None]
    cols = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    tiles = ()
    for k in ct.static_iter(range(K // TILE_K)):
        tiles = (*tiles, ct.gather(w, (expert, rows, cols + k * TILE_K), check_bounds=False))
    return tiles


def turn(w_gate, w_up, expert, n, K: Int, TILE_N: Int, TILE_K: Int):
    return rows_of(w_gate, expert, n, K, TILE_N, TILE_K), rows_of(w_up, expert, n, K, TILE_N, TILE_K)


def activated_rows(weights, xs, h, pair, n, alpha, limit, K: Int, TILE_N: Int, TILE_K: Int, KIND: Int, LIMITED: Bool):
    gate, up = sums_of(weights, xs, K, TILE_N, TILE_K)
    value = activated(gate, up, alpha, limit, h.dtype, KIND, True, LIMITED)
    ct.store(h, (pair, n), value.astype(h.dtype).reshape((1, TILE_N)))


@ct.kernel
def moe_stream_up_kernel(
    x,  # [1, K]
    w_gate,  # [E, N, K]
    w_up,  # [E, N, K]
    ids,  # [PAIRS]
    h,  # [PAIRS, N]; of a pair without an expert anything
    alpha,
    limit,
    PAIRS: Int,
    K: Int,
    TILE_N: Int,
    TILE_K: Int,
    AHEAD: Int,
    KIND: Int,
    LIMITED: Bool,
    OVERLAP: Bool,
):
    pair, first, blocks = ct.bid(0) % PAIRS, ct.bid(0) // PAIRS, ct.num_blocks(0) // PAIRS
    begin_alone(OVERLAP)  # what the next launch reads ahead of its wait, ids, was there before this one
    end = h.shape[1] // TILE_N
    last = end - 1 - (end - 1 - first) % blocks
    expert, _ = chosen(ids, pair, w_gate.shape[0])
    one = turn(w_gate, w_up, expert, first, K, TILE_N, TILE_K)
    if AHEAD == 2:
        two = turn(w_gate, w_up, expert, min(first + blocks, last), K, TILE_N, TILE_K)
    xs = row_at_once(x, K, TILE_K)
    if AHEAD == 1:
        for n in range(first, end, blocks):
            now = one
            one = turn(w_gate, w_up, expert, min(n + blocks, last), K, TILE_N, TILE_K)
            activated_rows(now, xs, h, pair, n, alpha, limit, K, TILE_N, TILE_K, KIND, LIMITED)
    else:
        for n in range(first, end - blocks, 2 * blocks):
            now = one
            one = turn(w_gate, w_up, expert, min(n + 2 * blocks, last), K, TILE_N, TILE_K)
            activated_rows(now, xs, h, pair, n, alpha, limit, K, TILE_N, TILE_K, KIND, LIMITED)
            now = two
            two = turn(w_gate, w_up, expert, min(n + 3 * blocks, last), K, TILE_N, TILE_K)
            activated_rows(now, xs, h, pair, n + blocks, alpha, limit, K, TILE_N, TILE_K, KIND, LIMITED)
        if (last - first) % (2 * blocks) == 0:
            activated_rows(one, xs, h, pair, last, alpha, limit, K, TILE_N, TILE_K, KIND, LIMITED)


@ct.kernel
def moe_held_down_kernel(
    h,  # [PAIRS, K]
    w,  # [E, N, K]
    ids,  # [PAIRS]
    weights,  # [PAIRS]
    shared,  # [1, N] if SHARED, else 0
    out,  # [1, N]
    PAIRS: Int,
    HOLD: Int,
    K: Int,
    TILE_N: Int,
    TILE_K: Int,
    SHARED: Bool,
    OVERLAP: Bool,
):
    let_next_begin(OVERLAP)
    n = ct.bid(0)
    held = ()
    for pair in ct.static_iter(range(HOLD)):
        expert, _ = chosen(ids, pair, w.shape[0])
        held = (*held, rows_of(w, expert, n, K, TILE_N, TILE_K))
    if OVERLAP:
        ct.grid_dependency_control_wait()
    # Each row of a tile of its own, since to hand a single one to all threads takes a barrier.
    cols = ct.arange(TILE_K, dtype=ct.int32)[None, :] + ct.zeros((TILE_N, 1), dtype=ct.int32)
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for pair in ct.static_iter(range(PAIRS)):
        expert, there = chosen(ids, pair, w.shape[0])
        tiles = held[pair] if pair < HOLD else rows_of(w, expert, n, K, TILE_N, TILE_K)
        weight = ct.gather(weights, pair).astype(ct.float32)
        for k in ct.static_iter(range(K // TILE_K)):
            row = ct.gather(h, (pair, cols + k * TILE_K), check_bounds=False).astype(ct.float32) * weight
            acc = acc + ct.where(there, tiles[k].astype(ct.float32) * row, 0.0)
    y = ct.sum(acc, axis=1)
    at = n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    if SHARED:
        y = y + ct.gather(shared, (0, at)).astype(ct.float32)
    ct.scatter(out, (0, at), y.astype(out.dtype))


@functools.lru_cache(maxsize=256)
def plan(width: int, inner: int, pairs: int, device: int) -> Plan | None:
    """For ``pairs`` experts of matrices [inner, width] and [width, inner], in 16 bits; None where they do not fit.

    In us a layer's router, choice and experts on an H200, one behind the other in a graph, and with the kernels for
    several tokens: of Qwen3-30B-A3B 30.7 and 35.6 (all experts held 32.1, none 31.5; two rows a turn 31.6), of
    Qwen3-Next 32.7 and 38.5, of OLMoE 36.4 and 41.0, of DeepSeek-V2-Lite 37.7 and 41.9 (eight rows of a tile, one
    expert held 40.8). Where rows are 4096 wide, as of Qwen3-235B-A22B, 97 and 90.
    """
    if device < 0:
        fits = width % 32 == inner % 16 == 0 and pairs <= MAX_PAIRS
        return Plan((2, 32, 1 + width // 32 % 2, 3), (4, 16, pairs // 2, 3)) if fits else None
    if pairs > MAX_PAIRS or width > MAX_WIDTH or inner > MAX_INNER or width % 1024 or inner % 128:
        return None
    tile_k = 256 if inner % 256 == 0 else 128
    held = pairs // 2 if tile_k == 256 else min(pairs, 4)
    return Plan((1, 1024, 2, 4), (4, tile_k, min(held, 6144 // inner), 4))  # of more, registers would spill


def one_token(
    chosen_plan: Plan, hidden: torch.Tensor, arrays: tuple, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    shared: torch.Tensor | None, out: torch.Tensor, options: tuple[float, float, int, bool],
) -> None:  # fmt: skip
    """Writes what ``fused_moe`` computes of one token to ``out``; arrays: w_gate, w_up; options: alpha, limit, KIND,
    LIMITED."""
    (width, inner), pairs, device = w2.shape[1:], ids.numel(), hidden.get_device()
    alpha, limit, kind, limited = options
    overlap = overlaps(device)
    tile_n, tile_k, ahead, occupancy = chosen_plan.up
    blocks = max(1, min(occupancy * sm_count(device) // pairs, inner // tile_n))
    h = hidden.new_empty(pairs, inner)
    kernel = hinted(moe_stream_up_kernel, occupancy=occupancy)
    sizes = (pairs, width, tile_n, tile_k, ahead, kind, limited, overlap)
    launch(out, (pairs * blocks,), kernel, (hidden, *arrays, ids, h, alpha, limit, *sizes), overlap)
    tile_n, tile_k, hold, occupancy = chosen_plan.down
    kernel = hinted(moe_held_down_kernel, occupancy=occupancy)
    args = (h, w2, ids, weights, 0 if shared is None else shared, out)
    sizes = (pairs, hold, inner, tile_n, tile_k, shared is not None, overlap)
    launch(out, (width // tile_n,), kernel, (*args, *sizes), overlap)
