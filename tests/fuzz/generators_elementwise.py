"""Calls of the activations and of dropout."""

from typing import Any

import torch

from fuzz.comparing import Results
from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates
from fuzz.generators_common import shape_any


@generates
def swiglu(draw: Draw) -> Case:
    shape = shape_any(draw)
    return Case({"a": draw.tensor(*shape, nan=True), "b": draw.tensor(*shape, nan=True)}, ("a", "b"), rowwise=True)


@generates
def geglu(draw: Draw) -> Case:
    shape = shape_any(draw)
    args = {
        "a": draw.tensor(*shape, nan=True),
        "b": draw.tensor(*shape, nan=True),
        "approximate": draw.one("tanh", "none"),
    }
    return Case(args, ("a", "b"), rowwise=True)


@generates
def gelu(draw: Draw) -> Case:
    shape = shape_any(draw)
    if draw.chance(0.1):
        shape = ()
    args = {"x": draw.tensor(*shape, nan=True), "approximate": draw.one("tanh", "none")}

    def settle(got: Results, reference: Results, oracle: Results, args: dict[str, Any]) -> None:
        # PyTorch adds 1 to erf, of which nothing is left below -8 in fp64 either.
        if args["approximate"] == "none" and oracle["output 0"].dtype == torch.float64:
            x = args["x"].double()
            oracle["output 0"] = torch.where(x < -1, 0.5 * x * torch.erfc(x * -(0.5**0.5)), oracle["output 0"])

    return Case(args, ("x",), rowwise=True, settle=settle)


@generates
def relu(draw: Draw) -> Case:
    shape = () if draw.chance(0.1) else shape_any(draw)
    return Case({"x": draw.tensor(*shape, nan=True)}, ("x",), rowwise=True)


@generates
def sigmoid_mul(draw: Draw) -> Case:
    shape = shape_any(draw)
    gate = shape if draw.chance(0.5) else (*shape[:-1], 1)
    return Case({"x": draw.tensor(*shape, nan=True), "gate": draw.tensor(*gate, nan=True)}, ("x", "gate"), rowwise=True)


@generates
def silu_and_mul(draw: Draw) -> Case:
    shape = shape_any(draw)
    args = {"input": draw.tensor(*shape[:-1], 2 * shape[-1], nan=True)}
    if draw.chance(0.3):
        args["out"] = draw.tensor(*shape, expand=False)
        return Case(args, (), ("out",), rowwise=True)
    return Case(args, ("input",), rowwise=True)


@generates
def dropout(draw: Draw) -> Case:
    shape = () if draw.chance(0.05) else shape_any(draw)
    inplace = draw.chance(0.25)
    args = {
        "x": draw.tensor(*shape, expand=not inplace, nan=True),
        "seed": draw.data.choice([0, 1, 2**63, 2**64 - 1, draw.data.getrandbits(64)]),
        "p": draw.one(0.0, 1.0, 0.5, 0.1, 1e-9, 1 - 1e-9, draw.choices.random()),
        "training": not draw.chance(0.1),
        "inplace": inplace,
    }
    return Case(args, () if inplace else ("x",), ("x",) if inplace else (), rowwise=True)
