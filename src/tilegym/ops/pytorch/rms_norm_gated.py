"""RMS normalisation with a gate in PyTorch, cast by cast as the Hugging Face models compute it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import CASTINGS
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import check_option

ACTIVATIONS = ("silu", "sigmoid")


def check_rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    group_size: int | None,
    activation: str,
    casting: str,
) -> None:
    """Raises ValueError for arguments that no backend accepts."""
    op = "rms_norm_gated"
    if x.dim() == 0 or x.shape != gate.shape:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, gate has {tuple(gate.shape)}; both must be [..., N]")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"{op}: weight has shape {tuple(weight.shape)}, x's last dimension is {x.shape[-1]}")
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"{op}: group_size is {group_size}; it must divide x's last dimension, {x.shape[-1]}")
    check_option(op, "activation", activation, ACTIVATIONS)
    check_option(op, "casting", casting, CASTINGS)


@register_impl("rms_norm_gated", "pytorch")
def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    activation: str = "silu",
    casting: str = "llama",
) -> torch.Tensor:
    check_rms_norm_gated(x, gate, weight, group_size, activation, casting)
    check_floating("rms_norm_gated", x=x, gate=gate, weight=weight)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    # What the models round in between.
    between = x.dtype if casting == "llama" else compute
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    y, factor = x.to(compute), act(gate.to(compute))
    if not norm_before_gate:
        y = y * factor
    groups = y.unflatten(-1, (-1, group_size)) if group_size is not None else y
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    y = groups.flatten(-2) if group_size is not None else groups
    y = y.to(between)
    if weight is not None:
        y = (y.to(compute) * weight.to(compute)).to(between)
    if norm_before_gate:
        y = y.to(compute) * factor
    return y.to(x.dtype)
