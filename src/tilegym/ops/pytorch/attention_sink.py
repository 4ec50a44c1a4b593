"""``attention_sink`` and ``attention_sink_decode`` in plain PyTorch, and what their backends share."""

import math
from collections.abc import Callable

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.attention import fmha
from tilegym.ops.pytorch.flash_decode import check_query
from tilegym.ops.pytorch.flash_decode import fmha_decode


@register_impl("attention_sink", "pytorch")
def attention_sink(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    start_q: int | torch.Tensor | None = None,
) -> torch.Tensor:
    return with_sinks("attention_sink", fmha, query, key, value, sinks, sm_scale, sliding_window, start_q)


@register_impl("attention_sink_decode", "pytorch")
def attention_sink_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    start_q: int | torch.Tensor | None = None,
    kv_len_per_split: int | None = None,
) -> torch.Tensor:
    options = (sinks, sm_scale, sliding_window, start_q, kv_len_per_split)
    return with_sinks_decode("attention_sink_decode", fmha, fmha_decode, query, key, value, *options)


def with_sinks(
    op: str,
    fmha: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    sm_scale: float | None,
    sliding_window: int | None,
    start_q: int | torch.Tensor | None,
) -> torch.Tensor:
    """``attention_sink`` by an implementation of fmha."""
    check_layout(op, query, key, value, sinks, sliding_window)
    if query.dim() == 5:
        query = query.flatten(2, 3)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    k, v, kv_len = up_to_last_query(op, q, k, v, start_q)
    check_arguments(op, q, k, v, sliding_window, None, sinks, None, kv_len)
    out = fmha(q, k, v, sm_scale, True, sliding_window, None, sinks, None, kv_len)
    return out.transpose(1, 2).flatten(2)


def with_sinks_decode(
    op: str,
    fmha: Callable,
    fmha_decode: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    sm_scale: float | None,
    sliding_window: int | None,
    start_q: int | torch.Tensor | None,
    kv_len_per_split: int | None,
) -> torch.Tensor:
    """``attention_sink_decode`` by implementations of fmha and fmha_decode."""
    if query.dim() < 4 or query.shape[1] != 1:
        return with_sinks(op, fmha, query, key, value, sinks, sm_scale, sliding_window, start_q)
    check_layout(op, query, key, value, sinks, sliding_window)
    # A single token's heads are laid out as its queries are: fewer views than for many.
    batch, _, *heads, head_dim = query.shape
    q = query.reshape(batch, math.prod(heads), 1, head_dim)
    k, v, kv_len = up_to_last_query(op, q, key.transpose(1, 2), value.transpose(1, 2), start_q)
    check_arguments(op, q, k, v, sliding_window, None, sinks, None, kv_len)
    check_query(q, kv_len_per_split, op)
    out = fmha_decode(q, k, v, sm_scale, kv_len_per_split, kv_len, sliding_window, None, sinks)
    return out.view(batch, 1, out.shape[1] * out.shape[3])


def check_layout(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    sliding_window: int | None,
) -> None:
    """Raises ValueError or TypeError unless the arguments are laid out as attention_sink's are."""
    grouped = query.dim() == 5
    if query.dim() not in (4, 5) or not key.dim() == value.dim() == 4 or (grouped and query.shape[2] != key.shape[2]):
        raise ValueError(
            f"{op}: expected query [B, Sq, Hkv, G, D] or [B, Sq, Hq, D] and key and value [B, Skv, Hkv, D], "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if sinks is None:
        raise TypeError(f"{op}: sinks must be a tensor, it is None")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{op}: sliding_window must be at least 1 (or None), it is {sliding_window}")


def up_to_last_query(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start_q: int | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """k and v, [B, Hkv, Skv, D], and kv_len, such that the first of the queries stands at ``start_q``."""
    if start_q is None:
        return k, v, None
    queries, keys = q.shape[2], k.shape[2]
    if isinstance(start_q, torch.Tensor):
        if start_q.is_floating_point() or start_q.numel() not in (1, q.shape[0]):
            raise ValueError(
                f"{op}: start_q must be a number or integers [1] or [{q.shape[0]}], "
                f"it is {start_q.dtype} {tuple(start_q.shape)}"
            )
        if start_q.device == q.device:
            return k, v, (start_q + queries).to(torch.int32).reshape(-1).expand(q.shape[0]).contiguous()
        if start_q.numel() > 1 or start_q.device.type != "cpu":
            raise ValueError(f"{op}: start_q must be on query's device, {q.device}, it is on {start_q.device}")
        start_q = int(start_q)
    last = start_q + queries
    if start_q < 0 or last > keys:
        raise ValueError(f"{op}: start_q is {start_q}, but {queries} queries from there do not stand at {keys} keys")
    return (k, v, None) if last == keys else (k[:, :, :last], v[:, :, :last], None)
