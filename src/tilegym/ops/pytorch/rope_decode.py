"""``rope_fmha_decode`` in plain PyTorch: ``rope_and_cache``, and ``fmha_decode`` over what the cache then holds."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.flash_decode import fmha_decode
from tilegym.ops.pytorch.rope_cache import check_cache
from tilegym.ops.pytorch.rope_cache import check_head_norms
from tilegym.ops.pytorch.rope_cache import rope_and_cache


def check_rope_decode(
    q, k, v, cos, sin, keys, values, position, kv_len, q_norm, k_norm, casting, one_half, pairs, window_size, sinks
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    check_cache(q, k, v, cos, sin, keys, values, position, one_half, pairs, "rope_fmha_decode")
    if v.shape != k.shape:
        raise ValueError(f"rope_fmha_decode: k and v must be alike, they are {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % max(k.shape[1], 1) or keys.shape[2] == 0:
        raise ValueError(
            f"rope_fmha_decode: the heads of q {tuple(q.shape)} must be a multiple of those of k {tuple(k.shape)}, "
            f"batch and head dimension the same, and the cache {tuple(keys.shape)} must have room"
        )
    if kv_len is not None and (kv_len.shape != q.shape[:1] or kv_len.dtype != torch.int32):
        raise ValueError(
            f"rope_fmha_decode: kv_len must be [{q.shape[0]}] int32, it is {tuple(kv_len.shape)} {kv_len.dtype}"
        )
    if window_size is not None and window_size < 1:
        raise ValueError(f"rope_fmha_decode: window_size must be at least 1 (or None), it is {window_size}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(
            f"rope_fmha_decode: sinks must be [{q.shape[1]}], one for each head of q, it is {tuple(sinks.shape)}"
        )
    check_head_norms("rope_fmha_decode", q, k, q_norm, k_norm, casting)


@register_impl("rope_fmha_decode", "pytorch")
def rope_fmha_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    sm_scale: float | None = None,
    settled: bool = False,
    kv_len: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
    one_half: bool = False,
    pairs: str = "",
    window_size: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    rotation = one_half, pairs
    check_rope_decode(
        q, k, v, cos, sin, keys, values, position, kv_len, q_norm, k_norm, casting, *rotation, window_size, sinks
    )
    norms = q_norm, k_norm, eps, offset, casting
    q = rope_and_cache(q, k, v, cos, sin, keys, values, position, *rotation, *norms)
    if kv_len is None:
        kv_len = (position.view(1) + 1).to(torch.int32).expand(q.shape[0]).contiguous()
    return fmha_decode(q, keys, values, sm_scale, None, kv_len, window_size, None, sinks)
