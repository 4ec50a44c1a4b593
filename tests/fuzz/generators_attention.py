"""Calls of attention with several queries."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fuzz.attention_parts import behind
from fuzz.attention_parts import heads_dims
from fuzz.attention_parts import lengths
from fuzz.attention_parts import mask_for
from fuzz.attention_parts import options
from fuzz.attention_parts import starts
from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates


def case_of_attention(draw: Draw, args: dict[str, Any], grad: Sequence[str] = ()) -> Case:
    """A case; gradients may be off by what the kernels round.

    They round P and dP to the dtype before they multiply them; what PyTorch spells out for sinks, caps and masks of
    other dtypes does not. Where keys are alike, or one has all the weight, the gradients of q and k are but what
    rounding dP leaves, sums over the values' columns.
    """
    floor = {} if draw.dtype == torch.float32 else {"gradients": 4 * torch.finfo(draw.dtype).eps}
    q, v = args.get("q", args.get("query")), args.get("v", args.get("value"))
    scale = args.get("scaling") or args.get("sm_scale") or q.shape[-1] ** -0.5
    columns = q.shape[-1] if v is None else v.shape[-1]
    return Case(args, grad, floor=floor, cancelled=max(0.5, 2.0 * scale * columns**0.5))


@generates
def fmha(draw: Draw) -> Case:
    draw.limit(3.0)
    b, (hk, hq, d, dv) = draw.size(3), heads_dims(draw)
    most = 1100 if draw.gpu else 150
    sq = draw.size(most)
    skv = sq if draw.chance(0.4) else draw.size(most)
    q, k, v = draw.tensor(b, hq, sq, d), draw.tensor(b, hk, skv, d), draw.tensor(b, hk, skv, dv)
    kv_len = lengths(draw, b, skv) if draw.chance(0.25) else None
    behind(draw, kv_len, k, v)
    args = {
        "q": q,
        "k": k,
        "v": v,
        "scaling": draw.one(None, None, 0.1, 1.0),
        "is_causal": draw.chance(0.6),
        **options(draw),
        "sinks": draw.weight(hq, dtype=draw.other_dtype()) if draw.chance(0.25) else None,
        "attention_mask": mask_for(draw, b, hq, sq, skv),
        "kv_len": kv_len,
    }
    return case_of_attention(draw, args, ("q", "k", "v", "sinks"))


@generates
def gemma_attention(draw: Draw) -> Case:
    case = fmha(draw)
    case.args.pop("sinks")
    case.grad = ["q", "k", "v"]
    if draw.chance(0.1):
        case.args["window_size"] = 0
    return case


def sink_args(draw: Draw, decode: bool) -> dict[str, Any]:
    """Arguments of attention_sink and attention_sink_decode."""
    draw.limit(3.0)
    b, (hk, hq, d, dv) = draw.size(3), heads_dims(draw)
    dv = d if draw.chance(0.8) else dv
    most = 1100 if draw.gpu else 130
    sq = 1 if decode and draw.chance(0.85) else draw.size(most)
    skv = sq + draw.size(most)
    query = draw.tensor(b, sq, hk, hq // hk, d) if draw.chance(0.5) else draw.tensor(b, sq, hq, d)
    start = draw.one("none", "number", "one", "each")
    start_q = None
    if start == "number":
        start_q = draw.data.randint(0, skv - sq)
    elif start != "none":
        start_q = torch.randint(0, skv - sq + 1, (1 if start == "one" else b,), generator=draw.generator)
        start_q = start_q.to(draw.one(torch.int64, torch.int32)).to(draw.device)
    args = {
        "query": query,
        "key": draw.tensor(b, skv, hk, d),
        "value": draw.tensor(b, skv, hk, dv),
        "sinks": draw.weight(hq, dtype=draw.other_dtype()),
        "sm_scale": draw.one(None, 0.2),
        "sliding_window": draw.one(None, None, 1, 5, 128),
        "start_q": start_q,
    }
    if decode:
        args["kv_len_per_split"] = draw.one(None, None, 16, 128)
    return args


@generates
def attention_sink(draw: Draw) -> Case:
    return case_of_attention(draw, sink_args(draw, False), ("query", "key", "value", "sinks"))


@generates
def attention_sink_decode(draw: Draw) -> Case:
    args = sink_args(draw, True)
    several = args["query"].shape[1] > 1
    return case_of_attention(draw, args, ("query", "key", "value", "sinks") if several else ())


@generates
def mla(draw: Draw) -> Case:
    draw.limit(3.0)
    b, (hk, hq, d, dv) = draw.size(3), heads_dims(draw)
    dr = draw.one(8, 16, 32, 64, 40, 1)
    most = 600 if draw.gpu else 130
    sq = draw.size(most)
    skv = sq if draw.chance(0.4) else draw.size(most)
    k, v, kpe = draw.tensor(b, hk, skv, d), draw.tensor(b, hk, skv, dv), draw.tensor(b, 1, skv, dr)
    kv_len = lengths(draw, b, skv) if draw.chance(0.25) else None
    behind(draw, kv_len, k, v, kpe)
    args = {
        "q": draw.tensor(b, hq, sq, d),
        "k": k,
        "v": v,
        "qpe": draw.tensor(b, hq, sq, dr),
        "kpe": kpe,
        "is_causal": draw.chance(0.6),
        "scaling": draw.one(None, None, 0.1),
        "attention_mask": mask_for(draw, b, hq, sq, skv),
        "kv_len": kv_len,
    }
    return case_of_attention(draw, args, ("q", "k", "v", "qpe", "kpe"))


@generates
def fmha_varlen(draw: Draw) -> Case:
    draw.limit(3.0)
    hk, hq, d, dv = heads_dims(draw)
    n, decode = draw.size(6), draw.chance(0.3)
    tq = n if decode else draw.size(2000 if draw.gpu else 300)
    tk = draw.size(3000 if draw.gpu else 300)
    of_q, of_k = starts(draw, n, tq, draw.data.random() < 0.4), starts(draw, n, tk, draw.data.random() < 0.4)
    if decode:
        of_q = torch.arange(n + 1)
        if draw.data.random() < 0.4:  # sequences without a query
            of_q = torch.randint(0, 2, (n + 1,), generator=draw.generator).cumsum(0)
            of_q = (of_q - of_q[0]).clamp(max=tq)
    k, v = draw.tensor(tk, hk, d), draw.tensor(tk, hk, dv)
    if draw.data.random() < 0.5:
        for t in (k, v):
            if 0 not in t.stride():
                t[int(of_k[-1]) :] = math.nan
    kind = draw.one(torch.int32, torch.int64)
    most_q, most_k = (int(x.diff().max()) if n else 0 for x in (of_q, of_k))
    args = {
        "q": draw.tensor(tq, hq, d),
        "k": k,
        "v": v,
        "cu_seqlens_q": of_q.to(kind).to(draw.device),
        "cu_seqlens_k": of_k.to(kind).to(draw.device),
        "max_seqlen_q": draw.one(None, most_q, most_q + 3),
        "max_seqlen_k": draw.one(None, most_k, most_k + 100),
        "scaling": draw.one(None, None, 0.1),
        "is_causal": draw.chance(0.7),
        **options(draw),
        "sinks": draw.weight(hq, dtype=draw.other_dtype()) if draw.chance(0.25) else None,
    }
    return Case(args, ("q", "k", "v") if draw.chance(0.05) else ())
