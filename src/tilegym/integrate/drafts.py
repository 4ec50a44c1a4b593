"""Draft Definitions, in FlashInfer-Bench's JSON, of what research finds."""

import re
from typing import Any

import torch
from torch import nn

from tilegym.integrate.findings import Finding
from tilegym.integrate.formulas import Formula
from tilegym.integrate.requirement import Source

_VARIABLE = {"M": "rows", "B": "batch", "S": "tokens", "T": "tokens", "Sq": "queries", "Skv": "keys and values"}
_MANY_SIZES = ("linear",)  # one requirement for layers of many sizes


def constants(finding: Finding, module: nn.Module) -> dict[str, int]:
    """The sizes of the axes that are the same in every call of the part in ``module``."""
    if finding.kind in _MANY_SIZES:
        return {}
    formula, found = finding.formula, {}
    for name, axes in formula.inputs.items():
        weight = _operand(module, name, finding)
        if isinstance(weight, torch.Tensor) and axes is not None and weight.ndim == len(axes):
            found |= dict(zip(axes, weight.shape, strict=True))
    said = finding.parameters
    if finding.kind in ("attention", "gated_delta_rule"):
        sizes = {"Hq": "heads", "Hkv": "kv_heads", "D": "head_dim", "Dv": "value_dim"}
        found |= {axis: said[name] for axis, name in sizes.items() if said.get(name)}
    elif finding.kind == "rope":
        held = said["rotated"] // (2 if said["angles"] in ("half", "complex") else 1)
        found |= {"D": round(said["rotated"] / said["factor"]), "C": held}
    elif said.get("size"):
        found["N"] = said["size"]
    return {axis: int(size) for axis, size in found.items() if axis in _axes(formula)}


def _operand(module: nn.Module, name: str, finding: Finding) -> Any:
    """The parameter that a formula's input stands for: by role, or by role and "_weight" or "_bias"."""
    if finding.kind in ("rope", "attention", "causal_conv1d", "gated_delta_rule"):
        return None
    path = finding.roles.get(name)
    if path is None:
        role, _, last = name.rpartition("_")
        path = f"{finding.roles[role]}.{last}" if role in finding.roles else ""
    for part in path.split(".") if path else ():
        module = getattr(module, part, None)
    return module if path else None


def _axes(formula: Formula) -> dict[str, None]:
    shapes = [*formula.inputs.values(), *formula.outputs.values()]
    return dict.fromkeys(axis for shape in shapes if shape is not None for axis in shape)


def draft(
    finding: Finding, sizes: dict[str, int], model_type: str, dtype: str, source: Source | None, op: str
) -> dict[str, Any]:
    """The Definition of a finding.

    Args:
        sizes: of the constant axes.
        dtype: of the model.
        source: what is written into the ``# Source:`` line.
        op: the op of TileGym, for the tags.
    """
    formula = finding.formula
    axes: dict[str, Any] = {}
    for axis in _axes(formula):
        if axis in sizes:
            axes[axis] = {"type": "const", "value": sizes[axis]}
        else:
            axes[axis] = {"type": "var"} | ({"description": _VARIABLE[axis]} if axis in _VARIABLE else {})

    def spec(name: str, shape: tuple[str, ...] | None) -> dict[str, Any]:
        return {"shape": None if shape is None else list(shape), "dtype": formula.dtypes.get(name, dtype)}

    where = source.url or f"{source.file}#L{source.first}-L{source.last}" if source else "unknown"
    flags = [] if source and source.immutable else ["source:not-a-commit"]
    said = {name: value for name, value in finding.parameters.items() if value not in (None, False, "", 1.0)}
    return {
        "name": definition_name(finding, sizes, model_type),
        "op_type": formula.op_type,
        "description": f"{finding.kind} of {model_type}: {', '.join(f'{k} {v}' for k, v in said.items())}",
        "tags": ["stage:draft", f"model:{model_type}", *([f"op:{op}"] if op else []), *flags],
        "axes": axes,
        "inputs": {name: spec(name, shape) for name, shape in formula.inputs.items()},
        "outputs": {name: spec(name, shape) for name, shape in formula.outputs.items()},
        "constraints": list(formula.constraints),
        "reference": f"# Source: {where}\n{formula.code}",
    }


def definition_name(finding: Finding, sizes: dict[str, int], model_type: str) -> str:
    """A name that says what, whose, and of which size."""
    parts = [model_type, finding.kind]
    for name in ("form", "activation", "style"):
        if finding.parameters.get(name):
            parts.append(str(finding.parameters[name]))
    if finding.parameters.get("window"):
        parts.append(f"w{finding.parameters['window']}")
    parts += [f"{axis.lower()}{size}" for axis, size in sizes.items()]
    return re.sub(r"[^a-z0-9_]+", "_", "_".join(parts).lower())
