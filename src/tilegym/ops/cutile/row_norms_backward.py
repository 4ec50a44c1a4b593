"""The backward pass of the normalisations of rows; ``row_norms.py`` has the formulas and the kernels' constants."""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import in_place
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.row_norms import MAX_CACHED_BACKWARD
from tilegym.ops.cutile.row_norms import add_blocks
from tilegym.ops.cutile.row_norms import add_pairs
from tilegym.ops.cutile.row_norms import behind
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import load_vector
from tilegym.ops.cutile.row_norms import outside
from tilegym.ops.cutile.row_norms import put
from tilegym.ops.cutile.row_norms import rows_over
from tilegym.ops.cutile.row_norms import scale_of
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.row_norms import sums_of_blocks
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span


def _normed(row, mean, rstd, CENTER: Bool):
    row = row.astype(ct.float32)
    return (row - mean if CENTER else row) * rstd


def _xhat(row, means, rstds, rows, CENTER: Bool):
    rstd = ct.gather(rstds, rows)[:, None]
    return _normed(row, ct.gather(means, rows)[:, None] if CENTER else rstd, rstd, CENTER)


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


def _load_statistics(means, rstds, tile, last, TILE_M: Int, CENTER: Bool, CHECK: Bool):
    rows = span(tile if CHECK else min(tile, last), TILE_M)
    rstd = ct.gather(rstds, rows, check_bounds=CHECK)[:, None]
    return (ct.gather(means, rows, check_bounds=CHECK)[:, None] if CENTER else rstd), rstd


def _load_rows(dy, x, means, rstds, tile, last, TILE_M: Int, TILE_N: Int, PIECES: Int, CENTER: Bool, CHECK: Bool):
    """What the backward pass needs of TILE_M rows, in registers."""
    statistics = _load_statistics(means, rstds, tile, last, TILE_M, CENTER, CHECK)
    if not CHECK:
        tile = min(tile, last)  # in the end the last rows once more
    ups = _load_pieces(dy, tile, TILE_M, TILE_N, PIECES, 0, False, CHECK)
    return ups, _load_pieces(x, tile, TILE_M, TILE_N, PIECES, 0, False, CHECK), statistics


def _zeros(TILE_M: Int, TILE_N: Int, PIECES: Int):
    pieces = ()
    for _ in ct.static_iter(range(PIECES)):
        pieces = (*pieces, ct.zeros((TILE_M, TILE_N), ct.float32))
    return pieces


def _store_sums(sums, parts, TILE_N: Int, PIECES: Int, CHECK: Bool):
    for piece in ct.static_iter(range(PIECES)):
        out = ct.sum(sums[piece], axis=0).astype(parts.dtype)
        ct.scatter(parts, (ct.bid(0), span(piece, TILE_N)), out, check_bounds=CHECK)


@ct.kernel
def backward_kernel(
    dy, x, through, weight, means, rstds, dx, dweight, dbias, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int,
    PIECES: Int, LATENCY: Int, BULK: Bool, CHECK: Bool, IN_TURN: Bool, CENTER: Bool, THROUGH: Bool, WEIGHT: Bool,
    DWEIGHT: Bool, DBIAS: Bool, OVERLAP: Bool, INPLACE: Bool,
):  # fmt: skip
    """Whole rows in registers, as PIECES tiles; blocks stride over them, and row ``bid`` of dweight and dbias is that
    block's sum.

    ``through`` is a gradient that is added to dx. LATENCY: what the compiler's own pipeline of loads is told, through
    shared memory, by the tensor memory accelerator (BULK) or by each thread; with 0 the next rows are read into
    registers before these are worked on. CHECK: whether some of a tile may lie outside of the rows. IN_TURN: a block's
    rows follow one another. OVERLAP: the launch that adds the sums may begin, and waits. INPLACE: dx is written over x,
    and stands for nothing itself.
    """
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    ws = ()
    for piece in ct.static_iter(range(PIECES)):
        ws = (*ws, load_vector(weight, span(piece, TILE_N), WEIGHT, CHECK))
    dws = _zeros(TILE_M, TILE_N, PIECES)
    dbs = _zeros(TILE_M, TILE_N, PIECES)
    last = x.shape[0] // TILE_M - 1
    if INPLACE:  # of this block: the others' rows are being overwritten
        last -= (last - ct.bid(0)) % ct.num_blocks(0)
    first, step, tiles = ct.bid(0), ct.num_blocks(0), (TILE_M, TILE_N, PIECES)
    end = ct.cdiv(x.shape[0], TILE_M)
    if IN_TURN:
        each = ct.cdiv(end, step)
        first, step, end = first * each, 1, min((first + 1) * each, end)
    if LATENCY == 0:
        following = _load_rows(dy, x, means, rstds, first, last, *tiles, CENTER, CHECK)
    elif not BULK:  # such a pipeline reads single numbers no row ahead
        following = _load_statistics(means, rstds, first, last, TILE_M, CENTER, CHECK)
    for tile in range(first, end, step):
        if LATENCY == 0:
            ups, xs, (mean, rstd) = following
            following = _load_rows(dy, x, means, rstds, tile + step, last, *tiles, CENTER, CHECK)
        else:
            if BULK:
                mean, rstd = _load_statistics(means, rstds, tile, last, TILE_M, CENTER, CHECK)
            else:
                mean, rstd = following
                following = _load_statistics(means, rstds, tile + step, last, TILE_M, CENTER, CHECK)
            ups = _load_pieces(dy, tile, *tiles, LATENCY, BULK, CHECK)
            xs = _load_pieces(x, tile, *tiles, LATENCY, BULK, CHECK)
        added = _load_pieces(through, tile, *tiles, LATENCY, BULK, CHECK) if THROUGH else ups
        products = ct.zeros((TILE_M, TILE_N), ct.float32)
        totals = ct.zeros((TILE_M, TILE_N), ct.float32)
        # Where columns are beyond the row's end up is 0, whatever xhat is.
        for piece in ct.static_iter(range(PIECES)):
            g = ups[piece].astype(ct.float32) * scale_of(ws[piece], OFFSET)
            products = products + g * _normed(xs[piece], mean, rstd, CENTER)
            totals = totals + g
        if CENTER:
            product, total = ct.reduce((products, totals), 1, add_pairs, (0.0, 0.0), keepdims=True)
            total = total * (1.0 / N)
        else:
            product = ct.sum(products, axis=1, keepdims=True)
        product = product * (1.0 / N)
        new_dws, new_dbs = (), ()
        for piece in ct.static_iter(range(PIECES)):
            up, xhat = ups[piece].astype(ct.float32), _normed(xs[piece], mean, rstd, CENTER)
            g = up * scale_of(ws[piece], OFFSET)
            grad = ((g - total if CENTER else g) - xhat * product) * rstd
            put(x if INPLACE else dx, tile, piece, grad + added[piece].astype(ct.float32) if THROUGH else grad)
            new_dws = (*new_dws, dws[piece] + up * xhat if DWEIGHT else dws[piece])
            new_dbs = (*new_dbs, dbs[piece] + up if DBIAS else dbs[piece])
        dws, dbs = new_dws, new_dbs
    if DWEIGHT:
        _store_sums(dws, dweight, TILE_N, PIECES, CHECK)
    if DBIAS:
        _store_sums(dbs, dbias, TILE_N, PIECES, CHECK)


@ct.kernel
def backward_few_kernel(
    dy, x, through, weight, means, rstds, dx, dweight, dbias, slices, OFFSET: Float, N: Int, TILE_N: Int, TILE_R: Int,
    TILE_C: Int, CENTER: Bool, THROUGH: Bool, WEIGHT: Bool, DWEIGHT: Bool, DBIAS: Bool,
):  # fmt: skip
    """The first ``slices`` blocks sum up TILE_C columns each of dweight and dbias, which need nothing of what the other
    blocks find out, dx of a row each: few rows come from the cache the second time."""
    block = ct.bid(1)
    if block < slices:
        cols = span(block, TILE_C)
        dw = ct.zeros((TILE_R, TILE_C), ct.float32)
        db = ct.zeros((TILE_R, TILE_C), ct.float32)
        for tile in range(ct.cdiv(x.shape[0], TILE_R)):
            rows = span(tile, TILE_R)
            up = load(dy, rows, cols).astype(ct.float32)
            dw = dw + up * _xhat(load(x, rows, cols), means, rstds, rows, CENTER)
            if DBIAS:
                db = db + up
        if DWEIGHT:
            ct.scatter(dweight, cols, ct.sum(dw, axis=0).astype(dweight.dtype))
        if DBIAS:
            ct.scatter(dbias, cols, ct.sum(db, axis=0).astype(dbias.dtype))
    else:
        check = outside(N, 1, TILE_N)
        rows, cols = span(block - slices, 1), span(0, TILE_N)
        scale = scale_of(load_vector(weight, cols, WEIGHT, check), OFFSET)
        g = load(dy, rows, cols, check).astype(ct.float32) * scale
        added = load(through, rows, cols, check).astype(ct.float32) if THROUGH else None
        xhat = _xhat(load(x, rows, cols, check), means, rstds, rows, CENTER)
        if THROUGH:
            g = behind(g, added)
        if CENTER:
            product, total = ct.reduce((g * xhat, g), 1, add_pairs, (0.0, 0.0), keepdims=True)
            g = g - total * (1.0 / N)
        else:
            product = ct.sum(g * xhat, axis=1, keepdims=True)
        grad = (g - xhat * (product * (1.0 / N))) * ct.gather(rstds, rows)[:, None]
        store(dx, rows, cols, grad + added if THROUGH else grad, check)


@ct.kernel
def row_means_kernel(
    dy, x, weight, means, rstds, mean_g, mean_product, OFFSET: Float, N: Int, TILE_N: Int, CENTER: Bool, WEIGHT: Bool
):
    """The means over g and g * xhat of rows of any length, one a block."""
    rows = span(ct.bid(0), 1)
    sums = ct.zeros((1, TILE_N), ct.float32)
    products = ct.zeros((1, TILE_N), ct.float32)
    for tile in range(ct.cdiv(N, TILE_N)):
        cols = span(tile, TILE_N)
        g = load(dy, rows, cols).astype(ct.float32) * scale_of(load_vector(weight, cols, WEIGHT), OFFSET)
        products = products + g * _xhat(load(x, rows, cols), means, rstds, rows, CENTER)
        if CENTER:
            sums = sums + g
    ct.scatter(mean_product, rows, ct.sum(products, axis=1) * (1.0 / N))
    if CENTER:
        ct.scatter(mean_g, rows, ct.sum(sums, axis=1) * (1.0 / N))


@ct.kernel
def backward_columns_kernel(
    dy, x, through, weight, means, rstds, mean_g, mean_product, dx, dweight, dbias, OFFSET: Float, TILE_M: Int,
    TILE_N: Int, CENTER: Bool, THROUGH: Bool, WEIGHT: Bool, DWEIGHT: Bool, DBIAS: Bool, INPLACE: Bool,
):  # fmt: skip
    """As ``backward_kernel``, given the rows' means: blocks stride over the rows of one tile of columns each."""
    cols = span(ct.bid(1), TILE_N)
    scale = scale_of(load_vector(weight, cols, WEIGHT), OFFSET)
    dw = ct.zeros((TILE_M, TILE_N), ct.float32)
    db = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.bid(0), ct.cdiv(x.shape[0], TILE_M), ct.num_blocks(0)):
        rows = span(tile, TILE_M)
        up = load(dy, rows, cols).astype(ct.float32)
        added = load(through, rows, cols).astype(ct.float32) if THROUGH else None
        xhat = _xhat(load(x, rows, cols), means, rstds, rows, CENTER)
        grad = up * scale - xhat * ct.gather(mean_product, rows)[:, None]
        if CENTER:
            grad = grad - ct.gather(mean_g, rows)[:, None]
        grad = grad * ct.gather(rstds, rows)[:, None]
        store(x if INPLACE else dx, rows, cols, grad + added if THROUGH else grad)
        if DWEIGHT:
            dw = dw + up * xhat
        if DBIAS:
            db = db + up
    if DWEIGHT:
        ct.scatter(dweight, (ct.bid(0), cols), ct.sum(dw, axis=0).astype(dweight.dtype))
    if DBIAS:
        ct.scatter(dbias, (ct.bid(0), cols), ct.sum(db, axis=0).astype(dbias.dtype))


@functools.lru_cache(maxsize=1024)
def backward_plan(
    rows: int, n: int, device: int, center: bool, add: bool, in_place: bool = False, itemsize: int = 2
) -> tuple[ct.kernel, int, tuple[int, int, int, int, bool, bool, bool]]:
    """(kernel, blocks, (TILE_M, TILE_N, PIECES, LATENCY, BULK, CHECK, IN_TURN)) of the backward pass in registers, for
    rows of up to MAX_CACHED_BACKWARD. ``center``: with a mean; ``add``: something is added; ``in_place``: dx over x;
    ``itemsize``: bytes of an element of x.

    The fastest on an H200 in bf16, without spills: 8192 rows of 2048, 2560, 4096, 5120 and 8192, and 65536 of 512.
    Without checks plain rows of 2048 take 36.8 us instead of 38.1, of 2560 in five pieces 41.5 instead of 44.9; rows
    with a mean are slower without them, but those of 2560 in five pieces, 46.3 us instead of 47.7. What is added is
    read before the reduction in rows of two pieces of 1024, not in one tile: 44.5 us, not 50.1. Plain rows of 4096, two
    at a time, through a pipeline of the threads' own loads take 60.2 us, one ahead in registers 62.5; rows of 2048 with
    a mean through one, in turn, 36.7 us instead of 37.8, not in turn 38.9. Others are slower through pipelines: with a
    mean they take too many registers, plain ones of 2048 take 36.0 us in turn instead of 35.7.

    In place the compiler's pipeline loads no row before the one before it is stored, and what it makes of plain rows in
    one tile of 2048 neither: they are read into registers, in pieces.
    """
    rows, plain, exact = rows if n else 0, not center and not add, not center and (not add or n == 2048)
    tile_n, pieces, latency = next_power_of_2(n), 1, 0
    # Many plain rows of 4096, two a block: half as many reductions to wait for, and half as many sums to add up.
    many = rows >= 32 * sm_count(device)
    two = n == 4096 and plain and not in_place and itemsize == 2 and rows % 2 == 0 and many
    in_turn = n == 2048 and center and not (add or in_place) and itemsize == 2 and many
    if two:
        warps, occupancy, tile_n, latency = 8, 1, 2048, 8
    elif in_turn:
        warps, occupancy, tile_n, latency, exact = 4, 3, 1024, 5, True
    elif n > 4096:
        warps, occupancy, tile_n, latency = (8, 1, 4096, 6) if n > 6144 else (8, 1, 2048, 4)
        if n % 8 or in_place:  # the pipeline copies rows that begin at 16 bytes
            tile_n, latency = 2048, 0
    elif n == 2560 and plain:
        warps, occupancy, tile_n = 4, 4, 512
    elif n == 2560 and center and not (add or in_place):
        warps, occupancy, tile_n, exact = 4, 3, 512, True
    elif n > 2048:
        # Where a third of one tile would be idle, three of 1024.
        warps, occupancy, tile_n = (4, 3, 1024) if n <= 3072 else (8, 2, 2048)
    else:
        warps, occupancy = 4, 4
        tile_n = min(tile_n, 1024) if (in_place or add) and not center else tile_n
    if n > tile_n:
        pieces = ct.cdiv(n, tile_n)
    most = sm_count(device)
    tile_m = 2 if two else max(1, min(2048 // (tile_n * pieces), next_power_of_2(rows // (occupancy * most))))
    kernel = hinted(backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    # More blocks make more sums to add up: at least four tiles each, if that leaves one to a multiprocessor.
    tiles = ct.cdiv(rows, tile_m)
    blocks = min(tiles, occupancy * most, max(most, tiles // 4))
    if (two or in_turn or occupancy == 4) and blocks:
        # Each with as many tiles: of 528 blocks 512 are left, whose sums are one tile. 8192x2048 with a mean takes
        # 39.1 us instead of 42.0.
        blocks = ct.cdiv(tiles, ct.cdiv(tiles, blocks))
    bulk = latency > 0 and not (two or in_turn)
    check = not two and (not exact or bulk or tile_m > 1 or n != tile_n * pieces)
    return kernel, blocks, (tile_m, tile_n, pieces, latency, bulk, check, in_turn)


# Up to so many rows a multiprocessor, of that many columns, one launch does all; it sums up tiles of FEW_ROWS x SLICE.
# On an H200 in bf16, instead of two launches: 16x4096 6.2 us instead of 8.3 (fused_add_rms_norm), 128x4096 6.8 instead
# of 8.8, 512x4096 10.0 instead of 11.7, but 2048x4096 22.4 instead of 22.2 (rms_norm).
MOST_ROWS, LEAST_COLUMNS, FEW_ROWS, SLICE = 4, 1024, 128, 32

# Tiles of the wide backward pass.
WIDE_M, WIDE_N = 4, 512


def _fake_backward(dy, x, through, weight, mean, rstd, offset, dims, dweight, dbias, dtype):
    n = 1
    for size in x.shape[-dims:]:  # torch.Size.numel() would make traced code depend on the sizes
        n = n * size
    return contiguous_like(x), *(rstd.new_empty(n if wanted else 0, dtype=dtype) for wanted in (dweight, dbias))


@compilable(fake=_fake_backward)
def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    through: torch.Tensor | None,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    dims: int,
    dweight: bool,
    dbias: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, and in ``dtype`` [N] the gradients of weight and bias, empty where not asked for.

    The rows are over the last ``dims`` dimensions of x, ``mean`` and ``rstd`` [M] their statistics, None for a mean
    that is not taken off; ``through`` is added to dx.
    """
    dx = contiguous_like(x)
    return dx, *_launch_backward(dx, dy, x, through, weight, mean, rstd, offset, dims, dweight, dbias, dtype)


@compilable(fake=lambda *args: _fake_backward(*args)[1:], mutates=("x",))
def norm_backward_in_place(
    dy: torch.Tensor,
    x: torch.Tensor,
    through: torch.Tensor | None,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    dims: int,
    dweight: bool,
    dbias: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`norm_backward`, but writes dx over x, which is contiguous."""
    return _launch_backward(None, dy, x, through, weight, mean, rstd, offset, dims, dweight, dbias, dtype)


def _launch_backward(dx, dy, x, through, weight, mean, rstd, offset, dims, dweight, dbias, dtype):
    """Writes dx, or over x without one, and returns the gradients of weight and bias."""
    over_x, dy, rows = dx is None, rows_over(dy, dims), rows_over(x, dims)
    m, n = rows.shape
    device, out = x.get_device(), 0 if over_x else dx.view(m, n)
    center, add, weighted = mean is not None, through is not None, weight is not None
    through = rows_over(through, dims) if add else rows
    w = weight.reshape(-1) if weighted else rows
    means = mean if center else rstd
    # The blocks that sum up read all rows, while others would overwrite them.
    few = (dweight or dbias) and not over_x
    if few and 1 < m <= MOST_ROWS * sm_count(device) and LEAST_COLUMNS <= n <= MAX_CACHED_BACKWARD:
        dw, db = (rstd.new_empty(n if wanted else 0, dtype=dtype) for wanted in (dweight, dbias))
        slices = ct.cdiv(n, SLICE)
        tiles = next_power_of_2(n), min(FEW_ROWS, next_power_of_2(m)), SLICE
        constants = (offset, n, *tiles, center, add, weighted, dweight, dbias)
        kernel = hinted(backward_few_kernel, num_worker_warps=8, occupancy=2)
        launch(x, (1, slices + m), kernel, (dy, rows, through, w, means, rstd, out, dw, db, slices, *constants))
        return dw, db
    cached = n <= MAX_CACHED_BACKWARD
    if cached:
        kernel, blocks, tiles = backward_plan(m, n, device, center, add, over_x, rows.dtype.itemsize)
        if tiles[4]:  # rows that repeat cannot be copied by the pipeline
            dy, rows, through = (t.contiguous() if 0 in t.stride() else t for t in (dy, rows, through))
    else:
        blocks = min(ct.cdiv(m, WIDE_M), max(1, 8 * sm_count(device) // ct.cdiv(n, WIDE_N)))
    weights = sums_of_blocks(rstd, blocks, n, dweight, dtype)
    biases = sums_of_blocks(rstd, blocks, n, dbias, dtype)
    parts = weights[0], biases[0]
    if cached:
        constants = (offset, n, *tiles, center, add, weighted, dweight, dbias, overlaps(device), over_x)
        launch(x, (blocks,), kernel, (dy, rows, through, w, means, rstd, out, *parts, *constants))
    else:
        mean_g, mean_product = (torch.empty_like(rstd) for _ in range(2))
        constants = (offset, n, 4096, center, weighted)
        kernel = hinted(row_means_kernel, num_worker_warps=8)
        launch(x, (m,), kernel, (dy, rows, w, means, rstd, mean_g, mean_product, *constants))
        arrays = (dy, rows, through, w, means, rstd, mean_g, mean_product, out, *parts)
        constants = (offset, WIDE_M, WIDE_N, center, add, weighted, dweight, dbias, over_x)
        launch(x, (blocks, ct.cdiv(n, WIDE_N)), backward_columns_kernel, (*arrays, *constants))
    add_blocks(blocks, weights, biases)
    return weights[1], biases[1]


def norm_gradients(
    wanted: int, dy: torch.Tensor, x: torch.Tensor, *args: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`norm_backward`, with dx written over x if that is wanted and nothing needs x any more."""
    if wanted and x.is_contiguous() and in_place.may_overwrite(wanted, x):
        sums = norm_backward_in_place(dy, x, *args)
        return *in_place.overwritten(x), *sums
    return norm_backward(dy, x, *args)
