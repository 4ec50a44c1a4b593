"""The GEMMs of a mixture of experts, over rows that are sorted by expert.

Each expert's rows are filled up to whole blocks of TILE_M (``moe_align.py``): a block of rows needs one expert's
weights, and starts where a tile does. With many rows an expert, rows are the left operand of ``ct.mma``. With few,
reading the weights is the work: then tall tiles of a weight are the left operand, and 16 or 32 rows the right one.
"""

import cuda.tile as ct

from tilegym.ops.cutile.bmm import load_tile as load_batch_tile
from tilegym.ops.cutile.matmul import load_tile
from tilegym.ops.cutile.matmul import tile_of_block
from tilegym.ops.cutile.moe_activation import activated
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import begin_alone
from tilegym.ops.cutile.tiling import span

NO_GATE, SPLIT, INTERLEAVED = range(3)  # what an expert's first matrix holds


def scalar_at(array, index):
    """In a kernel: one number of a vector."""
    return ct.load(array, (index,), (1,)).item()


def load_rows(x, m, k, TILE_M: Int, TILE_K: Int, WEIGHT_LEFT: Bool):
    """In a kernel: tile (m, k) of x, as the operand that WEIGHT_LEFT makes it."""
    if WEIGHT_LEFT:
        return load_tile(x, k, m, TILE_K, TILE_M, True, True)
    return load_tile(x, m, k, TILE_M, TILE_K, False, True)


def load_weight(w, expert, n, k, TILE_N: Int, TILE_K: Int, TRANSPOSED: Bool, WEIGHT_LEFT: Bool):
    """In a kernel: tile (n, k) of the expert's matrix in ``w`` [E, N, K], or [E, K, N] if TRANSPOSED."""
    if WEIGHT_LEFT:
        return load_batch_tile(w, expert, n, k, TILE_N, TILE_K, TRANSPOSED)
    return load_batch_tile(w, expert, k, n, TILE_K, TILE_N, not TRANSPOSED)


def multiply(rows, weight, acc, WEIGHT_LEFT: Bool, TF32: Bool):
    left, right = (weight, rows) if WEIGHT_LEFT else (rows, weight)
    if TF32:
        left, right = left.astype(ct.tfloat32), right.astype(ct.tfloat32)
    if left.dtype == ct.float32:
        # Each product and each sum is rounded, one after the other: sums of a few are more exact than one of all.
        return acc + ct.mma(left, right, ct.zeros(acc.shape, dtype=ct.float32))
    return ct.mma(left, right, acc)


def depth(dtype, TILE_K: Int, TF32: Bool):
    """In a kernel: how many products :func:`multiply` adds up at a time, TILE_K of them unless in fp32."""
    return min(TILE_K, 8) if dtype == ct.float32 and not TF32 else TILE_K


def zeros_for(TILE_M: Int, TILE_N: Int, WEIGHT_LEFT: Bool):
    return ct.zeros((TILE_N, TILE_M) if WEIGHT_LEFT else (TILE_M, TILE_N), dtype=ct.float32)


def product(
    x, w, expert, m, n, TILE_M: Int, TILE_N: Int, TILE_K: Int, TRANSPOSED: Bool, WEIGHT_LEFT: Bool, TF32: Bool,
    MAY_BE_NONE: Bool = False,
):  # fmt: skip
    """In a kernel: tile (m, n) of x times the expert's matrix, in fp32; transposed if WEIGHT_LEFT.

    MAY_BE_NONE: of the expert -1 it is 0.
    """
    acc = zeros_for(TILE_M, TILE_N, WEIGHT_LEFT)
    step = depth(x.dtype, TILE_K, TF32)
    steps = ct.cdiv(x.shape[1], step)
    if MAY_BE_NONE:
        steps = ct.where(expert >= 0, steps, 0).item()
    for k in range(steps):
        rows = load_rows(x, m, k, TILE_M, step, WEIGHT_LEFT)
        weight = load_weight(w, expert, n, k, TILE_N, step, TRANSPOSED, WEIGHT_LEFT)
        acc = multiply(rows, weight, acc, WEIGHT_LEFT, TF32)
    return acc


def load_bias(bias, expert, n, TILE_N: Int, WEIGHT_LEFT: Bool):
    """In a kernel: tile n of the expert's row of ``bias`` [E, N], to be added to an accumulator."""
    tile = ct.gather(bias, (expert, span(n, TILE_N))).astype(ct.float32)
    return tile.reshape((TILE_N, 1) if WEIGHT_LEFT else (1, TILE_N))


def store_rows(c, m, n, tile, WEIGHT_LEFT: Bool):
    """In a kernel: stores a tile that :func:`product` gave."""
    if WEIGHT_LEFT:
        ct.store(c, (n, m), tile.astype(c.dtype), order=(1, 0))
    else:
        ct.store(c, (m, n), tile.astype(c.dtype))


def every_other(both, which: Int, TILE_M: Int, TILE_N: Int, WEIGHT_LEFT: Bool):
    """In a kernel: the gates (0) or the ups (1) of an accumulator whose weights alternate."""
    # Each is the sum of itself and 0. ct.extract would do, but for sm_100 it does not compile on an accumulator.
    parity = ct.arange(2 * TILE_N, dtype=ct.int32) % 2 == which
    if WEIGHT_LEFT:
        masked = ct.where(parity[:, None], both, 0.0)
        chosen = ct.sum(masked.reshape((TILE_N, 2, TILE_M)), axis=1)
    else:
        masked = ct.where(parity[None, :], both, 0.0)
        chosen = ct.sum(masked.reshape((TILE_M, TILE_N, 2)), axis=2)
    return chosen


def activated_rows(
    x, w_gate, w_up, b_gate, b_up, expert, m, n, alpha, limit, dtype, TILE_M: Int, TILE_N: Int, TILE_K: Int,
    TRANSPOSED: Bool, GATE: Int, BIAS: Bool, KIND: Int, LIMITED: Bool, WEIGHT_LEFT: Bool, TF32: Bool,
):  # fmt: skip
    """In a kernel: act(x W_gate + b_gate, x W_up + b_up) of tile (m, n), in fp32; transposed if WEIGHT_LEFT."""
    if GATE == INTERLEAVED:
        both = product(x, w_gate, expert, m, n, TILE_M, 2 * TILE_N, TILE_K, TRANSPOSED, WEIGHT_LEFT, TF32)
        gate = every_other(both, 0, TILE_M, TILE_N, WEIGHT_LEFT)
        up = every_other(both, 1, TILE_M, TILE_N, WEIGHT_LEFT)
    elif GATE == SPLIT:
        gate = zeros_for(TILE_M, TILE_N, WEIGHT_LEFT)
        up = zeros_for(TILE_M, TILE_N, WEIGHT_LEFT)
        step = depth(x.dtype, TILE_K, TF32)
        for k in range(ct.cdiv(x.shape[1], step)):
            rows = load_rows(x, m, k, TILE_M, step, WEIGHT_LEFT)
            weight = load_weight(w_gate, expert, n, k, TILE_N, step, TRANSPOSED, WEIGHT_LEFT)
            gate = multiply(rows, weight, gate, WEIGHT_LEFT, TF32)
            weight = load_weight(w_up, expert, n, k, TILE_N, step, TRANSPOSED, WEIGHT_LEFT)
            up = multiply(rows, weight, up, WEIGHT_LEFT, TF32)
    else:
        gate = product(x, w_gate, expert, m, n, TILE_M, TILE_N, TILE_K, TRANSPOSED, WEIGHT_LEFT, TF32)
        up = gate
    if BIAS:
        gate = gate + load_bias(b_gate, expert, n, TILE_N, WEIGHT_LEFT)
        if GATE != NO_GATE:
            up = up + load_bias(b_up, expert, n, TILE_N, WEIGHT_LEFT)
    return activated(gate, up, alpha, limit, dtype, KIND, GATE != NO_GATE, LIMITED)


@ct.kernel
def moe_up_kernel(
    x,  # [R, H]: rows sorted by expert; [T, H] if ALL
    w_gate,  # [E, I, H], or [E, H, I] if TRANSPOSED; [E, H, 2I] if GATE == INTERLEAVED
    w_up,  # as w_gate if GATE == SPLIT, else 0
    b_gate,  # [E, I] if BIAS, else 0
    b_up,  # [E, I] if BIAS and there is a gate, else 0
    expert_of,  # [blocks]
    h,  # [R, I]
    alpha,
    limit,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANSPOSED: Bool,
    GATE: Int,
    BIAS: Bool,
    KIND: Int,
    LIMITED: Bool,
    WEIGHT_LEFT: Bool,
    TF32: Bool,
    ALL: Bool,
    OVERLAP: Bool,
):
    """h = act(x W_gate + b_gate, x W_up + b_up). ALL: each block of rows is that of all tokens."""
    begin(OVERLAP)
    m, n = tile_of_block(ct.bid(0), expert_of.shape[0], ct.cdiv(h.shape[1], TILE_N), GROUP_M)
    expert = scalar_at(expert_of, m)
    if expert >= 0:
        weights, sizes = (w_gate, w_up, b_gate, b_up), (TILE_M, TILE_N, TILE_K)
        options = (TRANSPOSED, GATE, BIAS, KIND, LIMITED, WEIGHT_LEFT, TF32)
        value = activated_rows(x, *weights, expert, 0 if ALL else m, n, alpha, limit, h.dtype, *sizes, *options)
        store_rows(h, m, n, value, WEIGHT_LEFT)


@ct.kernel
def grouped_gemm_kernel(
    x,  # [R, K]: rows sorted by expert
    w,  # [E, N, K], or [E, K, N] if TRANSPOSED
    bias,  # [E, N] if BIAS, else 0
    expert_of,  # [blocks]
    c,  # [R, N]
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANSPOSED: Bool,
    BIAS: Bool,
    WEIGHT_LEFT: Bool,
    TF32: Bool,
    PERSISTENT: Bool,
    OVERLAP: Bool,
):
    """Each block of rows times its expert's matrix. PERSISTENT, without BIAS: by no more blocks than run at once, which
    store a tile while they load the next."""
    begin(OVERLAP)
    n_tiles, sizes = ct.cdiv(c.shape[1], TILE_N), (TILE_M, TILE_N, TILE_K, TRANSPOSED, WEIGHT_LEFT, TF32)
    if PERSISTENT:
        for block in range(ct.bid(0), expert_of.shape[0] * n_tiles, ct.num_blocks(0)):
            m, n = tile_of_block(block, expert_of.shape[0], n_tiles, GROUP_M)
            # With a branch the tensor cores' instructions would wait for each other: what is left over gets zeros.
            store_rows(c, m, n, product(x, w, scalar_at(expert_of, m), m, n, *sizes, True), WEIGHT_LEFT)
    else:
        m, n = tile_of_block(ct.bid(0), expert_of.shape[0], n_tiles, GROUP_M)
        expert = scalar_at(expert_of, m)
        if expert >= 0:
            acc = product(x, w, expert, m, n, *sizes)
            if BIAS:
                acc = acc + load_bias(bias, expert, n, TILE_N, WEIGHT_LEFT)
            store_rows(c, m, n, acc, WEIGHT_LEFT)


@ct.kernel
def moe_spread_kernel(x, rows, out, TOP_K: Int, TILE_N: Int, OVERLAP: Bool):
    """Copies row t of x [T, H] to the rows ``rows[t * TOP_K + j]`` of out [R, H], where they are not -1."""
    begin(OVERLAP)
    tiles = ct.cdiv(x.shape[1], TILE_N)
    token, columns = ct.bid(0) // tiles, span(ct.bid(0) % tiles, TILE_N)
    tile = ct.gather(x, (token, columns))
    for j in range(TOP_K):
        ct.scatter(out, (scalar_at(rows, token * TOP_K + j), columns), tile)


@ct.kernel
def moe_gather_kernel(x, sorted_ids, out, TOP_K: Int, TILE_N: Int, OVERLAP: Bool):
    """The same, a block a row of out, which is 0 where no pair has the row."""
    begin(OVERLAP)
    tiles = ct.cdiv(x.shape[1], TILE_N)
    row, columns = ct.bid(0) // tiles, span(ct.bid(0) % tiles, TILE_N)
    # The pair that fills is the first one out of bounds.
    token = scalar_at(sorted_ids, row) // TOP_K
    ct.scatter(out, (row, columns), ct.gather(x, (token, columns)))


@ct.kernel
def moe_combine_kernel(
    y,  # [R, H]
    rows,  # [T * TOP_K] if SORTED, else 0: pair after pair
    weights,  # [T * TOP_K] if WEIGHTED, else 0
    shared,  # [T, H] if SHARED, else 0
    out,  # [T, H]
    TOP_K: Int,
    TILE_N: Int,
    SORTED: Bool,
    WEIGHTED: Bool,
    SHARED: Bool,
    OVERLAP: Bool,
):
    """out[t] = sum over j of weights[t, j] * y[rows[t, j]] (+ shared[t]), in the order of j."""
    begin_alone(OVERLAP)
    tiles = ct.cdiv(out.shape[1], TILE_N)
    token, columns = ct.bid(0) // tiles, span(ct.bid(0) % tiles, TILE_N)
    total = ct.zeros((TILE_N,), dtype=ct.float32)
    for j in range(TOP_K):
        row = token * TOP_K + j
        if SORTED:
            # What has no row, -1, is out of bounds, and reads as 0.
            row = scalar_at(rows, row)
        tile = ct.gather(y, (row, columns)).astype(ct.float32)
        if WEIGHTED:
            weight = scalar_at(weights, token * TOP_K + j).astype(ct.float32)
            tile = tile * (ct.where(row >= 0, weight, 0.0) if SORTED else weight)
        total = total + tile
    if SHARED:
        total = total + ct.gather(shared, (token, columns)).astype(ct.float32)
    ct.scatter(out, (token, columns), total.astype(out.dtype))


@ct.kernel
def grouped_outer_kernel(
    a,  # [R, M]
    b,  # [R, N]
    offsets,  # [E + 1]
    c,  # [E, M, N]
    TILE_M: Int,
    TILE_N: Int,
    TILE_R: Int,
    ALIGNED: Bool,
    TF32: Bool,
):
    """c[e] = a[rows of e].T @ b[rows of e]. ALIGNED: each expert's rows are whole tiles, and 0 where they only fill."""
    m_tiles, n_tiles = ct.cdiv(c.shape[1], TILE_M), ct.cdiv(c.shape[2], TILE_N)
    expert, tile = ct.bid(0) // (m_tiles * n_tiles), ct.bid(0) % (m_tiles * n_tiles)
    m, n = tile_of_block(tile, m_tiles, n_tiles, 8)
    begin, end = scalar_at(offsets, expert).astype(ct.int32), scalar_at(offsets, expert + 1).astype(ct.int32)
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for r in range(begin // TILE_R, ct.cdiv(end, TILE_R)):
        left = load_tile(a, m, r, TILE_M, TILE_R, True, True)
        right = load_tile(b, r, n, TILE_R, TILE_N, False, True)
        if not ALIGNED:
            # The first and the last tile hold others' rows too, whose NaN times 0 would be NaN.
            row = span(r, TILE_R)
            mine = (row >= begin) & (row < end)
            left = ct.where(mine[None, :], left, ct.zeros((1, 1), left.dtype))
            right = ct.where(mine[:, None], right, ct.zeros((1, 1), right.dtype))
        acc = multiply(left, right, acc, False, TF32)
    ct.store(c, (expert, m, n), acc.astype(c.dtype).reshape((1, TILE_M, TILE_N)))


@ct.kernel
def grouped_sum_kernel(x, weights, offsets, out, TILE_R: Int, TILE_N: Int, WEIGHTED: Bool):
    """out[e] = sum of the rows of e of x [R, N], times ``weights`` [R] if WEIGHTED."""
    tiles = ct.cdiv(out.shape[1], TILE_N)
    expert, columns = ct.bid(0) // tiles, span(ct.bid(0) % tiles, TILE_N)
    begin, end = scalar_at(offsets, expert).astype(ct.int32), scalar_at(offsets, expert + 1).astype(ct.int32)
    total = ct.zeros((TILE_R, TILE_N), dtype=ct.float32)
    for first in range(begin, end, TILE_R):
        row = first + ct.arange(TILE_R, dtype=ct.int32)
        row = ct.where(row < end, row, -1)
        tile = ct.gather(x, (row[:, None], columns[None, :])).astype(ct.float32)
        if WEIGHTED:
            tile = tile * ct.gather(weights, row)[:, None]
        total = total + tile
    ct.scatter(out, (expert, columns), ct.sum(total, axis=0).astype(out.dtype))
