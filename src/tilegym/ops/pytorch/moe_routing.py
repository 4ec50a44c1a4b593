"""``moe_topk_routing`` in plain PyTorch, as the routers of Hugging Face's models compute it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating

SCORINGS = ("softmax", "topk_softmax", "sigmoid")


def check_routing(
    router_logits: torch.Tensor,
    top_k: int,
    scoring: str,
    correction_bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
    out_dtype: torch.dtype | None,
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    check_floating("moe_topk_routing", router_logits=router_logits, correction_bias=correction_bias)
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise TypeError(f"moe_topk_routing: out_dtype is {out_dtype}, it must be floating point")
    if router_logits.dim() != 2:
        raise ValueError(f"moe_topk_routing: router_logits must be [T, E], they are {tuple(router_logits.shape)}")
    if scoring not in SCORINGS:
        raise ValueError(f"moe_topk_routing: scoring must be one of {', '.join(SCORINGS)}, it is {scoring!r}")
    experts = router_logits.shape[1]
    if num_groups < 1 or experts % num_groups or not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"moe_topk_routing: {experts} experts do not fall into {num_groups} equal groups, "
            f"of which {topk_groups} count"
        )
    if not 1 <= top_k <= experts // num_groups * topk_groups:
        raise ValueError(
            f"moe_topk_routing: top_k must be from 1 to the number of experts to choose from, it is {top_k}"
        )
    if num_groups > 1 and (scoring == "topk_softmax" or (scoring == "sigmoid" and experts == num_groups)):
        raise ValueError(
            f"moe_topk_routing: scoring {scoring!r} does not choose among {num_groups} groups of {experts}"
        )
    if correction_bias is not None and (scoring != "sigmoid" or correction_bias.shape != (experts,)):
        raise ValueError("moe_topk_routing: correction_bias must be [E], and goes with scoring 'sigmoid' only")


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest in each row, of equal ones the first: what topk leaves open."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


@register_impl("moe_topk_routing", "pytorch")
def moe_topk_routing(
    router_logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scaling_factor: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_routing(router_logits, top_k, scoring, correction_bias, num_groups, topk_groups, out_dtype)
    wide = torch.float64 if router_logits.dtype == torch.float64 else torch.float32
    if scoring == "topk_softmax":
        ids = _largest(router_logits, top_k)
        # In the logits' dtype: that of the model.
        weights = torch.softmax(router_logits.gather(1, ids), dim=-1)
        out_dtype = out_dtype or router_logits.dtype
    else:
        logits = router_logits.to(wide)
        scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)
        choice = scores.detach()
        if correction_bias is not None:
            choice = choice + correction_bias.to(wide)
        if num_groups > 1:
            groups = choice.view(len(choice), num_groups, choice.shape[1] // num_groups)
            best = groups.topk(2, dim=-1).values.sum(-1) if scoring == "sigmoid" else groups.amax(-1)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, topk_groups), True)
            allowed = allowed.repeat_interleave(groups.shape[-1], dim=1)
            choice = choice.masked_fill(~allowed, float("-inf"))
        ids = _largest(choice, top_k)
        weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0.0))
    weights = weights * scaling_factor
    return weights.to(out_dtype or wide), ids
