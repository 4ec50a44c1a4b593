"""RMS normalisation with a gate: ``norm(x) * act(gate)``, or ``norm(x * act(gate))``, over groups of columns.

With ``s = act(gate)``, ``xhat = u * rstd`` and ``rstd = rsqrt(mean(u^2) + eps)`` of ``u = x`` or ``u = x * s``, and g
the gradient of xhat (dy times weight, and times s where the gate comes behind), backward is
``du = rstd * (g - xhat * mean(g * xhat))``. Statistics are computed again: the backward pass holds the rows anyway.

Kernels take x as [M * GROUPS, N], N the columns of a group; block (., i) works on the rows of group i alone, so that it
needs one part of the weight.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.row_norms import MAX_CACHED
from tilegym.ops.cutile.row_norms import add_blocks
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import sums_of_blocks
from tilegym.ops.cutile.row_norms import whole_rows
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.rms_norm_gated import check_rms_norm_gated


def _at(tile, cols, TILE_M: Int, GROUPS: Int):
    """What indexes TILE_M rows of this block's group."""
    rows = span(tile, TILE_M)
    return (rows if GROUPS == 1 else rows * GROUPS + ct.bid(1))[:, None], cols[None, :]


def _load_weight(weight, cols, rows: Int, N: Int, GROUPS: Int, WEIGHT: Bool):
    """This group's part of the weight in fp32 for each of ``rows`` rows, 0 beyond its end.

    As a tile of the rows' shape each thread loads what it multiplies. Other threads would load a single row, which
    would pass through shared memory before anything else is loaded.
    """
    if not WEIGHT:
        return 1.0
    at = ct.broadcast_to(cols[None, :], (rows, cols.shape[0]))
    if GROUPS == 1:
        return ct.gather(weight, at).astype(ct.float32)
    return ct.gather(weight, ct.bid(1) * N + at, mask=at < N).astype(ct.float32)


def _act(gate, dtype, SILU: Bool):
    """act(gate) in fp32, exact enough for results in ``dtype``."""
    gate = gate.astype(ct.float32)
    return over_one_plus_exp(gate if SILU else 1.0, gate, dtype)


@ct.kernel
def rms_norm_gated_kernel(
    x, gate, weight, y, eps, N: Int, GROUPS: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool, NORM_FIRST: Bool, SILU: Bool,
    ROUND: Bool,
):  # fmt: skip
    """Each block takes TILE_M whole rows of a group."""
    cols = span(0, TILE_N)
    at = _at(ct.bid(0), cols, TILE_M, GROUPS)
    row, opening = ct.gather(x, at), ct.gather(gate, at)
    w = _load_weight(weight, cols, TILE_M, N, GROUPS, WEIGHT)
    factor = _act(opening, y.dtype, SILU)
    row = row.astype(ct.float32)
    if not NORM_FIRST:
        row = row * factor
    out = row * rstd_of(row * row, eps, N)
    if ROUND:
        out = out.astype(y.dtype).astype(ct.float32)
    out = out * w
    if NORM_FIRST:
        if ROUND:
            out = out.astype(y.dtype).astype(ct.float32)
        out = out * factor
    ct.scatter(y, at, out.astype(y.dtype))


@ct.kernel
def rms_norm_gated_backward_kernel(
    dy, x, gate, weight, dx, dgate, dweight, eps, N: Int, GROUPS: Int, TILE_M: Int, TILE_N: Int, WEIGHT: Bool,
    NORM_FIRST: Bool, SILU: Bool, DWEIGHT: Bool,
):  # fmt: skip
    """Blocks stride over the rows of a group, the last first: the cache may hold these still. Row ``bid`` of dweight is
    that block's sum."""
    cols = span(0, TILE_N)
    w = _load_weight(weight, cols, TILE_M, N, GROUPS, WEIGHT)
    dw = ct.zeros((TILE_M, TILE_N), ct.float32)
    end = ct.cdiv(x.shape[0] // GROUPS, TILE_M)
    for turn in range(ct.bid(0), end, ct.num_blocks(0)):
        at = _at(end - 1 - turn, cols, TILE_M, GROUPS)
        up, row, opening = ct.gather(dy, at), ct.gather(x, at), ct.gather(gate, at)
        up, row, opening = up.astype(ct.float32), row.astype(ct.float32), opening.astype(ct.float32)
        sigmoid = over_one_plus_exp(1.0, opening, x.dtype)
        factor = opening * sigmoid if SILU else sigmoid
        slope = sigmoid + factor * (1.0 - sigmoid) if SILU else sigmoid * (1.0 - sigmoid)
        u = row if NORM_FIRST else row * factor
        through = up * factor if NORM_FIRST else up  # the gradient of xhat * weight
        g = through * w
        # Rows behind the last are zeros, of which rstd is infinite if eps is zero.
        inside = span(end - 1 - turn, TILE_M)[:, None] < x.shape[0] // GROUPS
        r = ct.where(inside, rstd_of(u * u, eps, N), 0.0)
        xhat = u * r
        # In this order a multiplication and the addition are one instruction.
        du = r * (xhat * (ct.sum(g * xhat, axis=1, keepdims=True) * (-1.0 / N)) + g)
        if DWEIGHT:
            dw = dw + through * xhat
        if NORM_FIRST:
            ct.scatter(dx, at, du.astype(dx.dtype))
            ct.scatter(dgate, at, (up * xhat * w * slope).astype(dgate.dtype))
        else:
            ct.scatter(dx, at, (du * factor).astype(dx.dtype))
            ct.scatter(dgate, at, (du * row * slope).astype(dgate.dtype))
    if DWEIGHT:
        # A group's columns only: those beyond are the next one's.
        inside = ct.bid(1) * N + cols if GROUPS > 1 else cols
        ct.scatter(dweight, (ct.bid(0), inside), ct.sum(dw, axis=0).astype(dweight.dtype), mask=cols < N)


@functools.lru_cache(maxsize=1024)
def plan(rows: int, groups: int, n: int, device: int) -> tuple[ct.kernel, tuple[int, int], int, int]:
    """(kernel, grid, TILE_M, TILE_N) for [rows, groups, n] on CUDA device ``device`` (-1: CPU).

    Of short rows 2048 elements: more blocks at a time, some of which load while others compute.
    """
    rows = rows if n else 0  # without columns there is nothing to launch
    tile_m, tile_n = whole_rows(rows, n, device)
    tile_m = max(1, min(tile_m, 2048 // tile_n))
    elements = tile_m * tile_n
    warps, occupancy = (8 if elements >= 8192 else 4), max(1, min(8, 16384 // elements))
    kernel = hinted(rms_norm_gated_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (ct.cdiv(rows, tile_m), groups), tile_m, tile_n


@functools.lru_cache(maxsize=1024)
def backward_plan(rows: int, groups: int, n: int, device: int) -> tuple[ct.kernel, tuple[int, int], int, int]:
    """(kernel, grid, TILE_M, TILE_N) of the backward pass.

    262144x128 on an H200: 108.3 us with 4 blocks to a multiprocessor, 95.1 with 6, 92.4 with 8 (a copy 84.2). Of fewer
    rows half as many blocks, where that gives each up to four tiles, make half as many sums to add up: 16384x128 in
    13.2 us instead of 14.3. To let the launch that adds them begin early changes neither.
    """
    rows = rows if n else 0
    tile_n = next_power_of_2(n)
    warps, occupancy = (8, 2 if tile_n <= 4096 else 1) if tile_n > 2048 else (4, 8 if tile_n <= 1024 else 4)
    blocks = max(1, occupancy * sm_count(device) // groups)
    tile_m = max(1, min(1024 // tile_n, next_power_of_2(rows // blocks)))
    tiles = ct.cdiv(rows, tile_m)
    if occupancy == 8 and tiles:
        blocks = min(blocks, max(1, blocks // 2, tiles // 4))
        blocks = ct.cdiv(tiles, ct.cdiv(tiles, blocks))
    kernel = hinted(rms_norm_gated_backward_kernel, num_worker_warps=warps, occupancy=occupancy)
    return kernel, (min(tiles, blocks), groups), tile_m, tile_n


def _groups(x: torch.Tensor, n: int) -> torch.Tensor:
    """``x`` as [M * GROUPS, n]: a view where strides allow and fit the kernels' 32 bits, else a copy."""
    if x.dim() == 2 and x.shape[1] == n:
        rows = x
    else:
        rows = x.reshape(x.numel() // n, n) if n else x.reshape(x.shape[:-1].numel(), 0)
    return rows if rows.stride(0) <= INT32_MAX else rows.contiguous()


@compilable(fake=contiguous_like)
def rms_norm_gated_forward(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    norm_first: bool,
    n: int,
    silu: bool,
    rounded: bool,
) -> torch.Tensor:
    """The groups are of ``n`` columns."""
    y, groups = contiguous_like(x), (x.shape[-1] // n if n else 1)
    rows = _groups(x, n)
    kernel, grid, tile_m, tile_n = plan(rows.shape[0] // groups, groups, n, x.get_device())
    w = 0 if weight is None else weight
    constants = (n, groups, tile_m, tile_n, weight is not None, norm_first, silu, rounded)
    launch(x, grid, kernel, (rows, _groups(gate, n), w, y.view(rows.shape), eps, *constants))
    return y


def _fake_backward(dy, x, gate, weight, eps, norm_first, n, silu, dweight):
    dtype = torch.float32 if weight is None else weight.dtype
    return contiguous_like(x), contiguous_like(gate), x.new_empty(x.shape[-1] if dweight else 0, dtype=dtype)


@compilable(fake=_fake_backward)
def rms_norm_gated_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    norm_first: bool,
    n: int,
    silu: bool,
    dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, gate and weight, the last one empty if not asked for."""
    dx, dgate, groups = contiguous_like(x), contiguous_like(gate), (x.shape[-1] // n if n else 1)
    rows = _groups(x, n)
    kernel, grid, tile_m, tile_n = backward_plan(rows.shape[0] // groups, groups, n, x.get_device())
    w = rows if weight is None else weight
    dtype = torch.float32 if weight is None else weight.dtype
    parts, dw = sums_of_blocks(x, grid[0], x.shape[-1], dweight, dtype)
    constants = (n, groups, tile_m, tile_n, weight is not None, norm_first, silu, dweight)
    arrays = (_groups(dy, n), rows, _groups(gate, n), w, dx.view(rows.shape), dgate.view(rows.shape), parts)
    launch(x, grid, kernel, (*arrays, eps, *constants))
    add_blocks(grid[0], (parts, dw))
    return dx, dgate, dw


class RMSNormGated(Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, norm_first, n, silu, rounded):
        ctx.save_for_backward(x, gate, weight)
        ctx.options = eps, norm_first, n, silu
        return rms_norm_gated_forward(x, gate, weight, eps, norm_first, n, silu, rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dweight = ctx.needs_input_grad[2]
        dx, dgate, dw = rms_norm_gated_backward(dy, *ctx.saved_tensors, *ctx.options, dweight)
        return dx, dgate, dw if dweight else None, None, None, None, None, None


@register_impl("rms_norm_gated", "cutile")
def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    activation: str = "silu",
    casting: str = "llama",
) -> torch.Tensor:
    check_rms_norm_gated(x, gate, weight, group_size, activation, casting)
    if x.dtype not in FLOATS or gate.dtype not in FLOATS:
        check_floating("rms_norm_gated", x=x, gate=gate)
        raise UnsupportedError("x or gate is not fp32, fp16 or bf16")
    n = group_size if group_size and x.shape[-1] else x.shape[-1]
    if n > MAX_CACHED:
        raise UnsupportedError(f"a group is longer than {MAX_CACHED}")
    options = (eps, norm_before_gate, n, activation == "silu", casting == "llama")
    if torch.is_grad_enabled() and (
        x.requires_grad or gate.requires_grad or (weight is not None and weight.requires_grad)
    ):
        return RMSNormGated.apply(x, gate, weight, *options)
    return rms_norm_gated_forward(x, gate, weight, *options)
