"""The backward pass of the normalisations of rows; ``row_norms.py`` has the formulas and the kernels' constants.

Rows of up to MAX_CACHED_BACKWARD are held in registers: ``row_norms_backward_cached.py``.
"""

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
from tilegym.ops.cutile.row_norms import rows_over
from tilegym.ops.cutile.row_norms import scale_of
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.row_norms import sums_of_blocks
from tilegym.ops.cutile.row_norms_backward_cached import backward_plan
from tilegym.ops.cutile.row_norms_backward_cached import normed
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span


def _xhat(row, means, rstds, rows, CENTER: Bool):
    rstd = ct.gather(rstds, rows)[:, None]
    return normed(row, ct.gather(means, rows)[:, None] if CENTER else rstd, rstd, CENTER)


@ct.kernel
def backward_few_kernel(
    dy, x, through, weight, means, rstds, dx, dweight, dbias, slices, OFFSET: Float, N: Int, TILE_N: Int, TILE_R: Int,
    TILE_C: Int, CENTER: Bool, THROUGH: Bool, WEIGHT: Bool, DWEIGHT: Bool, DBIAS: Bool, OVERLAP: Bool,
):  # fmt: skip
    """The first ``slices`` blocks sum up TILE_C columns each of dweight and dbias, which need nothing of what the other
    blocks find out, dx of a row each: few rows come from the cache the second time."""
    begin(OVERLAP)
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


# Up to so many rows a multiprocessor, of that many columns, one launch does all; it sums up tiles of FEW_ROWS x SLICE.
# On an H200 in bf16, instead of two launches: 16x4096 6.2 us instead of 8.3 (fused_add_rms_norm), 128x4096 6.8 instead
# of 8.8, 512x4096 10.0 instead of 11.7, but 2048x4096 22.4 instead of 22.2 (rms_norm); 512x8192 in slices of 64 columns
# 15.8 us, of 32 16.7 (fused_add_rms_norm).
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
    device, out = x.get_device(), rows if over_x else dx.view(m, n)
    center, add, weighted = mean is not None, through is not None, weight is not None
    overlap = overlaps(device)
    through = rows_over(through, dims) if add else rows
    w = weight.reshape(-1) if weighted else rows
    means = mean if center else rstd
    # The blocks that sum up read all rows, while others would overwrite them.
    few = (dweight or dbias) and not over_x
    if few and 1 < m <= MOST_ROWS * sm_count(device) and LEAST_COLUMNS <= n <= MAX_CACHED_BACKWARD:
        dw, db = (rstd.new_empty(n if wanted else 0, dtype=dtype) for wanted in (dweight, dbias))
        # Where they take several turns, no more of them than multiprocessors, or they would keep the rows waiting.
        width = SLICE if m <= FEW_ROWS or n <= SLICE * sm_count(device) else 2 * SLICE
        slices = ct.cdiv(n, width)
        tiles = next_power_of_2(n), min(FEW_ROWS, next_power_of_2(m)), width
        constants = (offset, n, *tiles, center, add, weighted, dweight, dbias, overlap)
        kernel = hinted(backward_few_kernel, num_worker_warps=8, occupancy=2)
        arrays = (dy, rows, through, w, means, rstd, out, dw, db, slices)
        launch(x, (1, slices + m), kernel, (*arrays, *constants), overlap)
        return dw, db
    cached = n <= MAX_CACHED_BACKWARD
    if cached:
        kernel, blocks, tiles = backward_plan(m, n, device, center, add, rows.dtype.itemsize)
        if tiles[5]:  # rows that repeat cannot be copied by the pipeline
            dy, rows, through = (t.contiguous() if 0 in t.stride() else t for t in (dy, rows, through))
    else:
        blocks = min(ct.cdiv(m, WIDE_M), max(1, 8 * sm_count(device) // ct.cdiv(n, WIDE_N)))
    weights = sums_of_blocks(rstd, blocks, n, dweight, dtype)
    biases = sums_of_blocks(rstd, blocks, n, dbias, dtype)
    parts = weights[0], biases[0]
    if cached:
        constants = (offset, n, *tiles, center, add, weighted, dweight, dbias, overlap)
        launch(x, (blocks,), kernel, (dy, rows, through, w, means, rstd, out, *parts, *constants), overlap)
    else:
        mean_g, mean_product = (torch.empty_like(rstd) for _ in range(2))
        constants = (offset, n, 4096, center, weighted)
        kernel = hinted(row_means_kernel, num_worker_warps=8)
        launch(x, (m,), kernel, (dy, rows, w, means, rstd, mean_g, mean_product, *constants))
        arrays = (dy, rows, through, w, means, rstd, mean_g, mean_product, out, *parts)
        constants = (offset, WIDE_M, WIDE_N, center, add, weighted, dweight, dbias)
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
