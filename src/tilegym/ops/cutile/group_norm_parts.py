"""Kernels of group normalisation that hold a group in the registers of several blocks, so that it is read once.

A block takes a part: TILE_M channels of a group and TILE_N positions. It publishes what the group needs to know of its
part, and waits for what the group's other blocks publish. If it has looked ``patience`` times in vain, because they do
not run, it computes that itself. Forward these are the part's mean and sum of squared differences to it, which are
merged as Chan, Golub and LeVeque 1979 do, backward ``sum(g)`` and ``sum(g * xhat)`` with ``g = dy * w``.

x, y: [B * C, S]; statistics: [B * groups, 3], mean, what rounding left of it, and rstd; states: int64, one a part of
all groups, zeros before; PARTS: the number of a group's parts, or the next power of two; CHANNELS in a group, C in all;
OVERLAP: the launch before has to be waited for; DEEP: if not 0, a thread has that many times 16 bytes of a part, and
sums are over its values first, which takes fewer instructions. A block that is its whole group needs no states.
"""

import cuda.tile as ct

from tilegym.ops.cutile.parts import bits
from tilegym.ops.cutile.parts import clear_others
from tilegym.ops.cutile.parts import exchange
from tilegym.ops.cutile.parts import high
from tilegym.ops.cutile.parts import look
from tilegym.ops.cutile.parts import low
from tilegym.ops.cutile.parts import publish
from tilegym.ops.cutile.parts import turn_of
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


def _number(PARTS: Int):
    """The number of this block's group, and of its part in it."""
    # Along 1 and 2, where they come without a division.
    return (ct.bid(2), ct.bid(1)) if PARTS > 1 else (ct.bid(0), 0)


def _part(group, part, S: Int, CHANNELS: Int, TILE_M: Int, TILE_N: Int):
    """The rows and columns of a part of a group, and the channel of each row in its group."""
    across = ct.cdiv(S, TILE_N)
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


def _state(first, second):
    """Two numbers in fp32, and in the last bit that they are there."""
    return (bits(first) << 32) | bits(second) | 1


def _numbers(found):
    """What was published, 0 where nothing was."""
    return high(found), low(found)


def _rows_of(tile, DEEP: Int):
    """A part as DEEP vectors."""
    n, rows = ct.static_eval(tile.shape[0] * tile.shape[1] // DEEP), ()
    tile = tile.reshape((DEEP, n))
    for i in ct.static_iter(range(DEEP)):
        rows = (*rows, ct.extract(tile, (i, 0), (1, n)).reshape((n,)))
    return rows


def _sums_of(*vectors):
    """The sums over one or two vectors of which each thread of the block has 8 elements."""
    # Each warp's, then every thread adds up the warps': one barrier, where ct.sum takes two. On an H200 16x320x128x128
    # takes 91.5 us instead of 93.9; backward two barriers less made 2x320x128x128 slower, 27.9 us instead of 25.8.
    of_warps, sums = ct.static_eval((vectors[0].shape[0] // 256, 256)), ()
    warps = vectors[0].reshape((1, *of_warps))
    if len(vectors) == 2:
        warps = ct.cat((warps, vectors[1].reshape((1, *of_warps))), 0)
    warps = ct.sum(warps, axis=2)
    for i in ct.static_iter(range(len(vectors))):
        total = ct.extract(warps, (i, 0), (1, 1))
        for warp in ct.static_iter(range(1, of_warps[0])):
            total = total + ct.extract(warps, (i, warp), (1, 1))
        sums = (*sums, total.reshape(()))
    return sums


def _moments_of_rows(rows, true):
    """Mean and sum of squared differences to it: each thread's first, merged as those of parts are."""
    n, deep = rows[0].shape[0], len(rows)
    total, squares = rows[0].astype(ct.float32), ct.zeros((n,), ct.float32)
    for i in ct.static_iter(range(1, deep)):
        total = total + rows[i].astype(ct.float32)
    means = total * (1.0 / deep)
    for i in ct.static_iter(range(deep)):
        rest = _again(rows[i], true) - means
        squares = squares + rest * rest
    mean = _sums_of(means)[0] * (1.0 / n)
    rest = means - mean
    off, total = _sums_of(rest, squares + deep * rest * rest)
    return mean + off * (1.0 / n), total - off * off * (deep * 1.0 / n)


def _moments(tile, rows, cols, count, true, S: Int, CHANNELS: Int, DEEP: Int):
    """Mean and sum of squared differences to it."""
    if DEEP > 0:
        found = _moments_of_rows(_rows_of(tile, DEEP), true)
    else:
        found = _moments_of_tile(tile, rows, cols, count, true, S, CHANNELS)
    return found


def _moments_of_tile(tile, rows, cols, count, true, S: Int, CHANNELS: Int):
    mean = ct.sum(tile.astype(ct.float32)) / count
    rest = _again(tile, true) - mean
    if CHANNELS % tile.shape[0] != 0 or S % tile.shape[1] != 0:
        rest = ct.where((rows >= 0) & (cols < S), rest, 0.0)
    # What rounding left of the mean: a long sum of large values is off by more than one such value's rounding.
    off = ct.sum(rest) / count
    return mean + off, ct.sum(rest * rest) - off * off * count


@ct.kernel
def group_norm_parts_kernel(
    x, weight, bias, y, statistics, states, patience, eps, S: Int, C: Int, CHANNELS: Int, TILE_M: Int,
    TILE_N: Int, PARTS: Int, DEEP: Int, WEIGHT: Bool, BIAS: Bool, OVERLAP: Bool, TURNS: Int,
):  # fmt: skip
    group, part = _number(PARTS)
    parts = ct.cdiv(S, TILE_N) * ct.cdiv(CHANNELS, TILE_M)
    rows, cols, channels = _part(group, part, S, CHANNELS, TILE_M, TILE_N)
    tile = ct.gather(x, (rows, cols))
    w = _own(weight, rows, channels, C) if WEIGHT else 1.0
    b = _own(bias, rows, channels, C) if BIAS else 0.0
    if OVERLAP:
        ct.grid_dependency_control_wait()
    count = _sizes(part, S, CHANNELS, TILE_M, TILE_N)
    mean, total = _moments(tile, rows, cols, count, group > -2, S, CHANNELS, DEEP)
    off = 0.0
    if PARTS > 1:
        count = parts * ct.num_blocks(2)
        turn = turn_of(states, count, TURNS)
        first = turn * count + group * parts
        found, missing = exchange(states, first, part, parts, _state(mean, total), patience, PARTS)
        if missing > 0:
            for i in range(parts):
                of_rows, of_cols, _ = _part(group, i, S, CHANNELS, TILE_M, TILE_N)
                other, of_count = ct.gather(x, (of_rows, of_cols)), _sizes(i, S, CHANNELS, TILE_M, TILE_N)
                moments = _moments(other, of_rows, of_cols, of_count, group > -2, S, CHANNELS, DEEP)
                publish(states, first + i, _state(*moments))
            while missing > 0:
                found, missing = look(states, first, parts, PARTS)
            tile = ct.gather(x, (rows, cols))  # which takes no registers until now
        means, squares = _numbers(found)
        index = ct.arange(PARTS, dtype=ct.int32)
        counts = ct.where(index < parts, _sizes(index, S, CHANNELS, TILE_M, TILE_N), 0.0)
        # From this block's own mean, so that both sums are added up at once.
        rest = means - mean
        off = ct.sum(rest * counts) / (CHANNELS * S)
        total = ct.sum(squares + rest * rest * counts) - off * off * (CHANNELS * S)
        total = ct.where(total < 0.0, 0.0, total)
        mean, off = mean + off, mean - (mean + off) + off
    rstd = ct.rsqrt(total / (CHANNELS * S) + eps)
    scale = rstd * w
    out = (_again(tile, group > -3) - mean) * scale + (b - off * scale)
    ct.scatter(y, (rows, cols), out.astype(y.dtype))
    if part == 0:
        ct.scatter(statistics, (group, 0), mean)
        ct.scatter(statistics, (group, 1), off)
        ct.scatter(statistics, (group, 2), rstd)
    if PARTS > 1:
        clear_others(states, turn, group * parts + part, count, TURNS)


def _sums(up, row, mean, off, rstd):
    """Of each row the sums of dy and of dy * xhat, [TILE_M, 1]."""
    up = up.astype(ct.float32)  # 0 outside of the part
    product = ct.sum(up * (row.astype(ct.float32) - mean), axis=1, keepdims=True)
    total = ct.sum(up, axis=1, keepdims=True)
    return total, (product - off * total) * rstd


@ct.kernel
def group_norm_parts_backward_kernel(
    dy, x, statistics, weight, dx, sums, products, states, patience, S: Int, C: Int, CHANNELS: Int,
    TILE_M: Int, TILE_N: Int, PARTS: Int, WEIGHT: Bool, OVERLAP: Bool, TURNS: Int,
):  # fmt: skip
    """sums, products: [B * parts of a row, C], of dy and of dy * xhat."""
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()  # the sums of sums and products
    (group, part), across = _number(PARTS), ct.cdiv(S, TILE_N)
    parts = across * ct.cdiv(CHANNELS, TILE_M)
    rows, cols, channels = _part(group, part, S, CHANNELS, TILE_M, TILE_N)
    mean, off, rstd = known(statistics, group)
    w = _own(weight, rows, channels, C) if WEIGHT else 1.0
    up, row = ct.gather(dy, (rows, cols)), ct.gather(x, (rows, cols))
    if OVERLAP:
        # For the states to be cleared. It also keeps all loads in front of what is done with the first that arrive.
        ct.grid_dependency_control_wait()
    total, product = _sums(up, row, mean, off, rstd)
    at = (group * CHANNELS // C * across + part % across, ct.where(rows >= 0, group * CHANNELS % C + channels, -1))
    of_g, of_product = ct.sum(total * w), ct.sum(product * w)
    if PARTS > 1:
        count = parts * ct.num_blocks(2)
        turn = turn_of(states, count, TURNS)
        first = turn * count + group * parts
        found, missing = exchange(states, first, part, parts, _state(of_g, of_product), patience, PARTS)
        if missing > 0:
            for i in range(parts):
                of_rows, of_cols, of_channels = _part(group, i, S, CHANNELS, TILE_M, TILE_N)
                of_w = _own(weight, of_rows, of_channels, C) if WEIGHT else 1.0
                other = ct.gather(dy, (of_rows, of_cols)), ct.gather(x, (of_rows, of_cols))
                of_total, of_products = _sums(*other, mean, off, rstd)
                publish(states, first + i, _state(ct.sum(of_total * of_w), ct.sum(of_products * of_w)))
            while missing > 0:
                found, missing = look(states, first, parts, PARTS)
            up, row = ct.gather(dy, (rows, cols)), ct.gather(x, (rows, cols))  # which take no registers until now
        all_g, all_products = _numbers(found)
        of_g, of_product = ct.sum(all_g), ct.sum(all_products)
    mean_g, mean_product = of_g / (CHANNELS * S), of_product / (CHANNELS * S)
    # rstd * (g - mean_g - xhat * mean_product)
    slope = rstd * rstd * mean_product
    shift = off * slope - rstd * mean_g
    grad = _again(up, group > -3) * (w * rstd) + (shift - (_again(row, group > -3) - mean) * slope)
    ct.scatter(dx, (rows, cols), grad.astype(dx.dtype))
    ct.scatter(sums, at, total)
    ct.scatter(products, at, product)
    if PARTS > 1:
        clear_others(states, turn, group * parts + part, count, TURNS)
