"""What generators of attention draw: masks, lengths, heads and options."""

import math
from typing import Any

import torch

from fuzz.drawing import Draw


def mask_for(draw: Draw, b: int, h: int, sq: int, skv: int) -> torch.Tensor | None:
    """None, or a mask [B, H, Sq, Skv], with dimensions of 1 or left out: of bools, or added to the scores."""
    if draw.chance(0.6):
        return None
    shape = [n if draw.data.random() < 0.7 else 1 for n in (b, h, sq, skv)]
    shape = shape[draw.data.choice([0, 0, 1, 2]) :]
    if draw.chance(0.5):
        m = torch.rand(shape, generator=draw.generator) < draw.data.choice([0.9, 0.5, 0.1])
        return draw.laid_out(m)
    m = draw.numbers(shape)
    kind = draw.one(draw.dtype, torch.float32)
    hidden = torch.rand(shape, generator=draw.generator) < draw.data.choice([0.0, 0.3, 0.9])
    m = m.masked_fill(hidden, draw.data.choice([-math.inf, -math.inf, -1e4]))
    return draw.tensor(*shape, values=m, dtype=kind)


def lengths(draw: Draw, b: int, skv: int) -> torch.Tensor:
    """Of each sequence how many keys are valid."""
    return torch.randint(0, skv + 1, (b,), generator=draw.generator).to(torch.int32).to(draw.device)


def behind(draw: Draw, kv_len: torch.Tensor | None, *given: torch.Tensor) -> None:
    """Writes NaN to rows of ``given`` behind those that are valid, mostly."""
    if kv_len is None or draw.data.random() < 0.4:
        return
    for t in given:
        if 0 in t.stride() or not t.numel():
            continue
        where = torch.arange(t.shape[-2], device=t.device) >= kv_len.view(-1, 1).long()
        t.masked_fill_(where.view(-1, *(1,) * (t.dim() - 3), t.shape[-2], 1), math.nan)


def heads_dims(draw: Draw) -> tuple[int, int, int, int]:
    """Heads of keys, heads of queries, columns of keys, columns of values."""
    hk = draw.size(3, 0.0)
    group = draw.one(1, 1, 2, 4, 5, 8)
    d = draw.one(*[16, 32, 64, 128] * 2 + [1, 8, 24, 40, 72, 80, 96, 192, 256, 129])
    dv = d if draw.chance(0.75) else draw.one(1, 16, 40, 64, 128, 130)
    return hk, hk * group, d, dv


def options(draw: Draw) -> dict[str, Any]:
    """Options of all attention."""
    return {
        "window_size": draw.one(None, None, None, 1, 3, 17, 64, 1000),
        "soft_cap": draw.one(None, None, None, 2.0, 50.0),
    }


def starts(draw: Draw, n: int, total: int, slack: bool) -> torch.Tensor:
    """Where ``n`` packed sequences begin and the last one ends: at ``total``, or before it where ``slack``."""
    cuts = torch.randint(0, total + 1, (n + 1,), generator=draw.generator).sort().values
    cuts[0] = 0
    if not slack:
        cuts[-1] = total
    if n == 0:
        cuts[:] = 0
    return cuts
