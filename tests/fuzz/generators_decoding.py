"""Calls of attention with one query."""

import math
from typing import Any

import torch

from fuzz.attention_parts import behind
from fuzz.attention_parts import heads_dims
from fuzz.attention_parts import lengths
from fuzz.attention_parts import mask_for
from fuzz.attention_parts import options
from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates
from fuzz.generators_attention import gemma_attention


def decode_args(draw: Draw, scale: str, sinks: bool = True) -> dict[str, Any]:
    """Arguments of attention with one query and caches; ``scale`` is what the scale is called."""
    draw.limit(3.0)
    b, (hk, hq, d, dv) = draw.size(3), heads_dims(draw)
    skv = draw.size(3000 if draw.gpu else 400)
    q, k, v = draw.tensor(b, hq, 1, d), draw.tensor(b, hk, skv, d), draw.tensor(b, hk, skv, dv)
    kv_len = lengths(draw, b, skv) if draw.chance(0.4) else None
    behind(draw, kv_len, k, v)
    args = {
        "q": q,
        "k": k,
        "v": v,
        scale: draw.one(None, None, 0.1, 1.0),
        "kv_len_per_split": draw.one(None, None, 1, 16, 100, 128),
        "kv_len": kv_len,
        "attention_mask": mask_for(draw, b, hq, 1, skv),
        **options(draw),
    }
    if sinks:
        args["sinks"] = draw.weight(hq, dtype=draw.other_dtype()) if draw.chance(0.25) else None
    return args


@generates
def fmha_decode(draw: Draw) -> Case:
    return Case(decode_args(draw, "sm_scale"), ("q", "k", "v") if draw.chance(0.05) else ())


@generates
def gemma_attention_decode(draw: Draw) -> Case:
    if draw.chance(0.15):
        case = gemma_attention(draw)
        case.args.pop("is_causal")
        case.args["kv_len_per_split"] = draw.one(None, 16)
        return case
    args = decode_args(draw, "scaling", False)
    if draw.chance(0.1):
        args["window_size"] = 0
    return Case(args)


def mla_decoding_args(draw: Draw) -> dict[str, Any]:
    """Arguments that both forms of mla_decoding share."""
    draw.limit(3.0)
    b, h, s = draw.size(3), draw.one(1, 3, 16, 20, 40, 128 if draw.gpu else 17), draw.size(2000 if draw.gpu else 300)
    d, dr = draw.one(16, 40, 64, 128, 512, 100), draw.one(8, 16, 24, 64)
    kv, kpe = draw.tensor(b, s, d), draw.tensor(b, s, dr)
    kv_len = lengths(draw, b, s) if draw.chance(0.4) else None
    behind(draw, kv_len, kv, kpe)
    return {
        "q": draw.tensor(b, h, d),
        "qpe": draw.tensor(b, h, dr),
        "kv": kv,
        "kpe": kpe,
        "sm_scale": draw.one(0.07, 0.2),
        "kv_len": kv_len,
        "attention_mask": mask_for(draw, b, h, 1, s),
    }


@generates
def mla_decoding(draw: Draw) -> Case:
    args = mla_decoding_args(draw) | {"transpose": draw.one(None, True, False)}
    return Case(args, floor={"output 1": 5e-5})


@generates
def mla_decoding_split_kv(draw: Draw) -> Case:
    return Case(mla_decoding_args(draw) | {"kv_len_per_split": draw.one(None, None, 16, 100, 128)})


@generates
def fmha_paged_decode(draw: Draw) -> Case:
    draw.limit(3.0)
    hk, hq, d, dv = heads_dims(draw)
    n, size, m = draw.size(5), draw.one(1, 3, 16, 17, 64, 256), draw.size(6, 0.0)
    pages = n * m + 2
    lens = [
        draw.data.choice([0, 1, size * m, draw.data.randint(0, size * m), draw.data.randint(0, size * m)])
        for _ in range(n)
    ]
    order = list(range(pages))
    draw.data.shuffle(order)
    table = torch.full((n, m), 0)
    k_pages, v_pages = (torch.full((pages, size, hk, w), math.nan) for w in (d, dv))
    at = 0
    for i, length in enumerate(lens):
        for j in range(m):
            if j * size >= length:
                table[i, j] = draw.data.choice([0, -1, 2**30])
                continue
            table[i, j] = page = order[at]
            at += 1
            have = max(0, min(size, length - 1 - j * size))
            k_pages[page, :have], v_pages[page, :have] = draw.numbers((have, hk, d)), draw.numbers((have, hk, dv))
    kind = draw.one(torch.int32, torch.int64)
    if draw.chance(0.3) and d == dv:
        both = torch.stack((k_pages, v_pages), 1).to(draw.dtype).to(draw.device)
        k_given, v_given = both[:, 0], both[:, 1]
    else:
        k_given = draw.tensor(*k_pages.shape, values=k_pages, expand=False)
        v_given = draw.tensor(*v_pages.shape, values=v_pages, expand=False)
    args = {
        "q": draw.tensor(n, hq, d),
        "k": draw.tensor(n, hk, d),
        "v": draw.tensor(n, hk, dv),
        "k_pages": k_given,
        "v_pages": v_given,
        "block_table": draw.laid_out(table.to(kind), expand=False),
        "cu_seqlens_k": torch.tensor([0, *lens]).cumsum(0).to(draw.one(torch.int32, torch.int64)).to(draw.device),
        "scaling": draw.one(None, None, 0.1),
        **options(draw),
        "sinks": draw.weight(hq, dtype=draw.other_dtype()) if draw.chance(0.25) else None,
    }
    return Case(args, (), ("k_pages", "v_pages"))
