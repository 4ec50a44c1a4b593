"""Recognises linear layers, activations, and MLPs: which linear is the gate, how weights are packed, what activates."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tilegym.integrate import formulas
from tilegym.integrate.formulas import ACTIVATIONS
from tilegym.integrate.formulas import Formula
from tilegym.integrate.formulas import Gate
from tilegym.integrate.probe import DTYPES
from tilegym.integrate.probe import Match
from tilegym.integrate.probe import attempt
from tilegym.integrate.probe import best
from tilegym.integrate.probe import floats_of
from tilegym.integrate.probe import isolated
from tilegym.integrate.probe import numbers
from tilegym.integrate.probe import own_tensors


def recognise_linear(module: nn.Module) -> Match | None:
    """``x @ weight.T + bias`` by a module without children; ``what`` is {"bias", "transposed"}."""
    own = own_tensors(module)
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.ndim != 2 or len(own) != 1 + (bias is not None) or any(True for _ in module.children()):
        return None
    twins = {dtype: isolated(module, dtype) for dtype in DTYPES}

    for transposed in (False, True):
        x = numbers(3, 5, weight.shape[0 if transposed else 1])
        outputs = {dtype: attempt(lambda t=twins[dtype], x=x.to(dtype): t(x)) for dtype in DTYPES}
        if all(isinstance(output, torch.Tensor) for output in outputs.values()):
            formula = formulas.linear(bias is not None, transposed)
            what = {"bias": bias is not None, "transposed": transposed}
            match = best(
                outputs,
                [(formula, what)],
                lambda f, w, d, x=x: {"x": x.to(d), **{n: own_tensors(twins[d])[n] for n in f.inputs if n != "x"}},
            )
            if match:
                return match
    return None


def recognise_activation(module: nn.Module) -> Match | None:
    """An elementwise function without weights; ``what`` is its name in ``ACTIVATIONS``."""
    if own_tensors(module) or any(True for _ in module.children()):
        return None
    x = numbers(7, 16, scale=3.0)
    outputs = {dtype: attempt(lambda d=dtype: module.__class__.forward(module, x.to(d))) for dtype in DTYPES}
    if not all(isinstance(output, torch.Tensor) for output in outputs.values()):
        return None
    names = [name for name in ACTIVATIONS if name != "identity"]
    return best(outputs, ((formulas.elementwise(n), n) for n in names), lambda f, w, d: {"x": x.to(d)})


def recognise_mlp(module: nn.Module, linears: dict[str, bool], width: int) -> Match | None:
    """A gated or plain MLP over inputs of ``width``.

    Args:
        linears: the linear layers below the module, by path, and whether their weights are transposed.

    Returns:
        A match whose ``what`` has "roles" (role to path) and the formula's parameters.
    """
    if not 2 <= len(linears) <= 3 or len(set(linears.values())) != 1:
        return None
    if own_tensors(module) or width not in {_widths(module.get_submodule(p), t)[0] for p, t in linears.items()}:
        return None
    transposed = next(iter(linears.values()))
    # Weights and inputs so large that clamps at 5 to 10 come into effect.
    x = numbers(3, 11, width, scale=2.0)
    twins = {dtype: isolated(module, dtype, scale=2.5) for dtype in DTYPES}
    outputs = {dtype: attempt(lambda d=dtype: twins[d](x.to(d))) for dtype in DTYPES}
    if not all(isinstance(o, torch.Tensor) and o.shape == x.shape for o in outputs.values()):
        return None

    def inputs(formula: Formula, what: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        given = {"x": x.to(dtype)}
        for role, path in what["roles"].items():
            linear = twins[dtype].get_submodule(path)
            given |= {f"{role}_weight": linear.weight, f"{role}_bias": linear.bias}
        return {name: given[name] for name in formula.inputs}

    return best(outputs, _mlps(module, linears, transposed), inputs)


def _widths(linear: nn.Module, transposed: bool) -> tuple[int, int]:
    rows, columns = linear.weight.shape
    return (rows, columns) if transposed else (columns, rows)


def _mlps(module: nn.Module, linears: dict[str, bool], transposed: bool) -> Iterator[tuple[Formula, dict[str, Any]]]:
    widths = {path: _widths(module.get_submodule(path), transposed) for path in linears}
    biased = {path for path in linears if getattr(module.get_submodule(path), "bias", None) is not None}
    constants = floats_of(module)
    limits = [0.0, *dict.fromkeys(v for v in constants.values() if 1.0 < v <= 100.0)]
    alphas = [0.0, *dict.fromkeys(v for v in constants.values() if v != 1.0 and 0.5 < v < 4.0)]
    scales = [1.0, *dict.fromkeys(v for v in constants.values() if v not in (0.0, 1.0) and v < 100.0)]
    if len(linears) == 2:
        for up, down in itertools.permutations(linears):
            roles, biases = {"up": up, "down": down}, ()
            if widths[up][1] == widths[down][0]:
                biases = tuple(role for role, path in roles.items() if path in biased)
                for act in ACTIVATIONS:
                    yield formulas.mlp(act, biases, transposed), {"roles": roles, "activation": act}
            elif widths[up][1] == 2 * widths[down][0] and not transposed:
                roles = {"gate_up": up, "down": down}
                biases = tuple(role for role, path in roles.items() if path in biased)
                layouts = itertools.product(("concatenated", "interleaved"), (False, True))
                for limit, alpha, shift, (packed, up_first), act in itertools.product(
                    limits, alphas, (0.0, 1.0), layouts, ACTIVATIONS
                ):
                    if alpha and act != "silu":
                        continue
                    gate = Gate(act, packed, up_first, limit, alpha, shift)
                    yield formulas.gated_mlp(gate, biases), {"roles": roles, **_said(gate)}
    elif not transposed:
        for gate_path, up, down in itertools.permutations(linears):
            if widths[gate_path] != widths[up] or widths[up][1] != widths[down][0]:
                continue
            roles = {"gate": gate_path, "up": up, "down": down}
            biases = tuple(role for role, path in roles.items() if path in biased)
            for limit, alpha, act in itertools.product(limits, alphas, ACTIVATIONS):
                gate = Gate(act, limit=limit, alpha=alpha)
                yield formulas.gated_mlp(gate, biases), {"roles": roles, **_said(gate)}
            for act, scale, last in itertools.product(ACTIVATIONS, scales, scales):
                if (scale, last) != (1.0, 1.0):
                    what = {"roles": roles, **_said(Gate(act))}
                    what |= {n: v for n, v in (("gate_scale", scale), ("down_scale", last)) if v != 1.0}
                    yield formulas.gated_mlp(Gate(act), biases, scale, last), what


def _said(gate: Gate) -> dict[str, Any]:
    """A gate's parameters as a requirement has them."""
    said: dict[str, Any] = {"activation": gate.act}
    if gate.packed:
        said |= {"packed": gate.packed, "order": "up, gate" if gate.up_first else "gate, up"}
    return said | {name: v for name in ("limit", "alpha", "shift") if (v := getattr(gate, name))}
