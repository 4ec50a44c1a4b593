"""RMS normalisation of the heads of q and k in PyTorch."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import CASTINGS
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import check_option
from tilegym.ops.pytorch.checks import check_same_dtype
from tilegym.ops.pytorch.rms_norm import rms_norm


def check_dual_rms_norm(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, casting: str
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    op = "dual_rms_norm"
    if q.dim() < 2 or k.dim() < 2 or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{op}: q has shape {tuple(q.shape)}, k has {tuple(k.shape)}; they must be [..., heads, D]")
    if q.dtype != k.dtype:
        check_same_dtype(op, q=q, k=k)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape != q.shape[-1:]:
            raise ValueError(f"{op}: {name} has shape {tuple(weight.shape)}, the heads have {q.shape[-1]} dimensions")
    if casting not in CASTINGS:
        check_option(op, "casting", casting, CASTINGS)


@register_impl("dual_rms_norm", "pytorch")
def dual_rms_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    check_dual_rms_norm(q, k, q_weight, k_weight, casting)
    check_floating("dual_rms_norm", q=q)
    return tuple(
        rms_norm(x, x.shape[-1], weight, eps, offset=offset, casting=casting)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
