"""``splitk_reduce`` in plain PyTorch."""

import torch

from tilegym.backend import register_impl


@register_impl("splitk_reduce", "pytorch")
def splitk_reduce(
    partial: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    check_arguments(partial, lse, sinks)
    logits = lse
    if sinks is not None:
        logits = torch.cat((lse, sinks.to(lse.dtype).view(1, -1, 1).expand(*lse.shape[:2], 1)), dim=-1)
    seen = (lse > float("-inf")) | lse.isnan()
    weight = torch.softmax(logits.masked_fill(~seen.any(-1, keepdim=True), 0.0), dim=-1)[..., : lse.shape[2]]
    # A split that saw no key weighs nothing, whatever its output holds.
    weighted = torch.where(seen[..., None], weight[..., None] * partial, 0.0)
    return weighted.sum(2, keepdim=True).to(dtype)


def check_arguments(partial: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Raises ValueError or TypeError unless the arguments fit each other."""
    if partial.dim() != 4 or partial.shape[:3] != lse.shape:
        raise ValueError(
            "splitk_reduce: expected partial [B, Hq, splits, Dv] and lse [B, Hq, splits], "
            f"got {tuple(partial.shape)} and {tuple(lse.shape)}"
        )
    if partial.dtype != lse.dtype or partial.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"splitk_reduce: partial and lse must be fp32, they are {partial.dtype} and {lse.dtype}")
    if sinks is not None and sinks.shape != partial.shape[1:2]:
        raise ValueError(f"splitk_reduce: sinks must be [{partial.shape[1]}], it is {tuple(sinks.shape)}")
