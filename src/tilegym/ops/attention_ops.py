"""The declarations of the attentions of single model families, as :mod:`tilegym.ops.ops` has those of the others."""

from torch import Tensor

from tilegym.backend import dispatch


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
