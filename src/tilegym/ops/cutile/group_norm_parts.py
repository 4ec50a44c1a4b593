"""Kernels of group normalisation that hold a group in the registers of several blocks, so that it is read once.

A block takes a part: TILE_M channels of a group and TILE_N positions. It publishes what the group needs to know of its
part, and waits for what the group's other blocks publish. If it has looked ``patience`` times in vain, because they do
not run, it computes that itself. Forward these are the part's mean and sum of squared differences to it, which are
merged as Chan, Golub and LeVeque 1979 do, backward ``sum(g)`` and ``sum(g * xhat)`` with ``g = dy * w``.

x, y: [B * C, S]; statistics: [B * groups, 3], mean, what rounding left of it, and rstd; states: int64, one a part of
all groups, zeros before; PARTS: the number of a group's parts, or the next power of two; CHANNELS in a group, C in all;
OVERLAP: the launch before has to be waited for. A block that is its whole group needs no states.
"""

import cuda.tile as ct

from tilegym.ops.cutile.parts import bits
from tilegym.ops.cutile.parts import high
from tilegym.ops.cutile.parts import look
from tilegym.ops.cutile.parts import low
from tilegym.ops.cutile.parts import publish
from tilegym.ops.cutile.parts import wait
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int


def known(statistics, groups):
    """Mean, what rounding left of it, and rstd."""
    return ct.gather(statistics, (groups, 0)), ct.gather(statistics, (groups, 1)), ct.gather(statistics, (groups, 2))


def _again(row, true):
    """``row`` in fp32; bf16 is converted anew, since the compiler does not know that ``true`` is: so what is held until
    then are 16 bits a value."""
    if row.dtype == ct.bfloat16:
        shift = ct.where(true, 16, 0).astype(ct.uint32)
        return ct.bitcast(ct.bitcast(row, ct.uint16).astype(ct.uint32) << shift, ct.float32)
    return row.astype(ct.float32)


def _part(number, S: Int, CHANNELS: Int, TILE_M: Int, TILE_N: Int):
    """The rows and columns of part ``number`` of all groups', and the channel of each row in its group."""
    across = ct.cdiv(S, TILE_N)
    parts = across * ct.cdiv(CHANNELS, TILE_M)
    group, part = number // parts, number % parts
    channels = part // across * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    rows = ct.where(channels < CHANNELS, group * CHANNELS + channels, -1)
    return rows, part % across * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :], channels


def _sizes(parts, S: Int, CHANNELS: Int, TILE_M: Int, TILE_N: Int):
    """How many elements these parts of a group have."""
    across = ct.cdiv(S, TILE_N)
    high, wide = CHANNELS - parts // across * TILE_M, S - parts % across * TILE_N
    return (ct.minimum(high, TILE_M) * ct.minimum(wide, TILE_N)).astype(ct.float32)


def _own(vector, rows, channels, C: Int):
    """The values of the rows' channels, [TILE_M, 1], of a ``vector`` [C]."""
    return ct.gather(vector, ct.where(rows >= 0, (rows - channels) % C + channels, -1)).astype(ct.float32)


def _publish(states, number, first, second):
    """Two numbers in fp32 as one state, of which the last bit says that it is there."""
    publish(states, number, (bits(first) << 32) | bits(second) | 1)


def _numbers(found):
    """What was published, 0 where nothing was."""
    return high(found), low(found)


def _moments(tile, rows, cols, count, true, S: Int, CHANNELS: Int):
    """Mean and sum of squared differences to it."""
    mean = ct.sum(tile.astype(ct.float32)) / count
    rest = _again(tile, true) - mean
    if CHANNELS % tile.shape[0] != 0 or S % tile.shape[1] != 0:
        rest = ct.where((rows >= 0) & (cols < S), rest, 0.0)
    # What rounding left of the mean: a long sum of large values is off by more than one such value's rounding.
    off = ct.sum(rest) / count
    return mean + off, ct.sum(rest * rest) - off * off * count


@ct.kernel
def group_norm_parts_kernel(
    x, weight, bias, y, statistics, states, patience, eps, S: Int, C: Int, CHANNELS: Int, TILE_M: Int, TILE_N: Int,
    PARTS: Int, WEIGHT: Bool, BIAS: Bool, OVERLAP: Bool,
):  # fmt: skip
    block = ct.bid(0)
    parts = ct.cdiv(S, TILE_N) * ct.cdiv(CHANNELS, TILE_M)
    group, first = block // parts, block // parts * parts
    rows, cols, channels = _part(block, S, CHANNELS, TILE_M, TILE_N)
    tile = ct.gather(x, (rows, cols))
    count = _sizes(block - first, S, CHANNELS, TILE_M, TILE_N)
    mean, total = _moments(tile, rows, cols, count, block > -2, S, CHANNELS)
    off = 0.0
    if PARTS > 1:
        if OVERLAP:
            ct.grid_dependency_control_wait()
        _publish(states, block, mean, total)
        found, missing = wait(states, first, parts, patience, PARTS)
        if missing > 0:
            for i in range(parts):
                of_rows, of_cols, _ = _part(first + i, S, CHANNELS, TILE_M, TILE_N)
                other, of_count = ct.gather(x, (of_rows, of_cols)), _sizes(i, S, CHANNELS, TILE_M, TILE_N)
                _publish(states, first + i, *_moments(other, of_rows, of_cols, of_count, block > -2, S, CHANNELS))
            while missing > 0:
                found, missing = look(states, first, parts, PARTS)
            tile = ct.gather(x, (rows, cols))  # which takes no registers until now
        means, squares = _numbers(found)
        index = ct.arange(PARTS, dtype=ct.int32)
        counts = ct.where(index < parts, _sizes(index, S, CHANNELS, TILE_M, TILE_N), 0.0)
        mean = ct.sum(means * counts) / (CHANNELS * S)
        rest = ct.where(index < parts, means - mean, 0.0)
        off = ct.sum(rest * counts) / (CHANNELS * S)
        rest = rest - off
        total = ct.sum(squares) + ct.sum(rest * rest * counts)
    rstd = ct.rsqrt(total / (CHANNELS * S) + eps)
    if block == first:
        ct.scatter(statistics, (group, 0), mean)
        ct.scatter(statistics, (group, 1), off)
        ct.scatter(statistics, (group, 2), rstd)
    out = (_again(tile, block > -3) - mean - off) * rstd
    out = out * _own(weight, rows, channels, C) if WEIGHT else out
    out = out + _own(bias, rows, channels, C) if BIAS else out
    ct.scatter(y, (rows, cols), out.astype(y.dtype))


def _sums(up, row, mean, off, rstd):
    """Of each row the sums of dy and of dy * xhat, [TILE_M, 1]."""
    up = up.astype(ct.float32)  # 0 outside of the part
    product = up * (row.astype(ct.float32) - mean - off)
    return ct.sum(up, axis=1, keepdims=True), ct.sum(product, axis=1, keepdims=True) * rstd


@ct.kernel
def group_norm_parts_backward_kernel(
    dy, x, statistics, weight, dx, sums, products, states, patience, S: Int, C: Int, CHANNELS: Int, TILE_M: Int,
    TILE_N: Int, PARTS: Int, WEIGHT: Bool, OVERLAP: Bool,
):  # fmt: skip
    """sums, products: [B * parts of a row, C], of dy and of dy * xhat."""
    block, across = ct.bid(0), ct.cdiv(S, TILE_N)
    parts = across * ct.cdiv(CHANNELS, TILE_M)
    group, first = block // parts, block // parts * parts
    rows, cols, channels = _part(block, S, CHANNELS, TILE_M, TILE_N)
    up, row = ct.gather(dy, (rows, cols)), ct.gather(x, (rows, cols))
    mean, off, rstd = known(statistics, group)
    w = _own(weight, rows, channels, C) if WEIGHT else 1.0
    total, product = _sums(up, row, mean, off, rstd)
    at = (group * CHANNELS // C * across + block % across, ct.where(rows >= 0, group * CHANNELS % C + channels, -1))
    ct.scatter(sums, at, total)
    ct.scatter(products, at, product)
    of_g, of_product = ct.sum(total * w), ct.sum(product * w)
    if PARTS > 1:
        if OVERLAP:
            ct.grid_dependency_control_wait()
        _publish(states, block, of_g, of_product)
        found, missing = wait(states, first, parts, patience, PARTS)
        if missing > 0:
            for i in range(parts):
                of_rows, of_cols, of_channels = _part(first + i, S, CHANNELS, TILE_M, TILE_N)
                of_w = _own(weight, of_rows, of_channels, C) if WEIGHT else 1.0
                other = ct.gather(dy, (of_rows, of_cols)), ct.gather(x, (of_rows, of_cols))
                total, product = _sums(*other, mean, off, rstd)
                _publish(states, first + i, ct.sum(total * of_w), ct.sum(product * of_w))
            while missing > 0:
                found, missing = look(states, first, parts, PARTS)
            up, row = ct.gather(dy, (rows, cols)), ct.gather(x, (rows, cols))  # which take no registers until now
        all_g, all_products = _numbers(found)
        of_g, of_product = ct.sum(all_g), ct.sum(all_products)
    mean_g, mean_product = of_g / (CHANNELS * S), of_product / (CHANNELS * S)
    g = _again(up, block > -3) * w - mean_g
    grad = rstd * (g - (_again(row, block > -3) - mean - off) * (rstd * mean_product))
    ct.scatter(dx, (rows, cols), grad.astype(dx.dtype))
