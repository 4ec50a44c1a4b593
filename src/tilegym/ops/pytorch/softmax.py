"""Softmax in PyTorch, in fp32 as the Hugging Face models compute it."""

import torch

from tilegym.backend import register_impl


@register_impl("softmax", "pytorch")
def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.softmax(x, dim, dtype=compute).to(x.dtype)
