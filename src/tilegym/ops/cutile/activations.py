"""``gelu`` and ``relu``: elementwise functions of one tensor, and their gradients.

``gelu(x) = x * p(x)`` with p as in ``geglu.py``; backward ``dx = dy * (p + x * dp/dx)``. ``relu(x) = max(x, 0)``; for
its gradient a bit of each element is kept, which says whether it passes. NaN stays NaN.
"""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.geglu import _gate
from tilegym.ops.cutile.geglu import gelu_of
from tilegym.ops.cutile.pointwise import MAX_BLOCKS
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
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.activations import check_gelu
from tilegym.ops.pytorch.checks import check_floating


@ct.kernel
def gelu_kernel(x, y, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, TANH: Bool, OVERLAP: Bool):
    """x, y: [M, N]; one block a tile, neighbours along a row."""
    let_next_begin(OVERLAP)
    at = tile_of(y, TILE_M, TILE_N, GRID)
    value = ct.gather(x, at, check_bounds=CHECK)
    value = gelu_of(value.astype(ct.float32), value.dtype, TANH)
    ct.scatter(y, at, value.astype(y.dtype), check_bounds=CHECK)


@ct.kernel
def gelu_backward_kernel(dy, x, dx, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool, TANH: Bool, OVERLAP: Bool):
    begin(OVERLAP)
    at = tile_of(dx, TILE_M, TILE_N, GRID, LAST_FIRST=True)
    value, up = ct.gather(x, at, check_bounds=CHECK), ct.gather(dy, at, check_bounds=CHECK)
    wide = value.astype(ct.float32)
    p, slope = _gate(wide, value.dtype, TANH)
    ct.scatter(dx, at, (up.astype(ct.float32) * (p + wide * slope)).astype(dx.dtype), check_bounds=CHECK)


@ct.kernel
def relu_kernel(x, y, TILE_M: Int, TILE_N: Int, GRID: Int, CHECK: Bool):
    at = tile_of(y, TILE_M, TILE_N, GRID)
    value = ct.gather(x, at, check_bounds=CHECK)
    # A comparison with NaN is false; ct.maximum would turn NaN into 0.
    ct.scatter(y, at, ct.where(value <= 0, ct.zeros((1, 1), value.dtype), value), check_bounds=CHECK)


# The bits of a byte stand for elements that lie LANES apart: each thread makes and reads its bytes alone.
# On an H200 in bf16 both passes of 8192x14336 take 237 us, with 1024 lanes 240; 512x14336 21.7 with either.
LANES = 256
STRIPS = 8


def _strips(LANES: Int):
    """This block's bytes, and the first elements that they stand for."""
    lanes = ct.arange(LANES, dtype=ct.int32)
    return ct.bid(1) * LANES + lanes, ct.bid(1) * (STRIPS * LANES) + lanes


def _gather_strips(x, start, LANES: Int, CHECK: Bool):
    values = ()
    for strip in ct.static_iter(range(STRIPS)):
        values = (*values, ct.gather(x, start + strip * LANES, check_bounds=CHECK))
    return values


@ct.kernel
def relu_bits_kernel(x, bits, y, LANES: Int, CHECK: Bool, OVERLAP: Bool):
    """relu of x [n], and a bit for each element that passes; a block takes 8 strips of LANES elements."""
    let_next_begin(OVERLAP)
    at, start = _strips(LANES)
    values = _gather_strips(x, start, LANES, CHECK)
    passing = ct.zeros((LANES,), ct.int32)
    for strip in ct.static_iter(range(STRIPS)):
        closed = values[strip] <= 0  # false for NaN; ct.maximum would turn NaN into 0
        value = ct.where(closed, ct.zeros((1,), x.dtype), values[strip])
        ct.scatter(y, start + strip * LANES, value, check_bounds=CHECK)
        passing = passing + ct.where(closed, ct.zeros((1,), ct.int32), ct.full((1,), 1 << strip, ct.int32))
    ct.scatter(bits, at, passing.astype(ct.uint8), check_bounds=False)


@ct.kernel
def relu_backward_kernel(dy, bits, dx, LANES: Int, CHECK: Bool, OVERLAP: Bool):
    begin(OVERLAP)
    at, start = _strips(LANES)
    passing = ct.gather(bits, at, check_bounds=False).astype(ct.int32)
    values = _gather_strips(dy, start, LANES, CHECK)
    for strip in ct.static_iter(range(STRIPS)):
        open_ = (passing & ct.full((1,), 1 << strip, ct.int32)) != 0
        value = ct.where(open_, values[strip], ct.zeros((1,), dy.dtype))
        ct.scatter(dx, start + strip * LANES, value, check_bounds=CHECK)


PART = MAX_BLOCKS * STRIPS * LANES  # elements of one launch


def _like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _launch(kernel: ct.kernel, inputs: tuple[torch.Tensor, ...], *options: bool, overlap: bool = False) -> torch.Tensor:
    """The result of an elementwise kernel, in the first input's dtype and shape."""
    out = _like(inputs[0])
    rows = small_or_flat(*inputs, out)
    wide = kernel is gelu_backward_kernel and options[0]
    kernel, grid, tiles = layout(kernel, rows[-1].shape, out.get_device(), len(inputs))
    if wide and tiles[0] * tiles[1] > 1024:
        # As geglu's: of 16 elements a thread not all would be read before the first are computed with. On an H200 the
        # tanh form of 8192x14336 takes 174 us so, with 4 warps 184; erf's 172, not 168.
        kernel = hinted(kernel, num_worker_warps=8)
    launch(out, grid, kernel, (*rows, *tiles, *options), overlap=overlap)
    return out


@compilable(fake=lambda x, tanh: _like(x))
def gelu_forward(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    device = x.get_device()
    # Letting the next launch begin takes a barrier before the loads: of one input, 512x14336 takes 13.3 us instead of
    # 11.6 on an H200 (relu), 8192x2880 31.9 instead of 27.8 (gelu). So only where a GEMV may follow.
    signals = overlaps(device) and x.numel() < 2048 * sm_count(device)
    return _launch(gelu_kernel, (x,), tanh, signals)


@compilable(fake=lambda dy, x, tanh: _like(dy))
def gelu_backward(dy: torch.Tensor, x: torch.Tensor, tanh: bool) -> torch.Tensor:
    overlap = overlaps(x.get_device())
    return _launch(gelu_backward_kernel, (dy, x), tanh, overlap, overlap=overlap)


@compilable(fake=lambda x: _like(x))
def relu_forward(x: torch.Tensor) -> torch.Tensor:
    return _launch(relu_kernel, (x,))


def _relu_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(x), x.new_empty(ct.cdiv(x.numel(), STRIPS * LANES) * LANES, dtype=torch.uint8)


def _launch_strips(
    kernel: ct.kernel, bits: torch.Tensor, source: torch.Tensor, out: torch.Tensor, backward: bool
) -> None:
    """``out`` from ``source``, of one shape; ``bits`` is written with it, or read."""
    source, out = source.reshape(-1), out.view(-1)
    overlap = overlaps(out.get_device())
    for start in range(0, out.numel(), PART):
        part, part_out = source[start : start + PART], out[start : start + PART]
        n = part.numel()
        args = (part, bits[start // STRIPS :], part_out, LANES, n % (STRIPS * LANES) > 0, overlap)
        launch(out, (1, ct.cdiv(n, STRIPS * LANES)), kernel, args, overlap=overlap and backward)


@compilable(fake=_relu_outputs)
def relu_forward_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass of a training step: y, and the bits."""
    y, bits = _relu_outputs(x)
    _launch_strips(relu_bits_kernel, bits, x, y, False)
    return y, bits


@compilable(fake=lambda dy, bits: _like(dy))
def relu_backward(dy: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    dx = _like(dy)
    _launch_strips(relu_backward_kernel, bits, dy, dx, True)
    return dx


class GELU(Function):
    @staticmethod
    def forward(ctx, x, tanh):
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return gelu_forward(x, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return gelu_backward(dy, *ctx.saved_tensors, ctx.tanh), None


class ReLU(Function):
    @staticmethod
    def forward(ctx, x):
        y, bits = relu_forward_bits(x)
        ctx.save_for_backward(bits)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return relu_backward(dy, *ctx.saved_tensors)


@register_impl("gelu", "cutile")
def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    check_gelu(approximate)
    if x.dtype not in FLOATS:
        check_floating("gelu", x=x)
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and x.requires_grad:
        return GELU.apply(x, approximate == "tanh")
    return gelu_forward(x, approximate == "tanh")


@register_impl("relu", "cutile")
def relu(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in FLOATS:
        check_floating("relu", x=x)
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and x.requires_grad:
        return ReLU.apply(x)
    return relu_forward(x)
