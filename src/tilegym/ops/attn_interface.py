"""One function for attention, prefill and decoding, with every option either honoured or refused."""

import functools
from collections.abc import Callable

import torch

from tilegym.ops.autocast import as_autocast_wants
from tilegym.ops.mla_interface import latent_attention as latent_attention
from tilegym.ops.mla_interface import mla_decoding_interface as mla_decoding_interface
from tilegym.ops.mla_interface import mla_interface as mla_interface
from tilegym.ops.ops import fmha
from tilegym.ops.ops import fmha_decode
from tilegym.ops.pytorch.attention import attention


def fmha_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None = None,
    is_causal: bool = True,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of any number of queries: :func:`tilegym.ops.fmha_decode` for one, :func:`tilegym.ops.fmha` for more.

    Under ``torch.autocast`` it computes in autocast's dtype, as ``scaled_dot_product_attention`` does.

    Args:
        q: [B, Hq, Sq, D]; k: [B, Hkv, Skv, D]; v: [B, Hkv, Skv, Dv].
        scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len: as in :func:`tilegym.ops.fmha`.
        dropout: probability of dropping an attention weight, as in training; above zero PyTorch computes the call,
            whatever the backend.
        backend: for this call.

    Returns:
        [B, Hq, Sq, Dv] in q's dtype (autocast's, where it is on). Differentiable, where gradients are wanted.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """
    q, k, v = as_autocast_wants(q, k, v)
    if dropout > 0.0:
        return attention(q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len, dropout)
    if q.dim() == 4 and q.shape[2] == 1:
        # A single query stands at the last key: causal or not is the same.
        return fmha_decode(
            q,
            k,
            v,
            scaling,
            kv_len=kv_len,
            window_size=window_size,
            soft_cap=soft_cap,
            sinks=sinks,
            attention_mask=attention_mask,
            backend=backend,
        )
    return fmha(q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len, backend=backend)


def get_fmha_interface(backend: str | None = None) -> Callable[..., torch.Tensor]:
    """:func:`fmha_interface`, with ``backend`` filled in if one is given."""
    return fmha_interface if backend is None else functools.partial(fmha_interface, backend=backend)
