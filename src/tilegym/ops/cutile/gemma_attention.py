"""``gemma_attention`` and ``gemma_attention_decode`` by the kernels of ``fmha`` and ``fmha_decode``."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.cutile.attention import fmha
from tilegym.ops.cutile.flash_decode import fmha_decode
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.flash_decode import check_query


@register_impl("gemma_attention", "cutile")
def gemma_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    is_causal: bool = True,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
) -> torch.Tensor:
    window_size = window_size or None
    check_arguments("gemma_attention", q, k, v, window_size, soft_cap, None, attention_mask, kv_len)
    return fmha(q, k, v, scaling, is_causal, window_size, soft_cap, None, attention_mask, kv_len)


@register_impl("gemma_attention_decode", "cutile")
def gemma_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    kv_len_per_split: int | None = None,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
) -> torch.Tensor:
    window_size = window_size or None
    check_arguments("gemma_attention_decode", q, k, v, window_size, soft_cap, None, attention_mask, kv_len)
    if q.shape[2] != 1:
        return fmha(q, k, v, scaling, True, window_size, soft_cap, None, attention_mask, kv_len)
    check_query(q, kv_len_per_split, "gemma_attention_decode")
    return fmha_decode(q, k, v, scaling, kv_len_per_split, kv_len, window_size, soft_cap, None, attention_mask)
