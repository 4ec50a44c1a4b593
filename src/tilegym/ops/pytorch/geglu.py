"""GEGLU's activation in PyTorch, as the Hugging Face MLP computes it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating

APPROXIMATIONS = ("tanh", "none")


def check_geglu(a: torch.Tensor, b: torch.Tensor, approximate: str) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if a.shape != b.shape:
        raise ValueError(f"geglu: a has shape {tuple(a.shape)}, b has {tuple(b.shape)}; they must be the same")
    if a.dtype != b.dtype:
        raise TypeError(f"geglu: a is {a.dtype}, b is {b.dtype}; they must be the same")
    if approximate not in APPROXIMATIONS:
        allowed = " or ".join(map(repr, APPROXIMATIONS))
        raise ValueError(f"geglu: approximate is {approximate!r}; it must be {allowed}")


@register_impl("geglu", "pytorch")
def geglu(a: torch.Tensor, b: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    check_geglu(a, b, approximate)
    check_floating("geglu", a=a)
    return torch.nn.functional.gelu(a, approximate=approximate) * b
