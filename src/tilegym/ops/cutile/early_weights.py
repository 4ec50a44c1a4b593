"""Weights on their way to the L2 cache while a launch still waits for the one in front of it.

In a captured decoding step a launch begins before its predecessor ends, and waits for the row that it writes. The
memory would idle meanwhile, since what blocks read behind the wait they cannot ask for before: the compiler moves no
load by tensor map across it, and gathered tiles that are kept take the registers of the loop that follows. So one
element of each sector is gathered and nothing made of it. The same bytes are then loaded again as if nothing had been,
from the L2 cache, where whatever has been written meanwhile is seen.

On an H200 a layer of Llama-3.1-8B, all its launches in a graph, takes 114.8 us instead of 118.9.
"""

import cuda.tile as ct
import torch

from tilegym.backend import recording
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int

SECTOR = 32  # bytes that come from memory together
THREADS = 128  # of a block: each has an element in flight for every tile that is gathered
NOTHING = -1  # what no element's bits are, which the compiler must not know
MIN_BYTES = 2**25  # of the smallest weight, 4096x4096, for which it was measured


def begin_early(weights, n, out, nothing, TILE_N: Int, early, COLS: Int, OVERLAP: Bool):
    """In a kernel, as ``begin``, first of all: block n reads ahead of the wait what it then takes from ``weights``.

    Of each of them, [N, K] in 16 bits, the first COLS columns of TILE_N rows, by the ``early`` blocks that run first.
    ``nothing`` is NOTHING, which no element is: for it the first of ``out``, [1, N] or [1, 1, N], would be written.
    COLS is a multiple of what THREADS sectors of TILE_N rows cover.
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
                    tile = ct.gather(weight, (rows, cols + i * (step * across)))
                    seen = ct.maximum(seen, ct.bitcast(tile, ct.uint16).astype(ct.int32))
            at = 0 * seen
            index = (at, at) if out.ndim == 2 else (at, at, at)
            ct.scatter(out, index, at.astype(out.dtype), mask=seen == nothing)
    if OVERLAP:
        ct.grid_dependency_control_wait()


def columns_of(k: int, tile_n: int, wanted: int) -> int:
    """COLS: ``wanted``, but no more than rows of k columns need."""
    at_once = SECTOR // 2 * (THREADS // tile_n)
    return min(wanted, -(-k // at_once) * at_once)


def early_columns(weight: torch.Tensor, wanted: int) -> int:
    """COLS for a launch that reads ``weight`` first: ``wanted`` where its predecessor keeps it waiting, else 0.

    That is in a graph. One launch at a time, as eager calls mostly are, would wait for nothing but these loads.
    """
    if weight.dtype.itemsize != 2:
        return 0
    if not weight.is_cuda:
        return wanted
    waits = recording.ask(torch.cuda.is_current_stream_capturing)
    return wanted if waits and 2 * weight.numel() >= MIN_BYTES else 0
