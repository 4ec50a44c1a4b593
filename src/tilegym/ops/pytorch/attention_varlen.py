"""``fmha_varlen`` in plain PyTorch: one attention after the other, or one with a mask that keeps sequences apart."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.attention import attention
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.attention import without_rows_behind
from tilegym.ops.pytorch.checks import can_decide


@register_impl("fmha_varlen", "pytorch")
def fmha_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scaling: float | None = None,
    is_causal: bool = True,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size, soft_cap, sinks)
    total, keys = q.shape[0], k.shape[0]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if can_decide(cu_seqlens_q) and can_decide(cu_seqlens_k):
        options = (scaling, is_causal, window_size, soft_cap, sinks, None, None)
        of_q, of_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()  # each of which waits for the device
        *sequences, behind = zip(split(q, of_q), split(k, of_k), split(v, of_k), strict=True)
        out = [attention(*each, *options) for each in sequences if each[0].shape[2] > 0]
        # The queries behind all sequences see no key.
        out.append(attention(behind[0], *(x[:, :, :0] for x in behind[1:]), *options))
        return torch.cat(out, 2)[0].transpose(0, 1)
    # NaN in the keys of one sequence then makes NaN of all others.
    mask = visible_keys(cu_seqlens_q, cu_seqlens_k, total, keys, is_causal, window_size)
    (q,) = without_rows_behind(cu_seqlens_q[-1:], q)
    return attention(q, k, v, scaling, False, None, soft_cap, sinks, mask, cu_seqlens_k[-1:])[0].transpose(0, 1)


def split(x: torch.Tensor, starts: list[int]) -> tuple[torch.Tensor, ...]:
    """x [1, H, T, D] by sequence, and what lies behind all of them."""
    return x.split([b - a for a, b in zip(starts, [*starts[1:], x.shape[2]], strict=True)], 2)


def visible_keys(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    queries: int,
    keys: int,
    is_causal: bool,
    window_size: int | None,
) -> torch.Tensor:
    """Which keys a query sees: boolean [Tq, Tk]. Nothing is read on the host."""
    starts_q, starts_k = cu_seqlens_q.long(), cu_seqlens_k.long()
    last = starts_q.shape[0] - 1
    row, column = torch.arange(queries, device=starts_q.device), torch.arange(keys, device=starts_k.device)
    # The last start that is not behind a token is that of its sequence; ``last`` are those behind all sequences.
    of_row = torch.searchsorted(starts_q, row, right=True) - 1
    of_column = torch.searchsorted(starts_k, column, right=True) - 1
    end = (of_row + 1).clamp(max=last)
    position = (starts_k[end] - starts_q[end] + row)[:, None]  # of a query among all keys
    visible = (of_row[:, None] == of_column) & (of_row < last)[:, None]
    if is_causal:
        visible = visible & (column <= position)
    if window_size is not None:
        visible = visible & (position - column < window_size)
    return visible


def check_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raises ValueError or TypeError unless the arguments fit each other."""
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ValueError(
            f"fmha_varlen: q, k and v must have three dimensions, they have {q.dim()}, {k.dim()} and {v.dim()}"
        )
    check_arguments(
        "fmha_varlen", *(x.transpose(0, 1)[None] for x in (q, k, v)), window_size, soft_cap, sinks, None, None
    )
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.shape[0] < 1:
        raise ValueError(
            "fmha_varlen: cu_seqlens_q and cu_seqlens_k must both be [N + 1], "
            f"they are {tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"fmha_varlen: {name} must be int32 or int64, it is {starts.dtype}")
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if most is not None and most < 0:
            raise ValueError(f"fmha_varlen: {name} must not be negative, it is {most}")
