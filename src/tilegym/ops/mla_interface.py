"""Latent attention (MLA), prefill and decoding: every option is either honoured or refused.

A model caches one latent and one rotated key a token. :func:`latent_attention` takes these, and the weight that expands
them, and picks between expanding keys and values and absorbing the expansion into the query and the output.
"""

import torch

from tilegym.backend.selector import assert_backend_available
from tilegym.backend.selector import name_of
from tilegym.ops.attention_ops import mla
from tilegym.ops.attention_ops import mla_decoding
from tilegym.ops.attention_ops import mla_decoding_split_kv
from tilegym.ops.autocast import as_autocast_wants
from tilegym.ops.ops import bmm
from tilegym.ops.ops import linear
from tilegym.ops.pytorch.mla import mla_attention


def check_dropped(op: str, dropout: float, backend: str | None) -> None:
    """Raises ValueError for a ``dropout`` that is no probability, BackendError for a ``backend`` that cannot run here:
    calls with dropout, which are PyTorch's, name it for nothing else."""
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"{op}: dropout is {dropout}; it must be between 0 and 1")
    if backend is not None and not torch.compiler.is_compiling():
        assert_backend_available(name_of(backend))


def mla_interface(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qpe: torch.Tensor,
    kpe: torch.Tensor,
    is_causal: bool = True,
    scaling: float | None = None,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """:func:`tilegym.ops.mla`, under ``torch.autocast`` in autocast's dtype.

    Args:
        q: [B, H, Sq, D]; k: [B, Hkv, Skv, D]; v: [B, Hkv, Skv, Dv]; qpe: [B, H, Sq, Dr]; kpe: [B, 1, Skv, Dr].
        is_causal, scaling, attention_mask, kv_len: as in :func:`tilegym.ops.mla`.
        dropout: probability of dropping an attention weight, as in training; above zero PyTorch computes the call,
            whatever the backend.
        backend: for this call.

    Returns:
        [B, H, Sq, Dv] in q's dtype (autocast's, where it is on). Differentiable, where gradients are wanted.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """
    q, k, v, qpe, kpe = as_autocast_wants(q, k, v, qpe, kpe)
    if dropout != 0.0:
        check_dropped("mla_interface", dropout, backend)
        return mla_attention(q, k, v, qpe, kpe, is_causal, scaling, attention_mask, kv_len, dropout)
    return mla(q, k, v, qpe, kpe, is_causal, scaling, attention_mask, kv_len, backend=backend)


def mla_decoding_interface(
    q: torch.Tensor,
    qpe: torch.Tensor,
    kv: torch.Tensor,
    kpe: torch.Tensor,
    sm_scale: float,
    transpose: bool | None = None,
    kv_len: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    kv_len_per_split: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``out`` of :func:`tilegym.ops.mla_decoding`, under ``torch.autocast`` in autocast's dtype.

    Args:
        q: [B, H, D]; qpe: [B, H, Dr]; kv: [B, S, D]; kpe: [B, S, Dr].
        sm_scale, transpose, kv_len, attention_mask: as in :func:`tilegym.ops.mla_decoding`.
        kv_len_per_split: as in :func:`tilegym.ops.mla_decoding_split_kv`; ``transpose`` must be None then.
        backend: for this call.

    Returns:
        [B, H, D] in q's dtype (autocast's, where it is on).

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """
    q, qpe, kv, kpe = as_autocast_wants(q, qpe, kv, kpe)
    if kv_len_per_split is None:
        return mla_decoding(q, qpe, kv, kpe, sm_scale, transpose, kv_len, attention_mask, backend=backend)[0]
    if transpose is not None:
        raise ValueError("mla_decoding_interface: give transpose or kv_len_per_split, not both")
    return mla_decoding_split_kv(q, qpe, kv, kpe, sm_scale, kv_len_per_split, kv_len, attention_mask, backend=backend)


def latent_attention(
    q: torch.Tensor,
    qpe: torch.Tensor,
    latents: torch.Tensor,
    kpe: torch.Tensor,
    kv_b_weight: torch.Tensor,
    scaling: float,
    is_causal: bool = True,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
    dropout: float = 0.0,
    absorb: bool | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The attention of a DeepSeek-V2 or V3 layer, from what its cache should hold: latents and rotated keys.

    Expanded, as transformers' models compute it, ``latents @ kv_b_weight.T`` gives keys and values for every cached
    token at every step. Absorbed, a head's query goes through ``W_uk`` and its output through ``W_uv``, and all heads
    read the latents themselves: R + Dr numbers a token instead of H * (D + Dr + Dv), 576 instead of 40960 for
    DeepSeek-V3. Absorbing takes more arithmetic a query, so it is for decoding. It needs

    - latents in the cache. transformers' caches hold any pair of [B, heads, S, width]: call
      ``past_key_values.update(latents, kpe, layer_idx)`` with one head and attend to what it returns. Recent versions
      do so themselves; where the layer still expands before ``update`` (transformers 5.10), the call has to be moved;
    - kv_b_proj without bias, adapters or quantisation, so that its weight is all that it does;
    - one query a row, no gradients (no kernel has a backward pass through it) and no dropout.

    The two are equal but for rounding: in bf16 the absorbed query is rounded where the expanded keys are otherwise.

    Args:
        q: [B, H, Sq, D], the part of the queries that has no position; qpe: [B, H, Sq, Dr], rotated.
        latents: [B, 1, S, R], after kv_a_layernorm; kpe: [B, 1, S, Dr], rotated. For a static cache, all of it.
        kv_b_weight: [H * (D + Dv), R], kv_b_proj's: a head's rows follow each other, keys first.
        scaling: factor on the scores, the layer's ``scaling``.
        is_causal, attention_mask, kv_len: as in :func:`tilegym.ops.mla`.
        dropout: probability of dropping an attention weight.
        absorb: True or False to insist; None absorbs where the last of the conditions above holds.
        backend: for this call.

    Returns:
        [B, H, Sq, Dv] in q's dtype (autocast's, where it is on).

    Raises:
        ValueError: shapes or options do not fit, or absorb is True where it cannot be.
        TypeError: dtypes do not fit.
    """
    if q.dim() != 4 or latents.dim() != 4 or latents.shape[1] != 1:
        raise ValueError(
            f"latent_attention: expected q [B, H, Sq, D] and latents [B, 1, S, R], "
            f"got {tuple(q.shape)} and {tuple(latents.shape)}"
        )
    _, heads, queries, dim = q.shape
    rank = latents.shape[3]
    if kv_b_weight.dim() != 2 or kv_b_weight.shape[1] != rank or kv_b_weight.shape[0] % heads:
        raise ValueError(
            f"latent_attention: kv_b_weight must be [{heads} * (D + Dv), {rank}], it is {tuple(kv_b_weight.shape)}"
        )
    v_dim = kv_b_weight.shape[0] // heads - dim
    if v_dim < 1:
        raise ValueError(
            f"latent_attention: kv_b_weight has {kv_b_weight.shape[0] // heads} rows a head, too few for keys of {dim} "
            "and values"
        )
    if dropout != 0.0:
        check_dropped("latent_attention", dropout, backend)
    q, qpe, latents, kpe, kv_b_weight = as_autocast_wants(q, qpe, latents, kpe, kv_b_weight)
    gradient = torch.is_grad_enabled() and (
        q.requires_grad or qpe.requires_grad or latents.requires_grad or kpe.requires_grad or kv_b_weight.requires_grad
    )
    possible = queries == 1 and dropout == 0.0 and not gradient
    if absorb and not possible:
        raise ValueError("latent_attention: absorb=True takes one query a row, no gradients and no dropout")
    if absorb is None:
        absorb = possible
    expansion = kv_b_weight.view(heads, dim + v_dim, rank)
    if absorb:
        latent_q = bmm(q[:, :, 0].transpose(0, 1), expansion[:, :dim], backend=backend).transpose(0, 1)  # [B, H, R]
        latent_out = mla_decoding_split_kv(
            latent_q,
            qpe[:, :, 0],
            latents[:, 0],
            kpe[:, 0],
            scaling,
            kv_len=kv_len,
            attention_mask=attention_mask,
            backend=backend,
        )
        out = bmm(latent_out.transpose(0, 1), expansion[:, dim:], transpose_b=True, backend=backend)  # [H, B, Dv]
        return out.transpose(0, 1)[:, :, None]
    expanded = linear(latents[:, 0], kv_b_weight, backend=backend).unflatten(-1, (heads, dim + v_dim)).transpose(1, 2)
    k, v = expanded.split((dim, v_dim), -1)
    return mla_interface(q, k, v, qpe, kpe, is_causal, scaling, attention_mask, kv_len, dropout, backend)
