"""Activation functions in PyTorch."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.geglu import APPROXIMATIONS


def check_gelu(approximate: str) -> None:
    """Raises ValueError for an option that no backend accepts."""
    if approximate not in APPROXIMATIONS:
        allowed = " or ".join(map(repr, APPROXIMATIONS))
        raise ValueError(f"gelu: approximate is {approximate!r}; it must be {allowed}")


@register_impl("gelu", "pytorch")
def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    check_gelu(approximate)
    check_floating("gelu", x=x)
    return torch.nn.functional.gelu(x, approximate=approximate)


@register_impl("relu", "pytorch")
def relu(x: torch.Tensor) -> torch.Tensor:
    check_floating("relu", x=x)
    return torch.relu(x)
