"""Softmax in PyTorch, in fp32 as the Hugging Face models compute it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating


@register_impl("softmax", "pytorch")
def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    check_floating("softmax", x=x)
    # In fp32 within, whatever x's dtype.
    return torch.softmax(x, dim)
