"""A row times a weight, with the norm before it and the activation or the residual behind it in the same launch.

Each block computes the norm of the whole row for itself: the row lies in the caches, and nothing has to be waited for
but the row. On GPUs that can (compute capability 9.0) a launch begins while its predecessor still runs, and waits for
it before it reads (programmatic dependent launch), with its weights on their way: early_weights.py.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops import ops
from tilegym.ops.cutile import stream_gemv
from tilegym.ops.cutile.early_weights import NOTHING
from tilegym.ops.cutile.early_weights import begin_early
from tilegym.ops.cutile.early_weights import early_columns
from tilegym.ops.cutile.few_rows import MAX_ROWS
from tilegym.ops.cutile.few_rows import launch_few_rows
from tilegym.ops.cutile.few_rows_norm import few_rows_gated
from tilegym.ops.cutile.few_rows_norm import few_rows_several
from tilegym.ops.cutile.linear import DTYPES
from tilegym.ops.cutile.linear import launch_gemv
from tilegym.ops.cutile.linear import total
from tilegym.ops.cutile.linear import weight_tile
from tilegym.ops.cutile.matmul import check_supported
from tilegym.ops.cutile.pointwise import indices
from tilegym.ops.cutile.pointwise import plan as plan_of_tiles
from tilegym.ops.cutile.pointwise import small_or_flat
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import scaled
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import size_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.fused_gemv import ACTIVATIONS
from tilegym.ops.pytorch.fused_gemv import check_activation
from tilegym.ops.pytorch.fused_gemv import check_residual
from tilegym.ops.pytorch.fused_gemv import check_weights
from tilegym.ops.pytorch.linear import check_operands
from tilegym.ops.pytorch.rms_norm import check_rms_norm

PLACES = {activation: place for place, activation in enumerate(ACTIVATIONS)}


def _rstd(x, eps, K: Int, TILE_K: Int):
    squares = ct.zeros((1, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        row = weight_tile(x, 0, k, 1, TILE_K)
        squares = squares + row * row
    return rstd_of(squares, eps, K)


def _normed(x, norm, k, rstd, OFFSET: Float, ROUND: Bool, TILE_K: Int):
    """A tile of the normalised row, as rms_norm rounds it, in fp32; of x as it is if ``rstd`` is None."""
    if rstd is None:
        return weight_tile(x, 0, k, 1, TILE_K)
    w = ct.load(norm, (k,), (TILE_K,), padding_mode=ct.PaddingMode.ZERO).reshape((1, TILE_K))
    y = scaled(weight_tile(x, 0, k, 1, TILE_K) * rstd, w, None, x.dtype, OFFSET, ROUND)
    return y.astype(x.dtype).astype(ct.float32)


def _norm_gemv(
    x, norm, rstd, weight, bias, out, n, OFFSET: Float, ROUND: Bool, BIAS: Bool, K: Int, TILE_N: Int, TILE_K: Int
):  # fmt: skip
    acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        acc = acc + weight_tile(weight, n, k, TILE_N, TILE_K) * _normed(x, norm, k, rstd, OFFSET, ROUND, TILE_K)
    ct.store(out, (0, n), total(acc, bias, n, BIAS, TILE_N).astype(out.dtype))


@ct.kernel
def norm_gemv_kernel(
    x, norm, w1, w2, w3, b1, b2, b3, y1, y2, y3, first, second, eps, nothing, w4, b4, y4, third, EARLY: Int, COLS: Int,
    FOUR: Bool, NORMED: Bool, OFFSET: Float, ROUND: Bool, BIAS: Bool, K: Int, TILE_N: Int, TILE_K: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [1, K], norm [K] if NORMED, else 0; w_i [N_i, K], b_i [N_i] if BIAS, y_i [1, N_i], with blocks up to ``first``
    # for the first one, up to ``second`` for the second, and the others for the third, if FOUR up to ``third``; else
    # w4, b4, y4 are 0.
    n = ct.bid(0)
    begin_early((w1,), n, y1, nothing, TILE_N, min(EARLY, first), COLS, OVERLAP)
    rstd = _rstd(x, eps, K, TILE_K) if NORMED else None
    if n < first:
        _norm_gemv(x, norm, rstd, w1, b1, y1, n, OFFSET, ROUND, BIAS, K, TILE_N, TILE_K)
    elif n < second:
        _norm_gemv(x, norm, rstd, w2, b2, y2, n - first, OFFSET, ROUND, BIAS, K, TILE_N, TILE_K)
    elif FOUR:
        if n < third:
            _norm_gemv(x, norm, rstd, w3, b3, y3, n - second, OFFSET, ROUND, BIAS, K, TILE_N, TILE_K)
        else:
            _norm_gemv(x, norm, rstd, w4, b4, y4, n - third, OFFSET, ROUND, BIAS, K, TILE_N, TILE_K)
    else:
        _norm_gemv(x, norm, rstd, w3, b3, y3, n - second, OFFSET, ROUND, BIAS, K, TILE_N, TILE_K)


@ct.kernel
def norm_swiglu_kernel(
    x, norm, gate, up, out, eps, nothing, NORMED: Bool, OFFSET: Float, ROUND: Bool, ACTIVATION: Int, K: Int,
    TILE_N: Int, TILE_K: Int, EARLY: Int, COLS: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [1, K], norm [K] if NORMED, else 0, gate and up [N, K], out [1, N]
    n = ct.bid(0)
    begin_early((gate, up), n, out, nothing, TILE_N, EARLY, COLS, OVERLAP)
    rstd = _rstd(x, eps, K, TILE_K) if NORMED else None
    gates = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    ups = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    for k in range(ct.cdiv(K, TILE_K)):
        y = _normed(x, norm, k, rstd, OFFSET, ROUND, TILE_K)
        gates = gates + weight_tile(gate, n, k, TILE_N, TILE_K) * y
        ups = ups + weight_tile(up, n, k, TILE_N, TILE_K) * y
    gates, ups = ct.sum(gates, axis=1).astype(out.dtype), ct.sum(ups, axis=1).astype(out.dtype)
    y = stream_gemv.activated(gates, ups, ACTIVATION)
    ct.store(out, (0, n), y.reshape((1, TILE_N)))


@functools.lru_cache(maxsize=256)
def plan(kernel: ct.kernel, k: int, bits: int, device: int) -> tuple[ct.kernel, int, int, int, int, bool]:
    """(kernel, TILE_N, TILE_K, EARLY, COLS, OVERLAP) for rows of k elements of so many bits; COLS: in a graph.

    On CUDA device ``device`` (-1: CPU). The fastest on an H200, launch behind launch in a graph, in bf16, with COLS 0:
    2 x 14336x4096 with norm and SwiGLU in 56.8 us (4136 GB/s), 6144x4096 with a norm, in three parts, in 15.9 us (3175
    GB/s); behind the attention and with COLS 53.8 and 16.3. With 768 columns of gate and up a layer of Llama-3.1-8B
    takes 0.5 us less than with 1024; with a deeper pipeline of loads 2.3 us more, with a loop that is not unrolled 6.
    """
    if device < 0:
        return kernel, 8, 64, 2, 256, False
    tile_n, row_bits, occupancy, cols = (8, 8192, 3, 768) if kernel is norm_swiglu_kernel else (4, 16384, 4, 1024)
    tile_k, early = min(row_bits // bits, next_power_of_2(k)), occupancy * sm_count(device)
    return hinted(kernel, occupancy=occupancy), tile_n, tile_k, early, cols, overlaps(device)


def _fake_linears(x, norm_weight, eps, weights, biases, offset, rounded):
    return [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]


@compilable(_fake_linears)
def norm_gemv(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    offset: float,
    rounded: bool,
) -> list[torch.Tensor]:
    """x [..., K] with one row; the outputs [..., N_i]. No biases: an empty list."""
    outs = _fake_linears(x, norm_weight, eps, weights, biases, offset, rounded)
    k = x.shape[-1]
    four, absent = len(weights) == 4, 3 - len(weights)
    rows = [y.view(1, y.shape[-1]) for y in outs]
    arrays = [ts[:3] + ts[-1:] * absent for ts in (list(weights), list(biases) or [0] * len(weights), rows)]
    arrays = (x.view(1, k), 0 if norm_weight is None else norm_weight, *arrays[0], *arrays[1], *arrays[2])
    fourth = (weights[3], biases[3] if biases else 0, rows[3]) if four else (0, 0, 0)
    form = (four, norm_weight is not None, offset, rounded, len(biases) > 0, k)
    streamed = stream_gemv.norm_plan(weights)
    if streamed is not None:
        kernel, blocks, (first, second, third, end), tiles = streamed
        launch(x, (blocks,), kernel, (*arrays, first, second, end, eps, *fourth, third, *form, *tiles), tiles[-1])
        return outs
    kernel, tile_n, tile_k, early, cols, overlap = plan(norm_gemv_kernel, k, x.dtype.itemsize * 8, x.get_device())
    blocks = [-(-w.shape[0] // tile_n) for w in weights]
    fourth = (*fourth, sum(blocks[:3]), early, early_columns(weights[0], tile_n, cols))
    args = (*arrays, blocks[0], sum(blocks[:2]), eps, NOTHING, *fourth, *form, tile_n, tile_k, overlap)
    launch(x, (sum(blocks),), kernel, args, overlap)
    return outs


def _fake_swiglu(x, norm_weight, eps, gate, up, offset, rounded, activation):
    return x.new_empty(*x.shape[:-1], gate.shape[0])


@compilable(_fake_swiglu)
def norm_swiglu(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    gate: torch.Tensor,
    up: torch.Tensor,
    offset: float,
    rounded: bool,
    activation: str,
) -> torch.Tensor:
    """x [..., K] with one row; [..., N]."""
    out = _fake_swiglu(x, norm_weight, eps, gate, up, offset, rounded, activation)
    n, k = gate.shape
    norm = 0 if norm_weight is None else norm_weight
    form = (norm_weight is not None, offset, rounded, PLACES[activation], k)
    streamed = stream_gemv.plan(gate)
    if streamed is not None:
        kernel, blocks, tiles = streamed
        args = (x.view(1, k), norm, gate, up, out.view(1, n), eps, *form, *tiles)
        launch(x, (blocks,), kernel, args, tiles[-1])
        return out
    kernel, tile_n, tile_k, early, cols, overlap = plan(norm_swiglu_kernel, k, x.dtype.itemsize * 8, x.get_device())
    tiles = (tile_n, tile_k, early, early_columns(gate, tile_n, cols), overlap)
    args = (x.view(1, k), norm, gate, up, out.view(1, n), eps, NOTHING, *form, *tiles)
    launch(x, (-(-n // tile_n),), kernel, args, overlap)
    return out


@compilable(lambda x, weight, residual, bias, scale: residual.new_empty(residual.shape))
def gemv_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """x [..., K] with up to 16 rows, residual [..., N]; [..., N]."""
    out = residual.new_empty(residual.shape)
    n, k = weight.shape
    rows = x.view(-1, k)
    m = rows.shape[0]
    arrays = rows, weight, bias, residual.view(m, n), out.view(m, n)
    if m == 1:
        launch_gemv(*arrays, True, scale)
    else:
        launch_few_rows(*arrays, scale)
    return out


@ct.kernel
def add_kernel(y, residual, out, TILE_M: Int, TILE_N: Int):
    """y, residual, out: [M, N]; one block a tile, neighbours along a row."""
    at = indices(out, TILE_M, TILE_N)
    total = ct.gather(y, at).astype(ct.float32) + ct.gather(residual, at).astype(ct.float32)
    ct.scatter(out, at, total.astype(out.dtype))


@compilable(lambda y, residual: residual.new_empty(residual.shape))
def add_residual(y: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """y, residual [..., N]; [..., N]."""
    out = residual.new_empty(residual.shape)
    arrays = small_or_flat(y, residual, out)
    grid, tile_m, tile_n = plan_of_tiles(*size_of(arrays[0]), out.get_device())
    launch(out, grid, add_kernel, (*arrays, tile_m, tile_n))
    return out


def _rows_served(x: torch.Tensor, *others: torch.Tensor | None) -> int:
    """How many rows x has, if the kernels serve it: up to 16, everything contiguous, no gradients; else 0."""
    k = x.shape[-1]
    served = (
        0 < x.numel() <= MAX_ROWS * k
        and x.is_contiguous()
        and all(t is None or (t.is_contiguous() and t.numel()) for t in others)
        and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)))
    )
    return x.numel() // k if served else 0


def _is_of_dtype(norm_weight: torch.Tensor | None, x: torch.Tensor) -> bool:
    return norm_weight is None or norm_weight.dtype is x.dtype


@register_impl("rms_norm_linear", "cutile")
def rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor] | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> list[torch.Tensor]:
    check_weights("rms_norm_linear", weights, biases)
    biases_ = biases or [None] * len(weights)
    for weight, bias in zip(weights, biases_, strict=True):
        check_operands(x, weight, bias)
    if norm_weight is not None:
        check_rms_norm(x, norm_weight.shape, norm_weight, None, None, casting)
    check_supported(x, DTYPES)
    rows = _rows_served(x, norm_weight, *weights, *biases_)
    if rows == 1 and _is_of_dtype(norm_weight, x):
        return norm_gemv(x, norm_weight, eps, weights, biases or [], offset, casting == "llama")
    y = x
    if norm_weight is not None:
        y = ops.rms_norm(x, norm_weight.shape, norm_weight, eps, None, None, offset, casting, backend="cutile")
    if rows > 1:
        return few_rows_several(y, weights, biases or [])
    return [ops.linear(y, w, b, backend="cutile") for w, b in zip(weights, biases_, strict=True)]


@register_impl("rms_norm_swiglu", "cutile")
def rms_norm_swiglu(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    offset: float = 0.0,
    casting: str = "llama",
    activation: str = "silu",
) -> torch.Tensor:
    check_activation(activation)
    rows = _rows_served(x, norm_weight, gate_weight, up_weight)
    if rows and gate_weight.shape == up_weight.shape and (rows > 1 or _is_of_dtype(norm_weight, x)):
        check_operands(x, gate_weight, None)
        check_operands(x, up_weight, None)
        if norm_weight is not None:
            check_rms_norm(x, norm_weight.shape, norm_weight, None, None, casting)
        check_supported(x, DTYPES)
        if rows == 1:
            return norm_swiglu(x, norm_weight, eps, gate_weight, up_weight, offset, casting == "llama", activation)
        y = x
        if norm_weight is not None:
            y = ops.rms_norm(x, norm_weight.shape, norm_weight, eps, None, None, offset, casting, backend="cutile")
        return few_rows_gated(y, gate_weight, up_weight, PLACES[activation])
    gate, up = rms_norm_linear(x, norm_weight, eps, [gate_weight, up_weight], None, offset, casting)
    if activation == "silu":
        return ops.swiglu(gate, up, backend="cutile")
    return ops.geglu(gate, up, ACTIVATIONS[activation], backend="cutile")


@register_impl("linear_add", "cutile")
def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    check_operands(x, weight, bias)
    check_residual(x, weight, residual)
    check_supported(x, DTYPES)
    if _rows_served(x, weight, residual, bias):
        return gemv_add(x, weight, residual, bias, float(scale))
    y = ops.linear(x, weight, bias, backend="cutile")
    if scale != 1.0:
        y = y * scale
    if torch.is_grad_enabled() and (y.requires_grad or residual.requires_grad):
        return residual + y
    return add_residual(y, residual)
