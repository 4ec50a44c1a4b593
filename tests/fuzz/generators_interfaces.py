"""Calls of the interfaces over the ops, as models make them: attention of one query or several, layers of experts."""

from typing import Any

import torch

from fuzz.attention_parts import behind
from fuzz.attention_parts import lengths
from fuzz.attention_parts import mask_for
from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import calls
from fuzz.generators_attention import case_of_attention
from fuzz.generators_attention import fmha
from fuzz.generators_attention import gemma_attention
from fuzz.generators_attention import mla
from fuzz.generators_decoding import decode_args
from fuzz.generators_decoding import mla_decoding_args
from fuzz.generators_experts import fused_moe
from tilegym.ops import attn_interface
from tilegym.ops import mla_interface as latent
from tilegym.ops import moe_interface as experts

ROUTING = ("scoring", "renormalize", "num_groups", "topk_groups", "scaling_factor", "correction_bias")
LAYER = ("hidden_states", "router_logits", "w1", "w2", "top_k", "shared_w1", "shared_w2")


def one_query(draw: Draw) -> dict[str, Any]:
    """Arguments of a decoding step."""
    args = decode_args(draw, "scaling")
    args.pop("kv_len_per_split")
    return args | {"is_causal": draw.chance(0.6)}


@calls(attn_interface.fmha_interface)
def fmha_interface(draw: Draw) -> Case:
    args = one_query(draw) if draw.chance(0.4) else fmha(draw).args
    return case_of_attention(draw, args | {"dropout": 0.0}, ("q", "k", "v", "sinks"))


@calls(attn_interface.attention_sink_interface)
def attention_sink_interface(draw: Draw) -> Case:
    args = one_query(draw) if draw.chance(0.4) else fmha(draw).args
    heads, queries, keys = *args["q"].shape[1:3], args["k"].shape[2]
    args["sinks"] = draw.weight(heads, dtype=draw.other_dtype())
    if args["kv_len"] is None and queries <= keys and draw.chance(0.6):
        if draw.chance(0.5):
            args["start_q"] = draw.data.randint(0, keys - queries)
        else:
            number = 1 if draw.chance(0.5) else len(args["q"])
            start = torch.randint(0, keys - queries + 1, (number,), generator=draw.generator)
            args["start_q"] = start.to(draw.one(torch.int64, torch.int32)).to(draw.device)
    return case_of_attention(draw, args, ("q", "k", "v", "sinks"))


@calls(attn_interface.gemma_attention_interface)
def gemma_attention_interface(draw: Draw) -> Case:
    if draw.chance(0.6):
        return gemma_attention(draw)
    args = one_query(draw)
    args.pop("sinks")
    return case_of_attention(draw, args, ("q", "k", "v"))


@calls(latent.mla_interface)
def mla_interface(draw: Draw) -> Case:
    return mla(draw)


@calls(latent.mla_decoding_interface)
def mla_decoding_interface(draw: Draw) -> Case:
    args = mla_decoding_args(draw)
    how = draw.one("transpose", "kv_len_per_split", "neither")
    if how != "neither":
        args[how] = draw.chance(0.5) if how == "transpose" else draw.one(16, 100, 128)
    return Case(args)


@calls(latent.latent_attention)
def latent_attention(draw: Draw) -> Case:
    draw.limit(3.0)
    b, h, rank = draw.size(3), draw.one(1, 2, 5, 16), draw.one(16, 64, 128, 512, 40)
    d, dv, dr = draw.one(16, 32, 128, 24), draw.one(16, 32, 128, 40), draw.one(8, 16, 64)
    sq, keys = 1 if draw.chance(0.6) else draw.size(130), draw.size(600 if draw.gpu else 200)
    latents, kpe = draw.tensor(b, 1, keys, rank), draw.tensor(b, 1, keys, dr)
    kv_len = lengths(draw, b, keys) if draw.chance(0.3) else None
    behind(draw, kv_len, latents, kpe)
    args = {
        "q": draw.tensor(b, h, sq, d),
        "qpe": draw.tensor(b, h, sq, dr),
        "latents": latents,
        "kpe": kpe,
        "kv_b_weight": draw.weight(h * (d + dv), rank, scale=rank**-0.5),
        "scaling": draw.one(0.07, 0.2),
        "is_causal": draw.chance(0.7),
        "attention_mask": mask_for(draw, b, h, sq, keys),
        "kv_len": kv_len,
        "absorb": draw.one(None, None, False) if sq > 1 else draw.one(None, None, False, True),
    }
    return case_of_attention(draw, args, () if args["absorb"] else ("q", "qpe", "latents", "kpe", "kv_b_weight"))


def layer_of_experts(backend: str, **args: Any) -> torch.Tensor:
    """:func:`tilegym.ops.moe_interface.moe_interface`, of options by their own names."""
    routing = {name: args.pop(name) for name in ROUTING if name in args}
    layer = {name: args.pop(name) for name in LAYER if name in args}
    return experts.moe_interface(**layer, routing=routing, experts=args, backend=backend)


@calls(layer_of_experts)
def moe_interface(draw: Draw) -> Case:
    case = fused_moe(draw)
    args = case.args
    tokens, hidden = args["hidden_states"].shape
    number, width, scoring = args["w2"].shape[0], draw.size(60), draw.one("softmax", "topk_softmax", "sigmoid")
    # So far from each other that rounding does not decide who is chosen.
    order = torch.rand((tokens, number), generator=draw.generator).argsort(-1)
    del args["topk_ids"], args["topk_weights"]
    args |= {
        "router_logits": draw.tensor(tokens, number, values=(order - number / 2) / 4, expand=False),
        "top_k": draw.choices.randint(1, min(number, 4)),
        "scoring": scoring,
        "renormalize": draw.chance(0.5),
        "scaling_factor": draw.one(1.0, 2.5),
    }
    if draw.chance(0.4):
        args["shared_w1"] = draw.weight(2 * width, hidden, scale=hidden**-0.5)
        args["shared_w2"] = draw.weight(hidden, width, scale=max(width, 1) ** -0.5)
    if tokens and draw.chance(0.2):
        args["hidden_states"] = args["hidden_states"].unsqueeze(0)
    case.grad = [n for n in (*case.grad, "router_logits", "shared_w1", "shared_w2") if args.get(n) is not None]
    return case
