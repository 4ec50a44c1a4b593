"""Rotary functions of any family on the one rotation that the op computes, by how they pair and order dimensions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilegym.ops import apply_rope_base

STYLES = ("half", "half_reversed", "interleaved", "interleaved_to_half")


def rope(
    parameters: tuple[str, ...],
    roles: tuple[tuple[str, str], ...],
    style: str = "half",
    angles: str = "full",
    heads_dim: int | None = 1,
    backend: str | None = None,
) -> Callable:
    """A function that rotates one or two tensors of heads.

    Args:
        parameters: the names of the function's parameters, in order.
        roles: (role, parameter): "q" and "k", or "x", and "cos" and "sin", or "freqs", complex numbers.
        style: "half": dimension i goes with i + R/2; "half_reversed": by the negative angle; "interleaved": 2i goes
            with 2i + 1; "interleaved_to_half": so too, and the results come in halves.
        angles: of R rotated dimensions cos and sin hold "full": R numbers, in two equal halves; "repeated": each of R/2
            twice in a row; "half": R/2.
        heads_dim: of the heads, where the function has no parameter ``unsqueeze_dim``; None: the angles have it.
    """
    named = dict(roles)
    rotated = tuple(named[role] for role in ("q", "k", "x") if role in named)

    def rotate(*args, **kwargs):
        given = dict(zip(parameters[: len(args)], args, strict=True)) | kwargs
        dim = given.get("unsqueeze_dim", heads_dim)
        if "freqs" in named:
            freqs = given[named["freqs"]]
            cos, sin = freqs.real, freqs.imag
        else:
            cos, sin = given[named["cos"]], given[named["sin"]]
        there = [given[name] for name in rotated if given.get(name) is not None]  # Qwen4-Exp rotates q alone, too
        unbatched = dim is not None and cos.ndim == 2 and there[0].ndim == 3
        if unbatched:
            dim = 1 if "unsqueeze_dim" in given and dim in (0, -3) else 2
            there, cos, sin = [x[None] for x in there], cos[None], sin[None]
        if cos.ndim == 4:
            dim = 1 if cos.shape[1] == 1 else 2
            cos, sin = cos.squeeze(dim), sin.squeeze(dim)
        if cos.ndim == 2:
            cos, sin, dim = cos[None], sin[None], dim or 1
        if angles == "repeated":
            cos, sin = cos[..., ::2], sin[..., ::2]
        if style == "half_reversed":
            sin = -sin
        whole = angles == "full" and "freqs" not in named
        pairs = cos.shape[-1] // 2 if whole else cos.shape[-1]
        tensors = [_split(x, 2 * pairs, style) for x in there]

        def turned(q: Tensor, *others: Tensor) -> list[Tensor]:
            k = others[0] if others else q.narrow(dim, 0, 1)
            results = apply_rope_base(q, k, cos, sin, None, dim, 2 * pairs / q.shape[-1], backend=backend)
            return [_join(y, 2 * pairs, style) for y in results[: 1 + len(others)]]

        if len({x.dtype for x in tensors}) == 1:
            results = turned(*tensors)
        else:  # under autocast, where one comes out of a product and one out of a norm
            results = [y for x in tensors for y in turned(x)]
        results = [y[0] for y in results] if unbatched else results
        return tuple(results) if len(tensors) == 2 else results[0]

    return rotate


def _split(x: Tensor, rotated: int, style: str) -> Tensor:
    """[x0, x1, x2, x3, ..., rest] as [x0, x2, ..., x1, x3, ..., rest]; as it is where halves go together already."""
    if not style.startswith("interleaved"):
        return x
    halves = x[..., :rotated].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves if rotated == x.shape[-1] else torch.cat((halves, x[..., rotated:]), -1)


def _join(x: Tensor, rotated: int, style: str) -> Tensor:
    """The inverse of :func:`_split`, where the function gives neighbours back."""
    if style != "interleaved":
        return x
    pairs = x[..., :rotated].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return pairs if rotated == x.shape[-1] else torch.cat((pairs, x[..., rotated:]), -1)


def rope_sample(module: Any, options: dict[str, Any], like: Tensor) -> tuple:
    """Arguments for the function, in the order of its parameters; the last ones are left to their defaults."""
    named = dict(options["roles"])
    dim, width, angle = options.get("heads_dim", 1), 8, torch.arange(12.0, device=like.device).view(1, 3, 4)
    heads = {"q": 2, "k": 1, "x": 2}
    complex_ = "freqs" in named
    if complex_:
        values = {named["freqs"]: torch.polar(torch.ones_like(angle), angle)}
    else:
        full = {"full": torch.cat((angle, angle), -1), "repeated": angle.repeat_interleave(2, -1), "half": angle}
        table = full[options.get("angles", "full")]
        values = {named["cos"]: table.cos().to(like.dtype), named["sin"]: table.sin().to(like.dtype)}
    if dim is None:
        values = {name: value.unsqueeze(1) for name, value in values.items()}
    for role, count in heads.items():
        if role in named:
            shape = (1, 3, count, width) if dim == 2 else (1, count, 3, width)
            size = torch.Size(shape).numel()
            values[named[role]] = torch.sin(torch.arange(1.0, size + 1, device=like.device)).view(shape).to(like.dtype)
    parameters = options["parameters"]
    if dim == 2 and "unsqueeze_dim" in parameters:  # by default it is another one
        values |= {"unsqueeze_dim": 2} | dict.fromkeys({"position_ids"} & set(parameters))
    used = [name for name in parameters if name in values]
    if tuple(used) != tuple(parameters[: len(used)]):
        raise ValueError("its parameters come in another order")
    return tuple(values[name] for name in used)
