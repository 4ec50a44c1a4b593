"""Recognises norms: RMS and layer norms, with or without weights, offset, groups and gate, in every order of casts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tilegym.integrate.formulas import Formula
from tilegym.integrate.formulas import norm
from tilegym.integrate.probe import DTYPES
from tilegym.integrate.probe import Match
from tilegym.integrate.probe import attempt
from tilegym.integrate.probe import best
from tilegym.integrate.probe import floats_of
from tilegym.integrate.probe import isolated
from tilegym.integrate.probe import numbers
from tilegym.integrate.probe import own_tensors

_DEFAULT_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)


def recognise_norm(module: nn.Module, width: int, gated: bool) -> Match | None:
    """The norm that ``module`` computes over ``width`` numbers, with a gate as second argument if ``gated``.

    ``what`` of the match holds the parameters of :func:`~tilegym.integrate.formulas.norm`, and under "weight" and
    "bias" the names of the parameters, "" for none.
    """
    own = own_tensors(module)
    if len(own) > 2 or any(p.ndim > 2 for p in own.values()) or any(True for _ in module.children()):
        return None
    weight = next((name for name, p in own.items() if p.shape[-1] == width and "bias" not in name), "")
    bias = next((name for name, p in own.items() if p.shape[-1] == width and "bias" in name), "")
    if len(own) != bool(weight) + bool(bias):
        return None
    rows = own[weight].shape[:-1] if weight else ()
    # Small inputs, where eps weighs as much as the mean square, besides ordinary ones.
    x = torch.cat((numbers(2, 3, *rows, width), numbers(2, 3, *rows, width, scale=1e-3, seed=7)))
    gate = numbers(*x.shape, scale=2.0, seed=3)
    outputs, twins = {}, {}
    for dtype in DTYPES:
        twins[dtype] = isolated(module, dtype)
        arguments = (x.to(dtype), gate.to(dtype)) if gated else (x.to(dtype),)
        outputs[dtype] = attempt(lambda t=twins[dtype], a=arguments: t(*a))
        if not isinstance(outputs[dtype], torch.Tensor):
            return None

    def inputs(formula: Formula, what: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        given = {"x": x.to(dtype), "gate": gate.to(dtype)}
        held = own_tensors(twins[dtype])
        given |= {role: held[name] for role, name in (("weight", weight), ("bias", bias)) if name}
        return {name: given[name] for name in formula.inputs}

    return best(outputs, _candidates(module, weight, bias, gated, width), inputs)


def _candidates(
    module: nn.Module, weight: str, bias: str, gated: bool, width: int
) -> Iterator[tuple[Formula, dict[str, Any]]]:
    constants = floats_of(module)
    epsilons = [v for name, v in constants.items() if 0 < v < 1e-2]
    epsilons = list(dict.fromkeys([*epsilons, *(e for e in _DEFAULT_EPS if not epsilons)]))
    groups = [1]
    for value in (int(v) for v in constants.values()):
        groups += [g for g in (value, width // value if value else 0) if 1 < g < width and width % g == 0]
    orders = (
        [("before", "silu"), ("after", "silu"), ("before", "sigmoid"), ("after", "sigmoid")] if gated else [("", "")]
    )
    for eps in epsilons:
        for count in dict.fromkeys(groups):
            for order, act in orders:
                for kind in ("rms_norm", "layer_norm"):
                    for offset in (0.0, 1.0) if weight else (0.0,):
                        for casting in ("llama", "gemma") if weight or bias else ("llama",):
                            what = dict(
                                kind=kind, eps=eps, casting=casting, offset=offset, weight=bool(weight),
                                bias=bool(bias), groups=count, gate=order, act=act or "silu",
                            )  # fmt: skip
                            yield norm(**what), what | {"weight": weight, "bias": bias, "size": width}
