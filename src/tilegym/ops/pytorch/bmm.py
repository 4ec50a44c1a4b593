"""``bmm`` in plain PyTorch."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.matmul import FP8_DTYPES


def check_batches(a: torch.Tensor, b: torch.Tensor, transpose_a: bool, transpose_b: bool) -> None:
    """Raises ValueError or TypeError unless op(a[i]) @ op(b[i]) is defined for every i."""
    if a.dim() != 3 or b.dim() != 3:
        raise ValueError(f"bmm: a and b must have three dimensions, they have {a.dim()} and {b.dim()}")
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a and b must have one batch size, they have {a.shape[0]} and {b.shape[0]}")
    if a.shape[1 if transpose_a else 2] != b.shape[2 if transpose_b else 1]:
        raise ValueError(
            f"bmm: op(a) has {a.shape[1 if transpose_a else 2]} columns and op(b) {b.shape[2 if transpose_b else 1]} "
            f"rows (a {tuple(a.shape)}, transpose_a={transpose_a}; b {tuple(b.shape)}, transpose_b={transpose_b})"
        )
    if a.dtype != b.dtype:
        raise TypeError(f"bmm: a and b must have one dtype, they have {a.dtype} and {b.dtype}")


@register_impl("bmm", "pytorch")
def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    static_persistent: bool | None = None,
) -> torch.Tensor:
    check_batches(a, b, transpose_a, transpose_b)
    a, b = a.mT if transpose_a else a, b.mT if transpose_b else b
    if a.dtype in FP8_DTYPES:
        # Every fp8 value is an fp16 value, but the sum of their products needs fp32.
        return torch.bmm(a.float(), b.float()).half()
    return torch.bmm(a, b)
