"""``argmax`` in PyTorch."""

import math

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating

FEW_ROWS = 64  # that leave most of a GPU idle, if a block takes a row


def check_argmax(x: torch.Tensor, out: torch.Tensor | None) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"argmax: x must be [..., V] with V > 0, it is {tuple(x.shape)}")
    check_floating("argmax", x=x)
    if out is None:
        return
    if out.dtype is not torch.int64:
        raise TypeError(f"argmax: out is {out.dtype}, it must be torch.int64")
    if out.shape != x.shape[:-1] or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"argmax: out must be contiguous, of shape {tuple(x.shape[:-1])} and on {x.device}; "
            f"it is {tuple(out.shape)} with strides {out.stride()} on {out.device}"
        )


@register_impl("argmax", "pytorch")
def argmax(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    check_argmax(x, out)
    found = _argmax(x)
    return found if out is None else out.copy_(found)


def _argmax(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return x.argmax(-1)  # the width may be a symbol, of which there is no gcd
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    parts = math.gcd(width, 256)
    if parts == 1 or not 0 < rows <= FEW_ROWS or not x.is_contiguous():
        return x.argmax(-1)
    top, at = x.view(rows, parts, width // parts).max(-1)  # so that more blocks are at work
    part = top.argmax(-1, keepdim=True)
    return at.gather(1, part).add_(part, alpha=width // parts).view(x.shape[:-1])
