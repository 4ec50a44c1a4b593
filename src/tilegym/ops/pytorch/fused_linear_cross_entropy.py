"""Cross entropy of a linear layer's outputs in PyTorch, a chunk of rows at a time."""

import functools

import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tilegym.backend import register_impl
from tilegym.backend.wrapped import untraceable
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.cross_entropy import check_targets
from tilegym.ops.pytorch.cross_entropy import cross_entropy
from tilegym.ops.pytorch.cross_entropy import reduced


def check_fused_linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    chunk_size: int,
    reduction: str,
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    op = "fused_linear_cross_entropy"
    fits = hidden_states.dim() > 0 and weight.dim() == 2 and hidden_states.shape[-1] == weight.shape[1]
    if not fits or 0 in weight.shape:
        raise ValueError(
            f"{op}: hidden_states has shape {tuple(hidden_states.shape)}, weight has {tuple(weight.shape)}; "
            "they must be [..., H] and [V, H], with V and H of 1 or more"
        )
    check_targets(op, hidden_states.shape[:-1], target, reduction)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias has shape {tuple(bias.shape)}, weight has {tuple(weight.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden_states.dtype:
            raise TypeError(f"{op}: {name} is {tensor.dtype}, hidden_states is {hidden_states.dtype}")
    if chunk_size < 1:
        raise ValueError(f"{op}: chunk_size is {chunk_size}; it must be positive")


def _losses(hidden, weight, bias, target, ignore_index):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return cross_entropy(logits, target, ignore_index, reduction="none")


@register_impl("fused_linear_cross_entropy", "pytorch")
def fused_linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    chunk_size: int = 4096,
    reduction: str = "mean",
) -> torch.Tensor:
    check_fused_linear_cross_entropy(hidden_states, weight, target, bias, chunk_size, reduction)
    check_floating("fused_linear_cross_entropy", hidden_states=hidden_states)
    chunks = zip(
        hidden_states.reshape(-1, weight.shape[1]).split(chunk_size), target.reshape(-1).split(chunk_size), strict=True
    )
    run = functools.partial(checkpoint, _losses, use_reentrant=False, preserve_rng_state=False)
    # The backward pass computes each chunk's logits again: saved, they would be all there at once.
    if untraceable(forward_ad._current_level) is not None:
        run = _losses  # torch.func's transforms cannot do that
    losses = [run(hidden, weight, bias, rows, ignore_index) for hidden, rows in chunks]
    return reduced(torch.cat(losses).view(target.shape), target, ignore_index, reduction)
