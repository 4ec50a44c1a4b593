"""``matmul`` in plain PyTorch."""

import torch

from tilegym.backend import register_impl

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@register_impl("matmul", "pytorch")
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    static_persistent: bool | None = None,
    use_tma: bool | None = None,
) -> torch.Tensor:
    check_operands(a, b, trans_a, trans_b)
    if a.dtype in FP8_DTYPES:
        # Every fp8 value is an fp16 value, but the sum of their products needs fp32.
        a, b = a.float(), b.float()
        return ((a.t() if trans_a else a) @ (b.t() if trans_b else b)).half()
    return (a.t() if trans_a else a) @ (b.t() if trans_b else b)


def check_operands(a: torch.Tensor, b: torch.Tensor, trans_a: bool, trans_b: bool) -> None:
    """Raises ValueError or TypeError unless op(a) @ op(b) is defined."""
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"matmul: a and b must have two dimensions, they have {a.dim()} and {b.dim()}")
    if a.shape[0 if trans_a else 1] != b.shape[1 if trans_b else 0]:
        raise ValueError(
            f"matmul: op(a) has {a.shape[0 if trans_a else 1]} columns and op(b) {b.shape[1 if trans_b else 0]} rows "
            f"(a {tuple(a.shape)}, trans_a={trans_a}; b {tuple(b.shape)}, trans_b={trans_b})"
        )
    if a.dtype != b.dtype:
        raise TypeError(f"matmul: a and b must have one dtype, they have {a.dtype} and {b.dtype}")
