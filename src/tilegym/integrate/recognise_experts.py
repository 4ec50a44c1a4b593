"""Recognises banks of experts, and the routing that chooses among them."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from tilegym.integrate import formulas_experts as formulas
from tilegym.integrate.formulas import ACTIVATIONS
from tilegym.integrate.formulas import Formula
from tilegym.integrate.formulas import Gate
from tilegym.integrate.formulas_experts import Routing
from tilegym.integrate.probe import Match
from tilegym.integrate.probe import attempt
from tilegym.integrate.probe import best
from tilegym.integrate.probe import distance
from tilegym.integrate.probe import floats_of
from tilegym.integrate.probe import isolated
from tilegym.integrate.probe import numbers
from tilegym.integrate.probe import own_tensors
from tilegym.integrate.recognise_mlps import _said


def expert_arguments(arguments: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(hidden states [T, H], expert ids [T, K], weights [T, K]) among the arguments of a call, or None."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    ids = [t for t in tensors if t.ndim == 2 and t.dtype in (torch.int64, torch.int32)]
    if len(ids) != 1:
        return None
    weights = [t for t in tensors if t.is_floating_point() and t.shape == ids[0].shape]
    hidden = [t for t in tensors if t.is_floating_point() and t.ndim == 2 and t.shape[0] == len(ids[0])]
    hidden = [t for t in hidden if t is not (weights[0] if weights else None)]
    return (hidden[0], ids[0], weights[0]) if weights and hidden else None


def recognise_experts(module: nn.Module, order: list[str], width: int) -> Match | None:
    """A bank of experts with three-dimensional weights, called with hidden states, ids and weights.

    Args:
        order: how the module is called: of "x", "ids", "weights", by position or as name=what.
        width: of the hidden states.

    Returns:
        A match whose ``what`` has "roles" and the parameters.
    """
    own = own_tensors(module)
    banks = {name: p for name, p in own.items() if p.ndim == 3}
    flat = {name: p for name, p in own.items() if p.ndim == 2}
    if len(banks) != 2 or len(own) != len(banks) + len(flat):
        return None
    count = next(iter(banks.values())).shape[0]
    x = numbers(24, width, scale=2.0)
    ids = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(i))[:2] for i in range(24)])
    weights = numbers(*ids.shape).abs()
    twins, outputs = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        twins[dtype] = isolated(module, dtype, scale=2.5)
        given = {"x": x.to(dtype), "ids": ids, "weights": weights.to(dtype)}
        positional = [given[what] for what in order if "=" not in what]
        named = {name: given[what] for name, _, what in (o.partition("=") for o in order) if what}
        outputs[dtype] = attempt(lambda t=twins[dtype], p=positional, n=named: t(*p, **n))
        if not isinstance(outputs[dtype], torch.Tensor):
            return None

    def inputs(formula: Formula, what: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        held = own_tensors(twins[dtype])
        given = {"x": x.to(dtype), "topk_ids": ids, "topk_weights": weights.to(dtype)}
        given |= {role: held[name] for role, name in what["roles"].items()}
        return {name: given[name] for name in formula.inputs}

    return best(outputs, _banks(module, banks, flat, width), inputs)


def _banks(module: nn.Module, banks: dict, flat: dict, width: int) -> Iterator[tuple[Formula, dict[str, Any]]]:
    constants = floats_of(module)
    limits = [0.0, *dict.fromkeys(v for v in constants.values() if 1.0 < v <= 100.0 and v != width)]
    alphas = [0.0, *dict.fromkeys(v for v in constants.values() if v != 1.0 and 0.5 < v < 4.0)]
    for first, down in itertools.permutations(banks):
        for transposed in (False, True):
            columns, rows = (2, 1) if not transposed else (1, 2)
            inner, outer = banks[first].shape[rows], banks[down].shape[columns]
            if banks[first].shape[columns] != width or banks[down].shape[rows] != width:
                continue
            if inner not in (outer, 2 * outer):
                continue
            role = "up" if inner == outer else "gate_up"
            roles = {f"{role}_weight": first, f"{down_role}_weight": down} if (down_role := "down") else {}
            for name, bias in flat.items():
                roles[f"{role if bias.shape[1] == inner else 'down'}_bias"] = name
            if inner == width:  # the shapes do not tell the biases apart
                roles |= {f"{r}_bias": n for r, w in ((role, first), ("down", down)) for n in flat if n.startswith(w)}
            if len(roles) != 2 + len(flat):
                continue
            biases = tuple(r for r in (role, "down") if f"{r}_bias" in roles)
            layout = {"roles": roles, "transposed": transposed}
            if role == "up":
                for act in ACTIVATIONS:
                    yield formulas.experts(None, act, transposed, biases), layout | {"activation": act}
                continue
            options = itertools.product(
                limits, alphas, (0.0, 1.0), ("concatenated", "interleaved"), (False, True), ACTIVATIONS
            )
            for limit, alpha, shift, packed, up_first, act in options:
                if alpha and act != "silu":
                    continue
                gate = Gate(act, packed, up_first, limit, alpha, shift)
                yield formulas.experts(gate, act, transposed, biases), layout | _said(gate)


def recognise_routing(
    block: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, settings: dict[str, float]
) -> Match | None:
    """How ``block`` got ids and weights, [T, K] both, from hidden states [T, H], judged by what it got.

    Args:
        settings: numbers of the config, any of which may be a factor or a count of groups.

    Returns:
        A match whose ``what`` has "roles" and the fields of :class:`Routing` that are not as usual.
    """
    experts = 1 + int(ids.max())
    matrices = {n: p for n, p in block.named_parameters() if p.ndim == 2 and p.shape[1] == x.shape[1]}
    held = dict(block.named_parameters()) | dict(block.named_buffers())
    vectors = {n: t.detach().flatten() for n, t in held.items() if t.numel() == max(t.shape, default=0)}
    scale = [1.0, *dict.fromkeys(v for v in settings.values() if v not in (0.0, 1.0) and abs(v) < 64)]
    groups = sorted({int(v) for v in settings.values() if v in (2, 4, 8)})
    for name, matrix in matrices.items():
        if matrix.shape[0] < experts or matrix.shape[0] > 512:
            continue
        beside = {n: t for n, t in vectors.items() if t.shape[0] == matrix.shape[0]}
        for bias, correction in itertools.product(("", *beside), repeat=2):
            if bias and bias == correction:
                continue
            beside_it = {r: n for r, n in (("bias", bias), ("correction", correction)) if n}
            given = {"x": x, "weight": matrix.detach()} | {role: vectors[n] for role, n in beside_it.items()}
            match = _fit(given, ids, weights, scale, groups, bool(bias), bool(correction))
            if match:
                return Match(match.formula, match.errors, {"roles": {"weight": name} | beside_it, **match.what})
    return None


def _fit(given, ids, weights, scale, groups, bias, correction) -> Match | None:
    order = ids.sort(-1)
    expected = weights.float().gather(1, order.indices)
    ways = [(1, 1, "top2"), *((g, t, s) for g in groups for t in range(1, g) for s in ("top2", "max"))]
    for scoring, (count, best_groups, score) in itertools.product(("softmax", "sigmoid", "softmax_topk"), ways):
        if scoring == "softmax_topk" and (count > 1 or correction) or given["weight"].shape[0] % count:
            continue
        for normalised, factor, eps in itertools.product((False, True), scale, (0.0, 1e-20, 1e-9)):
            if (
                (eps or scoring == "softmax_topk")
                and (not normalised or scoring == "softmax_topk")
                and (eps or normalised)
            ):
                continue
            way = Routing(scoring, ids.shape[1], normalised, factor, count, best_groups, score, correction, bias, eps)
            formula = formulas.routing(way)
            got = attempt(lambda f=formula: f.run(**given))
            if got is None or not torch.equal(got[1].sort(-1).values, order.values):
                break  # the choice does not depend on what the inner loop varies
            error = distance(got[0].gather(1, got[1].sort(-1).indices), expected)
            if error <= 64.0:
                usual = asdict(Routing(scoring, ids.shape[1]))
                shown = ("scoring", "top_k", "normalised", *(("top_groups", "group_score") if count > 1 else ()))
                said = {k: v for k, v in asdict(way).items() if k in shown or (v != usual[k] and k != "group_score")}
                return Match(formula, {"float32": round(error, 3)}, said)
    return None
