"""How :mod:`tilegym.ops.cutile.decode_varlen` finds and loads a tile of keys or values, packed or in pages.

A page of few keys makes no tile that ``ct.mma`` multiplies well, and rows that are addressed one by one take twice to
four times as long. Such a page's tile has the keys of several kv heads, HEADS, one behind the other for each key: row r
is of key r // HEADS and head r % HEADS of them. Its products with queries of other heads are left out of the softmax.
"""

import cuda.tile as ct

from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int


def page_of(pages, n, key, SIZE: Int):
    """In a kernel: the page that holds a key of sequence n. A tile of one number would be loaded by the warps that
    multiply, and those that load wait for them."""
    return ct.gather(pages, (n, key // SIZE)).astype(ct.int32).item()


def place_of(pages, n, j, seen, TILE_N: Int, HEADS: Int, SIZE: Int):
    """In a kernel: where tile j of the keys of sequence n is: its page, and which of the page's tiles it is; or, where
    a tile may lie in several pages, the page and the row of each key, two [TILE_N]."""
    if SIZE == 0:
        return 0, j
    if SIZE * HEADS % TILE_N == 0:
        return page_of(pages, n, j * (TILE_N // HEADS), SIZE), j % (SIZE * HEADS // TILE_N)
    key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    return ct.gather(pages, (n, key // SIZE), mask=seen).astype(ct.int32), key % SIZE


def keys_of(k, page, first_head, row, seen, TILE_N: Int, TILE_D: Int, HEADS: Int, SIZE: Int, FULL: Bool):
    """In a kernel: the tile of keys, [TILE_N, TILE_D], at what :func:`place_of` gave."""
    zero = ct.PaddingMode.ZERO
    if HEADS > 1:
        shape = (1, 1, TILE_N // HEADS, HEADS, TILE_D)
        return ct.load(k, (page, first_head, row, 0, 0), shape, padding_mode=zero).reshape((TILE_N, TILE_D))
    if SIZE % TILE_N == 0:
        tile = ct.load(k, (page, first_head, row, 0), (1, 1, TILE_N, TILE_D), padding_mode=zero)
        return tile.reshape((TILE_N, TILE_D))
    at = (page[:, None], first_head, row[:, None], ct.arange(TILE_D, dtype=ct.int32)[None, :])
    return ct.gather(k, at, mask=seen[:, None], check_bounds=not FULL)


def values_of(
    v, page, first_head, row, seen, TILE_N: Int, TILE_DV: Int, HEADS: Int, SIZE: Int, FULL: Bool, MASKED: bool
):
    """In a kernel: the tile of values, [TILE_DV, TILE_N]; zeros where not ``seen`` if MASKED and of one head."""
    dims, zero = ct.arange(TILE_DV, dtype=ct.int32)[:, None], ct.PaddingMode.ZERO
    if HEADS > 1:
        shape, order = (1, 1, TILE_DV, TILE_N // HEADS, HEADS), (0, 1, 4, 2, 3)
        tile = ct.load(v, (page, first_head, 0, row, 0), shape, order=order, padding_mode=zero)
        return tile.reshape((TILE_DV, TILE_N))
    if SIZE % TILE_N > 0:
        return ct.gather(v, (page[None, :], first_head, row[None, :], dims), mask=seen[None, :], check_bounds=not FULL)
    if MASKED:
        rows = row * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        return ct.gather(v, (page, first_head, rows, dims), mask=seen[None, :])
    tile = ct.load(v, (page, first_head, 0, row), (1, 1, TILE_DV, TILE_N), order=(0, 1, 3, 2), padding_mode=zero)
    return tile.reshape((TILE_DV, TILE_N))


def add_by_head(acc, v_tile, p, seen, own, HEADS: Int):
    """In a kernel: ``acc`` plus the product of values and ``p``, in each column only of values that are ``seen`` and of
    the head that ``own`` says; for values of which some are not finite."""
    head = ct.arange(v_tile.shape[1], dtype=ct.int32) % HEADS
    for h in range(HEADS):
        values = ct.where((seen & (head == h))[None, :], v_tile, ct.zeros(v_tile.shape, v_tile.dtype))
        acc = ct.where((own == h)[None, :], ct.mma(values, p, acc), acc)
    return acc


def scatter_new(array, at, new, n, HEADS: Int, TILE: Int):
    """In a kernel: writes the rows of ``new``, [N, Hkv, D], of sequence n and HEADS heads to ``at``: the page, which
    HEADS heads of it, and the row in the page."""
    columns, first_head = ct.arange(TILE, dtype=ct.int32), at[1]
    if HEADS == 1:
        ct.scatter(array, (*at, columns), ct.gather(new, (n, first_head, columns)))
    else:
        each, columns = ct.arange(HEADS, dtype=ct.int32)[:, None], columns[None, :]
        ct.scatter(array, (*at, each, columns), ct.gather(new, (n, first_head * HEADS + each, columns)))
