"""Calls of rotary embeddings, alone and with the cache that a decoding step writes to."""

import math

import torch

from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates
from fuzz.generators_common import norm_options


def tables(draw: Draw, shape: tuple[int, ...], r: int, halves: bool) -> list[torch.Tensor]:
    """cos and sin [*shape, R]: of all columns, whose halves are alike, or of one half."""
    angles = torch.rand((*shape, r // 2), generator=draw.generator) * 6.3
    if halves:
        angles = torch.cat((angles, angles), -1)
    kind = draw.one(draw.dtype, torch.float32)
    return [draw.tensor(*angles.shape, values=f(angles), dtype=kind, expand=False) for f in (torch.cos, torch.sin)]


@generates
def apply_rope_base(draw: Draw) -> Case:
    b, s, hq, hk = draw.size(3), draw.size(140 if draw.gpu else 40), draw.size(9), draw.size(4)
    d = draw.one(2, 8, 16, 24, 64, 80, 128, 256)
    r = d if draw.chance(0.5) else 2 * draw.choices.randint(1, d // 2)
    unsqueeze = draw.one(1, 2)
    kind = draw.one("b", "1", "table", "table1")
    halves = draw.chance(0.6)
    positions = None
    if kind in ("b", "1"):
        cos, sin = tables(draw, (b if kind == "b" else 1, s), r, halves)
        if draw.chance(0.2):
            positions = draw.integers(0, 50, b, s)
    else:
        most = draw.size(200, 0.0)
        cos, sin = tables(draw, (most,), r, halves)
        positions = draw.integers(0, most, b if kind == "table" else 1, s, dtype=draw.one(torch.int64, torch.int32))

    def shape(heads: int) -> tuple[int, ...]:
        return (b, heads, s, d) if unsqueeze == 1 else (b, s, heads, d)

    if draw.chance(0.3) and unsqueeze == 1:
        packed = draw.tensor(b, s, (hq + hk) * d, expand=False)
        q = packed[..., : hq * d].unflatten(-1, (hq, d)).transpose(1, 2)
        k = packed[..., hq * d :].unflatten(-1, (hk, d)).transpose(1, 2) if hk else packed.new_empty(b, hk, s, d)
    else:
        q, k = draw.tensor(*shape(hq), nan=True), draw.tensor(*shape(hk))
    args = {
        "q": q,
        "k": k,
        "cos": cos,
        "sin": sin,
        "position_ids": positions,
        "unsqueeze_dim": unsqueeze,
        "partial_rotary_factor": r / d,
    }
    return Case(args, ("q", "k"))


def cache_case(draw: Draw, decode: bool) -> Case:
    """A case of a step that rotates q and k and writes k and v to a cache, which holds NaN from there on."""
    b, hk, cap = draw.size(3), draw.size(3, 0.0 if decode else 0.02), draw.size(600 if draw.gpu else 200, 0.0)
    hq = hk * draw.one(1, 2, 4, 7)
    d = draw.one(16, 24, 32, 64, 80, 128)
    dv = d if decode or draw.chance(0.7) else draw.one(8, 16, 40)
    r = d if draw.chance(0.5) else 2 * draw.choices.randint(1, d // 2)
    one_half = draw.chance(0.3)
    cos, sin = tables(draw, (draw.one(1, b), 1), r, not one_half)
    at = draw.data.choice([0, cap - 1, draw.data.randrange(cap)])
    if decode:
        draw.limit(4.0)
    keys, values = draw.numbers((b, hk, cap, d), draw.magnitude), draw.numbers((b, hk, cap, dv), draw.magnitude)
    keys[:, :, at:], values[:, :, at:] = math.nan, math.nan
    args = {
        "q": draw.tensor(b, hq, 1, d),
        "k": draw.tensor(b, hk, 1, d),
        "v": draw.tensor(b, hk, 1, dv),
        "cos": cos,
        "sin": sin,
        "keys": draw.tensor(*keys.shape, values=keys, expand=False),
        "values": draw.tensor(*values.shape, values=values, expand=False),
        "position": torch.tensor([at], dtype=draw.one(torch.int32, torch.int64), device=draw.device),
        "one_half": one_half,
        "pairs": draw.one("", "kept", "to halves"),
        "eps": draw.one(1e-6, 1e-5),
        **norm_options(draw),
    }
    if draw.chance(0.5):
        args |= {"q_norm": draw.weight(d), "k_norm": draw.weight(d)}
    if decode:
        args |= {
            "sm_scale": draw.one(None, 0.3, 1.0),
            "settled": draw.chance(0.3),
            "window_size": draw.one(None, None, 1, 5, 128, 1000),
            "sinks": draw.weight(hq, dtype=draw.other_dtype()) if draw.chance(0.3) else None,
            "kv_len": torch.full((b,), at + 1, dtype=torch.int32, device=draw.device) if draw.chance(0.5) else None,
        }
    return Case(args, (), ("keys", "values"))


@generates
def rope_and_cache(draw: Draw) -> Case:
    return cache_case(draw, False)


@generates
def rope_fmha_decode(draw: Draw) -> Case:
    return cache_case(draw, True)
