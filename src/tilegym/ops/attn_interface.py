"""Attention for models, prefill and decoding behind one function a family: every option is honoured or refused."""

import functools
from collections.abc import Callable

import torch

from tilegym.ops.autocast import as_autocast_wants
from tilegym.ops.mla_interface import check_dropped
from tilegym.ops.mla_interface import latent_attention as latent_attention
from tilegym.ops.mla_interface import mla_decoding_interface as mla_decoding_interface
from tilegym.ops.mla_interface import mla_interface as mla_interface
from tilegym.ops.ops import fmha
from tilegym.ops.ops import fmha_decode
from tilegym.ops.pytorch.attention import attention
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.attention_sink import up_to_last_query
from tilegym.ops.pytorch.checks import wants_gradient


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
        BackendError: backend is unknown.
    """
    q, k, v = as_autocast_wants(q, k, v)
    if dropout != 0.0:
        check_dropped("fmha_interface", dropout, backend)
        return attention(q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len, dropout)
    options = (window_size, soft_cap, sinks, attention_mask)
    if q.dim() == 4 and q.shape[2] == 1 and not wants_gradient(q, k, v, sinks, attention_mask):
        # A single query stands at the last key: causal or not is the same.
        return fmha_decode(q, k, v, scaling, None, kv_len, *options, backend=backend)
    return fmha(q, k, v, scaling, is_causal, *options, kv_len, backend=backend)


def get_fmha_interface(backend: str | None = None) -> Callable[..., torch.Tensor]:
    """:func:`fmha_interface`, with ``backend`` filled in if one is given."""
    return _with_backend(fmha_interface, backend)


def attention_sink_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    scaling: float | None = None,
    is_causal: bool = True,
    window_size: int | None = None,
    soft_cap: float | None = None,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    start_q: int | torch.Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """:func:`fmha_interface` with sinks, as gpt-oss has them.

    Args:
        q: [B, Hq, Sq, D]; k: [B, Hkv, Skv, D]; v: [B, Hkv, Skv, Dv].
        sinks: [Hq], a logit for each head in the softmax's denominator.
        scaling, is_causal, window_size, soft_cap, attention_mask, kv_len, dropout, backend: as in
            :func:`fmha_interface`.
        start_q: the key position of the first query, as in :func:`tilegym.ops.attention_sink`; says the same as
            ``kv_len = start_q + Sq``.

    Returns:
        [B, Hq, Sq, Dv] in q's dtype (autocast's, where it is on). Differentiable, where gradients are wanted.

    Raises:
        ValueError: shapes or options do not fit, or both kv_len and start_q are given.
        TypeError: dtypes do not fit.
    """
    if start_q is not None:
        if kv_len is not None:
            raise ValueError("attention_sink_interface: give kv_len or start_q, not both")
        check_arguments("attention_sink_interface", q, k, v, window_size, soft_cap, sinks, attention_mask, None)
        keys = k.shape[2]
        k, v, kv_len = up_to_last_query("attention_sink_interface", q, k, v, start_q)
        if attention_mask is not None and k.shape[2] < keys and attention_mask.shape[-1:] == (keys,):
            attention_mask = attention_mask[..., : k.shape[2]]
    return fmha_interface(
        q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len, dropout, backend
    )


def get_attention_sink_interface(backend: str | None = None) -> Callable[..., torch.Tensor]:
    """:func:`attention_sink_interface`, with ``backend`` filled in if one is given."""
    return _with_backend(attention_sink_interface, backend)


def gemma_attention_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    is_causal: bool = True,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """:func:`fmha_interface` with the arguments of :func:`tilegym.ops.gemma_attention`, prefill and decoding.

    Args:
        q: [B, Hq, Sq, D]; k: [B, Hkv, Skv, D]; v: [B, Hkv, Skv, Dv].
        scaling, window_size, soft_cap, is_causal, attention_mask, kv_len: as in :func:`tilegym.ops.gemma_attention`.
        dropout, backend: as in :func:`fmha_interface`.

    Returns:
        [B, Hq, Sq, Dv] in q's dtype (autocast's, where it is on). Differentiable, where gradients are wanted.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """
    return fmha_interface(
        q, k, v, scaling, is_causal, window_size or None, soft_cap, None, attention_mask, kv_len, dropout, backend
    )


def get_gemma_attention_interface(backend: str | None = None) -> Callable[..., torch.Tensor]:
    """:func:`gemma_attention_interface`, with ``backend`` filled in if one is given."""
    return _with_backend(gemma_attention_interface, backend)


def _with_backend(interface: Callable, backend: str | None) -> Callable[..., torch.Tensor]:
    return interface if backend is None else functools.partial(interface, backend=backend)
