"""Cross entropy over a vocabulary in PyTorch, in fp32 as the Hugging Face models compute it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating

REDUCTIONS = ("mean", "sum", "none")


def check_targets(op: str, rows: torch.Size, target: torch.Tensor, reduction: str) -> None:
    """Raises ValueError or TypeError for a target or a reduction that no backend accepts."""
    if target.shape != rows:
        raise ValueError(f"{op}: target has shape {tuple(target.shape)}; it must be {tuple(rows)}, one class a row")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: target is {target.dtype}; it must be int64 or int32")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}, allowed are {', '.join(map(repr, REDUCTIONS))}")


def check_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, softcap: float | None, reduction: str
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if logits.dim() == 0 or not logits.shape[-1]:
        raise ValueError(f"cross_entropy: logits has shape {tuple(logits.shape)}; its last dimension is the classes")
    check_targets("cross_entropy", logits.shape[:-1], target, reduction)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cross_entropy: label_smoothing is {label_smoothing}; it must be between 0 and 1")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"cross_entropy: softcap is {softcap}; it must be positive, or None for no cap")


def reduced(losses: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str) -> torch.Tensor:
    """The losses of all rows, 0 where ignored, as ``reduction`` says; on their device, without waiting for it."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


@register_impl("cross_entropy", "pytorch")
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    check_cross_entropy(logits, target, label_smoothing, softcap, reduction)
    check_floating("cross_entropy", logits=logits)
    x = logits if logits.dtype == torch.float64 else logits.float()
    x = x.masked_fill((target == ignore_index)[..., None], 0.0)  # may be NaN, which times 0 is NaN
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    losses = torch.nn.functional.cross_entropy(
        x.reshape(-1, x.shape[-1]),
        target.reshape(-1).long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).view(target.shape)
    if z_loss:
        losses = losses + z_loss * torch.where(target != ignore_index, torch.logsumexp(x, -1).square(), 0.0)
    return reduced(losses, target, ignore_index, reduction)
