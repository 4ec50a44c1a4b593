"""Calls of linear attention: the gated delta rule and the convolution before it."""

import math
from typing import Any

import torch

from fuzz.attention_parts import starts
from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates


def arguments_of_delta_rule(draw: Draw, chunk: bool) -> dict[str, Any]:
    """Arguments of the gated delta rule, now and then of packed sequences."""
    b, t, hk = draw.size(2), draw.size((400 if draw.gpu else 140) if chunk else 20), draw.one(1, 2)
    hv, dk, dv = hk * draw.one(1, 2, 3), draw.one(8, 16, 24, 32, 64, 128, 100), draw.one(8, 16, 40, 64, 128)
    gates = draw.one(draw.dtype, torch.float32)
    normalize = draw.chance(0.6)
    draw.limit(3.0)
    g = -0.3 * draw.numbers((b, t, hv)).exp()
    if draw.data.random() < 0.2:
        g = g.masked_fill(torch.rand(g.shape, generator=draw.generator) < 0.1, -math.inf)
        draw.notes.append("g -inf")
    if draw.data.random() < 0.1:
        g = g * 50
    scale = None if normalize else dk**-0.5
    packed, n = t and draw.chance(0.1), draw.choices.randint(1, 4)
    if packed:
        b = 1
        g = g[:1] if g.shape[0] else -draw.numbers((1, t, hv)).abs()
    state = None
    if draw.chance(0.5):
        state = draw.tensor(n if packed else b, hv, dk, dv, dtype=draw.one(torch.float32, draw.dtype))
    args = {
        "query": draw.tensor(b, t, hk, dk, scale=scale),
        "key": draw.tensor(b, t, hk, dk, scale=scale, magnitude=None if normalize else 1.0),
        "value": draw.tensor(b, t, hv, dv),
        "g": draw.tensor(b, t, hv, values=g, dtype=gates),
        "beta": draw.tensor(b, t, hv, values=draw.numbers((b, t, hv)).sigmoid(), dtype=gates),
        "initial_state": state,
        "output_final_state": draw.chance(0.6),
        "use_qk_l2norm_in_kernel": normalize,
    }
    if packed:
        args["cu_seqlens"] = starts(draw, n, t, True).to(draw.device)
    if chunk:
        args["chunk_size"] = draw.one(64, 64, 16, 7)
    return args


def delta_case(draw: Draw, chunk: bool) -> Case:
    """A case of the gated delta rule, in chunks or step by step."""
    output, state = (2e-6, 1e-5) if draw.dtype == torch.float32 else (3e-3, 3e-3)
    floor = {"output 0": output, "output 1": state, "gradients": 3 * state}
    names = ("query", "key", "value", "g", "beta", "initial_state")
    return Case(arguments_of_delta_rule(draw, chunk), names, floor=floor)


@generates
def chunk_gated_delta_rule(draw: Draw) -> Case:
    return delta_case(draw, True)


@generates
def recurrent_gated_delta_rule(draw: Draw) -> Case:
    return delta_case(draw, False)


@generates
def causal_conv1d_fn(draw: Draw) -> Case:
    b, ch, t = draw.size(3), draw.size(140), draw.size(1000 if draw.gpu else 140)
    taps, kind = draw.choices.choices([1, 2, 3, 4, 5], [1, 4, 4, 8, 1])[0], draw.other_dtype()
    x = draw.tensor(b, ch, t, nan=True)
    if draw.chance(0.4):
        x = draw.tensor(b, t, ch, expand=False).transpose(1, 2)
    args = {
        "hidden_states": x,
        "weight": draw.weight(ch, taps, dtype=kind),
        "bias": draw.weight(ch, dtype=kind) if draw.chance(0.5) else None,
        "activation": draw.one(None, "silu", "swish"),
        "seq_idx": draw.integers(0, 3, b, t).sort().values if draw.chance(0.08) else None,
    }
    # A sum's error may be small by luck; PyTorch rounds what it sums to the dtype.
    floor = {} if draw.dtype == torch.float32 else {"output 0": torch.finfo(draw.dtype).eps / 4}
    return Case(args, ("hidden_states", "weight", "bias"), floor=floor)


@generates
def causal_conv1d_update(draw: Draw) -> Case:
    b, ch, t = draw.size(3), draw.size(140), draw.choices.choices([1, draw.size(6), draw.size(40)], [6, 3, 1])[0]
    taps, kind = draw.choices.choices([1, 2, 3, 4, 5], [1, 4, 4, 8, 1])[0], draw.other_dtype()
    length = taps - 1 + draw.one(0, 1, 1, 3)
    args = {
        "hidden_states": draw.tensor(b, ch, t),
        "conv_state": draw.tensor(b, ch, length, dtype=draw.other_dtype(), expand=False),
        "weight": draw.weight(ch, taps, dtype=kind),
        "bias": draw.weight(ch, dtype=kind) if draw.chance(0.5) else None,
        "activation": draw.one(None, "silu", "swish"),
    }
    return Case(args, (), ("conv_state",))


@generates
def gated_delta_step(draw: Draw) -> Case:
    b, hk = draw.size(3), draw.one(1, 2)
    hv, dk, dv = hk * draw.one(1, 2, 3), draw.one(8, 16, 32, 64, 128, 24), draw.one(8, 16, 64, 128)
    ch, taps, kind = 2 * hk * dk + hv * dv, draw.one(2, 4, 4, 3), draw.other_dtype()
    draw.limit(3.0)
    args = {
        "qkv": draw.tensor(b, 1, ch),
        "z": draw.tensor(b, 1, hv * dv),
        "b": draw.tensor(b, 1, hv),
        "a": draw.tensor(b, 1, hv),
        "conv_state": draw.tensor(b, ch, taps - draw.one(0, 0, 0, 1), dtype=draw.other_dtype(), expand=False),
        "state": draw.tensor(b, hv, dk, dv, dtype=draw.one(torch.float32, torch.float32, draw.dtype), expand=False),
        "conv_weight": draw.weight(ch, taps, dtype=kind),
        "conv_bias": draw.weight(ch, dtype=kind) if draw.chance(0.3) else None,
        "a_log": draw.weight(hv, dtype=draw.one(torch.float32, draw.dtype)),
        "dt_bias": draw.weight(hv, dtype=draw.other_dtype()),
        "norm_weight": draw.weight(dv, dtype=draw.other_dtype()),
        "eps": draw.one(1e-6, 1e-5),
        "settled": draw.chance(0.3),
    }
    return Case(args, (), ("conv_state", "state"))
