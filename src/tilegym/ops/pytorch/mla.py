"""``mla`` in plain PyTorch: the two parts of queries and keys joined, then ordinary attention."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.attention import attention
from tilegym.ops.pytorch.attention import check_arguments


@register_impl("mla", "pytorch")
def mla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qpe: torch.Tensor,
    kpe: torch.Tensor,
    is_causal: bool = True,
    scaling: float | None = None,
    attention_mask: torch.Tensor | None = None,
    kv_len: torch.Tensor | None = None,
) -> torch.Tensor:
    return mla_attention(q, k, v, qpe, kpe, is_causal, scaling, attention_mask, kv_len)


def mla_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qpe: torch.Tensor,
    kpe: torch.Tensor,
    is_causal: bool,
    scaling: float | None,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """``mla``, with dropout of the attention weights besides."""
    check_mla(q, k, v, qpe, kpe, attention_mask, kv_len)
    q, k = join_parts(q, k, qpe, kpe)
    return attention(q, k, v, scaling, is_causal, None, None, None, attention_mask, kv_len, dropout)


def join_parts(
    q: torch.Tensor, k: torch.Tensor, qpe: torch.Tensor, kpe: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of one piece, [B, H, Sq, D + Dr] and [B, Hkv, Skv, D + Dr], as the models write them out."""
    return torch.cat((q, qpe), -1), torch.cat((k, kpe.expand(-1, k.shape[1], -1, -1)), -1)


def check_mla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qpe: torch.Tensor,
    kpe: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> None:
    """Raises ValueError or TypeError unless the arguments fit each other."""
    check_arguments("mla", q, k, v, None, None, None, attention_mask, kv_len)
    batch, heads, queries, _ = q.shape
    kpe_shape, qpe_shape = kpe.shape, qpe.shape
    if len(qpe_shape) != 4 or qpe_shape[:3] != q.shape[:3] or kpe_shape != (batch, 1, k.shape[2], qpe_shape[3]):
        raise ValueError(
            f"mla: expected qpe [B, H, Sq, Dr] and kpe [B, 1, Skv, Dr] with B, H, Sq = {(batch, heads, queries)} and "
            f"Skv = {k.shape[2]}, got {tuple(qpe_shape)} and {tuple(kpe_shape)}"
        )
    if not q.dtype == qpe.dtype == kpe.dtype:
        raise TypeError(f"mla: qpe and kpe must have q's dtype {q.dtype}, they have {qpe.dtype} and {kpe.dtype}")
