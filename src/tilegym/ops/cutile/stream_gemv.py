"""Rows of gate and up one after the other by a few blocks, the next ones on their way while one is multiplied.

A block that takes some rows and ends leaves the memory idle while the next one begins, normalises the row and asks for
its first weights. Here as many blocks as run beside each other take all rows in turn, and hold the row, normalised
once, and the weights of one or two turns ahead in registers; the first of them come ahead of the wait for the launch in
front. Where a wave of blocks holds all there is, each takes its rows at once.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.ops.cutile.early_weights import row_at_once
from tilegym.ops.cutile.early_weights import rows_at_once
from tilegym.ops.cutile.early_weights import waits_in_graph
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
    """In a kernel: the row x [1, K], normalised as rms_norm does it, as tiles [1, TILE_K]; norms: the weight's."""
    row = row_at_once(x, K, TILE_K)
    squares = ct.zeros((1, TILE_K), dtype=ct.float32)
    for k in ct.static_iter(range(K // TILE_K)):
        squares = squares + row[k].astype(ct.float32) * row[k].astype(ct.float32)
    rstd = rstd_of(squares, eps, K)
    ys = ()
    for k in ct.static_iter(range(K // TILE_K)):
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


def gated_rows(weights, ys, out, n, K: Int, TILE_N: Int, TILE_K: Int):
    """In a kernel: stores TILE_N elements, the n-th so many."""
    gate, up = sums_of(weights, ys, K, TILE_N, TILE_K)
    ct.store(out, (0, n), gated(gate.astype(out.dtype), up.astype(out.dtype)).reshape((1, TILE_N)))


@ct.kernel
def stream_swiglu_kernel(
    x, norm, gate, up, out, eps, OFFSET: Float, ROUND: Bool, K: Int, TILE_N: Int, TILE_K: Int, AHEAD: Int, OVERLAP: Bool
):  # fmt: skip
    # x [1, K], norm [K], gate and up [N, K], out [1, N]; N is a multiple of TILE_N, K of TILE_K. AHEAD: turns whose
    # weights are on their way, one or two; 0: each block has one. What is behind a block's last turn is that once more.
    let_next_begin(OVERLAP)
    first, blocks = ct.bid(0), ct.num_blocks(0)
    end = gate.shape[0] // TILE_N
    last = end - 1 - (end - 1 - first) % blocks
    one = both_at_once(gate, up, first, K, TILE_N, TILE_K)
    if AHEAD == 2:
        two = both_at_once(gate, up, min(first + blocks, last), K, TILE_N, TILE_K)
    norms = row_at_once(norm, K, TILE_K)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    ys = normed_row(x, norms, eps, OFFSET, ROUND, K, TILE_K)
    if AHEAD == 0:
        gated_rows(one, ys, out, first, K, TILE_N, TILE_K)
    elif AHEAD == 1:
        for n in range(first, end, blocks):
            now = one
            one = both_at_once(gate, up, min(n + blocks, last), K, TILE_N, TILE_K)
            gated_rows(now, ys, out, n, K, TILE_N, TILE_K)
    else:
        for n in range(first, end - blocks, 2 * blocks):
            now = one
            one = both_at_once(gate, up, min(n + 2 * blocks, last), K, TILE_N, TILE_K)
            gated_rows(now, ys, out, n, K, TILE_N, TILE_K)
            now = two
            two = both_at_once(gate, up, min(n + 3 * blocks, last), K, TILE_N, TILE_K)
            gated_rows(now, ys, out, n + blocks, K, TILE_N, TILE_K)
        if (last - first) % (2 * blocks) == 0:
            gated_rows(one, ys, out, last, K, TILE_N, TILE_K)


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
