"""Rows of weights behind a norm, one after the other by a few blocks, the next on their way while one is multiplied.

A block that takes some rows and ends leaves the memory idle while the next one begins, normalises the row and asks for
its first weights. Here as many blocks as run beside each other take all rows in turn, and hold the row, normalised
once, and the weights of one or two turns ahead in registers; the first of them come ahead of the wait for the launch in
front. Where a wave of blocks holds all there is, each takes its rows at once.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.ops.cutile.early_weights import HALF_BYTES
from tilegym.ops.cutile.early_weights import row_at_once
from tilegym.ops.cutile.early_weights import rows_at_once
from tilegym.ops.cutile.early_weights import waits_in_graph
from tilegym.ops.cutile.geglu import gelu_gated
from tilegym.ops.cutile.linear import total
from tilegym.ops.cutile.row_norms import add_pairs
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import scaled
from tilegym.ops.cutile.swiglu import gated
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count

BLOCKS = 3  # of a multiprocessor: with four, two turns ahead do not fit into the registers of all sizes


def normed_row(x, norms, eps, OFFSET: Float, ROUND: Bool, K: Int, TILE_K: Int):
    """In a kernel: the row x [1, K], normalised as rms_norm does it, as tiles [1, TILE_K]; norms: the weight's, or None
    for x as it is."""
    row = row_at_once(x, K, TILE_K)
    if norms is None:
        return row
    squares = ct.zeros((1, TILE_K), dtype=ct.float32)
    for k in ct.static_iter(range((K + TILE_K - 1) // TILE_K)):
        squares = squares + row[k].astype(ct.float32) * row[k].astype(ct.float32)
    rstd = rstd_of(squares, eps, K)
    ys = ()
    for k in ct.static_iter(range((K + TILE_K - 1) // TILE_K)):
        y = scaled(row[k].astype(ct.float32) * rstd, norms[k], None, x.dtype, OFFSET, ROUND)
        ys = (*ys, y.astype(x.dtype))
    return ys


def both_at_once(gate, up, n, K: Int, TILE_N: Int, TILE_K: Int):
    return rows_at_once(gate, n, K, TILE_N, TILE_K), rows_at_once(up, n, K, TILE_N, TILE_K)


def sums_of(weights, xs, K: Int, TILE_N: Int, TILE_K: Int):
    """In a kernel: the rows of two weights, as both_at_once has them, times the row xs: [TILE_N] each, in fp32."""
    gates = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    ups = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in ct.static_iter(range(K // TILE_K)):
        x = xs[k].astype(ct.float32)
        gates = gates + weights[0][k].astype(ct.float32) * x
        ups = ups + weights[1][k].astype(ct.float32) * x
    return ct.reduce((gates, ups), 1, add_pairs, (0.0, 0.0))


def activated(gate, up, ACTIVATION: Int):
    """In a kernel: the activation of ``gate``, by its place in ACTIVATIONS, times ``up``, in their dtype."""
    if ACTIVATION == 0:
        y = gated(gate, up)
    else:
        y = gelu_gated(gate, up, ACTIVATION == 1)
    return y


def gated_rows(weights, ys, out, n, ACTIVATION: Int, K: Int, TILE_N: Int, TILE_K: Int):
    """In a kernel: stores TILE_N elements, the n-th so many."""
    gate, up = sums_of(weights, ys, K, TILE_N, TILE_K)
    y = activated(gate.astype(out.dtype), up.astype(out.dtype), ACTIVATION)
    ct.store(out, (0, n), y.reshape((1, TILE_N)))


@ct.kernel
def stream_swiglu_kernel(
    x, norm, gate, up, out, eps, NORMED: Bool, OFFSET: Float, ROUND: Bool, ACTIVATION: Int, K: Int, TILE_N: Int,
    TILE_K: Int, AHEAD: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [1, K], norm [K] if NORMED, else 0, gate and up [N, K], out [1, N]; N is a multiple of TILE_N, K of TILE_K.
    # AHEAD: turns whose weights are on their way, one or two; 0: each block has one. What is behind a block's last turn
    # is that once more.
    let_next_begin(OVERLAP)
    first, blocks = ct.bid(0), ct.num_blocks(0)
    end = gate.shape[0] // TILE_N
    last = end - 1 - (end - 1 - first) % blocks
    one = both_at_once(gate, up, first, K, TILE_N, TILE_K)
    if AHEAD == 2:
        two = both_at_once(gate, up, min(first + blocks, last), K, TILE_N, TILE_K)
    norms = row_at_once(norm, K, TILE_K) if NORMED else None
    if OVERLAP:
        ct.grid_dependency_control_wait()
    ys = normed_row(x, norms, eps, OFFSET, ROUND, K, TILE_K)
    if AHEAD == 0:
        gated_rows(one, ys, out, first, ACTIVATION, K, TILE_N, TILE_K)
    elif AHEAD == 1:
        for n in range(first, end, blocks):
            now = one
            one = both_at_once(gate, up, min(n + blocks, last), K, TILE_N, TILE_K)
            gated_rows(now, ys, out, n, ACTIVATION, K, TILE_N, TILE_K)
    else:
        for n in range(first, end - blocks, 2 * blocks):
            now = one
            one = both_at_once(gate, up, min(n + 2 * blocks, last), K, TILE_N, TILE_K)
            gated_rows(now, ys, out, n, ACTIVATION, K, TILE_N, TILE_K)
            now = two
            two = both_at_once(gate, up, min(n + 3 * blocks, last), K, TILE_N, TILE_K)
            gated_rows(now, ys, out, n + blocks, ACTIVATION, K, TILE_N, TILE_K)
        if (last - first) % (2 * blocks) == 0:
            gated_rows(one, ys, out, last, ACTIVATION, K, TILE_N, TILE_K)


def one_of(weights, n, ends, FOUR: Bool, K: Int, TILE_N: Int, TILE_K: Int):
    """In a kernel: the n-th TILE_N rows of weights one below the other; n of the second begins with the first of the
    ``ends``."""
    first, second, third = ends
    if n < first:
        tiles = rows_at_once(weights[0], n, K, TILE_N, TILE_K)
    elif n < second:
        tiles = rows_at_once(weights[1], n - first, K, TILE_N, TILE_K)
    elif FOUR:
        if n < third:
            tiles = rows_at_once(weights[2], n - second, K, TILE_N, TILE_K)
        else:
            tiles = rows_at_once(weights[3], n - third, K, TILE_N, TILE_K)
    else:
        tiles = rows_at_once(weights[2], n - second, K, TILE_N, TILE_K)
    return tiles


def put_one(tiles, ys, biases, outs, n, ends, FOUR: Bool, BIAS: Bool, K: Int, TILE_N: Int, TILE_K: Int):
    """In a kernel: stores the products of such rows."""
    first, second, third = ends
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in ct.static_iter(range((K + TILE_K - 1) // TILE_K)):
        acc = acc + tiles[k].astype(ct.float32) * ys[k].astype(ct.float32)
    if n < first:
        put_total(acc, biases[0], outs[0], n, BIAS, TILE_N)
    elif n < second:
        put_total(acc, biases[1], outs[1], n - first, BIAS, TILE_N)
    elif FOUR:
        if n < third:
            put_total(acc, biases[2], outs[2], n - second, BIAS, TILE_N)
        else:
            put_total(acc, biases[3], outs[3], n - third, BIAS, TILE_N)
    else:
        put_total(acc, biases[2], outs[2], n - second, BIAS, TILE_N)


def put_total(acc, bias, out, n, BIAS: Bool, TILE_N: Int):
    ct.store(out, (0, n), total(acc, bias, n, BIAS, TILE_N).astype(out.dtype))


@ct.kernel
def stream_norm_gemv_kernel(
    x, norm, w1, w2, w3, b1, b2, b3, y1, y2, y3, first, second, end, eps, w4, b4, y4, third, FOUR: Bool,
    NORMED: Bool, OFFSET: Float, ROUND: Bool, BIAS: Bool, K: Int, TILE_N: Int, TILE_K: Int, AHEAD: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [1, K], norm [K] if NORMED, else 0; w_i [N_i, K], b_i [N_i] if BIAS, y_i [1, N_i]; N_i are multiples of TILE_N.
    # Of ``end`` turns those up to ``first`` are for w1, those up to ``second`` for w2, and if FOUR those from ``third``
    # on for w4; else w4, b4 and y4 are 0. AHEAD as above.
    let_next_begin(OVERLAP)
    begin, blocks = ct.bid(0), ct.num_blocks(0)
    last = end - 1 - (end - 1 - begin) % blocks
    weights, biases, outs = (w1, w2, w3, w4), (b1, b2, b3, b4), (y1, y2, y3, y4)
    ends = first, second, third
    one = one_of(weights, begin, ends, FOUR, K, TILE_N, TILE_K)
    if AHEAD == 2:
        two = one_of(weights, min(begin + blocks, last), ends, FOUR, K, TILE_N, TILE_K)
    norms = row_at_once(norm, K, TILE_K) if NORMED else None
    if OVERLAP:
        ct.grid_dependency_control_wait()
    ys = normed_row(x, norms, eps, OFFSET, ROUND, K, TILE_K)
    if AHEAD == 0:
        put_one(one, ys, biases, outs, begin, ends, FOUR, BIAS, K, TILE_N, TILE_K)
    elif AHEAD == 1:
        for n in range(begin, end, blocks):
            now = one
            one = one_of(weights, min(n + blocks, last), ends, FOUR, K, TILE_N, TILE_K)
            put_one(now, ys, biases, outs, n, ends, FOUR, BIAS, K, TILE_N, TILE_K)
    else:
        for n in range(begin, end - blocks, 2 * blocks):
            now = one
            one = one_of(weights, min(n + 2 * blocks, last), ends, FOUR, K, TILE_N, TILE_K)
            put_one(now, ys, biases, outs, n, ends, FOUR, BIAS, K, TILE_N, TILE_K)
            now = two
            two = one_of(weights, min(n + 3 * blocks, last), ends, FOUR, K, TILE_N, TILE_K)
            put_one(now, ys, biases, outs, n + blocks, ends, FOUR, BIAS, K, TILE_N, TILE_K)
        if (last - begin) % (2 * blocks) == 0:
            put_one(one, ys, biases, outs, last, ends, FOUR, BIAS, K, TILE_N, TILE_K)


@functools.lru_cache(maxsize=256)
def _plan(n: int, k: int, device: int) -> tuple[ct.kernel, int, tuple[int, int, int, bool]] | None:
    if device < 0:
        if k not in (64, 128, 192) or n % 4:
            return None
        tile_n, ahead = (4, 0) if k == 64 else (2, k // 64 - 1)
        return stream_swiglu_kernel, min(3, n // tile_n) if ahead else n // tile_n, (tile_n, 64, ahead, False)
    kernel, blocks = hinted(stream_swiglu_kernel, occupancy=BLOCKS), BLOCKS * sm_count(device)
    overlap = overlaps(device)
    if k <= 1024 and not (k % 256 or n % 8) and n // 8 <= blocks:
        return kernel, n // 8, (8, 256, 0, overlap)
    if 3072 <= k <= 8192 and k % 1024 == 0:
        return kernel, min(n, blocks), (1, 1024, 2 if k == 4096 else 1, overlap)
    return None


def plan(gate: torch.Tensor) -> tuple[ct.kernel, int, tuple[int, int, int, bool]] | None:
    """(kernel, blocks, (TILE_N, TILE_K, AHEAD, OVERLAP)) for gate and up [n, k]; None: norm_swiglu_kernel is for them.

    In a graph, in 16 bits. A layer takes so on an H200, with norm_swiglu_kernel in brackets: of Llama-3.1-8B 108.4 us
    (109.4; with one turn ahead 109.8), of Qwen3-8B 97.6 (98.3), of Llama-3.2-3B 64.6 (73.6; with two turns 70.0), of
    Qwen3-14B 192.1 (192.8; 199.6), of Llama-3.1-70B 428.3 (434.9), of Qwen3-0.6B 18.6 (19.7). With other widths, where
    rows are no multiple of what a block loads at once, it is slower, as with 2048 columns.
    """
    return _plan(*gate.shape, gate.get_device()) if waits_in_graph(gate) else None


@functools.lru_cache(maxsize=256)
def _norm_plan(
    rows: tuple[int, ...], k: int, device: int
) -> tuple[ct.kernel, int, tuple[int, ...], tuple[int, int, int, bool]] | None:
    tile_n, ahead, occupancy = _norm_tiles(rows[0], k, device < 0)
    if tile_n == 0 or any(n % tile_n for n in rows):
        return None
    turns = blocks = sum(rows) // tile_n
    if ahead:  # as many blocks as run at once, fewer where that takes no more turns
        at_once = occupancy * sm_count(device)
        blocks = -(-turns // -(-turns // at_once))
    kernel = stream_norm_gemv_kernel if device < 0 else hinted(stream_norm_gemv_kernel, occupancy=occupancy)
    tiles = (tile_n, 64 if device < 0 else 1024, ahead, overlaps(device))
    return kernel, blocks, tuple(sum(rows[:i]) // tile_n for i in (1, 2, 3, 4)), tiles


def _norm_tiles(n: int, k: int, on_cpu: bool) -> tuple[int, int, int]:
    """(TILE_N, AHEAD, blocks of a multiprocessor); TILE_N 0: the kernel is not for a first weight of [n, k]."""
    if on_cpu:
        return {64: (4, 0, 0), 128: (4, 0, 0), 160: (2, 1, 3), 192: (2, 2, 3)}.get(k, (0, 0, 0))
    if k in (1024, 4096):
        return (4, 0, 4) if 2 * n * k <= HALF_BYTES else (0, 0, 0)
    if k % 8 or not 1024 < k <= 8192:
        return 0, 0, 0
    if k < 4096:
        return 2, 2 if k == 2048 else 1, 4
    return 1, 1, 4 if k <= 5120 else 3


def norm_plan(
    weights: list[torch.Tensor],
) -> tuple[ct.kernel, int, tuple[int, ...], tuple[int, int, int, bool]] | None:
    """(kernel, blocks, ends, (TILE_N, TILE_K, AHEAD, OVERLAP)) for up to four weights [N_i, k]; ends: of their turns.

    None: norm_gemv_kernel is for them. In a graph, in 16 bits, k at most 8192. A layer takes so on an H200, with
    norm_gemv_kernel, or rows at once where the same kernel takes no turns (1024, 4096), in brackets: with the widths of
    Llama-3.1-70B 388.6 us (413.1), of Qwen3-14B 178.0 (183.2), of Llama-3.2-3B 58.1 (59.2), of Llama-3.2-1B 38.1
    (39.9), and of widths that 1024 does not divide, Qwen2.5-7B 114.3 (119.6), Qwen3-4B 58.7 (63.4), Qwen2.5-1.5B 34.2
    (35.5), and 2880, with gpt-oss-20b's heads and dense experts, 44.5 (47.2); of Llama-3.1-8B at best 107.0 (106.9).
    Rows at once were 112.0 there, when norm_gemv_kernel was 115.3, with half as many rows a block 121.6; of Qwen3-0.6B
    23.8 and 24.6.
    """
    if not waits_in_graph(weights[0]):
        return None
    return _norm_plan(tuple(w.shape[0] for w in weights), weights[0].shape[1], weights[0].get_device())
