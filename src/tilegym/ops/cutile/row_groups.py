"""Long rows that begin anywhere in memory, as those of GPT-2's 50257 logits, read and written 16 bytes at a time.

Taken row by row, their numbers would be read one by one, and so would those of rows of 50264: they begin at 16 bytes,
but that they end there the compiler knows of multiples of WHOLE alone. So all rows together are an array of groups of V
numbers, 16 bytes each, and the parts of a row are of the groups that lie in it. What is left of a row, its edges, lies
in a group before these and in one behind, which hold numbers of the rows beside it, too: they are read and written one
by one.
"""

import cuda.tile as ct
import torch

from tilegym.ops.cutile.tiling import LINE
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import span

WHOLE = 16  # numbers: of a shape cuTile tells the compiler whether they divide it
MAX_NUMBERS = 2**31 - 2**20  # which 32 bits count, and those of a part that begins behind them


def group_size(n: int, *arrays: torch.Tensor) -> int:
    """V of arrays of one shape whose rows have n numbers, if groups serve them better than rows, else 0."""
    v, numbers = LINE // arrays[0].element_size(), arrays[0].numel()
    served = n % WHOLE and numbers % v == 0 and numbers <= MAX_NUMBERS and all(x.is_contiguous() for x in arrays)
    return v if served else 0


def parts_of_groups(n: int, tile_n: int, v: int) -> tuple[int, int]:
    """How many parts of ``tile_n`` numbers the groups of a row of n make, and up to how many numbers are its edges."""
    return ct.cdiv(n // v * v, tile_n), 2 * v if n % v else 0


def _places(row, n, limit, number, TILE_N: Int, V: Int):
    """Where the numbers of part ``number`` of a row of n are, and which are of groups in its first ``limit``."""
    # Multiplied with V last: that is how the compiler knows what divides them.
    first = ((row * n + V - 1) // V + number * (TILE_N // V)) * V
    index = ct.arange(TILE_N, dtype=ct.int32)
    return first + index, index < (row * n + limit) // V * V - first


def load_groups(x, row, n, limit, number, TILE_N: Int, V: Int, padding):
    place, there = _places(row, n, limit, number, TILE_N, V)
    return ct.gather(x, place, mask=there, padding_value=padding, check_bounds=False)


def _store_groups(y, row, n, number, out, TILE_N: Int, V: Int):
    place, there = _places(row, n, n, number, TILE_N, V)
    ct.scatter(y, place, out.astype(y.dtype), mask=there, check_bounds=False)


def _edges(row, n, V: Int):
    """Where a row's edges are, [2 * V], and which of these places are some; a row has more numbers than that."""
    start, end, index = row * n, row * n + n, ct.arange(2 * V, dtype=ct.int32)
    place = ct.where(index < V, start + index, end // V * V + index - V)
    return place, place < ct.where(index < V, (start + V - 1) // V * V, end)


def _load_edges(x, row, n, wanted, V: Int, padding):
    """A row's edges if they are ``wanted``; ``padding`` in all other places of [2 * V]."""
    place, there = _edges(row, n, V)
    return ct.gather(x, place, mask=there & wanted, padding_value=padding, check_bounds=False)


def _store_edges(y, row, n, wanted, out, V: Int):
    place, there = _edges(row, n, V)
    ct.scatter(y, place, out.astype(y.dtype), mask=there & wanted, check_bounds=False)


def store_part(y, row, n, number, out, TILE_N: Int, V: Int):
    if V:
        _store_groups(y, row, n, number, out, TILE_N, V)
    else:
        ct.scatter(y, at(y, row, span(number, TILE_N)), out.astype(y.dtype))


def _rest_columns(parts, wanted, TILE_N: Int, EXTRA: Int):
    return ct.where(wanted, parts * TILE_N + ct.arange(EXTRA, dtype=ct.int32), -1)


def load_rest(x, row, n, parts, wanted, TILE_N: Int, EXTRA: Int, V: Int, padding):
    """What a row has beside its parts, up to EXTRA numbers, if that is ``wanted``."""
    if V:
        rest = _load_edges(x, row, n, wanted, V, padding)
    else:
        rest = ct.gather(x, at(x, row, _rest_columns(parts, wanted, TILE_N, EXTRA)), padding_value=padding)
    return rest


def store_rest(y, row, n, parts, wanted, out, TILE_N: Int, EXTRA: Int, V: Int):
    if V:
        _store_edges(y, row, n, wanted, out, V)
    else:
        ct.scatter(y, at(y, row, _rest_columns(parts, wanted, TILE_N, EXTRA)), out.astype(y.dtype))
