"""``y = gelu(a) * b``, gelu(a) rounded to the dtype before the product.

``gelu(a) = a * p`` with ``p = Phi(a)``, the normal distribution function, or, approximated by tanh, with
``p = (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))``, ``u = sqrt(2 / pi) * (a + 0.044715 a^3)`` (Hendrycks and Gimpel 2016,
arXiv:1606.08415). Backward: ``da = dy * b * (p + a * dp/da)``, ``db = dy * gelu(a)``.
"""

import math

import cuda.tile as ct
import torch

from tilegym.backend import in_place
from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import layout
from tilegym.ops.cutile.pointwise import small_or_flat
from tilegym.ops.cutile.pointwise import tile_of
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.geglu import check_geglu

TWO_SQRT_2_OVER_PI = 2.0 * math.sqrt(2.0 / math.pi)
CUBIC = 0.044715
ONE_OVER_SQRT_2_PI = 1.0 / math.sqrt(2.0 * math.pi)


def _tail(a, dtype):
    """Phi(-|a|) for fp32 ``a``, within 1e-9 before rounding, and the density that it decays with.

    Phi(-|a|) = exp(-a^2 / 2) * erfcx(|a| / sqrt(2)) / 2. The second factor, divided by t = 1 / (1 + 0.4 |a|), is smooth
    over all of (0, 1]: a polynomial in t, fitted (minimax) to it.
    """
    # Approximate division, and a power of two that may end in 0, are exact enough for 16 bits, and take a few steps.
    t = 1.0 + 0.4 * ct.abs(a)
    if dtype == ct.float32:
        t = 1.0 / t
    else:
        t = ct.truediv(1.0, t, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    p = 0.118389025 + -0.02358478 * t
    p = -0.19475327 + p * t
    p = 0.036903687 + p * t
    p = 0.1397443 + p * t
    p = 0.09409722 + p * t
    p = 0.17083895 + p * t
    p = 0.15836486 + p * t
    if dtype == ct.float32:
        bell = ct.exp(-0.5 * a * a)
    else:
        bell = ct.exp2(a * a * -0.7213475204444817, flush_to_zero=True)
    return bell * (p * t), bell


def _logistic(x, dtype):
    """1 / (1 + exp(-x)) and its derivative, both to ``dtype``'s relative precision also far from 0."""
    if dtype == ct.float32:
        e = ct.exp(-ct.abs(x))
        larger = 1.0 / (1.0 + e)
    else:
        e = ct.exp2(ct.abs(x) * -1.4426950408889634, flush_to_zero=True)
        larger = ct.truediv(1.0, 1.0 + e, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    smaller = e * larger
    return ct.where(x > 0.0, larger, smaller), smaller * larger


def _gate(a, dtype, TANH: Bool):
    """p and dp/da for fp32 ``a``, exact enough for results in ``dtype``."""
    if TANH:
        square = a * a
        p, slope = _logistic(a * (TWO_SQRT_2_OVER_PI + (TWO_SQRT_2_OVER_PI * CUBIC) * square), dtype)
        slope = slope * (TWO_SQRT_2_OVER_PI + (3.0 * TWO_SQRT_2_OVER_PI * CUBIC) * square)
        # Far out the first factor is 0 and the second may be infinite.
        return p, ct.where(square < 1.0e4, slope, 0.0)
    tail, bell = _tail(a, dtype)
    return ct.where(a > 0.0, 1.0 - tail, tail), ONE_OVER_SQRT_2_PI * bell


def gelu_of(a, dtype, TANH: Bool):
    """gelu of fp32 ``a``, exact enough for results in ``dtype``."""
    if dtype == ct.float32:
        p, _ = _gate(a, dtype, TANH)
        return a * p
    # Alone it takes fewer steps than with its derivative, and 16 bits need fewer of the polynomial's terms.
    if TANH:
        # -2u times log2(e). Where its power overflows the quotient is 0.
        scale = ct.static_eval(-TWO_SQRT_2_OVER_PI * math.log2(math.e))
        power = ct.exp2(a * (scale + (scale * CUBIC) * (a * a)), flush_to_zero=True)
        return ct.truediv(a, 1.0 + power, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    # As _tail, within 4e-5 of it, relative.
    t = ct.truediv(1.0, 1.0 + 0.38 * ct.abs(a), rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    p = 0.18887204 + -0.08992631 * t
    p = 0.09198311 + p * t
    p = 0.15782842 + p * t
    p = 0.15122525 + p * t
    tail = ct.exp2(a * a * -0.7213475204444817, flush_to_zero=True) * (p * t)
    return a * ct.where(a > 0.0, 1.0 - tail, tail)


@ct.kernel
def geglu_kernel(a, b, y, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, TANH: Bool, OVERLAP: Bool):
    """a, b, y: [M, N] or [B, S, N]; one block a tile, neighbours along a row."""
    let_next_begin(OVERLAP)
    at = tile_of(y, TILE_M, TILE_N, GRID)
    gate, up = ct.gather(a, at, check_bounds=CHECK), ct.gather(b, at, check_bounds=CHECK)
    ct.scatter(y, at, gelu_gated(gate, up, TANH), check_bounds=CHECK)


def gelu_gated(gate, up, TANH: Bool):
    """In a kernel: gelu(gate) * up, in their dtype."""
    gelu = gelu_of(gate.astype(ct.float32), gate.dtype, TANH).astype(gate.dtype)
    return (gelu.astype(ct.float32) * up.astype(ct.float32)).astype(gate.dtype)


@ct.kernel
def geglu_backward_kernel(
    dy, a, b, da, db, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, TANH: Bool, INPLACE: Bool, OVERLAP: Bool
):  # fmt: skip
    """INPLACE: da is written over a, db over b, and da and db stand for nothing."""
    begin(OVERLAP)
    at = tile_of(dy, TILE_M, TILE_N, GRID, LAST_FIRST=True)
    gate, up = ct.gather(a, at, check_bounds=CHECK), ct.gather(b, at, check_bounds=CHECK)
    g = ct.gather(dy, at, check_bounds=CHECK)
    wide, up, g = gate.astype(ct.float32), up.astype(ct.float32), g.astype(ct.float32)
    p, slope = _gate(wide, gate.dtype, TANH)
    ct.scatter(b if INPLACE else db, at, (g * (wide * p)).astype(b.dtype), check_bounds=CHECK)
    ct.scatter(a if INPLACE else da, at, (g * up * (p + wide * slope)).astype(a.dtype), check_bounds=CHECK)


def _like(t: torch.Tensor, *_) -> torch.Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@compilable(fake=_like)
def geglu_forward(a: torch.Tensor, b: torch.Tensor, tanh: bool) -> torch.Tensor:
    y = _like(a)
    rows = small_or_flat(a, b, y)
    kernel, grid, tiles = layout(geglu_kernel, rows[0].shape, y.get_device())
    launch(y, grid, kernel, (*rows, *tiles, tanh, overlaps(y.get_device())))
    return y


def _launch_backward(tanh, dy, a, b, da=None, db=None) -> None:
    """Writes the gradients into da and db, or over a and b; all are [M, N] or [B, S, N]."""
    kernel, grid, tiles = layout(geglu_backward_kernel, dy.shape, dy.get_device())
    outputs = (0, 0, *tiles, tanh, True) if da is None else (da, db, *tiles, tanh, False)
    # 16 elements a thread would not all be read before the first are computed with: on an H200 8192x14336 takes 295 us
    # with 4 warps, and 275.6 so.
    if tiles[0] * tiles[1] > 1024:
        kernel = hinted(geglu_backward_kernel, num_worker_warps=8)
    overlap = overlaps(dy.get_device())
    launch(dy, grid, kernel, (dy, a, b, *outputs, overlap), overlap=overlap)


@compilable(fake=lambda dy, a, b, tanh: (_like(a), _like(b)))
def geglu_backward(dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, torch.Tensor]:
    da, db = _like(a), _like(b)
    _launch_backward(tanh, *small_or_flat(dy, a, b, da, db))
    return da, db


@compilable(fake=lambda dy, a, b, tanh: None, mutates=("a", "b"))
def geglu_backward_in_place(dy: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tanh: bool) -> None:
    """Writes the gradients over a and b, which are 2-D or contiguous."""
    _launch_backward(tanh, *small_or_flat(dy, a, b))


class GEGLU(Function):
    @staticmethod
    def forward(ctx, a, b, tanh):
        ctx.save_for_backward(a, b)
        ctx.tanh, ctx.in_place = tanh, in_place.wanted(in_place.UNSEEN)
        return geglu_forward(a, b, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved, overwrites = in_place.unpack(ctx)
        if overwrites:
            geglu_backward_in_place(dy, *saved, ctx.tanh)
            return *in_place.overwritten(*saved), None
        return *geglu_backward(dy, *saved, ctx.tanh), None


@register_impl("geglu", "cutile")
def geglu(a: torch.Tensor, b: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    check_geglu(a, b, approximate)
    if a.dtype not in FLOATS:
        check_floating("geglu", a=a)
        raise UnsupportedError("a and b are not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return GEGLU.apply(a, b, approximate == "tanh")
    return geglu_forward(a, b, approximate == "tanh")
