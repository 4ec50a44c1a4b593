"""``quantized_linear`` in plain PyTorch: the weight is written out in the dtype of x."""

import torch
import torch.nn.functional as F

from tilegym.backend import register_impl

WEIGHTS = (torch.int8, torch.float8_e4m3fn)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of the kernels: from some 1500 rows on a weight that is first written out, and cuBLAS, are faster; a block's rows and
# columns are multiples of what a tile takes of them.
MOST_ROWS, BLOCK_N, BLOCK_K = 1024, 64, 128


@register_impl("quantized_linear", "pytorch")
def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    block_size: tuple[int, int] | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    check_operands(x, weight, scale, bias, block_size, residual)
    y = F.linear(x, dequantized(weight, scale, block_size, x.dtype), bias)
    return y if residual is None else residual + y


def dequantized(
    weight: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """``weight * scale`` [N, K], multiplied in fp32 (for fp64 in fp64) and rounded once to ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    scale = scale.to(wide)
    if block_size is not None:
        (n, k), (rows, columns) = weight.shape, block_size
        scale = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    elif scale.numel() != 1:
        scale = scale.reshape(-1, 1)
    return (weight.to(wide) * scale).to(dtype)


def check_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    block_size: tuple[int, int] | None,
    residual: torch.Tensor | None = None,
) -> None:
    """Raises ValueError or TypeError unless residual + x @ (weight * scale).T + bias is defined."""
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(x.shape)}, {tuple(weight.shape)}"
        raise ValueError(f"quantized_linear: expected x [..., K] and weight [N, K], got {shapes}")
    if weight.dtype not in WEIGHTS:
        raise TypeError(f"quantized_linear: weight must be int8 or float8_e4m3fn, it is {weight.dtype}")
    if x.dtype not in FLOATS:
        raise TypeError(f"quantized_linear: x must be fp32, fp16 or bf16, it is {x.dtype}")
    if scale.dtype not in FLOATS:
        raise TypeError(f"quantized_linear: scale must be fp32, fp16 or bf16, it is {scale.dtype}")
    n, k = weight.shape
    if block_size is None:
        shapes = ((), (1,), (1, 1), (n,), (n, 1))
    elif len(block_size) == 2 and min(block_size) > 0:
        shapes = ((-(-n // block_size[0]), -(-k // block_size[1])),)
    else:
        raise ValueError(f"quantized_linear: block_size must be (rows, columns), it is {block_size}")
    if tuple(scale.shape) not in shapes:
        wanted = f"{list(shapes[0])}" if block_size else f"one number, [{n}] or [{n}, 1]"
        raise ValueError(f"quantized_linear: scale must be {wanted}, it is {list(scale.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"quantized_linear: bias must be [{n}], it is {list(bias.shape)}")
    if bias is not None and bias.dtype != x.dtype:
        raise TypeError(f"quantized_linear: bias must have the dtype of x, {x.dtype}, it has {bias.dtype}")
    if residual is not None and residual.shape != (*x.shape[:-1], n):
        wanted, found = [*x.shape[:-1], n], list(residual.shape)
        raise ValueError(f"quantized_linear: residual must be {wanted}, it is {found}")
    if residual is not None and residual.dtype != x.dtype:
        raise TypeError(f"quantized_linear: residual must have the dtype of x, {x.dtype}, it has {residual.dtype}")
