"""``rms_norm_linear``, ``rms_norm_swiglu``, ``linear_add``, ``rms_norm_add``: the ops that they stand for, in a row."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import check_option
from tilegym.ops.pytorch.geglu import geglu
from tilegym.ops.pytorch.linear import linear
from tilegym.ops.pytorch.rms_norm import check_rms_norm
from tilegym.ops.pytorch.rms_norm import rms_norm
from tilegym.ops.pytorch.swiglu import swiglu

ACTIVATIONS = {"silu": "", "gelu_tanh": "tanh", "gelu": "none"}  # and how geglu approximates them


def check_activation(activation: str) -> None:
    """Raises ValueError unless ``rms_norm_swiglu`` has the activation."""
    if activation not in ACTIVATIONS:
        check_option("rms_norm_swiglu", "activation", activation, tuple(ACTIVATIONS))


def check_weights(op: str, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> None:
    """Raises ValueError unless there are one to four weights, and a bias for each if for any."""
    if not 1 <= len(weights) <= 4:
        raise ValueError(f"{op}: {len(weights)} weights, allowed are 1 to 4")
    if biases is not None and len(biases) != len(weights):
        raise ValueError(f"{op}: {len(biases)} biases for {len(weights)} weights")


def check_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    """Raises ValueError or TypeError unless ``residual`` has the result's shape and dtype."""
    shape = (*x.shape[:-1], weight.shape[0])
    if residual.shape != shape:
        raise ValueError(f"linear_add: residual has shape {tuple(residual.shape)}, the product has {shape}")
    if residual.dtype is not x.dtype:
        raise TypeError(f"linear_add: residual is {residual.dtype}, x is {x.dtype}")


def check_rms_norm_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, casting: str) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    check_floating("rms_norm_add", x=x)
    check_rms_norm(x, weight.shape, weight, None, None, casting)
    if residual.shape != x.shape:
        raise ValueError(f"rms_norm_add: residual has shape {tuple(residual.shape)}, x has {tuple(x.shape)}")
    if residual.dtype is not x.dtype:
        raise TypeError(f"rms_norm_add: residual is {residual.dtype}, x is {x.dtype}")


@register_impl("rms_norm_linear", "pytorch")
def rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor] | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> list[torch.Tensor]:
    check_weights("rms_norm_linear", weights, biases)
    y = x
    if norm_weight is not None:
        y = rms_norm(x, norm_weight.shape, norm_weight, eps, None, None, offset, casting)
    return [linear(y, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True)]


@register_impl("rms_norm_swiglu", "pytorch")
def rms_norm_swiglu(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    offset: float = 0.0,
    casting: str = "llama",
    activation: str = "silu",
) -> torch.Tensor:
    check_activation(activation)
    gate, up = rms_norm_linear(x, norm_weight, eps, [gate_weight, up_weight], None, offset, casting)
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, ACTIVATIONS[activation])


@register_impl("linear_add", "pytorch")
def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    check_residual(x, weight, residual)
    y = linear(x, weight, bias)
    return residual + (y if scale == 1.0 else y * scale)


@register_impl("rms_norm_add", "pytorch")
def rms_norm_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    check_rms_norm_add(x, weight, residual, casting)
    return residual + rms_norm(x, weight.shape, weight, eps, None, None, offset, casting)
