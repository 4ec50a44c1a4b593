"""Weights on their way to the L2 cache while a launch still waits for the one in front of it.

In a captured decoding step a launch begins before its predecessor ends, and waits for the row that it writes. The
memory would idle meanwhile, since what blocks read behind the wait they cannot ask for before: the compiler moves no
load by tensor map across it, and gathered tiles that are kept take the registers of the loop that follows. So one
element of each sector is gathered and nothing made of it. The same bytes are then loaded again as if nothing had been,
from the L2 cache, where whatever has been written meanwhile is seen.

On an H200 a layer of Llama-3.1-8B, all its launches in a graph, takes 114.8 us instead of 118.9.

Where a block's rows fit into its registers, and enough blocks beside each other, all of them are loaded at once and
kept (``rows_at_once``), which takes no second load.
"""

import cuda.tile as ct
import torch

from tilegym.backend import recording
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int

SECTOR = 32  # bytes that come from memory together
THREADS = 128  # of a block: each has an element in flight for every tile that is gathered
NOTHING = -1  # what no element's bits are, which the compiler must not know
# Of the smallest weight for which it was measured, and of the largest for which half as much is faster. On an H200 a
# layer with the sizes of Qwen3-0.6B takes 24.6 us so (25.7 without), of Llama-3.2-1B 46.4 (48.5); of Qwen2.5-7B, whose
# weights are larger but for two of 26 MB, 125.1 (124.5 with all, 126.1 without).
MIN_BYTES, HALF_BYTES = 2**22, 2**25


def begin_early(weights, n, out, nothing, TILE_N: Int, early, COLS: Int, OVERLAP: Bool, IN_TURN: Bool = False):
    """In a kernel, as ``begin``, first of all: block n reads ahead of the wait what it then takes from ``weights``.

    Of each of them, [N, K] in 16 bits, the first COLS columns of TILE_N rows, by the ``early`` blocks that run first.
    ``nothing`` is NOTHING, which no element is: for it the first of ``out``, [1, N] or [1, 1, N], would be written.
    COLS is a multiple of what THREADS sectors of TILE_N rows cover. IN_TURN: each load waits for the one before it, so
    that what the launch in front still loads does not queue behind them all.
    """
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    if COLS > 0:
        if n < early:
            step, across = ct.static_eval(SECTOR // 2), ct.static_eval(THREADS // TILE_N)
            rows = n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[:, None]
            cols = step * ct.arange(across, dtype=ct.int32)[None, :]
            seen = ct.zeros((TILE_N, across), dtype=ct.int32)
            for weight in ct.static_iter(weights):
                for i in ct.static_iter(range(COLS // (step * across))):
                    at = cols + i * (step * across)
                    if IN_TURN:
                        at = at + ct.where(seen == nothing, 1, 0)
                    tile = ct.gather(weight, (rows, at))
                    seen = ct.maximum(seen, ct.bitcast(tile, ct.uint16).astype(ct.int32))
            at = 0 * seen
            index = (at, at) if out.ndim == 2 else (at, at, at)
            ct.scatter(out, index, at.astype(out.dtype), mask=seen == nothing)
    if OVERLAP:
        ct.grid_dependency_control_wait()


def rows_at_once(weight, n, K: Int, TILE_N: Int, TILE_K: Int):
    """In a kernel: rows n * TILE_N to (n + 1) * TILE_N of ``weight``, [N, K], as tiles [TILE_N, TILE_K].

    N is a multiple of TILE_N. K is one of TILE_K, or all columns: the last tile is 0 beyond them.
    """
    rows = (n * TILE_N + ct.arange(TILE_N, dtype=ct.int32))[:, None]
    cols = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    tiles = ()
    for k in ct.static_iter(range((K + TILE_K - 1) // TILE_K)):
        check = (k + 1) * TILE_K > K
        tiles = (*tiles, ct.gather(weight, (rows, cols + k * TILE_K), check_bounds=check))
    return tiles


def row_at_once(x, K: Int, TILE_K: Int):
    """In a kernel: ``x``, [K] or [1, K], as tiles [1, TILE_K], the last one 0 beyond K."""
    cols = ct.arange(TILE_K, dtype=ct.int32)[None, :]
    tiles = ()
    for k in ct.static_iter(range((K + TILE_K - 1) // TILE_K)):
        at, check = cols + k * TILE_K, (k + 1) * TILE_K > K
        tiles = (*tiles, ct.gather(x, (0, at) if x.ndim == 2 else at, check_bounds=check))
    return tiles


def columns_of(k: int, tile_n: int, wanted: int) -> int:
    """COLS: ``wanted`` or a little more, but no more than rows of k columns need."""
    at_once = SECTOR // 2 * (THREADS // tile_n)
    return min(-(-wanted // at_once), -(-k // at_once)) * at_once


def waits_in_graph(weight: torch.Tensor) -> bool:
    """Whether a launch that reads ``weight`` has a predecessor that keeps it waiting, for whose time this is made.

    That is in a graph. One launch at a time, as eager calls mostly are, would wait for nothing but these loads. On a
    CPU always, so that tests see it.
    """
    if weight.dtype.itemsize != 2:
        return False
    if not weight.is_cuda:
        return True
    return 2 * weight.numel() >= MIN_BYTES and recording.ask(torch.cuda.is_current_stream_capturing)


def early_columns(weight: torch.Tensor, tile_n: int, wanted: int) -> int:
    """COLS for a launch that reads ``weight`` first by rows of tile_n: ``wanted``, of smaller ones half; 0 for none."""
    if not waits_in_graph(weight):
        return 0
    half = weight.is_cuda and 2 * weight.numel() <= HALF_BYTES
    return columns_of(weight.shape[1], tile_n, wanted // 2 if half else wanted)


def rows_fit(weight: torch.Tensor) -> bool:
    """Whether a launch that reads ``weight`` first does it by ``rows_at_once``, four rows in tiles of 1024 columns.

    That is in a graph, for sizes between those for which it was measured, 2048x1024 and 4096x4096; longer rows need
    more registers than there are.
    """
    n, k = weight.shape
    if not weight.is_cuda:
        return weight.dtype.itemsize == 2 and not n % 4 and k in (64, 128)
    return k <= 4096 and not (n % 4 or k % 1024) and 2 * weight.numel() <= HALF_BYTES and waits_in_graph(weight)
