"""``qwen3_5_rotation``, with PyTorch's rounding at every step. Without it:

y2 = x * cos + where(column < 4, -x[column + 4], x[column - 4]) * sin
y = where(column < 8, y2, x)
"""

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import plan
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import span

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rounded(value, dtype):
    """In a kernel: ``value`` as PyTorch keeps it between two steps, in fp32."""
    return value.astype(dtype).astype(ct.float32)


@ct.kernel
def qwen3_5_rotation_each_kernel(x, cos, sin, y, cos_outer, cos_inner, N: Int, TILE_M: Int, TILE_N: Int):
    """One block a tile, neighbours along a row."""
    across = ct.cdiv(N, TILE_N)
    rows, cols = span(ct.bid(0) // across, TILE_M), span(ct.bid(0) % across, TILE_N)
    x_tile = load(x, rows, cols).astype(ct.float32)
    cos_rows = rows // cos_outer * cos_inner + rows % cos_inner
    cos_tile = load(cos, cos_rows, cols).astype(ct.float32)
    x_ahead = load(x, rows, cols + 4).astype(ct.float32)
    x_behind = load(x, rows, cols - 4).astype(ct.float32)
    sin_tile = load(sin, cos_rows, cols).astype(ct.float32)
    product = rounded(ct.where(cols[None, :] < 4, -x_ahead, x_behind) * sin_tile, x.dtype)
    y2 = rounded(rounded(x_tile * cos_tile, x.dtype) + product, x.dtype)
    y3 = ct.where(cols[None, :] < 8, y2, x_tile)
    store(y, rows, cols, y3)


def _qwen3_5_rotation_each_outputs(x, cos, sin):
    return contiguous_like(x)


@compilable(fake=_qwen3_5_rotation_each_outputs)
def qwen3_5_rotation_each_forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = _qwen3_5_rotation_each_outputs(x, cos, sin)
    rows = rows_of(x)
    m, n = rows.shape[0], 16
    grid, tile_m, tile_n = plan(m, n, x.get_device())
    arrays = (rows, cos.reshape(-1, 8), sin.reshape(-1, 8), y.view(m, 16), x.shape[1:-1].numel(), x.shape[2:-1].numel())
    launch(x, grid, qwen3_5_rotation_each_kernel, (*arrays, n, tile_m, tile_n))
    return y


@ct.kernel
def qwen3_5_rotation_each_backward_kernel(dy, cos, sin, dx, cos_outer, cos_inner, N: Int, TILE_M: Int, TILE_N: Int):
    """One block a tile, neighbours along a row."""
    across = ct.cdiv(N, TILE_N)
    rows, cols = span(ct.bid(0) // across, TILE_M), span(ct.bid(0) % across, TILE_N)
    dy_tile = load(dy, rows, cols).astype(ct.float32)
    dy_ahead = load(dy, rows, cols + 4).astype(ct.float32)
    cos_rows = rows // cos_outer * cos_inner + rows % cos_inner
    sin_ahead = load(sin, cos_rows, cols + 4).astype(ct.float32)
    dy_behind = load(dy, rows, cols - 4).astype(ct.float32)
    sin_behind = load(sin, cos_rows, cols - 4).astype(ct.float32)
    cos_tile = load(cos, cos_rows, cols).astype(ct.float32)
    before = cols[None, :] < 8
    total = ct.where(before, 0.0, dy_tile) + ct.where(cols[None, :] < 4, dy_ahead, 0.0) * sin_ahead
    d_y = ct.where(before, dy_tile, 0.0)
    store(dx, rows, cols, total - ct.where(before, dy_behind * sin_behind, 0.0) + d_y * cos_tile)


def _qwen3_5_rotation_each_gradients(dy, cos, sin):
    return contiguous_like(dy)


@compilable(fake=_qwen3_5_rotation_each_gradients)
def qwen3_5_rotation_each_backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    dx = _qwen3_5_rotation_each_gradients(dy, cos, sin)
    rows = rows_of(dy)
    m, n = rows.shape[0], 16
    grid, tile_m, tile_n = plan(m, n, dy.get_device())
    arrays = (
        rows,
        cos.reshape(-1, 8),
        sin.reshape(-1, 8),
        dx.view(m, 16),
        dy.shape[1:-1].numel(),
        dy.shape[2:-1].numel(),
    )
    launch(dy, grid, qwen3_5_rotation_each_backward_kernel, (*arrays, n, tile_m, tile_n))
    return dx


class Qwen35RotationEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return qwen3_5_rotation_each_forward(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():
            raise UnsupportedError("there is no second derivative")
        dx = qwen3_5_rotation_each_backward(dy, *ctx.saved_tensors)
        return dx, None, None


def qwen3_5_rotation_each(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Computes ``y`` as at the top of this file.

    Args:
        x: [..., 16], in one of DTYPES.
        cos: [..., 8], repeated over leading dimensions, in one of DTYPES.
        sin: [..., 8], repeated over leading dimensions, in one of DTYPES.

    Raises:
        UnsupportedError: the kernels do not serve these arguments.
    """
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    if x.dtype not in DTYPES or cos.dtype != x.dtype or sin.dtype != x.dtype:
        raise UnsupportedError("a dtype is none that the kernels are for")
    if (
        x.shape[-1] != 16
        or x.dim() != 4
        or cos.shape != (*x.shape[:1], 1, *x.shape[2:-1], 8)
        or sin.shape != (*x.shape[:1], 1, *x.shape[2:-1], 8)
    ):
        raise UnsupportedError("the shapes are not those of the region")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise UnsupportedError("there is no gradient of one of its inputs")
    if torch.is_grad_enabled() and x.requires_grad:
        return Qwen35RotationEach.apply(x, cos, sin)
    return qwen3_5_rotation_each_forward(x, cos, sin)


def qwen3_5_rotation(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes its results, one after the other, as at the top of this file.

    Args:
        q: [..., 16], in one of DTYPES.
        k: [..., 16], in one of DTYPES.
        cos: [..., 8], repeated over leading dimensions, in one of DTYPES.
        sin: [..., 8], repeated over leading dimensions, in one of DTYPES.

    Raises:
        UnsupportedError: the kernels do not serve these arguments.
    """
    return qwen3_5_rotation_each(q, cos, sin), qwen3_5_rotation_each(k, cos, sin)
