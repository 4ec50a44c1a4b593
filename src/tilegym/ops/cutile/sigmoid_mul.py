"""``y = x * sigmoid(gate)``, with the sigmoid rounded to the dtype before the product.

Backward, with s the sigmoid: ``dx = dy * s``, ``dgate = dy * x * s * (1 - s)``. A gate of one value a row is the same
kernels' with a stride of 0; autograd adds up its gradient.
"""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import layout
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.pointwise import small_or_flat
from tilegym.ops.cutile.pointwise import tile_of
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.sigmoid_mul import check_sigmoid_mul


@ct.kernel
def sigmoid_mul_kernel(x, gate, y, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, OVERLAP: Bool):
    """x, gate, y: [M, N] or [B, S, N]; one block a tile, neighbours along a row."""
    let_next_begin(OVERLAP)
    at = tile_of(y, TILE_M, TILE_N, GRID)
    value, opening = ct.gather(x, at, check_bounds=CHECK), ct.gather(gate, at, check_bounds=CHECK)
    sigmoid = over_one_plus_exp(1.0, opening, opening.dtype).astype(opening.dtype)
    ct.scatter(y, at, (value.astype(ct.float32) * sigmoid.astype(ct.float32)).astype(y.dtype), check_bounds=CHECK)


@ct.kernel
def sigmoid_mul_backward_kernel(
    dy, x, gate, dx, dgate, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, OVERLAP: Bool
):  # fmt: skip
    begin(OVERLAP)
    at = tile_of(dy, TILE_M, TILE_N, GRID, LAST_FIRST=True)
    value, opening = ct.gather(x, at, check_bounds=CHECK), ct.gather(gate, at, check_bounds=CHECK)
    up = ct.gather(dy, at, check_bounds=CHECK)
    up, value = up.astype(ct.float32), value.astype(ct.float32)
    sigmoid = over_one_plus_exp(1.0, opening, opening.dtype)
    ct.scatter(dx, at, (up * sigmoid).astype(dx.dtype), check_bounds=CHECK)
    dgate_of = up * value * (sigmoid * (1.0 - sigmoid))
    ct.scatter(dgate, at, dgate_of.astype(dgate.dtype), check_bounds=CHECK)


@compilable(fake=contiguous_like)
def sigmoid_mul_forward(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    rows = small_or_flat(x, gate, y)
    kernel, grid, tiles = layout(sigmoid_mul_kernel, rows[2].shape, y.get_device())
    launch(y, grid, kernel, (*rows, *tiles, overlaps(y.get_device())))
    return y


def _fake_backward(dy, x, gate):
    return contiguous_like(x), contiguous_like(x)


@compilable(fake=_fake_backward)
def sigmoid_mul_backward(dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dgate = _fake_backward(dy, x, gate)
    rows = small_or_flat(dy, x, gate, dx, dgate)
    kernel, grid, tiles = layout(sigmoid_mul_backward_kernel, rows[3].shape, dy.get_device())
    overlap = overlaps(dy.get_device())
    launch(dy, grid, kernel, (*rows, *tiles, overlap), overlap=overlap)
    return dx, dgate


class SigmoidMul(Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return sigmoid_mul_forward(x, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return sigmoid_mul_backward(dy, *ctx.saved_tensors)


@register_impl("sigmoid_mul", "cutile")
def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    check_sigmoid_mul(x, gate)
    if x.dtype not in FLOATS:
        check_floating("sigmoid_mul", x=x)
        raise UnsupportedError("x and gate are not fp32, fp16 or bf16")
    if gate.shape != x.shape:
        gate = gate.expand(x.shape)
    if torch.is_grad_enabled() and (x.requires_grad or gate.requires_grad):
        return SigmoidMul.apply(x, gate)
    return sigmoid_mul_forward(x, gate)
