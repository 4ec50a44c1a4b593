"""Kernels that each show one part of the language."""

import cuda.tile as ct

ZERO = ct.PaddingMode.ZERO
ConstInt = ct.Constant[int]

# Conversion


@ct.kernel
def convert(x, outputs, size: ConstInt):
    tile = ct.load(x, (0,), (size,))
    for output in ct.static_iter(outputs):
        ct.store(output, (0,), tile.astype(output.dtype))


@ct.kernel
def round_to_tf32(x, y, size: ConstInt):
    ct.store(y, (0,), ct.load(x, (0,), (size,)).astype(ct.tfloat32).astype(ct.float32))


@ct.kernel
def round_modes(x, single, half, tf32, size: ConstInt):
    wide = ct.load(x, (0,), (size,))
    for i, mode in ct.static_iter(enumerate((ct.RoundingMode.RZ, ct.RoundingMode.RM, ct.RoundingMode.RP))):
        ct.store(single, (i, 0), ct.reshape(ct.astype(wide, ct.float32, rounding_mode=mode), (1, size)))
    narrow = wide.astype(ct.float32)
    ct.store(half, (0,), ct.astype(narrow, ct.float16, rounding_mode=ct.RoundingMode.RZ))
    ct.store(tf32, (0,), ct.astype(narrow, ct.tfloat32, rounding_mode=ct.RoundingMode.RA).astype(ct.float32))


@ct.kernel
def bit_patterns(x, y, z, size: ConstInt):
    tile = ct.load(x, (0,), (size,))
    ct.store(y, (0,), ct.bitcast(tile, y.dtype))
    ct.store(z, (0,), ct.pack_to_bytes(tile))


@ct.kernel
def unpack(x, y, size: ConstInt):
    ct.store(y, (0,), ct.unpack_from_bytes(ct.load(x, (0,), (size,)), y.dtype))


# Memory


@ct.kernel
def copy_padded(x, y, mode: ConstInt, rows: ConstInt, columns: ConstInt):
    i, j = ct.bid(0), ct.bid(1)
    if mode == 0:
        tile = ct.load(x, (i, j), (rows, columns), padding_mode=ct.PaddingMode.ZERO)
    elif mode == 1:
        tile = ct.load(x, (i, j), (rows, columns), padding_mode=ct.PaddingMode.NEG_ZERO)
    elif mode == 2:
        tile = ct.load(x, (i, j), (rows, columns), padding_mode=ct.PaddingMode.NAN)
    elif mode == 3:
        tile = ct.load(x, (i, j), (rows, columns), padding_mode=ct.PaddingMode.POS_INF)
    else:
        tile = ct.load(x, (i, j), (rows, columns), padding_mode=ct.PaddingMode.NEG_INF)
    ct.store(y, (i, j), tile)


@ct.kernel
def copy_transposed(x, y, rows: ConstInt, columns: ConstInt):
    i, j = ct.bid(0), ct.bid(1)
    tile = ct.load(x, (j, i), (columns, rows), order="F", padding_mode=ZERO)
    ct.store(y, (j, i), tile)


@ct.kernel
def store_column_major(x, y, rows: ConstInt, columns: ConstInt):
    i, j = ct.bid(0), ct.bid(1)
    ct.store(y, (j, i), ct.load(x, (i, j), (rows, columns), padding_mode=ZERO).transpose(), order="C")


@ct.kernel
def gather_scatter(x, indices, y, size: ConstInt):
    index = ct.load(indices, (0,), (size,))
    ct.scatter(y, ct.arange(size, dtype=ct.int32), ct.gather(x, index))
    ct.scatter(y, index + size, ct.gather(x, index, padding_value=7, mask=index > 2), mask=index < size)


@ct.kernel
def gather_rows(x, indices, y, rows: ConstInt, columns: ConstInt):
    row = ct.load(indices, (0,), (rows,))
    column = ct.arange(columns, dtype=ct.int32)
    ct.store(y, (0, 0), ct.gather(x, (row[:, None], column[None, :])))


@ct.kernel
def gather_one_of_each_row(x, indices, y):
    row = ct.bid(0)
    ct.scatter(y, row, ct.gather(x, (row, ct.gather(indices, row))))


@ct.kernel
def overlapping_tiles(x, y, size: ConstInt, step: ConstInt):
    view = x.tiled_view((size,), traversal_steps=(step,), padding_mode=ZERO)
    for i in range(view.num_tiles(0)):
        ct.store(y, (i, 0), ct.reshape(view.load((i,)), (1, size)))


@ct.kernel
def sliced(x, y, start, stop, size: ConstInt):
    part = x.slice(axis=0, start=start, stop=stop)
    for i in range(ct.num_tiles(part, 0, (size,))):
        ct.store(y, (i,), ct.load(part, (i,), (size,), padding_mode=ZERO))


@ct.kernel
def sum_of_list(arrays, y, size: ConstInt):
    total = ct.zeros((size,), ct.float32)
    for i in range(len(arrays)):
        total += ct.load(arrays[i], (ct.bid(0),), (size,), padding_mode=ZERO)
    ct.store(y, (ct.bid(0),), total)


@ct.kernel
def raw_offsets(x, y, size: ConstInt):
    offsets = ct.arange(size, dtype=ct.int32)
    tile = x.get_raw_memory().load_offset(offsets * 2, mask=offsets < size // 2, padding_value=-1)
    y.get_raw_memory().store_offset(size - 1 - offsets, tile)


@ct.kernel
def scalars(x, y, integer, number, flag, wide: ct.ScalarInt64):
    value = ct.load(x, (ct.bid(0),), ()) if x.ndim == 1 else 0
    if flag:
        value = value + integer * number + wide // 2**33
    ct.store(y, (ct.bid(0),), value)


@ct.kernel
def rows_at(x, indices, y, start, rows: ConstInt, columns: ConstInt):
    row = ct.load(indices, (0,), (rows,))
    tile = ct.load_advanced_indexing(x, (row, ct.Slice(start, columns)), padding_mode=ZERO)
    ct.store_advanced_indexing(y, (row, ct.Slice(start, columns)), tile)


@ct.kernel
def undetermined_rows(x, y):
    row = ct.arange(4, dtype=ct.int32) * 2
    ct.store(y, (0, 0), ct.load_advanced_indexing(x, (row, ct.Slice(0, 4))))


# Shape


@ct.kernel
def shapes(x, y, rows: ConstInt, columns: ConstInt):
    tile = ct.load(x, (0, 0), (rows, columns))
    flipped = ct.permute(tile, (1, 0))
    joined = ct.cat((flipped, ct.reshape(tile, (columns, rows))), 1)
    corner = ct.extract(joined, (1, 1), (columns // 2, rows))
    joined = ct.insert(joined, (0, 0), corner)
    row = ct.extract(tile, (rows - 1, 0), (1, columns))
    spread = ct.broadcast_to(ct.reshape(row, (columns, 1)), (columns, 2 * rows))
    ct.store(y, (0, 0), joined)
    ct.store(y, (1, 0), spread)


@ct.kernel
def select(x, y, z, size: ConstInt):
    left, right = ct.load(x, (0,), (size,)), ct.load(y, (0,), (size,))
    index = ct.arange(size, dtype=ct.int32)
    ct.store(z, (0,), ct.where((index % 3 == 0) | (left < right), left, right))


# Reduction and scan


def larger_magnitude(left, right):
    return ct.where(ct.abs(left) >= ct.abs(right), left, right)


def first_of_equal(value, index, other, other_index):
    takes = (value > other) | ((value == other) & (index < other_index))
    return ct.where(takes, value, other), ct.where(takes, index, other_index)


@ct.kernel
def reductions(x, y, axis: ConstInt, rows: ConstInt, columns: ConstInt):
    tile = ct.load(x, (0, 0), (rows, columns))
    functions = (ct.sum, ct.prod, ct.max, ct.min)
    for i, function in ct.static_iter(enumerate(functions)):
        result = function(tile, axis=axis)
        ct.store(y, (i, 0), ct.reshape(result, (1, result.shape[0])))
    extreme = ct.reduce(tile, axis, larger_magnitude, 0)
    ct.store(y, (4, 0), ct.reshape(extreme, (1, extreme.shape[0])))


@ct.kernel
def arg_reductions(x, y, axis: ConstInt, rows: ConstInt, columns: ConstInt):
    tile = ct.load(x, (0, 0), (rows, columns))
    for i, function in ct.static_iter(enumerate((ct.argmax, ct.argmin))):
        result = function(tile, axis=axis)
        ct.store(y, (i, 0), ct.reshape(result, (1, result.shape[0])))
    ids = ct.broadcast_to(ct.arange(columns, dtype=ct.int32)[None, :], (rows, columns))
    _, index = ct.reduce((tile, ids), 1, first_of_equal, (0, 0))
    ct.store(y, (2, 0), ct.reshape(index, (1, rows)))


@ct.kernel
def nan_reductions(x, y, rows: ConstInt, columns: ConstInt):
    tile = ct.load(x, (0, 0), (rows, columns))
    ct.store(y, (0, 0), ct.reshape(ct.max(tile, axis=1), (1, rows)))
    ct.store(y, (1, 0), ct.reshape(ct.min(tile, axis=1), (1, rows)))
    ct.store(y, (2, 0), ct.reshape(ct.max(tile, axis=1, propagate_nan=True), (1, rows)))


@ct.kernel
def scans(x, y, axis: ConstInt, rows: ConstInt, columns: ConstInt):
    tile = ct.load(x, (0, 0), (rows, columns))
    ct.store(y, (0, 0), ct.cumsum(tile, axis=axis))
    ct.store(y, (1, 0), ct.cumsum(tile, axis=axis, reverse=True))
    ct.store(y, (2, 0), ct.cumprod(tile, axis=axis))
    ct.store(y, (3, 0), ct.scan(tile, axis, larger_magnitude, 0))


# Matrix products


@ct.kernel
def multiply(x, y, z, m: ConstInt, n: ConstInt, k: ConstInt):
    left, right = ct.load(x, (0, 0), (m, k)), ct.load(y, (0, 0), (k, n))
    ct.store(z, (0, 0), ct.mma(left, right, ct.load(z, (0, 0), (m, n))))


@ct.kernel
def multiply_tf32(x, y, z, m: ConstInt, n: ConstInt, k: ConstInt):
    left = ct.load(x, (0, 0), (m, k)).astype(ct.tfloat32)
    right = ct.load(y, (0, 0), (k, n)).astype(ct.tfloat32)
    ct.store(z, (0, 0), ct.mma(left, right, ct.load(z, (0, 0), (m, n))))


@ct.kernel
def multiply_batched(x, y, z, b: ConstInt, m: ConstInt, n: ConstInt, k: ConstInt):
    left, right = ct.load(x, (0, 0, 0), (b, m, k)), ct.load(y, (0, 0, 0), (b, k, n))
    ct.store(z, (0, 0, 0), left @ right)


@ct.kernel
def multiply_scaled(x, xs, y, ys, z, m: ConstInt, n: ConstInt, k: ConstInt, blocks: ConstInt):
    left, right = ct.load(x, (0, 0), (m, k)), ct.load(y, (0, 0), (k, n))
    left_scale, right_scale = ct.load(xs, (0, 0), (m, blocks)), ct.load(ys, (0, 0), (blocks, n))
    ct.store(z, (0, 0), ct.mma_scaled(left, left_scale, right, right_scale, ct.zeros((m, n), ct.float32)))


@ct.kernel
def multiply_float4(x, xs, y, ys, z, m: ConstInt, n: ConstInt, k: ConstInt, blocks: ConstInt):
    left, right = ct.load(x, (0, 0), (m, k)), ct.load(y, (0, 0), (n, k))
    left_scale, right_scale = ct.load(xs, (0, 0), (m, blocks)), ct.load(ys, (0, 0), (blocks, n))
    product = ct.mma_scaled(left, left_scale, right.transpose(), right_scale, ct.zeros((m, n), ct.float32))
    ct.store(z, (0, 0), product)


@ct.kernel
def round_to_float4(x, y, z, size: ConstInt):
    tile = ct.load(x, (0,), (size,)).astype(ct.float4_e2m1fn)
    ct.store(y, (0,), tile)
    ct.store(z, (0,), ct.pack_to_bytes(tile))


# Atomics


@ct.kernel
def atomic_arithmetic(total, low, high, updates, size: ConstInt):
    value = ct.load(updates, (ct.bid(0),), (size,))
    slot = ct.arange(size, dtype=ct.int32) % 8
    ct.atomic_add(total, slot, value)
    ct.atomic_min(low, slot, value)
    ct.atomic_max(high, slot, value)


@ct.kernel
def atomic_float_add(total, updates, size: ConstInt):
    ct.atomic_add(total, ct.arange(size, dtype=ct.int32) % 8, ct.load(updates, (ct.bid(0),), (size,)))


@ct.kernel
def atomic_bits(ones, zeros, parity, updates, size: ConstInt):
    value = ct.load(updates, (ct.bid(0),), (size,))
    slot = ct.arange(size, dtype=ct.int32) % 8
    ct.atomic_or(ones, slot, value)
    ct.atomic_and(zeros, slot, value)
    ct.atomic_xor(parity, slot, value)


@ct.kernel
def atomic_swap(x, old, size: ConstInt):
    index = ct.arange(size, dtype=ct.int32)
    before = ct.atomic_cas(x, index, 3, 100)
    ct.store(old, (0, 0), ct.reshape(before, (1, size)))
    ct.store(old, (1, 0), ct.reshape(ct.atomic_xchg(x, index + size, index), (1, size)))


@ct.kernel
def atomic_view(total, updates, size: ConstInt):
    view = total.tiled_view((size,))
    view.atomic_store_add((0,), ct.load(updates, (ct.bid(0),), (size,)))


# Control flow


@ct.kernel
def control_flow(x, y, limit, size: ConstInt):
    block = ct.bid(0)
    tile = ct.load(x, (block,), (size,))
    total = ct.zeros((size,), ct.float32)
    steps = 0
    for i in range(0, limit, 2):
        if i == 3 * block:
            continue
        if i > 8:
            break
        total += tile * i
        steps += 1
    while steps < 20:
        steps += 3
        if steps == 11:
            total = -total
    if block == 2:
        ct.store(y, (block,), total)
        return
    ct.store(y, (block,), total + steps)


@ct.kernel
def nested_jumps(x, y, size: ConstInt):
    """Writes the first position at which the row's values exceed their row's number, found the long way round."""
    row = ct.bid(0)
    for i in range(size):
        tries = 0
        while True:
            tries += 1
            if tries > 3:
                break
            if ct.load(x, (row, i), (1, 1)).item() > row:
                ct.store(y, (row,), ct.full((1,), i * 10 + tries, ct.int32))
                return
            if i % 2 == 0:
                continue
            break
    ct.store(y, (row,), ct.full((1,), -1, ct.int32))
