"""Group normalisation in PyTorch."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating


def check_group_norm(
    input: torch.Tensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> None:
    """Raises ValueError for arguments that no backend accepts."""
    if input.dim() < 2:
        raise ValueError(f"group_norm: input has shape {tuple(input.shape)}; it must be [B, C, ...]")
    channels = input.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"group_norm: num_groups is {num_groups}; it must divide the channels, {channels}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (channels,):
            raise ValueError(f"group_norm: {name} has shape {tuple(tensor.shape)}; it must be ({channels},)")


@register_impl("group_norm", "pytorch")
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    check_group_norm(input, num_groups, weight, bias)
    check_floating("group_norm", input=input)
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    # On a CPU torch keeps the statistics of fp16 in fp16, and refuses a weight of another dtype.
    weight, bias = (None if t is None else t.to(compute) for t in (weight, bias))
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # torch's backward pass fails for a bias alone
    if not input.numel():  # which PyTorch 2.15 refuses, unless it is the batch that is empty
        return _of_nothing(input.to(compute), weight, bias).to(input.dtype)
    return torch.group_norm(input.to(compute).contiguous(), num_groups, weight, bias, eps).to(input.dtype)


def _of_nothing(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """A result without elements, which gives weight and bias gradients of 0."""
    over_channels = (1, -1) + (1,) * (input.dim() - 2)
    result = input if weight is None else input * weight.view(over_channels)
    return result.contiguous() if bias is None else result + bias.view(over_channels)
