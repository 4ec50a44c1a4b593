"""``fmha`` in plain PyTorch: ``scaled_dot_product_attention`` where it can express the call, else spelled out."""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import can_decide
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import has_address
from tilegym.ops.pytorch.checks import wants_gradient

# What an additive mask may add to all keys of a query before SDPA's fused kernels give wrong gradients, see _is_lost.
MOST_ADDED = 1000.0
_BACKENDS_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@register_impl("fmha", "pytorch")
def fmha(
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
) -> torch.Tensor:
    return attention(q, k, v, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    is_causal: bool,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
    dropout: float = 0.0,
    op: str = "fmha",
) -> torch.Tensor:
    """``fmha``, with dropout of the attention weights besides. Errors name ``op``."""
    check_arguments(op, q, k, v, window_size, soft_cap, sinks, attention_mask, kv_len)
    check_floating(op, q=q)
    scaling = q.shape[3] ** -0.5 if scaling is None else scaling
    queries, keys = q.shape[2], k.shape[2]
    if keys == 0:
        return _spelled_out(q, k, v, scaling, soft_cap, sinks, None, dropout)  # zeros, with gradients
    if kv_len is not None:
        k, v = without_rows_behind(kv_len, k, v)
    plain = window_size is None and kv_len is None and attention_mask is None
    # A single query at the last key sees every key; SDPA aligns its own causal mask top-left.
    # What torch.compile makes of a comparison of open sizes is no bool, which SDPA asks for; a branch settles it.
    causal_in_sdpa = True if is_causal and plain and queries == keys else False
    mask = None
    if not (plain and (causal_in_sdpa or not is_causal or queries == 1)):
        mask = _visible_keys(queries, keys, is_causal, window_size, kv_len, q.device)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            mask = mask & attention_mask
        elif attention_mask is not None:
            mask = attention_mask.masked_fill(~mask, float("-inf"))
    # Given an additive mask of another dtype than q's, some of SDPA's kernels on GPUs return NaN.
    other_dtype = mask is not None and mask.dtype not in (torch.bool, q.dtype)
    # So do they where everything is dropped.
    spelled_out = soft_cap is not None or sinks is not None or other_dtype or dropout == 1.0
    if spelled_out or mask is not None and wants_gradient(q, k, v, attention_mask) and _is_lost(mask):
        if causal_in_sdpa:
            mask = _visible_keys(queries, keys, True, None, None, q.device)
        return _spelled_out(q, k, v, scaling, soft_cap, sinks, mask, dropout)
    if q.is_cuda and has_address(q):
        q = q.contiguous() if 0 in q.stride() else q  # cuDNN lays out its result like q
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and q.dtype == torch.float32:
        # Of SDPA's kernels for fp32 only the one that writes all scores down takes grouped heads.
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    if mask is None:
        grouped = True if groups > 1 else False
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal_in_sdpa, scale=scaling, enable_gqa=grouped
        )
    if groups > 1:
        # With a mask, grouped heads would send SDPA to its slowest path.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask, blind = _see_something(mask)
    # cuDNN's gradients are wrong for some masks (torch 2.11, bf16, padded rows), with no word of it.
    with sdpa_kernel(_BACKENDS_WITH_MASK) if q.is_cuda else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.masked_fill(blind, 0.0)


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """``t``, or a copy of a view that does not begin, or whose rows do not, at multiples of 16 bytes: as much SDPA's
    kernels read at a time, and of such views raise, or break the process's CUDA context (torch 2.11, fp32 and a mask).
    """
    line = 16 // t.element_size()
    batch, head, row, last = t.stride()
    aligned = last == 1 and (batch | head | row) % line == 0 and t.data_ptr() % 16 == 0
    if aligned or t.shape[3] % line:  # what is padded is copied
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _visible_keys(
    queries: int, keys: int, is_causal: bool, window_size: int | None, kv_len: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Which keys a query sees: boolean [B or 1, 1, Sq, Skv]."""
    column = torch.arange(keys, device=device)
    length = keys if kv_len is None else kv_len.view(-1, 1, 1, 1).clamp(0, keys)
    position = length - queries + torch.arange(queries, device=device)[:, None]  # [B or 1, 1, Sq, 1]
    visible = (column < length).expand(*length.shape[:2], queries, keys) if kv_len is not None else column >= 0
    if is_causal:
        visible = visible & (column <= position)
    if window_size is not None:
        visible = visible & (position - column < window_size)
    return visible.expand(queries, keys)[None, None] if visible.dim() < 4 else visible


def without_rows_behind(length: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensors`` [B, ..., S, D] with zeros behind the first ``length`` [B] of S.

    What a cache holds there may be NaN, of which a weight of zero makes NaN, too.
    """
    rows = tensors[0].shape[-2]
    behind = torch.arange(rows, device=length.device) >= length[:, None]
    behind = behind.view(behind.shape[0], *(1,) * (tensors[0].dim() - 3), rows, 1)
    return tuple(t.masked_fill(behind, 0.0) for t in tensors)


def _is_lost(mask: torch.Tensor) -> bool:
    """Whether SDPA's fused kernels would give wrong gradients for this mask, or may, where it cannot be looked at.

    Of each query they keep the logarithm of the sum of exponentials. Where a finite number masks every key, as
    transformers' masks do for padding, the sum of them is lost beside it.
    """
    if mask.dtype == torch.bool:
        return False
    if not can_decide(mask):
        return True
    most = mask.detach().amax(-1)
    return bool(((most.abs() > MOST_ADDED) & most.isfinite()).any())


def _see_something(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask with those rows opened that see no key (softmax and gradient stay finite), and which rows they are."""
    if mask.dtype == torch.bool:
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    blind = (mask == float("-inf")).all(-1, keepdim=True)
    return mask.masked_fill(blind, 0.0), blind


def _spelled_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """The formula with nothing fused: scores and softmax in fp32 (fp64 for fp64)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).transpose(2, 3) * scaling  # [B, Hq, Sq, Skv]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    blind = None
    if mask is not None:
        mask, blind = _see_something(mask)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    p = F.dropout(torch.softmax(scores, dim=-1)[..., : v.shape[2]], dropout)
    out = (p.to(dtype) @ v.to(dtype)).to(q.dtype)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _broadcasts(shape: torch.Size, full: tuple[int, ...]) -> bool:
    missing = len(full) - len(shape)
    if missing < 0:
        return False
    for i, size in enumerate(shape, missing):
        if size != 1 and size != full[i]:
            return False
    return True


def check_arguments(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> None:
    """Raises ValueError or TypeError, naming ``op``, unless the arguments fit each other."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{op}: q, k and v must have four dimensions, they have {q.dim()}, {k.dim()} and {v.dim()}")
    batch, heads, queries, head_dim = q.shape
    kv_batch, kv_heads, keys, k_dim = k.shape
    v_batch, v_heads, v_keys, _ = v.shape
    if k_dim != head_dim or not batch == kv_batch == v_batch or v_heads != kv_heads or v_keys != keys:
        raise ValueError(
            f"{op}: expected q [B, Hq, Sq, D], k [B, Hkv, Skv, D] and v [B, Hkv, Skv, Dv], "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if head_dim == 0:
        raise ValueError(f"{op}: q {tuple(q.shape)} and k have a head dimension of 0")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{op}: q's {heads} heads are not a multiple of k's {kv_heads}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"{op}: q, k and v must have one dtype, they have {q.dtype}, {k.dtype} and {v.dtype}")
    if isinstance(window_size, (tuple, list)):
        raise TypeError(f"{op}: window_size is one number of keys, the query's own included, not {window_size}")
    if window_size is not None and window_size < 1:
        raise ValueError(f"{op}: window_size must be at least 1 (or None), it is {window_size}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{op}: soft_cap must be positive (or None), it is {soft_cap}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"{op}: sinks must be [{heads}], one for each head of q, it is {tuple(sinks.shape)}")
    if kv_len is not None:
        if not isinstance(kv_len, torch.Tensor):
            raise TypeError(f"{op}: kv_len must be a tensor [{batch}], one for each batch entry, it is {kv_len}")
        if kv_len.shape != (batch,):
            raise ValueError(f"{op}: kv_len must be [{batch}], one for each batch entry, it is {tuple(kv_len.shape)}")
        if kv_len.is_floating_point():
            raise TypeError(f"{op}: kv_len must be of integers, it is {kv_len.dtype}")
    if attention_mask is not None:
        if not (attention_mask.dtype == torch.bool or attention_mask.is_floating_point()):
            raise TypeError(f"{op}: attention_mask must be boolean or floating point, it is {attention_mask.dtype}")
        full = (batch, heads, queries, keys)
        shape = attention_mask.shape
        if not _broadcasts(shape, full):
            raise ValueError(f"{op}: attention_mask {tuple(shape)} cannot be broadcast to [B, Hq, Sq, Skv] {full}")
