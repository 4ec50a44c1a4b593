"""``fmha_decode`` in plain PyTorch: attention with a single query."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.attention import attention


@register_impl("fmha_decode", "pytorch")
def fmha_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | None = None,
    kv_len_per_split: int | None = None,
    kv_len: torch.Tensor | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    check_query(q, kv_len_per_split)
    # The query stands at the last key, so that causal or not is the same.
    options = (window_size, soft_cap, sinks, attention_mask, kv_len)
    return attention(q, k, v, sm_scale, True, *options, op="fmha_decode")


def check_query(q: torch.Tensor, kv_len_per_split: int | None, op: str = "fmha_decode") -> None:
    """Raises ValueError, naming ``op``, unless q holds one query a head and the splits have a length."""
    if q.dim() != 4 or q.shape[2] != 1:
        raise ValueError(f"{op}: q must be [B, Hq, 1, D], it is {tuple(q.shape)}")
    if kv_len_per_split is not None and kv_len_per_split < 1:
        raise ValueError(f"{op}: kv_len_per_split must be at least 1 (or None), it is {kv_len_per_split}")
