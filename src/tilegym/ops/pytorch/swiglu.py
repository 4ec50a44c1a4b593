"""SwiGLU's activation in PyTorch, as the Hugging Face MLP computes it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating


def check_swiglu(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if a.shape != b.shape:
        raise ValueError(f"swiglu: a has shape {tuple(a.shape)}, b has {tuple(b.shape)}; they must be the same")
    if a.dtype != b.dtype:
        raise TypeError(f"swiglu: a is {a.dtype}, b is {b.dtype}; they must be the same")


@register_impl("swiglu", "pytorch")
def swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    check_swiglu(a, b)
    check_floating("swiglu", a=a)
    return torch.nn.functional.silu(a) * b
