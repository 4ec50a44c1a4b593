"""``rope_and_cache``: norms, the rotation, and two writes at a position that the device knows."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import CASTINGS
from tilegym.ops.pytorch.checks import check_option
from tilegym.ops.pytorch.rms_norm import rms_norm
from tilegym.ops.pytorch.rope import apply_rope_base

PAIRS = ("", "kept", "to halves")


def check_cache(
    q, k, v, cos, sin, keys, values, position, one_half=False, pairs: str = "", op: str = "rope_and_cache"
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if {q.dim(), k.dim(), v.dim()} != {4} or q.shape[2] != 1 or k.shape[2] != 1 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{op}: q must be [B, Hq, 1, D], k [B, Hkv, 1, D] and v [B, Hkv, 1, Dv]; they are {tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)}"
        )
    batch, heads, _, dim = k.shape
    if q.shape[0] != batch or q.shape[3] != dim:
        raise ValueError(f"{op}: q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head dimension")
    widths = [dim, v.shape[3]]
    for cache, width in zip((keys, values), widths, strict=True):
        if cache.dim() != 4 or cache.shape != (batch, heads, keys.shape[2], width):
            raise ValueError(
                f"{op}: keys and values must be [{batch}, {heads}, capacity, D] with D {widths[0]} and {widths[1]}; "
                f"they are {tuple(keys.shape)}, {tuple(values.shape)}"
            )
    if position.numel() != 1:
        raise ValueError(f"{op}: position must hold one number, it is {tuple(position.shape)}")
    if position.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: position must be int32 or int64, it is {position.dtype}")
    parts = 2 if one_half else 1
    fit = cos.dim() == 3 and cos.shape == sin.shape and cos.shape[0] in (1, batch) and cos.shape[1] == 1
    if not fit or parts * cos.shape[2] > dim:
        most = dim // parts
        raise ValueError(
            f"{op}: cos and sin must be [1 or {batch}, 1, R <= {most}]; they are {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    if cos.shape[2] * parts % 2:
        raise ValueError(f"{op}: cos and sin must be two halves, they are {tuple(cos.shape)}")
    if pairs not in PAIRS:
        raise ValueError(f"{op}: pairs must be one of {', '.join(map(repr, PAIRS))}, it is {pairs!r}")
    if not q.dtype is k.dtype is v.dtype is keys.dtype is values.dtype:
        raise TypeError(f"{op}: q is {q.dtype}, k {k.dtype}, v {v.dtype}, the cache {keys.dtype}")


def check_head_norms(op: str, q, k, q_norm, k_norm, casting: str = "llama") -> None:
    """Raises ValueError or TypeError unless there is no norm, or one for the heads of q and one for those of k."""
    if casting not in CASTINGS:
        check_option(op, "casting", casting, CASTINGS)
    if q_norm is None and k_norm is None:
        return
    for name, norm, x in (("q_norm", q_norm, q), ("k_norm", k_norm, k)):
        if norm is None or norm.shape != x.shape[3:]:
            found = "None" if norm is None else tuple(norm.shape)
            raise ValueError(f"{op}: {name} must be [{x.shape[3]}] like the other norm, it is {found}")
        if norm.dtype != x.dtype:
            raise TypeError(f"{op}: {name} is {norm.dtype}, {name[0]} is {x.dtype}")


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
    pairs: str = "",
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    check_cache(q, k, v, cos, sin, keys, values, position, one_half, pairs)
    check_head_norms("rope_and_cache", q, k, q_norm, k_norm, casting)
    if q_norm is not None:
        q, k = (rms_norm(x, w.shape, w, eps, None, None, offset, casting) for x, w in ((q, q_norm), (k, k_norm)))
    if one_half:
        cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
    width = cos.shape[-1]
    if pairs:
        q, k = (_halves(t, width) for t in (q, k))
    q, k = apply_rope_base(q, k, cos, sin, None, 1, width / q.shape[-1])
    if pairs == "kept":
        q, k = (_pairs(t, width) for t in (q, k))
    at = position.view(1).long()
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    return q


def _halves(x: torch.Tensor, width: int) -> torch.Tensor:
    """The even elements of the first ``width`` before the odd ones."""
    return torch.cat((x[..., :width:2], x[..., 1:width:2], x[..., width:]), dim=-1)


def _pairs(x: torch.Tensor, width: int) -> torch.Tensor:
    """What ``_halves`` has brought apart, together again."""
    return torch.cat((x[..., :width].unflatten(-1, (2, -1)).mT.flatten(-2), x[..., width:]), dim=-1)
