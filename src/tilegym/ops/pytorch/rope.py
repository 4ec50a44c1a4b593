"""Rotary position embedding in PyTorch, cast by cast as the Hugging Face models compute it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating


def rotary_dim(q: torch.Tensor, partial_rotary_factor: float) -> int:
    """How many of a head's dimensions are rotated: as many as in transformers, and R for a factor of R / D."""
    # As a number that torch.compile leaves open the factor would make another of the dimensions that it is told.
    return q.shape[-1] if partial_rotary_factor == 1.0 else int(q.shape[-1] * partial_rotary_factor + 1e-6)


def check_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    unsqueeze_dim: int,
    rotary: int,
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"apply_rope_base: unsqueeze_dim is {unsqueeze_dim}, it must be 1 or 2")
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"apply_rope_base: q and k have {q.dim()} and {k.dim()} dimensions, they must have 4")
    # Each shape is read once: this runs before every launch, and to read one takes longer than to compare it.
    heads, of_q, of_k = unsqueeze_dim, q.shape, k.shape
    batch, tokens, dim = of_q[0], of_q[3 - heads], of_q[3]
    if of_k[0] != batch or of_k[3 - heads] != tokens or of_k[3] != dim:
        raise ValueError(f"apply_rope_base: q {tuple(of_q)} and k {tuple(of_k)} may differ in dimension {heads} only")
    if q.dtype != k.dtype:
        raise TypeError(f"apply_rope_base: q is {q.dtype}, k is {k.dtype}; they must be the same")
    if rotary % 2 or not 0 < rotary <= dim:
        raise ValueError(f"apply_rope_base: {rotary} of {dim} dimensions cannot be rotated in pairs")
    table, of_sin = cos.shape, sin.shape
    # One by one: torch.compile finds no number in a tuple that is equal to it only by value.
    if table != of_sin or (table[-1] != rotary and table[-1] != rotary // 2):
        raise ValueError(
            f"apply_rope_base: cos {tuple(table)} and sin {tuple(of_sin)} must have one shape and "
            f"{rotary} or {rotary // 2} columns"
        )
    name, shape, dims = "cos", table, 3
    if position_ids is not None and len(table) == 2:
        name, shape, dims = "position_ids", position_ids.shape, 2
    if len(shape) != dims or shape[0] not in (1, batch) or shape[1] != tokens:
        raise ValueError(f"apply_rope_base: {name} has shape {tuple(shape)} for {batch} rows of {tokens} tokens")


def tables_of_tokens(
    cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin per token, [B or 1, S, width], looked up by position if they are [positions, width].

    Raises TypeError for position_ids by which nothing can be looked up.
    """
    if position_ids is not None and cos.dim() == 2:
        if position_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"apply_rope_base: position_ids are {position_ids.dtype}, they must be int32 or int64")
        return cos[position_ids], sin[position_ids]
    return cos, sin


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary = cos.shape[-1]
    x, rest = x[..., :rotary], x[..., rotary:]
    first, second = x.chunk(2, dim=-1)
    y = (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y


@register_impl("apply_rope_base", "pytorch")
def apply_rope_base(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    partial_rotary_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    rotary = rotary_dim(q, partial_rotary_factor)
    check_rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary)
    check_floating("apply_rope_base", q=q)
    cos, sin = tables_of_tokens(cos, sin, position_ids)
    if cos.shape[-1] < rotary:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)
