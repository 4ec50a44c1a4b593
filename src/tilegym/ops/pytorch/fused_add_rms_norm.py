"""Residual addition and RMS normalisation in PyTorch, cast by cast as the Hugging Face models compute them."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import CASTINGS
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import check_option
from tilegym.ops.pytorch.rms_norm import rms_norm


def check_fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, casting: str
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if x.shape != residual.shape:
        raise ValueError(
            f"fused_add_rms_norm: x has shape {tuple(x.shape)}, residual has {tuple(residual.shape)}; "
            "they must be the same"
        )
    if x.dim() == 0:
        raise ValueError("fused_add_rms_norm: x has no dimensions; it needs one to normalise over")
    if x.dtype != residual.dtype:
        raise TypeError(f"fused_add_rms_norm: x is {x.dtype}, residual is {residual.dtype}; they must be the same")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"fused_add_rms_norm: weight has shape {tuple(weight.shape)}, x's last dimension is {x.shape[-1]}"
        )
    if casting not in CASTINGS:
        check_option("fused_add_rms_norm", "casting", casting, CASTINGS)


@register_impl("fused_add_rms_norm", "pytorch")
def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    check_fused_add_rms_norm(x, residual, weight, casting)
    check_floating("fused_add_rms_norm", x=x)
    total = x + residual
    return rms_norm(total, total.shape[-1], weight, eps, offset=offset, casting=casting), total
