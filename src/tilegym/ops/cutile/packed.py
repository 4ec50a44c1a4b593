"""In kernels over packed sequences: which one a block works at, and where it lies."""

import cuda.tile as ct

from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int

STARTS_AT_ONCE = 128


def number_at(x, i):
    """Number ``i`` of a vector of integers."""
    return ct.load(x, (i,), (1,)).astype(ct.int32).item()


def last_start(starts, t, TILE: Int, OWN_TILES: Bool):
    """The last n with ``starts[n] // TILE <= t``, if OWN_TILES with ``starts[n] // TILE + n <= t``."""
    count = 0
    for c in range(ct.cdiv(starts.shape[0], STARTS_AT_ONCE)):
        n = c * STARTS_AT_ONCE + ct.arange(STARTS_AT_ONCE, dtype=ct.int32)
        real = n < starts.shape[0]
        first = ct.gather(starts, n, mask=real).astype(ct.int32) // TILE
        if OWN_TILES:
            first = first + n
        count = count + ct.sum((real & (first <= t)).astype(ct.int32)).item()
    return count - 1


def keys_of_sequence(starts, sequence, end):
    """Where sequence number ``sequence`` begins, and its length; that behind the last one reaches to ``end``."""
    first = number_at(starts, sequence)
    behind = end
    if sequence < starts.shape[0] - 1:
        behind = number_at(starts, sequence + 1)
    return first, behind - first
