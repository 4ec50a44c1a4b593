"""``silu(x[..., :H]) * x[..., H:]``: the kernels of swiglu over the two halves of each row."""

import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.swiglu import launch_swiglu
from tilegym.ops.cutile.swiglu import launch_swiglu_backward
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.pytorch.silu_and_mul import check_silu_and_mul


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of [M, 2H], as views [M, H]."""
    return rows.chunk(2, dim=1) if rows.shape[1] else (rows, rows)


def _output(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@compilable(fake=_output)
def silu_and_mul_forward(x: torch.Tensor) -> torch.Tensor:
    rows = rows_of(x)
    y = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    launch_swiglu(*_halves(rows), y)
    return y if rows is x else y.view(*x.shape[:-1], y.shape[1])


@compilable(fake=lambda dy, x: torch.empty_like(x, memory_format=torch.contiguous_format))
def silu_and_mul_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_swiglu_backward(rows_of(dy), *_halves(rows_of(x)), *_halves(rows_of(dx)))
    return dx


class SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return silu_and_mul_forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return silu_and_mul_backward(dy, *ctx.saved_tensors)


@register_impl("silu_and_mul", "cutile")
def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    check_silu_and_mul(input, out)
    if input.dtype not in FLOATS:
        raise UnsupportedError("input is not fp32, fp16 or bf16")
    if out is not None:
        with torch.no_grad():
            if torch.compiler.is_compiling() or not out.is_contiguous():
                return out.copy_(silu_and_mul_forward(input))
            launch_swiglu(*_halves(rows_of(input)), rows_of(out))
            return out
    if torch.is_grad_enabled() and input.requires_grad:
        return SiluAndMul.apply(input)
    return silu_and_mul_forward(input)
