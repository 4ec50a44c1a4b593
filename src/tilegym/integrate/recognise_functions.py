"""Recognises functions of modeling files by the calls that a trace holds: rotations, convolutions, linear attention."""

from collections.abc import Iterator
from typing import Any

import torch

from tilegym.integrate import formulas_sequence as formulas
from tilegym.integrate.formulas import ACTIVATIONS
from tilegym.integrate.formulas import Formula
from tilegym.integrate.probe import Match
from tilegym.integrate.probe import attempt
from tilegym.integrate.probe import best
from tilegym.integrate.trace import Call


def _tensor_arguments(call: Call) -> dict[str, torch.Tensor]:
    return {name: value for name, value in call.values.items() if isinstance(value, torch.Tensor)}


def recognise_rope(call: Call) -> Match | None:
    """A rotation of one or two tensors by angles that come as cos and sin, or as complex numbers.

    ``what`` has the formula's parameters and, under "arguments", which parameter of the function is which.
    """
    given = _tensor_arguments(call)
    floats = {name: t for name, t in given.items() if t.is_floating_point() and t.ndim >= 2}
    turns = {name: t for name, t in given.items() if t.is_complex()}
    names = list(floats)
    for count in (2, 1):
        rotated, rest = names[:count], names[count:]
        if len(rotated) < count or any(floats[n].ndim != 4 or floats[n].shape[-1] % 2 for n in rotated):
            continue
        if turns:
            orders = [(next(iter(turns)),)]
        elif len(rest) >= 2 and floats[rest[0]].shape == floats[rest[1]].shape:
            orders = [(rest[0], rest[1]), (rest[1], rest[0])]
        else:
            continue
        roles = ("q", "k")[:count] if count == 2 else ("x",)
        for angles in orders:
            keys = ("freqs",) if turns else ("cos", "sin")
            arguments = dict(zip(roles, rotated, strict=True)) | dict(zip(keys, angles, strict=True))
            match = _match_rope(call, given, arguments, roles)
            if match:
                return match
    return None


def _match_rope(call: Call, given: dict[str, torch.Tensor], arguments: dict[str, str], roles: tuple) -> Match | None:
    angle = given[arguments.get("cos", arguments.get("freqs"))]
    tensors = {role: given[name] for role, name in arguments.items()}
    outputs = {torch.float32: call.output}
    low = {
        n: v.to(torch.bfloat16) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in call.values.items()
    }
    again = attempt(lambda: call.callee(**low))
    if again is not None:
        outputs[torch.bfloat16] = again

    def inputs(formula: Formula, what: Any, dtype: torch.dtype) -> dict[str, Any]:
        return {role: t.to(dtype) if t.is_floating_point() else t for role, t in tensors.items()}

    match = best(outputs, _rotations(tensors[roles[0]], angle, roles), inputs)
    return match and Match(match.formula, match.errors, match.what | {"arguments": arguments})


def _rotations(x: torch.Tensor, angle: torch.Tensor, roles: tuple) -> Iterator[tuple[Formula, dict[str, Any]]]:
    """Rotations whose shapes fit ``x`` and the angles."""
    width, pairs = x.shape[-1], angle.shape[-1]
    if angle.is_complex():
        widths = [("complex", 2 * pairs)]
    else:
        widths = [("full", pairs), ("repeated", pairs), ("half", 2 * pairs)]
    dims: list[int | None] = [None] if angle.ndim == 4 else [1, 2] if angle.ndim == 3 else [0, 1]
    for angles, rotated in widths:
        if rotated > width or rotated % 2:
            continue
        for heads_dim in dims:
            for style in formulas.ROTATIONS:
                for casting in ("input", "float32"):
                    what = dict(style=style, angles=angles, rotated=rotated, heads_dim=heads_dim, casting=casting)
                    shared = "ONE" if angle.shape[0] == 1 and x.shape[0] != 1 else "B"
                    yield (
                        formulas.rope(**what, names=roles, shared=shared),
                        what | {"factor": rotated / width, "tensors": len(roles)},
                    )


def recognise_conv(call: Call) -> Match | None:
    """A depthwise causal convolution, over a whole sequence or as the step after a state.

    ``what`` has "form", "activation", "width" and "arguments".
    """
    given = _tensor_arguments(call)
    x = [name for name, t in given.items() if t.ndim == 3 and t.is_floating_point()]
    weight = [name for name, t in given.items() if t.ndim == 2 and t.is_floating_point()]
    bias = [name for name, t in given.items() if t.ndim == 1 and t.is_floating_point()]
    output = call.output[0] if isinstance(call.output, tuple) else call.output
    if not x or len(weight) != 1 or len(bias) > 1 or not isinstance(output, torch.Tensor):
        return None
    arguments = {"x": x[0], "weight": weight[0]} | ({"bias": bias[0]} if bias else {})
    form = "update" if len(x) > 1 else "full"
    if form == "update":
        arguments["state"] = x[1]
    values = {role: given[name] for role, name in arguments.items()}

    def candidates() -> Iterator[tuple[Formula, dict[str, Any]]]:
        for act in ("identity", *(a for a in ACTIVATIONS if a != "identity")):
            what = {"form": form, "activation": act, "width": values["weight"].shape[1], "arguments": arguments}
            yield formulas.causal_conv1d(form, act, bool(bias)), what

    return best({torch.float32: output}, candidates(), lambda f, w, d: {n: values[n] for n in f.inputs})


def recognise_delta_rule(call: Call) -> Match | None:
    """The gated delta rule in chunks or token by token; ``what`` has "l2norm", "per_channel", "state", "arguments"."""
    given = {name: t for name, t in _tensor_arguments(call).items() if t.is_floating_point()}
    output = call.output[0] if isinstance(call.output, tuple) else call.output
    names = [name for name, t in given.items() if t.ndim in (3, 4)]
    if len(names) < 5 or not isinstance(output, torch.Tensor) or output.ndim != 4:
        return None
    state = names[5] if len(names) > 5 else ""
    arguments = dict(zip(("q", "k", "v", "g", "beta"), names, strict=False)) | ({"state": state} if state else {})
    values = {role: given[name] for role, name in arguments.items()}
    per_channel = values["g"].ndim == 4
    candidates = (
        (
            formulas.gated_delta_rule(l2norm, per_channel, bool(state)),
            {"l2norm": l2norm, "per_channel": per_channel, "state": bool(state), "arguments": arguments},
        )
        for l2norm in (True, False)
    )
    # fp32 in another order over the whole sequence.
    return best({torch.float32: output}, candidates, lambda f, w, d: {n: values[n] for n in f.inputs})
