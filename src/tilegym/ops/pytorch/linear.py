"""``linear`` in plain PyTorch."""

import torch
import torch.nn.functional as F

from tilegym.backend import register_impl


@register_impl("linear", "pytorch")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    settled: bool = False,
) -> torch.Tensor:
    check_operands(x, weight, bias, out_dtype)
    if out_dtype is None:
        return F.linear(x, weight, bias)
    return F.linear(*in_dtype(out_dtype, x, weight, bias))


def in_dtype(dtype: torch.dtype | None, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [t if t is None or dtype is None else t.to(dtype) for t in tensors]


def check_operands(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None
) -> None:
    """Raises ValueError or TypeError unless x @ weight.T + bias is defined."""
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: expected x [..., K] and weight [N, K], got {tuple(x.shape)}, {tuple(weight.shape)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        dtypes = [str(t.dtype) for t in (x, weight, bias) if t is not None]
        raise TypeError(f"linear: x, weight and bias must have one dtype, they have {', '.join(dtypes)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias must be [{weight.shape[0]}], it is {tuple(bias.shape)}")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise TypeError(f"linear: out_dtype must be {x.dtype} or torch.float32, it is {out_dtype}")
