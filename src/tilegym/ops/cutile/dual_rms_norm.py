"""RMS normalisation of the heads of q and of k in one launch each way; ``row_norms.py`` has the formulas.

The first blocks take rows of q, the others rows of k. Statistics are computed again in the backward pass: a head is so
short that its sum costs less than reading what it was.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import of_caller
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.row_norms import MAX_CACHED_BACKWARD
from tilegym.ops.cutile.row_norms import add_blocks
from tilegym.ops.cutile.row_norms import add_pairs
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import load_vector
from tilegym.ops.cutile.row_norms import put
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import scale_of
from tilegym.ops.cutile.row_norms import scaled
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.row_norms import sums_of_blocks
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import row_count
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.dual_rms_norm import check_dual_rms_norm


def _forward(x, weight, y, tile, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, ROUND: Bool):
    rows, cols = span(tile, TILE_M), span(0, TILE_N)
    row = load(x, rows, cols)
    w = load_vector(weight, cols, WEIGHT)  # before the row is waited for
    row = row.astype(ct.float32)
    store(y, rows, cols, scaled(row * rstd_of(row * row, eps, N), w, None, y.dtype, OFFSET, ROUND))


@ct.kernel
def dual_rms_norm_kernel(
    q, k, q_weight, k_weight, q_out, k_out, q_blocks, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int,
    Q_WEIGHT: Bool, K_WEIGHT: Bool, ROUND: Bool,
):  # fmt: skip
    """Each block takes TILE_M heads of q or of k, which are [T, H, N]."""
    block = ct.bid(0)
    if block < q_blocks:
        _forward(q, q_weight, q_out, block, eps, OFFSET, N, TILE_M, TILE_N, Q_WEIGHT, ROUND)
    else:
        _forward(k, k_weight, k_out, block - q_blocks, eps, OFFSET, N, TILE_M, TILE_N, K_WEIGHT, ROUND)


def _backward(
    dy, x, weight, dx, dweight, first, blocks, eps, OFFSET: Float, N: Int, TILE_M: Int, TILE_N: Int, CHECK: Bool,
    WEIGHT: Bool, DWEIGHT: Bool, OVERLAP: Bool,
):  # fmt: skip
    cols = span(0, TILE_N)
    # As a tile of the rows' shape, since each thread loads what it multiplies.
    w = ct.gather(weight, ct.broadcast_to(cols[None, :], (TILE_M, TILE_N))) if WEIGHT else None
    scale = scale_of(w, OFFSET)
    dw = ct.zeros((TILE_M, TILE_N), ct.float32)
    end = ct.cdiv(row_count(x), TILE_M)
    top = end - 1
    last = top - (top - first) % blocks
    # The last rows come first: of what was written a moment ago the cache holds these still.
    rows = span(top - first, TILE_M)
    next_up, next_row = load(dy, rows, cols, CHECK), load(x, rows, cols, CHECK)
    for turn in range(first, end, blocks):
        up, row = next_up.astype(ct.float32), next_row.astype(ct.float32)
        # In the end the last turn's rows once more.
        rows = span(top - min(turn + blocks, last), TILE_M)
        next_up, next_row = load(dy, rows, cols, CHECK), load(x, rows, cols, CHECK)
        g = up * scale
        # Both sums at once: neither needs the other.
        squares, products = ct.reduce((row * row, g * row), 1, add_pairs, (0.0, 0.0), keepdims=True)
        r = ct.rsqrt(squares * (1.0 / N) + eps)
        if CHECK:  # rows behind the last are zeros, of which this is infinite if eps is zero
            r = ct.where(span(top - turn, TILE_M)[:, None] < row_count(x), r, 0.0)
        xhat = row * r
        put(dx, top - turn, 0, r * (xhat * (products * r * (-1.0 / N)) + g))
        if DWEIGHT:
            dw = dw + up * xhat
    if OVERLAP:  # not before: it takes a barrier, for which the first rows would wait
        ct.grid_dependency_control_launch_dependents()
    if DWEIGHT:
        ct.scatter(dweight, (first, cols), ct.sum(dw, axis=0).astype(dweight.dtype))


@ct.kernel
def dual_rms_norm_backward_kernel(
    dq_out, dk_out, q, k, q_weight, k_weight, dq, dk, dq_weight, dk_weight, q_blocks, eps, OFFSET: Float, N: Int,
    TILE_M: Int, TILE_N: Int, CHECK: Bool, Q_WEIGHT: Bool, K_WEIGHT: Bool, DQ_WEIGHT: Bool, DK_WEIGHT: Bool,
    OVERLAP: Bool,
):  # fmt: skip
    """The first q_blocks blocks stride over the heads of q, the others over those of k. CHECK: whether some of a tile
    may lie outside of the rows. OVERLAP: it waits for the launch in front, and the one that adds the sums may
    begin, and waits."""
    if OVERLAP:
        ct.grid_dependency_control_wait()
    block = ct.bid(0)
    if block < q_blocks:
        _backward(
            dq_out, q, q_weight, dq, dq_weight, block, q_blocks, eps, OFFSET, N, TILE_M, TILE_N, CHECK, Q_WEIGHT,
            DQ_WEIGHT, OVERLAP,
        )  # fmt: skip
    else:
        k_blocks = ct.num_blocks(0) - q_blocks
        _backward(
            dk_out, k, k_weight, dk, dk_weight, block - q_blocks, k_blocks, eps, OFFSET, N, TILE_M, TILE_N, CHECK,
            K_WEIGHT, DK_WEIGHT, OVERLAP,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def plan(q_rows: int, k_rows: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int, int]:
    """(kernel, grid, blocks for q, TILE_M, TILE_N); tiles of as many elements as rms_norm's of short rows."""
    q_rows, k_rows = (q_rows, k_rows) if n else (0, 0)
    tile_n = next_power_of_2(n)
    # A decoding step has few rows: they are spread over blocks of their own.
    tile_m = max(1, min(4096 // tile_n, next_power_of_2((q_rows + k_rows) // (4 * sm_count(device)))))
    elements = tile_m * tile_n
    kernel = hinted(
        dual_rms_norm_kernel, num_worker_warps=8 if elements >= 8192 else 4, occupancy=min(8, 32768 // elements)
    )
    q_blocks = ct.cdiv(q_rows, tile_m)
    return kernel, (q_blocks + ct.cdiv(k_rows, tile_m),), q_blocks, tile_m, tile_n


@functools.lru_cache(maxsize=1024)
def backward_plan(q_rows: int, k_rows: int, n: int, device: int) -> tuple[ct.kernel, int, int, tuple[int, int, bool]]:
    """(kernel, blocks for q, blocks for k, (TILE_M, TILE_N, CHECK)): tiles of 1024 elements, of which eight blocks a
    multiprocessor have registers for, or of 2048 for half as many blocks.

    8192x32x8x128 on an H200: 76.0 us without reading ahead, with it 70.7 (a copy 65.3), in tiles of 2048 71.0;
    8192x8x4x256 in tiles of 1024 49.5, of 2048, half as many sums to store and add up, 47.9 (41.7). 512x32x8x128, by
    half as many blocks, 11.3 instead of 12.7.
    """
    q_rows, k_rows = (q_rows, k_rows) if n else (0, 0)
    tile_n = next_power_of_2(n)
    elements, warps, occupancy = (1024, 8, 2) if tile_n > 2048 else (2048, 4, 4) if tile_n == 256 else (1024, 4, 8)
    if q_rows + k_rows <= 256 * sm_count(device):
        occupancy = min(occupancy, 4)
    most = occupancy * sm_count(device)
    tile_m = max(1, min(elements // tile_n, next_power_of_2((q_rows + k_rows) // most)))
    q_tiles, k_tiles = ct.cdiv(q_rows, tile_m), ct.cdiv(k_rows, tile_m)
    share = q_rows / max(q_rows + k_rows, 1)
    q_blocks = min(q_tiles, max(1, round(most * share)))
    k_blocks = min(k_tiles, max(1, round(most * (1.0 - share))))
    # Each with as many tiles, and fewer sums to add up.
    each = max(ct.cdiv(q_tiles, max(q_blocks, 1)), ct.cdiv(k_tiles, max(k_blocks, 1)), 1)
    q_blocks, k_blocks = ct.cdiv(q_tiles, each), ct.cdiv(k_tiles, each)
    check = n != tile_n or q_rows % tile_m > 0 or k_rows % tile_m > 0
    kernel = hinted(dual_rms_norm_backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, q_blocks, k_blocks, (tile_m, tile_n, check)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., H, D] as [T * H, D] if it is contiguous, where finding a row takes no division, else as [T, H, D]: a
    view where strides allow and fit the kernels' 32 bits, else a copy."""
    if x.is_contiguous():
        return x.view(x.shape[:-1].numel(), x.shape[-1])
    if x.dim() != 3:
        *lead, heads, dim = x.shape
        x = x[None] if not lead else x.reshape(x.shape[:-2].numel(), heads, dim)
    return x if max(x.stride()) <= INT32_MAX else x.contiguous()


def _rows(heads: torch.Tensor) -> int:
    return size_of(heads)[0]


@compilable(fake=lambda q, k, *_: (contiguous_like(q), contiguous_like(k)))
def dual_rms_norm_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    rounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = contiguous_like(q), contiguous_like(k)
    q_heads, k_heads = _heads(q), _heads(k)
    n = q.shape[-1]
    kernel, grid, q_blocks, tile_m, tile_n = plan(_rows(q_heads), _rows(k_heads), n, q.get_device())
    weights = (q_heads if q_weight is None else q_weight, k_heads if k_weight is None else k_weight)
    constants = (offset, n, tile_m, tile_n, q_weight is not None, k_weight is not None, rounded)
    outputs = (q_out.view(q_heads.shape), k_out.view(k_heads.shape))
    launch(q, grid, kernel, (q_heads, k_heads, *weights, *outputs, q_blocks, eps, *constants))
    return q_out, k_out


def _fake_backward(dq_out, dk_out, q, k, q_weight, k_weight, eps, offset, dq_weight, dk_weight):
    sums = (
        q.new_empty(q.shape[-1] if wanted else 0, dtype=torch.float32 if weight is None else weight.dtype)
        for weight, wanted in ((q_weight, dq_weight), (k_weight, dk_weight))
    )
    return contiguous_like(q), contiguous_like(k), *sums


@compilable(fake=_fake_backward)
def dual_rms_norm_backward(
    dq_out: torch.Tensor,
    dk_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    dq_weight: bool,
    dk_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and their weights, the last two empty if not asked for."""
    dq, dk, n = contiguous_like(q), contiguous_like(k), q.shape[-1]
    q, k = _heads(q), _heads(k)
    kernel, q_blocks, k_blocks, tiles = backward_plan(_rows(q), _rows(k), n, q.get_device())
    weights = (q if q_weight is None else q_weight, k if k_weight is None else k_weight)
    q_sums = sums_of_blocks(q, q_blocks, n, dq_weight, weights[0].dtype if q_weight is not None else torch.float32)
    k_sums = sums_of_blocks(k, k_blocks, n, dk_weight, weights[1].dtype if k_weight is not None else torch.float32)
    arrays = (_heads(dq_out), _heads(dk_out), q, k, *weights, dq.view(_rows(q), n), dk.view(_rows(k), n))
    given = (q_weight is not None, k_weight is not None, dq_weight, dk_weight)
    overlap = overlaps(q.get_device())
    constants = (offset, n, *tiles, *given, overlap)
    launch(q, (q_blocks + k_blocks,), kernel, (*arrays, q_sums[0], k_sums[0], q_blocks, eps, *constants), overlap)
    add_blocks(max(q_blocks, k_blocks), q_sums, k_sums)
    return dq, dk, q_sums[1], k_sums[1]


class DualRMSNorm(Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, eps, offset, rounded):
        ctx.save_for_backward(q, k, q_weight, k_weight)
        ctx.options = eps, offset
        return dual_rms_norm_forward(q, k, q_weight, k_weight, eps, offset, rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq_out, dk_out):
        wanted = ctx.needs_input_grad[2:4]
        dq, dk, *sums = dual_rms_norm_backward(dq_out, dk_out, *ctx.saved_tensors, *ctx.options, *wanted)
        return dq, dk, *(s if w else None for s, w in zip(sums, wanted, strict=True)), None, None, None


@register_impl("dual_rms_norm", "cutile")
def dual_rms_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    check_dual_rms_norm(q, k, q_weight, k_weight, casting)
    if q.dtype not in FLOATS:
        check_floating("dual_rms_norm", q=q)
        raise UnsupportedError("q and k are not fp32, fp16 or bf16")
    if q.shape[-1] > MAX_CACHED_BACKWARD:
        raise UnsupportedError(f"a head has more than {MAX_CACHED_BACKWARD} dimensions")
    options = (of_caller(eps), of_caller(offset), casting == "llama")
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or (q_weight is not None and q_weight.requires_grad)
        or (k_weight is not None and k_weight.requires_grad)
    ):
        return DualRMSNorm.apply(q, k, q_weight, k_weight, *options)
    return dual_rms_norm_forward(q, k, q_weight, k_weight, *options)
