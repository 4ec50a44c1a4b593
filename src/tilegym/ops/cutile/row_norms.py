"""What the normalisations of rows share: pieces of their kernels, their tiles, and their backward pass.

With ``xhat = x * rstd``, or ``(x - mean) * rstd`` where a mean is taken off (CENTER), and
``g = dy * (offset + weight)``, backward is ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))``, without mean(g) where
no mean is taken off, and over the rows ``dweight = sum(dy * xhat)`` and ``dbias = sum(dy)``. Each block sums over rows
of its own, then the blocks' sums are added in a fixed order: the gradients are the same in every run.

Constants of the kernels: WEIGHT, BIAS, DWEIGHT, DBIAS and THROUGH say whether that array is given (else 0 or any array
stands in its place, untouched); ROUND, whether xhat is rounded to the dtype of y before it is scaled.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import at
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span

# A row of up to this many elements is held in the registers of one block; the backward pass holds four times as much.
MAX_CACHED = 16384
MAX_CACHED_BACKWARD = 8192


def load(x, rows, cols):
    return ct.gather(x, at(x, rows[:, None], cols[None, :]))


def load_vector(vector, cols, GIVEN: Bool):
    return ct.gather(vector, cols)[None, :] if GIVEN else None


def store(y, rows, cols, value):
    ct.scatter(y, at(y, rows[:, None], cols[None, :]), value.astype(y.dtype))


def put(y, tile, piece, value):
    """In a loop: stores a tile of whole rows, or a piece of them. Scatters into one array, each of which may write what
    another wrote, would take a barrier for every 16 bytes of a thread."""
    ct.store(y, (tile, piece), value.astype(y.dtype), allow_tma=False)


def behind(row, *others):
    """``row``, which is known only when the others are: so they are read before a reduction over it. The compiler sinks
    loads to where they are used, and a block would wait for memory twice."""
    kind = ct.static_eval(ct.uint32 if row.dtype == ct.float32 else ct.uint16)
    zero = ct.full((1, 1), ct.bid(1), ct.int32).astype(kind)  # grids have one axis, which the compiler does not know
    bits = ct.bitcast(row, kind)
    for other in ct.static_iter(others):
        bits = bits | (ct.bitcast(other.astype(row.dtype), kind) & zero)
    return ct.bitcast(bits, row.dtype)


def scale_of(weight, OFFSET: Float):
    """offset + weight in fp32, as a tile or a number."""
    scale = 1.0 if weight is None else weight.astype(ct.float32)
    return scale if OFFSET == 0.0 else scale + OFFSET


def scaled(xhat, weight, bias, dtype, OFFSET: Float, ROUND: Bool):
    """xhat * (offset + weight) + bias in fp32."""
    if ROUND:
        xhat = xhat.astype(dtype).astype(ct.float32)
    out = xhat * scale_of(weight, OFFSET)
    return out if bias is None else out + bias.astype(ct.float32)


def rstd_of(squares, eps, N: Int):
    return ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / N) + eps)


def centered(row, mean, cols, N: Int):
    """row - mean, and 0 beyond the row's end, so that it adds nothing to sums."""
    return ct.where(cols[None, :] < N, row - mean, 0.0)


def _normed(row, mean, rstd, CENTER: Bool):
    row = row.astype(ct.float32)
    return (row - mean if CENTER else row) * rstd


def _xhat(row, means, rstds, rows, CENTER: Bool):
    rstd = ct.gather(rstds, rows)[:, None]
    return _normed(row, ct.gather(means, rows)[:, None] if CENTER else rstd, rstd, CENTER)


def _load_pieces(x, tile, TILE_M: Int, TILE_N: Int, PIECES: Int, LATENCY: Int):
    pieces = ()
    for piece in ct.static_iter(range(PIECES)):
        if LATENCY:
            shape, zero = (TILE_M, TILE_N), ct.PaddingMode.ZERO
            pieces = (*pieces, ct.load(x, (tile, piece), shape, padding_mode=zero, latency=LATENCY))
        else:
            pieces = (*pieces, load(x, span(tile, TILE_M), span(piece, TILE_N)))
    return pieces


def _load_rows(dy, x, means, rstds, tile, TILE_M: Int, TILE_N: Int, PIECES: Int, LATENCY: Int, CENTER: Bool):
    """What the backward pass needs of TILE_M rows."""
    rows = span(tile, TILE_M)
    rstd = ct.gather(rstds, rows)[:, None]
    mean = ct.gather(means, rows)[:, None] if CENTER else rstd
    ups = _load_pieces(dy, tile, TILE_M, TILE_N, PIECES, LATENCY)
    return ups, _load_pieces(x, tile, TILE_M, TILE_N, PIECES, LATENCY), mean, rstd


def add_pairs(a, b, c, d):
    return a + c, b + d


def _zeros(TILE_M: Int, TILE_N: Int, PIECES: Int):
    pieces = ()
    for _ in ct.static_iter(range(PIECES)):
        pieces = (*pieces, ct.zeros((TILE_M, TILE_N), ct.float32))
    return pieces


def _store_sums(sums, parts, TILE_N: Int, PIECES: Int):
    for piece in ct.static_iter(range(PIECES)):
        out = ct.sum(sums[piece], axis=0).astype(parts.dtype)
        ct.scatter(parts, (ct.bid(0), span(piece, TILE_N)), out)


@ct.kernel
def backward_kernel(
    dy, x, through, weight, means, rstds, dx, dweight, dbias, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int,
    PIECES: Int, LATENCY: Int, CENTER: Bool, THROUGH: Bool, WEIGHT: Bool, DWEIGHT: Bool, DBIAS: Bool, OVERLAP: Bool,
):  # fmt: skip
    """Whole rows in registers, as PIECES tiles; blocks stride over them, and row ``bid`` of dweight and dbias is that
    block's sum.

    ``through`` is a gradient that is added to dx. LATENCY: what the compiler's own pipeline of loads is told, through
    shared memory; with 0 the next rows are read into registers before these are worked on. OVERLAP: the launch that
    adds the sums may begin, and waits.
    """
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    ws = ()
    for piece in ct.static_iter(range(PIECES)):
        ws = (*ws, load_vector(weight, span(piece, TILE_N), WEIGHT))
    dws = _zeros(TILE_M, TILE_N, PIECES)
    dbs = _zeros(TILE_M, TILE_N, PIECES)
    if LATENCY == 0:
        following = _load_rows(dy, x, means, rstds, ct.bid(0), TILE_M, TILE_N, PIECES, 0, CENTER)
    for tile in range(ct.bid(0), ct.cdiv(x.shape[0], TILE_M), ct.num_blocks(0)):
        if LATENCY == 0:
            ups, xs, mean, rstd = following
            later = tile + ct.num_blocks(0)  # out of bounds in the end: nothing is read then
            following = _load_rows(dy, x, means, rstds, later, TILE_M, TILE_N, PIECES, 0, CENTER)
        else:
            ups, xs, mean, rstd = _load_rows(dy, x, means, rstds, tile, TILE_M, TILE_N, PIECES, LATENCY, CENTER)
        added = _load_pieces(through, tile, TILE_M, TILE_N, PIECES, LATENCY) if THROUGH else ups
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
            put(dx, tile, piece, grad + added[piece].astype(ct.float32) if THROUGH else grad)
            new_dws = (*new_dws, dws[piece] + up * xhat if DWEIGHT else dws[piece])
            new_dbs = (*new_dbs, dbs[piece] + up if DBIAS else dbs[piece])
        dws, dbs = new_dws, new_dbs
    if DWEIGHT:
        _store_sums(dws, dweight, TILE_N, PIECES)
    if DBIAS:
        _store_sums(dbs, dbias, TILE_N, PIECES)


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
    TILE_N: Int, CENTER: Bool, THROUGH: Bool, WEIGHT: Bool, DWEIGHT: Bool, DBIAS: Bool,
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
        store(dx, rows, cols, grad + added if THROUGH else grad)
        if DWEIGHT:
            dw = dw + up * xhat
        if DBIAS:
            db = db + up
    if DWEIGHT:
        ct.scatter(dweight, (ct.bid(0), cols), ct.sum(dw, axis=0).astype(dweight.dtype))
    if DBIAS:
        ct.scatter(dbias, (ct.bid(0), cols), ct.sum(db, axis=0).astype(dbias.dtype))


@ct.kernel
def add_blocks_kernel(parts0, parts1, out0, out1, TILE_M: Int, TILE_N: Int, FIRST: Bool, OVERLAP: Bool):
    """out [N] = sums over the rows of parts; blocks (., 0) the first pair, if there is one, the next the second."""
    if OVERLAP:
        ct.grid_dependency_control_wait()
    if FIRST and ct.bid(1) == 0:
        _add_rows(parts0, out0, TILE_M, TILE_N)
    else:
        _add_rows(parts1, out1, TILE_M, TILE_N)


def _add_rows(parts, out, TILE_M: Int, TILE_N: Int):
    cols = span(ct.bid(0), TILE_N)
    total = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.cdiv(parts.shape[0], TILE_M)):
        total = total + load(parts, span(tile, TILE_M), cols)
    ct.scatter(out, cols, ct.sum(total, axis=0).astype(out.dtype))


def whole_rows(rows: int, n: int, device: int) -> tuple[int, int]:
    """(TILE_M, TILE_N) for whole rows of [rows, n] in registers: short rows share a block, as long as there are blocks
    for every multiprocessor."""
    tile_n = next_power_of_2(n)
    return max(1, min(4096 // tile_n, next_power_of_2(rows // (4 * sm_count(device))))), tile_n


def at_once(tiles: int, device: int) -> bool:
    """Whether all blocks of a forward pass run at once, so that none works while another waits for memory."""
    return tiles <= sm_count(device)


def forward_warps(tiles: int, elements: int, device: int) -> int:
    """Warps of a block that holds a tile of ``elements``. Where there are fewer tiles than multiprocessors, what counts
    is how long one takes: with 8 warps each thread issues half as many instructions."""
    return 8 if elements >= 8192 or (elements >= 2048 and tiles < sm_count(device)) else 4


@functools.lru_cache(maxsize=1024)
def backward_plan(rows: int, n: int, device: int) -> tuple[ct.kernel, int, int, int, int, int]:
    """(kernel, blocks, TILE_M, TILE_N, PIECES, LATENCY) of the backward pass in registers, for rows of up to
    MAX_CACHED_BACKWARD.

    The fastest on an H200 in bf16, without spills: 8192 rows of 2048, 2560, 4096, 5120 and 8192, and 65536 of 512.
    """
    rows = rows if n else 0
    tile_n, pieces, latency = next_power_of_2(n), 1, 0
    if n > 4096:
        warps, occupancy, tile_n, latency = (8, 1, 4096, 6) if n > 6144 else (8, 1, 2048, 4)
        if n % 8:  # the pipeline copies rows that begin at 16 bytes
            tile_n, latency = 2048, 0
    elif n > 2048:
        # Where a third of one tile would be idle, three of 1024.
        warps, occupancy, tile_n = (4, 3, 1024) if n <= 3072 else (8, 2, 2048)
    else:
        warps, occupancy = 4, 4
    if n > 2048:
        pieces = ct.cdiv(n, tile_n)
    tile_m = max(1, min(2048 // (tile_n * pieces), next_power_of_2(rows // (occupancy * sm_count(device)))))
    kernel = hinted(backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    # More blocks make more sums to add up: at least four tiles each, if that leaves one to a multiprocessor.
    tiles, most = ct.cdiv(rows, tile_m), sm_count(device)
    return kernel, min(tiles, occupancy * most, max(most, tiles // 4)), tile_m, tile_n, pieces, latency


# Tiles of the wide backward pass.
WIDE_M, WIDE_N = 4, 512


def sums_of_blocks(
    like: torch.Tensor, blocks: int, n: int, wanted: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the blocks put their sums, [blocks, n], and where :func:`add_blocks` adds them, [n] in ``dtype``.

    A single block writes the result itself. If it is not wanted: ``like``, and an empty tensor.
    """
    if not wanted:
        return like, like.new_empty(0, dtype=dtype)
    out = like.new_empty(n, dtype=dtype) if blocks else like.new_zeros(n, dtype=dtype)
    return (out.view(1, n) if blocks <= 1 else like.new_empty(blocks, n, dtype=torch.float32)), out


def add_blocks(blocks: int, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Adds up the sums of one or two pairs from :func:`sums_of_blocks`, of up to ``blocks`` blocks, in one launch."""
    wanted = [pair for pair in pairs if pair[1].numel() and pair[0].shape[0] > 1]
    if blocks > 1 and wanted:
        add_rows(*wanted)


@functools.lru_cache(maxsize=1024)
def add_tile(m: int) -> tuple[int, int]:
    """(TILE_M, TILE_N) to add up m rows: all of them at once, since each further turn would wait for memory again."""
    tile_m = min(1024, next_power_of_2(m))
    return tile_m, max(4, min(128, 4096 // tile_m))


def add_rows(*pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Adds up the rows of the first of one or two pairs, fp32 [M, N], into the second, [N] of any dtype.

    M and N of two pairs may differ.
    """
    (parts0, out0), (parts1, out1) = pairs[0], pairs[-1]
    tile_m, tile_n = add_tile(max(parts0.shape[0], parts1.shape[0]))
    grid = (ct.cdiv(max(out0.shape[0], out1.shape[0]), tile_n), len(pairs))
    overlap = overlaps(out0.get_device())
    args = (parts0, parts1, out0, out1, tile_m, tile_n, len(pairs) == 2, overlap)
    launch(out0, grid, add_blocks_kernel, args, overlap)


def rows_over(x: torch.Tensor, dims: int) -> torch.Tensor:
    """``x`` as [M, N], N over its last ``dims`` dimensions."""
    if dims == 1:
        return rows_of(x)
    n = x.shape[-dims:].numel()
    rows = x.reshape(x.shape[:-dims].numel(), n)
    return rows if rows.stride(0) <= INT32_MAX else rows.contiguous()


def contiguous_like(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def sums_dtype(weight: torch.Tensor | None, bias_dtype: torch.dtype | None) -> torch.dtype:
    """In which dtype the gradients of weight and bias are written: theirs, or fp32 if they have two."""
    dtypes = {t for t in (None if weight is None else weight.dtype, bias_dtype) if t is not None}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


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
    dx, dy, rows = contiguous_like(x), rows_over(dy, dims), rows_over(x, dims)
    m, n = rows.shape
    device, out = x.get_device(), dx.view(m, n)
    center, add, weighted = mean is not None, through is not None, weight is not None
    through = rows_over(through, dims) if add else rows
    w = weight.reshape(-1) if weighted else rows
    means = mean if center else rstd
    cached = n <= MAX_CACHED_BACKWARD
    if cached:
        kernel, blocks, *tiles = backward_plan(m, n, device)
        if tiles[-1]:  # rows that repeat cannot be copied by the pipeline
            dy, rows, through = (t.contiguous() if 0 in t.stride() else t for t in (dy, rows, through))
    else:
        blocks = min(ct.cdiv(m, WIDE_M), max(1, 8 * sm_count(device) // ct.cdiv(n, WIDE_N)))
    weights = sums_of_blocks(rstd, blocks, n, dweight, dtype)
    biases = sums_of_blocks(rstd, blocks, n, dbias, dtype)
    parts = weights[0], biases[0]
    if cached:
        constants = (offset, n, *tiles, center, add, weighted, dweight, dbias, overlaps(device))
        launch(x, (blocks,), kernel, (dy, rows, through, w, means, rstd, out, *parts, *constants))
    else:
        mean_g, mean_product = (torch.empty_like(rstd) for _ in range(2))
        constants = (offset, n, 4096, center, weighted)
        kernel = hinted(row_means_kernel, num_worker_warps=8)
        launch(x, (m,), kernel, (dy, rows, w, means, rstd, mean_g, mean_product, *constants))
        arrays = (dy, rows, through, w, means, rstd, mean_g, mean_product, out, *parts)
        constants = (offset, WIDE_M, WIDE_N, center, add, weighted, dweight, dbias)
        launch(x, (blocks, ct.cdiv(n, WIDE_N)), backward_columns_kernel, (*arrays, *constants))
    add_blocks(blocks, weights, biases)
    return dx, weights[1], biases[1]
