"""``mla_decoding`` and ``mla_decoding_split_kv`` in plain PyTorch: one key and value for all heads."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.attention import without_rows_behind


@register_impl("mla_decoding", "pytorch")
def mla_decoding(
    q: torch.Tensor,
    qpe: torch.Tensor,
    kv: torch.Tensor,
    kpe: torch.Tensor,
    sm_scale: float,
    transpose: bool | None = None,
    kv_len: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_decoding("mla_decoding", q, qpe, kv, kpe, None, kv_len, attention_mask)
    return _attend(q, qpe, kv, kpe, sm_scale, kv_len, attention_mask)


@register_impl("mla_decoding_split_kv", "pytorch")
def mla_decoding_split_kv(
    q: torch.Tensor,
    qpe: torch.Tensor,
    kv: torch.Tensor,
    kpe: torch.Tensor,
    sm_scale: float,
    kv_len_per_split: int | None = None,
    kv_len: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    check_decoding("mla_decoding_split_kv", q, qpe, kv, kpe, kv_len_per_split, kv_len, attention_mask)
    return _attend(q, qpe, kv, kpe, sm_scale, kv_len, attention_mask)[0]


def _attend(q, qpe, kv, kpe, sm_scale, kv_len, attention_mask) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and the lse. In fp32 at least."""
    given, dtype = q.dtype, torch.promote_types(q.dtype, torch.float32)
    if kv_len is not None:
        kv, kpe = without_rows_behind(kv_len, kv, kpe)
    q, qpe, kv, kpe = (t.to(dtype) for t in (q, qpe, kv, kpe))
    scores = (q @ kv.mT + qpe @ kpe.mT) * sm_scale  # [B, H, S]
    if attention_mask is not None:
        mask = attention_mask.expand(*scores.shape[:2], 1, scores.shape[2])[:, :, 0]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if kv_len is not None:
        behind = torch.arange(scores.shape[2], device=q.device) >= kv_len.view(-1, 1, 1)
        scores = scores.masked_fill(behind, float("-inf"))
    # Rows that see nothing are opened, so that softmax and its gradient stay finite, and are zero in the end.
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    out = scores.masked_fill(blind, 0.0).softmax(-1).to(dtype) @ kv
    return out.masked_fill(blind, 0.0).to(given), scores.logsumexp(-1).to(dtype)


def check_decoding(
    op: str,
    q: torch.Tensor,
    qpe: torch.Tensor,
    kv: torch.Tensor,
    kpe: torch.Tensor,
    kv_len_per_split: int | None,
    kv_len: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> None:
    """Raises ValueError or TypeError, naming ``op``, unless the arguments fit each other."""
    if not q.dim() == qpe.dim() == kv.dim() == kpe.dim() == 3:
        raise ValueError(
            f"{op}: q, qpe, kv and kpe must have three dimensions, "
            f"they have {q.dim()}, {qpe.dim()}, {kv.dim()} and {kpe.dim()}"
        )
    batch, heads, dim = q.shape
    rope_dim, keys = qpe.shape[2], kv.shape[1]
    if qpe.shape[:2] != (batch, heads) or kv.shape != (batch, keys, dim) or kpe.shape != (batch, keys, rope_dim):
        raise ValueError(
            f"{op}: expected q [B, H, D], qpe [B, H, Dr], kv [B, S, D] and kpe [B, S, Dr], "
            f"got {tuple(q.shape)}, {tuple(qpe.shape)}, {tuple(kv.shape)} and {tuple(kpe.shape)}"
        )
    if not q.dtype == qpe.dtype == kv.dtype == kpe.dtype:
        raise TypeError(
            f"{op}: q, qpe, kv and kpe must have one dtype, they have {q.dtype}, {qpe.dtype}, {kv.dtype}, {kpe.dtype}"
        )
    if kv_len_per_split is not None and kv_len_per_split < 1:
        raise ValueError(f"{op}: kv_len_per_split must be at least 1 (or None), it is {kv_len_per_split}")
    # Views cost time: lengths that are right need none.
    wrong_length = kv_len is not None and (kv_len.shape != (batch,) or kv_len.is_floating_point())
    if wrong_length or attention_mask is not None:
        check_arguments(op, q[:, :, None], kv[:, None], kv[:, None], None, None, None, attention_mask, kv_len)
