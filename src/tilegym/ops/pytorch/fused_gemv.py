"""``rms_norm_linear``, ``rms_norm_swiglu`` and ``linear_add`` as the ops that they stand for, one after the other."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.linear import linear
from tilegym.ops.pytorch.rms_norm import rms_norm
from tilegym.ops.pytorch.swiglu import swiglu


def check_weights(op: str, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> None:
    """Raises ValueError unless there are one to three weights, and a bias for each if for any."""
    if not 1 <= len(weights) <= 3:
        raise ValueError(f"{op}: {len(weights)} weights, allowed are 1 to 3")
    if biases is not None and len(biases) != len(weights):
        raise ValueError(f"{op}: {len(biases)} biases for {len(weights)} weights")


def check_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    """Raises ValueError or TypeError unless ``residual`` has the result's shape and dtype."""
    shape = (*x.shape[:-1], weight.shape[0])
    if residual.shape != shape:
        raise ValueError(f"linear_add: residual has shape {tuple(residual.shape)}, the product has {shape}")
    if residual.dtype is not x.dtype:
        raise TypeError(f"linear_add: residual is {residual.dtype}, x is {x.dtype}")


@register_impl("rms_norm_linear", "pytorch")
def rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor] | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> list[torch.Tensor]:
    check_weights("rms_norm_linear", weights, biases)
    y = rms_norm(x, norm_weight.shape, norm_weight, eps, None, None, offset, casting)
    return [linear(y, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True)]


@register_impl("rms_norm_swiglu", "pytorch")
def rms_norm_swiglu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    return swiglu(*rms_norm_linear(x, norm_weight, eps, [gate_weight, up_weight], None, offset, casting))


@register_impl("linear_add", "pytorch")
def linear_add(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    check_residual(x, weight, residual)
    return residual + linear(x, weight, bias)
