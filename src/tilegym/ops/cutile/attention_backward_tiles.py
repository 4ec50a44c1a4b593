"""Tiles of queries and keys as the kernels of attention's backward pass take them: in parts of columns."""

import cuda.tile as ct

from tilegym.ops.cutile.attention_common import load_rows
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int


def load_parts(x, pe, batch, head, pe_head, i, ROWS: Int, TILE_P: Int, PARTS: Int, TILE_R: Int, TF32: Bool):
    """As load_rows, PARTS tiles of TILE_P columns, and if TILE_R one of the columns behind them: of ``x``, or, unless
    that is 0, of head ``pe_head`` of ``pe``.
    """
    tiles = ()
    for part in ct.static_iter(range(PARTS)):
        tiles = (*tiles, load_rows(x, batch, head, i, ROWS, TILE_P, TF32, part))
    if TILE_R:
        if pe.ndim == 0:
            tiles = (*tiles, load_rows(x, batch, head, i, ROWS, TILE_R, TF32, PARTS * TILE_P // TILE_R))
        else:
            tiles = (*tiles, load_rows(pe, batch, pe_head, i, ROWS, TILE_R, TF32))
    return tiles


def zero_parts(ROWS: Int, TILE_P: Int, PARTS: Int, TILE_R: Int):
    tiles = ()
    for _ in ct.static_iter(range(PARTS)):
        tiles = (*tiles, ct.zeros((ROWS, TILE_P), dtype=ct.float32))
    if TILE_R:
        tiles = (*tiles, ct.zeros((ROWS, TILE_R), dtype=ct.float32))
    return tiles


def sum_of_products(a, b, total):
    """``total`` and a b^T of all parts."""
    for part in ct.static_iter(range(len(a))):
        total = ct.mma(a[part], ct.transpose(b[part]), total)
    return total


def add_products(a, b, totals):
    """``totals[n] + a b[n]`` of all parts."""
    new = ()
    for part in ct.static_iter(range(len(b))):
        new = (*new, ct.mma(a, b[part], totals[part]))
    return new


def keep_rows(kept, tiles):
    new = ()
    for part in ct.static_iter(range(len(tiles))):
        new = (*new, ct.where(kept, tiles[part], 0.0))
    return new


def column_of(part: int, tiles):
    """Where tile number ``part`` begins in an array that has all, in units of its own columns, which divide others'."""
    return part * tiles[0].shape[1] // tiles[part].shape[1]


def store_parts(x, pe, batch, head, i, tiles, scaling, PARTS: Int):
    """The reverse of load_parts, times ``scaling`` unless that is None."""
    for part in ct.static_iter(range(len(tiles))):
        tile = tiles[part] if scaling is None else tiles[part] * scaling
        if part == PARTS and pe.ndim:
            ct.store(pe, (batch, head, i, 0), tile.reshape((1, 1, *tile.shape)).astype(pe.dtype))
        else:
            index = (batch, head, i, column_of(part, tiles))
            ct.store(x, index, tile.reshape((1, 1, *tile.shape)).astype(x.dtype))


def load_statistic(x, part, batch, head, i, TILE_M: Int):
    """Of x [parts, B, Hq, Sq] the values of some queries, [TILE_M]."""
    tile = ct.load(x, (part, batch, head, i), (1, 1, 1, TILE_M), padding_mode=ct.PaddingMode.ZERO)
    return tile.reshape((TILE_M,))
