"""Calls of the norms."""

import math

from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates
from fuzz.generators_common import eps_of
from fuzz.generators_common import norm_options
from fuzz.generators_common import width


@generates
def rms_norm(draw: Draw) -> Case:
    n, lead = width(draw), draw.lead(300 if draw.gpu else 30)
    args = {
        "input": draw.tensor(*lead, n, nan=True),
        "normalized_shape": draw.one(n, (n,)),
        "weight": draw.weight(n, dtype=draw.other_dtype()) if draw.chance(0.85) else None,
        "eps": eps_of(draw),
        "bias": draw.weight(n, dtype=draw.other_dtype()) if draw.chance(0.3) else None,
        "mode": draw.one(None, None, "static_persistent", "multi_wave_reload", "multi_wave_cached"),
        **norm_options(draw),
    }
    return Case(args, ("input", "weight", "bias"), rowwise=True)


@generates
def fused_add_rms_norm(draw: Draw) -> Case:
    n, lead = width(draw), draw.lead(300 if draw.gpu else 30)
    args = {
        "x": draw.tensor(*lead, n, nan=True),
        "residual": draw.tensor(*lead, n),
        "eps": eps_of(draw),
        "weight": draw.weight(n, dtype=draw.other_dtype()) if draw.chance(0.85) else None,
        **norm_options(draw),
    }
    return Case(args, ("x", "residual", "weight"), rowwise=True)


@generates
def layer_norm(draw: Draw) -> Case:
    n, lead = width(draw), draw.lead(300 if draw.gpu else 30)
    shape = (n,)
    if draw.chance(0.3):
        shape = (draw.one(1, 2, 5), draw.size(64, 0.0))
    kind = draw.other_dtype()
    args = {
        "input": draw.tensor(*lead, *shape, nan=True),
        "normalized_shape": shape[0] if len(shape) == 1 and draw.chance(0.5) else shape,
        "weight": draw.weight(*shape, dtype=kind) if draw.chance(0.7) else None,
        "bias": draw.weight(*shape, dtype=kind) if draw.chance(0.6) else None,
        "eps": eps_of(draw),
    }
    return Case(args, ("input", "weight", "bias"), rowwise=True)


@generates
def rms_norm_gated(draw: Draw) -> Case:
    n, lead = width(draw), draw.lead(300 if draw.gpu else 30)
    divisors = [d for d in range(1, n + 1) if n % d == 0] or [1]
    args = {
        "x": draw.tensor(*lead, n, nan=True),
        "gate": draw.tensor(*lead, n, dtype=draw.other_dtype()),
        "eps": eps_of(draw),
        "weight": draw.weight(n, dtype=draw.other_dtype()) if draw.chance(0.85) else None,
        "norm_before_gate": draw.chance(0.5),
        "group_size": draw.one(None, draw.choices.choice(divisors)),
        "activation": draw.one("silu", "sigmoid"),
        "casting": draw.one("llama", "gemma"),
    }
    return Case(args, ("x", "gate", "weight"), rowwise=True)


@generates
def dual_rms_norm(draw: Draw) -> Case:
    d = draw.one(1, 3, 16, 17, 64, 80, 128, 129, 256)
    lead, hq, hk = draw.lead(40 if draw.gpu else 8), draw.size(9), draw.size(5)
    lead_k = lead if draw.chance(0.8) else draw.lead(8)
    if draw.chance(0.4) and lead == lead_k:
        packed = draw.tensor(*lead, (hq + 2 * hk) * d, expand=False)
        q = packed[..., : hq * d].unflatten(-1, (hq, d))
        k = packed[..., hq * d : (hq + hk) * d].unflatten(-1, (hk, d)) if hk * d else packed.new_empty(*lead, hk, d)
    else:
        q, k = draw.tensor(*lead, hq, d, nan=True), draw.tensor(*lead_k, hk, d, nan=True)
    kinds = draw.other_dtype(), draw.other_dtype()
    args = {
        "q": q,
        "k": k,
        "eps": eps_of(draw),
        "q_weight": draw.weight(d, dtype=kinds[0]) if draw.chance(0.8) else None,
        "k_weight": draw.weight(d, dtype=kinds[1]) if draw.chance(0.8) else None,
        **norm_options(draw),
    }
    return Case(args, ("q", "k", "q_weight", "k_weight"), rowwise=True)


@generates
def group_norm(draw: Draw) -> Case:
    groups, per, images = draw.size(8, 0.0), draw.size(12, 0.0), draw.size(4)
    # Without positions PyTorch's own gradients of weight and bias are NaN, in fp64 too; the kernels' are 0.
    positions = draw.one((), (draw.size(100, 0.0),), (draw.size(9, 0.0), draw.size(17, 0.0)))
    shape = (images, groups * per, *positions)
    args = {
        "input": draw.tensor(*shape, nan=True),
        "num_groups": groups,
        "weight": draw.weight(groups * per, dtype=draw.other_dtype()) if draw.chance(0.7) else None,
        "bias": draw.weight(groups * per, dtype=draw.other_dtype()) if draw.chance(0.7) else None,
        "eps": eps_of(draw),
    }
    return Case(args, ("input", "weight", "bias"))


@generates
def rms_norm_add(draw: Draw) -> Case:
    n, lead = width(draw), draw.lead(100 if draw.gpu else 70)
    if math.prod(lead) * n > 20000 and not draw.gpu:
        n = 40
    args = {
        "x": draw.tensor(*lead, n, nan=True),
        "weight": draw.weight(n, dtype=draw.other_dtype()),
        "eps": eps_of(draw),
        "residual": draw.tensor(*lead, n),
        **norm_options(draw),
    }
    return Case(args, ("x", "weight", "residual"), rowwise=True)
