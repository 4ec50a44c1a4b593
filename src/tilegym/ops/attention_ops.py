"""The declarations of the attentions of single model families, as :mod:`tilegym.ops.ops` has those of the others."""

from torch import Tensor

from tilegym.backend import dispatch


@dispatch("attention_sink")
def attention_sink(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    start_q: int | Tensor | None = None,
) -> Tensor:
    """Causal attention with a learned logit for each head in the softmax's denominator, as gpt-oss has it.

    ``sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))`` with ``s = sm_scale * q k^T`` (arXiv:2508.10925, section 2).
    Query i stands at key position ``start_q + i`` and sees the keys up to its own, the last ``sliding_window`` of them.

    Args:
        query: [B, Sq, Hkv, G, D] with the G query heads of each kv head, or [B, Sq, Hkv * G, D]; fp32, fp16 or bf16.
        key, value: [B, Skv, Hkv, D], any strides; keys behind the last query's position count for nothing.
        sinks: [Hkv * G].
        sm_scale: factor on the scores, default 1/sqrt(D).
        sliding_window: W keys including the query's own; None for all.
        start_q: the position of the first query: a number, or integers [1] or [B], one for each row, on query's device,
            where they are read (a captured graph replays with those of the moment). The last query's position is less
            than Skv. None: the last query stands at the last key, as for a chunk of a prompt behind its cache.

    Returns:
        [B, Sq, Hkv * G * D] in query's dtype. Differentiable in query, key, value and sinks.

    Raises:
        ValueError: shapes do not fit, or a number start_q lets a query stand behind the last key.
        TypeError: dtypes do not fit.
    """


@dispatch("attention_sink_decode")
def attention_sink_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    start_q: int | Tensor | None = None,
    kv_len_per_split: int | None = None,
) -> Tensor:
    """:func:`attention_sink` for a decoding step, its keys split among blocks as in :func:`tilegym.ops.fmha_decode`.

    Args:
        query: as for :func:`attention_sink` with Sq = 1; more queries, as speculative decoding has them, are a short
            prefill.
        key, value, sinks, sm_scale, sliding_window, start_q: as for :func:`attention_sink`.
        kv_len_per_split: how many keys one block takes; None picks from shape and GPU.

    Returns:
        [B, Sq, Hkv * G * D] in query's dtype. Differentiable if Sq > 1.

    Raises:
        ValueError, TypeError: as for :func:`attention_sink`.
    """


@dispatch("gemma_attention")
def gemma_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    is_causal: bool = True,
    attention_mask: Tensor | None = None,
    kv_len: Tensor | None = None,
) -> Tensor:
    """Attention as Gemma has it: ``softmax(mask(soft_cap * tanh(scaling * q k^T / soft_cap))) v`` (arXiv:2408.00118).

    Args:
        q: [B, Hq, Sq, D]; k: [B, Hkv, Skv, D]; v: [B, Hkv, Skv, Dv]; fp32, fp16 or bf16, any strides.
        scaling: factor on the scores, default 1/sqrt(D); Gemma's own is ``query_pre_attn_scalar ** -0.5``.
        window_size: W keys including the query's own (the local layers); None or 0 for all.
        soft_cap: bound of the scores (Gemma 2: 50); None for none (Gemma 3).
        is_causal, attention_mask, kv_len: as in :func:`tilegym.ops.fmha`.

    Returns:
        [B, Hq, Sq, Dv] in q's dtype. Differentiable in q, k and v.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """


@dispatch("gemma_attention_decode")
def gemma_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    kv_len_per_split: int | None = None,
    attention_mask: Tensor | None = None,
    kv_len: Tensor | None = None,
) -> Tensor:
    """:func:`gemma_attention` for a decoding step, its keys split among blocks as in :func:`tilegym.ops.fmha_decode`.

    Args:
        q: as for :func:`gemma_attention` with Sq = 1; more queries, as speculative decoding has them, are a short
            prefill.
        k, v, scaling, window_size, soft_cap, attention_mask, kv_len: as for :func:`gemma_attention`.
        kv_len_per_split: how many keys one block takes; None picks from shape and GPU.

    Returns:
        [B, Hq, Sq, Dv] in q's dtype. Differentiable if Sq > 1.

    Raises:
        ValueError, TypeError: as for :func:`gemma_attention`.
    """


@dispatch("mla")
def mla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qpe: Tensor,
    kpe: Tensor,
    is_causal: bool = True,
    scaling: float | None = None,
    attention_mask: Tensor | None = None,
    kv_len: Tensor | None = None,
) -> Tensor:
    """Multi-head latent attention over expanded keys and values (DeepSeek-V2, arXiv:2405.04434, equations 41 to 46).

    ``softmax(mask(scaling * (q k^T + qpe kpe^T))) v``: the part of a key that has its position is one for all heads.
    With fewer queries than keys the causal diagonal is aligned bottom-right, as for :func:`tilegym.ops.fmha`: a chunk
    of a prompt sees all of the chunks before it.

    Args:
        q: [B, H, Sq, D], fp32, fp16 or bf16, any strides; qpe: [B, H, Sq, Dr], rotated.
        k: [B, Hkv, Skv, D]; v: [B, Hkv, Skv, Dv]; H is a multiple of Hkv.
        kpe: [B, 1, Skv, Dr], rotated.
        is_causal: whether keys behind a query's own are hidden from it.
        scaling: factor on the scores, default 1/sqrt(D + Dr).
        attention_mask: broadcastable to [B, H, Sq, Skv]: boolean (True: attend) or additive in a float dtype; on top of
            is_causal.
        kv_len: [B] int32 on q's device, the number of keys that are valid in each row (a static cache is longer).

    Returns:
        [B, H, Sq, Dv] in q's dtype; a query that sees no key gives zeros. Differentiable in q, k, v, qpe and kpe, the
        same bits in every run.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes do not fit.
    """


@dispatch("mla_decoding")
def mla_decoding(
    q: Tensor,
    qpe: Tensor,
    kv: Tensor,
    kpe: Tensor,
    sm_scale: float,
    transpose: bool | None = None,
    kv_len: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One new token's latent attention with the expansion absorbed (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    ``softmax(sm_scale * (q kv^T + qpe kpe^T)) kv``: all heads attend to one latent a token, its key and its value. For
    head h, q is ``W_uk[h]^T q_nope`` and the attention's output ``W_uv[h] out``, with W_uk and W_uv the rows of
    kv_b_proj that give a head's key and value; :func:`tilegym.ops.mla_interface.latent_attention` applies them.

    Args:
        q: [B, H, D], fp32, fp16 or bf16 (D = 512 in DeepSeek's models); qpe: [B, H, Dr], rotated (Dr = 64).
        kv: [B, S, D], the latents after their norm; kpe: [B, S, Dr], rotated; any strides.
        sm_scale: factor on the scores. The model's is 1/sqrt of the width of its *expanded* queries (128 + 64 for
            DeepSeek-V2 and V3), which the latents do not show: there is no default.
        transpose: how the kernel lays out the scores, True for [keys, heads], False for [heads, keys]; None picks by
            the number of heads. It changes no result but for rounding.
        kv_len: [B] int32 on q's device, the number of valid keys in each row; None for S. It is read on the device: a
            captured graph replays with the lengths of the moment.
        attention_mask: broadcastable to [B, H, 1, S]: boolean (True: attend) or additive in a float dtype.

    Returns:
        out: [B, H, D] in q's dtype; zeros where no key is seen.
        lse: [B, H] fp32, the natural logarithm of the sum of the exponentials of the scores, with which attention over
            parts of the keys merges; -inf where no key is seen.
        Not differentiable in the cuTile kernels; PyTorch serves calls that want gradients.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes do not fit.
    """


@dispatch("mla_decoding_split_kv")
def mla_decoding_split_kv(
    q: Tensor,
    qpe: Tensor,
    kv: Tensor,
    kpe: Tensor,
    sm_scale: float,
    kv_len_per_split: int | None = None,
    kv_len: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """``out`` of :func:`mla_decoding`, with a say in how the keys are split among blocks.

    Args:
        kv_len_per_split: how many keys of the cache one block takes; None picks from shape and GPU.
        q, qpe, kv, kpe, sm_scale, kv_len, attention_mask: as in :func:`mla_decoding`.

    Returns:
        [B, H, D] in q's dtype; zeros where no key is seen.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """
