"""Calls of mixtures of experts: routing, sorting and the experts."""

import math

import torch

from fuzz.drawing import DTYPES
from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates
from fuzz.routing import settle_choices


@generates
def moe_align_block_size(draw: Draw) -> Case:
    t, k, e = draw.size(300), draw.size(8), draw.size(130, 0.0)
    low, high = (0, e) if draw.chance(0.6) else (-2, e + 3)
    ids = draw.integers(low, high, t, k, dtype=draw.one(torch.int32, torch.int64))
    if draw.data.random() < 0.2:
        ids = torch.full((t, k), draw.data.randrange(e), dtype=ids.dtype, device=draw.device)
    return Case({"topk_ids": ids, "block_size": draw.one(1, 2, 16, 32, 64, 128), "num_experts": e}, exact=True)


@generates
def moe_topk_routing(draw: Draw) -> Case:
    t, scoring = draw.size(100), draw.one("softmax", "topk_softmax", "sigmoid")
    groups = draw.one(1, 1, 2, 4, 8) if scoring != "topk_softmax" else 1
    per = draw.size(40, 0.0) if groups == 1 or scoring != "sigmoid" else draw.size(40, 0.0) + 1
    e, top_groups = groups * per, draw.choices.randint(1, groups)
    k = draw.choices.randint(1, min(per * top_groups, 10))
    draw.limit(30.0)
    x = draw.numbers((t, e), draw.magnitude)
    if draw.data.random() < 0.3:
        x = (x * 2).round() / 2  # equal ones
    if draw.data.random() < 0.1:
        x = x.masked_fill(torch.rand(x.shape, generator=draw.generator) < 0.2, -math.inf)
    args = {
        "router_logits": draw.tensor(t, e, values=x),
        "top_k": k,
        "scoring": scoring,
        "renormalize": draw.chance(0.5),
        "num_groups": groups,
        "topk_groups": top_groups,
        "scaling_factor": draw.one(1.0, 2.5),
        "out_dtype": draw.one(None, None, *DTYPES),
    }
    if scoring == "sigmoid" and draw.chance(0.5):
        args["correction_bias"] = draw.weight(e, dtype=torch.float32)
    oracle = {} if args["out_dtype"] is None else {"out_dtype": torch.float64}
    return Case(args, ("router_logits",), settle=settle_choices, oracle=oracle)


@generates
def fused_moe(draw: Draw) -> Case:
    t, h = draw.size(120 if draw.gpu else 40), draw.size(300 if draw.gpu else 80, 0.0)
    e, i, k = draw.size(17, 0.0), draw.size(150 if draw.gpu else 50, 0.0), draw.size(4, 0.02)
    activation = draw.one("silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss")
    kind = draw.one("concat", "concat", "interleaved", "up", "none")
    if activation == "gpt_oss" and kind == "none":
        kind = "concat"
    transposed = draw.chance(0.3)
    draw.limit(3.0)
    wide = i if kind in ("up", "none") else 2 * i

    def up(columns: int) -> torch.Tensor:
        return draw.weight(*((e, h, columns) if transposed else (e, columns, h)), scale=h**-0.5)

    low, high = (0, e) if draw.chance(0.7) else (-2, e + 2)
    args = {
        "hidden_states": draw.tensor(t, h),
        "w1": up(wide),
        "topk_ids": draw.integers(low, high, t, k, dtype=draw.one(torch.int64, torch.int32)),
        "w2": draw.weight(*((e, i, h) if transposed else (e, h, i)), scale=i**-0.5),
        "topk_weights": draw.weight(t, k, dtype=draw.other_dtype(0.4)),
        "activation": activation,
        "w1_up": up(i) if kind == "up" else None,
        "interleaved": kind == "interleaved",
        "transposed": transposed,
        "b1": draw.weight(e, wide) if kind != "up" and draw.chance(0.4) else None,
        "b2": draw.weight(e, h) if draw.chance(0.4) else None,
        "alpha": draw.one(1.702, 1.0),
        "limit": draw.one(None, None, 7.0, 0.5),
        "shared_output": draw.tensor(t, h) if draw.chance(0.3) else None,
    }
    names = ("hidden_states", "w1", "w2", "topk_weights", "b1", "b2", "w1_up", "shared_output")
    return Case(args, names)
