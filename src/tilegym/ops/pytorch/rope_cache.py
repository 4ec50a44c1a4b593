"""``rope_and_cache``: the rotation, and two writes at a position that the device knows."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.rope import apply_rope_base


def check_cache(q, k, v, cos, sin, keys, values, position, one_half=False, op: str = "rope_and_cache") -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if q.dim() != 4 or q.shape[2] != 1 or k.shape != v.shape or k.shape[2] != 1:
        raise ValueError(
            f"{op}: q must be [B, Hq, 1, D] and k, v [B, Hkv, 1, D]; they are {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)}"
        )
    batch, heads, _, dim = k.shape
    if keys.shape != values.shape or keys.shape[:2] != (batch, heads) or keys.shape[3] != dim:
        raise ValueError(
            f"{op}: keys and values must be [{batch}, {heads}, capacity, {dim}]; they are "
            f"{tuple(keys.shape)}, {tuple(values.shape)}"
        )
    if position.numel() != 1:
        raise ValueError(f"{op}: position must hold one number, it is {tuple(position.shape)}")
    parts = 2 if one_half else 1
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[1] != 1 or parts * cos.shape[2] > dim:
        most = dim // parts
        raise ValueError(
            f"{op}: cos and sin must be [1 or B, 1, R <= {most}]; they are {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    if cos.shape[2] * parts % 2:
        raise ValueError(f"{op}: cos and sin must be two halves, they are {tuple(cos.shape)}")
    if not q.dtype is k.dtype is v.dtype is keys.dtype is values.dtype:
        raise TypeError(f"{op}: q is {q.dtype}, k {k.dtype}, v {v.dtype}, the cache {keys.dtype}")


@register_impl("rope_and_cache", "pytorch")
def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    one_half: bool = False,
) -> torch.Tensor:
    check_cache(q, k, v, cos, sin, keys, values, position, one_half)
    if one_half:
        cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    q, k = apply_rope_base(q, k, cos, sin, None, 1, cos.shape[-1] / q.shape[-1])
    keys.index_copy_(2, position.view(1), k)
    values.index_copy_(2, position.view(1), v)
    return q
