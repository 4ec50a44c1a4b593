"""The backward pass of the normalisations of rows that a block holds in registers: its kernel, and its tiles.

``row_norms.py`` has the formulas and the kernel's constants.
"""

import functools

import cuda.tile as ct

from tilegym.ops.cutile.row_norms import add_pairs
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import load_vector
from tilegym.ops.cutile.row_norms import put
from tilegym.ops.cutile.row_norms import row_sum
from tilegym.ops.cutile.row_norms import scale_of
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span


def normed(row, mean, rstd, CENTER: Bool, FUSED: Int = 0):
    row = row.astype(ct.float32)
    if CENTER and FUSED:
        xhat = row * rstd - mean * rstd
    else:
        xhat = (row - mean if CENTER else row) * rstd
    return xhat


def _load_pieces(x, tile, TILE_M: Int, TILE_N: Int, PIECES: Int, LATENCY: Int, BULK: Bool, CHECK: Bool):
    pieces = ()
    for piece in ct.static_iter(range(PIECES)):
        if BULK:
            shape, zero = (TILE_M, TILE_N), ct.PaddingMode.ZERO
            pieces = (*pieces, ct.load(x, (tile, piece), shape, padding_mode=zero, latency=LATENCY))
        elif LATENCY:
            at = span(tile, TILE_M)[:, None], span(piece, TILE_N)[None, :]
            pieces = (*pieces, ct.gather(x, at, check_bounds=CHECK, latency=LATENCY))
        else:
            pieces = (*pieces, load(x, span(tile, TILE_M), span(piece, TILE_N), CHECK))
    return pieces


def _load_statistics(means, rstds, tile, TILE_M: Int, CENTER: Bool, CHECK: Bool):
    rows = span(tile, TILE_M)
    rstd = ct.gather(rstds, rows, check_bounds=CHECK)[:, None]
    return (ct.gather(means, rows, check_bounds=CHECK)[:, None] if CENTER else rstd), rstd


def _load_rows(dy, x, means, rstds, tile, TILE_M: Int, TILE_N: Int, PIECES: Int, CENTER: Bool, CHECK: Bool):
    """What the backward pass needs of TILE_M rows, in registers."""
    statistics = _load_statistics(means, rstds, tile, TILE_M, CENTER, CHECK)
    ups = _load_pieces(dy, tile, TILE_M, TILE_N, PIECES, 0, False, CHECK)
    return ups, _load_pieces(x, tile, TILE_M, TILE_N, PIECES, 0, False, CHECK), statistics


def _zeros(TILE_M: Int, TILE_N: Int, PIECES: Int):
    pieces = ()
    for _ in ct.static_iter(range(PIECES)):
        pieces = (*pieces, ct.zeros((TILE_M, TILE_N), ct.float32))
    return pieces


def _store_sums(sums, parts, PIECES: Int):
    for piece in ct.static_iter(range(PIECES)):
        put(parts, ct.bid(0), piece, ct.sum(sums[piece], axis=0, keepdims=True))


def _step(
    rows, added, tile, ws, sums, out, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, PIECES: Int, WARPS: Int,
    FUSED: Int, CENTER: Bool, DWEIGHT: Bool, DBIAS: Bool,
):  # fmt: skip
    """Writes dx of TILE_M rows; the sums for dweight and dbias with theirs."""
    (ups, xs, (mean, rstd)), (dws, dbs) = rows, sums
    products = ct.zeros((TILE_M, TILE_N), ct.float32)
    totals = ct.zeros((TILE_M, TILE_N), ct.float32)
    # Where columns are beyond the row's end up is 0, whatever xhat is.
    for piece in ct.static_iter(range(PIECES)):
        g = ups[piece].astype(ct.float32) * scale_of(ws[piece], OFFSET)
        products = products + g * normed(xs[piece], mean, rstd, CENTER, FUSED)
        totals = totals + g
    total = 0.0
    if not CENTER:
        product = row_sum(products, out.dtype, WARPS, False)
    elif WARPS:
        both = row_sum(ct.cat((products, totals), 0), out.dtype, WARPS, False)
        product, total = ct.extract(both, (0, 0), (1, 1)), ct.extract(both, (1, 0), (1, 1))
    else:
        product, total = ct.reduce((products, totals), 1, add_pairs, (0.0, 0.0), keepdims=True)
    product, total = product * (1.0 / N), total * (1.0 / N)
    if FUSED == 2:
        product, total = product * rstd, total * rstd
    new_dws, new_dbs = (), ()
    for piece in ct.static_iter(range(PIECES)):
        up, xhat = ups[piece].astype(ct.float32), normed(xs[piece], mean, rstd, CENTER, FUSED)
        g = up * scale_of(ws[piece], OFFSET)
        if FUSED == 2:
            grad = g * rstd - (xhat * product + total if CENTER else xhat * product)
        else:
            grad = ((g - total if CENTER else g) - xhat * product) * rstd
        put(out, tile, piece, grad if added is None else grad + added[piece].astype(ct.float32))
        new_dws = (*new_dws, dws[piece] + up * xhat if DWEIGHT else dws[piece])
        new_dbs = (*new_dbs, dbs[piece] + up if DBIAS else dbs[piece])
    return new_dws, new_dbs


@ct.kernel
def backward_kernel(
    dy, x, through, weight, means, rstds, dx, dweight, dbias, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int,
    PIECES: Int, AHEAD: Int, LATENCY: Int, BULK: Bool, CHECK: Bool, LATE: Bool, WARPS: Int, FUSED: Int,
    CENTER: Bool, THROUGH: Bool, WEIGHT: Bool, DWEIGHT: Bool, DBIAS: Bool, OVERLAP: Bool,
):  # fmt: skip
    """Whole rows in registers, as PIECES tiles; blocks stride over them, and row ``bid`` of dweight and dbias is that
    block's sum. The last rows come first: of what was written a moment ago the cache holds these still. dx may be x,
    of which a row is read before it is written; under two names loads do not wait for stores. On an H200 in bf16 both
    passes of rms_norm of 8192x4096 take 91.9 us instead of 95.0, over x the backward pass of 8192x8192 103 instead of
    124.

    ``through`` is a gradient that is added to dx. AHEAD: how many tiles are read into registers before one is worked
    on, 1 or 2, or with 0 LATENCY: what the compiler's own pipeline of loads is told, through shared memory, by the
    tensor memory accelerator (BULK) or by each thread. CHECK: whether some of a tile may lie outside of the rows.
    FUSED: how much is written so that one instruction multiplies and adds, 1: xhat, 2: dx too, which is less work and
    takes more registers. OVERLAP: it waits for the launch in front, and the one that adds the sums may begin, and
    waits; LATE: behind the loop, since that takes a barrier, for which the first loads would wait.
    """
    if OVERLAP:
        ct.grid_dependency_control_wait()
        if not LATE:
            ct.grid_dependency_control_launch_dependents()
    ws = ()
    for piece in ct.static_iter(range(PIECES)):
        ws = (*ws, load_vector(weight, span(piece, TILE_N), WEIGHT, CHECK))
    sums = _zeros(TILE_M, TILE_N, PIECES), _zeros(TILE_M, TILE_N, PIECES)
    first, step, tiles = ct.bid(0), ct.num_blocks(0), (TILE_M, TILE_N, PIECES)
    end = ct.cdiv(x.shape[0], TILE_M)
    top = end - 1
    # In the end the rows of the block's last turn are read once more: others' are far away, and may be overwritten.
    last = top - (top - first) % step
    loads, constants = (*tiles, CENTER, CHECK), (OFFSET, N, *tiles, WARPS, FUSED, CENTER, DWEIGHT, DBIAS)
    if AHEAD == 1:
        following = _load_rows(dy, x, means, rstds, top - first, *loads)
        for turn in range(first, end, step):
            rows = following
            following = _load_rows(dy, x, means, rstds, top - min(turn + step, last), *loads)
            added = _load_pieces(through, top - turn, *tiles, 0, False, CHECK) if THROUGH else None
            sums = _step(rows, added, top - turn, ws, sums, dx, *constants)
    elif AHEAD == 2:
        even = _load_rows(dy, x, means, rstds, top - first, *loads)
        odd = _load_rows(dy, x, means, rstds, top - min(first + step, last), *loads)
        for turn in range(first, end - step, 2 * step):
            rows = even
            even = _load_rows(dy, x, means, rstds, top - min(turn + 2 * step, last), *loads)
            added = _load_pieces(through, top - turn, *tiles, 0, False, CHECK) if THROUGH else None
            sums = _step(rows, added, top - turn, ws, sums, dx, *constants)
            rows = odd
            odd = _load_rows(dy, x, means, rstds, top - min(turn + 3 * step, last), *loads)
            added = _load_pieces(through, top - turn - step, *tiles, 0, False, CHECK) if THROUGH else None
            sums = _step(rows, added, top - turn - step, ws, sums, dx, *constants)
        if (last - first) % (2 * step) == 0:
            added = _load_pieces(through, top - last, *tiles, 0, False, CHECK) if THROUGH else None
            sums = _step(even, added, top - last, ws, sums, dx, *constants)
    else:
        if not BULK:  # such a pipeline reads single numbers no row ahead
            following = _load_statistics(means, rstds, top - first, TILE_M, CENTER, CHECK)
        for turn in range(first, end, step):
            if BULK:
                statistics = _load_statistics(means, rstds, top - turn, TILE_M, CENTER, CHECK)
            else:
                statistics = following
                following = _load_statistics(means, rstds, top - min(turn + step, last), TILE_M, CENTER, CHECK)
            ups = _load_pieces(dy, top - turn, *tiles, LATENCY, BULK, CHECK)
            xs = _load_pieces(x, top - turn, *tiles, LATENCY, BULK, CHECK)
            added = _load_pieces(through, top - turn, *tiles, LATENCY, BULK, CHECK) if THROUGH else None
            sums = _step((ups, xs, statistics), added, top - turn, ws, sums, dx, *constants)
    if OVERLAP and LATE:
        ct.grid_dependency_control_launch_dependents()
    if DWEIGHT:
        _store_sums(sums[0], dweight, PIECES)
    if DBIAS:
        _store_sums(sums[1], dbias, PIECES)


@functools.lru_cache(maxsize=1024)
def backward_plan(
    rows: int, n: int, device: int, center: bool, add: bool, itemsize: int = 2
) -> tuple[ct.kernel, int, tuple[int, int, int, int, int, bool, bool, bool, int, int]]:
    """(kernel, blocks, (TILE_M, TILE_N, PIECES, AHEAD, LATENCY, BULK, CHECK, LATE, WARPS, FUSED)) of the backward
    pass in registers, for rows of up to MAX_CACHED_BACKWARD. ``center``: with a mean; ``add``: something is added;
    ``itemsize``: bytes of an element of x.

    The fastest on an H200 in bf16: 8192 rows of 1024 to 8192, and 65536 of 512. Without checks plain rows of 2048 take
    36.8 us instead of 38.1, of 2560 in five pieces 41.5 instead of 44.9; rows with a mean are slower without them, but
    those of 2560 in five pieces, 46.3 us instead of 47.7. What is added is read before the reduction in rows of two
    pieces of 1024, not in one tile: 44.5 us, not 50.1. Plain rows of 4096, two at a time, through a pipeline of the
    threads' own loads take 60.2 us, one ahead in registers 62.5. Others are slower through pipelines: with a mean they
    take too many registers. Rows of 2048 take 33.8 us read two ahead in four pieces, by three blocks a multiprocessor
    (34.3 not LATE), 35.1 one ahead by four, 36.0 through a pipeline; with a mean 35.9, and 36.7 through one. Two ahead
    in three pieces, instead of in one tile of which a part is idle, rows of 1536 take 25.7 us instead of 29.9, with a
    mean 27.9 instead of 33.0, of 1280 23.1 instead of 26.7, of 1792 30.0 instead of 32.7, of 1600 with a mean 31.2
    instead of 33.8, and 16384 of 768, two at a time, 27.0 instead of 30.5, one at a time with a mean 29.8 instead of
    32.0, of 640 23.8 instead of 27.5. Two ahead and without checks, by three blocks a multiprocessor, several short
    rows a tile: 65536x512 57.7 instead of 61.8, 262144x128 57.0 instead of 58.3, 65536x256 34.6 instead of 35.5,
    8192x1024 18.7 instead of 18.9; with a mean no faster. 65536x512 where something is added takes 74.0 us without
    checks by five blocks, one ahead, instead of 80.3; 8192x1536 33.7 in three pieces, instead of 34.7. Two ahead, rows
    of 2880 take 45.4 us with 8 warps, with a mean 48.5, one ahead 46.8 and 48.9; rows of 3072 as long as one ahead, of
    2560 longer, but with a mean 34.8 instead of 36.8, and 32768 of them 123 instead of 134. Rows of 4096 with a mean
    62.6 us in four pieces, 64.1 in two.
    """
    rows, plain, exact = rows if n else 0, not center and not add, not center and (not add or n == 2048)
    tile_n, pieces, latency = next_power_of_2(n), 1, 0
    several = itemsize == 2 and rows >= 32 * sm_count(device)
    many = several and not add
    # Many plain rows of 4096, two a block: half as many reductions to wait for, and half as many sums to add up.
    two = many and n == 4096 and plain and rows % 2 == 0
    four = many and n == 4096 and center
    deep, three = many and n == 2048, many and 2560 < n < 3072
    short = many and plain and 128 <= n <= 1024 and n == tile_n and rows % (2048 // n) == 0
    added = several and add and not center and n == 512 and rows % 4 == 0
    thirds = n % 8 == 0 and ((many and (512 < n <= 768 or 1024 < n < 2048)) or (several and n == 1536 and not center))
    five = n == 2560 and center and not add
    if two:
        warps, occupancy, tile_n, latency = 8, 1, 2048, 8
    elif n > 4096:
        warps, occupancy, tile_n, latency = (8, 1, 4096, 6) if n > 6144 else (8, 1, 2048, 4)
        if n % 8:  # the pipeline copies rows that begin at 16 bytes
            tile_n, latency = 2048, 0
    elif four:
        warps, occupancy, tile_n, exact = 8, 2, 1024, True
    elif deep:
        warps, occupancy, tile_n, exact = 4, 3, 512, True
    elif three:
        warps, occupancy, tile_n = 8, 2, 1024
    elif short:
        warps, occupancy = 4, 3
    elif added:
        warps, occupancy = 4, 5
    elif thirds and n <= 768:
        warps, occupancy, tile_n, exact = 4, 8 if center else 4, 256, True
    elif thirds:
        warps, occupancy, tile_n, exact = 4, 3 if center and n > 1536 else 4, 512, True
    elif n == 2560 and plain:
        warps, occupancy, tile_n = 4, 4, 512
    elif five:
        warps, occupancy, tile_n, exact = 4, 3, 512, True
    elif n > 2048:
        # Where a third of one tile would be idle, three of 1024.
        warps, occupancy, tile_n = (4, 3, 1024) if n <= 3072 else (8, 2, 2048)
    else:
        warps, occupancy = 4, 4
        tile_n = min(tile_n, 1024) if add and not center else tile_n
    if n > tile_n:
        pieces = ct.cdiv(n, tile_n)
    most = sm_count(device)
    tile_m = max(1, min(2048 // (tile_n * pieces), next_power_of_2(rows // (occupancy * most))))
    tile_m = 2 if two else 1 if thirds and center else tile_m
    kernel = hinted(backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    # More blocks make more sums to add up: at least four tiles each, if that leaves one to a multiprocessor.
    tiles = ct.cdiv(rows, tile_m)
    blocks = min(tiles, occupancy * most, max(most, tiles // 4))
    # Behind one barrier: 8192x2880 with a mean 48.5 us instead of 50.6, 2048x4096 20.9 instead of 21.7. But 8192x2560
    # takes 46.2 instead of 44.6 with a mean, 55.2 instead of 52.1 where something is added, and 8192x8192 with a mean
    # 122.6 instead of 111.1.
    one = itemsize == 2 and tile_m == 1 and 2048 <= n <= 4096 and not (five or (add and 2048 < n <= 3072))
    one = one or (thirds and tile_m == 1)
    if (two or one or short or added or occupancy == 4) and blocks:
        # Each with as many tiles: of 528 blocks 512 are left, whose sums are one tile. 8192x2048 with a mean takes
        # 39.1 us instead of 42.0.
        blocks = ct.cdiv(tiles, ct.cdiv(tiles, blocks))
    bulk = latency > 0 and not two
    whole = two or short or added or (thirds and n == tile_n * pieces and rows % tile_m == 0)
    check = not whole and (not exact or bulk or tile_m > 1 or n != tile_n * pieces)
    # Several rows a tile leave registers for it: 8192x1024 20.5 us instead of 22.9, 65536x512 62.7 instead of 67.1.
    fused = four or three or added or (itemsize == 2 and tile_m > 1 and not (two or add))
    ahead = 0 if latency else 2 if deep or three or short or thirds or (five and many) else 1
    # 8192x1024 19.9 us instead of 20.6, with a mean 21.2 instead of 22.0, x1536 30.7 instead of 31.4, x2880 where
    # something is added 56.7 instead of 57.4. But x2560 with a mean 46.9 instead of 44.5, and through pipelines, which
    # the barrier breaks up, twice as long and more.
    late = ahead == 2 or (ahead == 1 and (1024 <= n <= 2048 or (add and n <= 4096)))
    how = bulk, check, late, warps if one else 0, 2 if fused else int(one)
    return kernel, blocks, (tile_m, tile_n, pieces, ahead, latency, *how)
