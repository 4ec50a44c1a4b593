"""Layer normalisation in PyTorch."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating


def check_layer_norm(
    input: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[int, ...]:
    """``normalized_shape`` as a tuple.

    Raises:
        ValueError: for arguments that no backend accepts.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or input.shape[-len(shape) :] != shape:
        raise ValueError(
            f"layer_norm: normalized_shape is {shape}; it must be the last dimensions of input, {tuple(input.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"layer_norm: {name} has shape {tuple(tensor.shape)}, normalized_shape is {shape}")
    return shape


@register_impl("layer_norm", "pytorch")
def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    shape = check_layer_norm(input, normalized_shape, weight, bias)
    check_floating("layer_norm", input=input)
    if all(t is None or t.dtype == input.dtype for t in (weight, bias)):
        return torch.nn.functional.layer_norm(input, shape, weight, bias, eps)
    # A weight of another dtype: torch takes that on some devices only.
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    weight, bias = (None if t is None else t.to(compute) for t in (weight, bias))
    return torch.nn.functional.layer_norm(input.to(compute), shape, weight, bias, eps).to(input.dtype)
