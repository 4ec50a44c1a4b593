"""Regions whose results lie over different rows, as of queries and of fewer keys: regions beside each other."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from tilegym.autokernel.generate.errors import Unsupported
from tilegym.autokernel.generate.graph import Builder
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import in_order
from tilegym.autokernel.generate.graph import structure
from tilegym.autokernel.generate.importer import Importer
from tilegym.autokernel.generate.nodes import results_of
from tilegym.autokernel.generate.nodes import sizes
from tilegym.autokernel.generate.operations import evaluate


def read_program(
    program: ExportedProgram, names: Sequence[str], inputs: Sequence[Any], dtype: torch.dtype, name: str
) -> Region:
    """Reads a region; if that cannot be done at once, the results of each leading sizes by themselves.

    Raises:
        Unsupported: it is none that kernels are generated for.
    """
    groups: dict[tuple, list[int]] = {}
    for i, node in enumerate(results_of(program)):
        groups.setdefault(sizes(node)[:-1], []).append(i)
    try:
        return Importer(program, names, inputs, dtype, name).region()
    except Unsupported:
        if len(groups) < 2 or list(groups.values()) != [[i] for i in range(len(groups))]:
            raise
    parts: list[tuple[Region, list[str]]] = []
    for chosen in groups.values():
        part = Importer(program, names, inputs, dtype, name, chosen).region()
        arguments = list(part.signature)
        same = next((p for p, _ in parts if _shape_of(p) == _shape_of(part)), None)
        parts.append((same or part, arguments))
    whole = Region(name, {}, [o for p, _ in parts for o in p.outputs], list(names), Builder(evaluate), dtype)
    whole.parts = parts
    whole.width = max(p.width for p, _ in parts)
    for number, part in enumerate(whole.different_parts, 1):
        calls = [arguments for p, arguments in parts if p is part]
        others = {a for p, arguments in parts if p is not part for a in arguments}
        part.name = f"{name}_{next((a for a in calls[0] if a not in others), number)}" if others else f"{name}_each"
        if len(calls) > 1:
            _rename(part, [old for old, *others in zip(*calls, strict=True) if any(o != old for o in others)])
    return whole


def _shape_of(region: Region) -> str:
    """A text that is equal for regions that differ in nothing but names."""
    like = region.outputs[0].like
    inputs = [
        (v.dtype, v.width, v.shape == like.shape, v.shape[:-1] == like.shape[:-1]) for v in region.inputs.values()
    ]
    text = f"{structure(region)} {region.views} {inputs} {region.numbers} {region.outputs[0].dtype}"
    for i, name in enumerate((*region.signature, *(o.name for o in region.outputs))):
        text = re.sub(rf"\b{name}\b", f"#{i}", text)
    return text


def _rename(region: Region, names: list[str]) -> None:
    """Gives inputs that are not always the same the names x, and the results the names y."""
    new = {n: "x" if len(names) == 1 else f"x{i}" for i, n in enumerate(names)}
    new |= {o.name: "y" if len(region.outputs) == 1 else f"y{i}" for i, o in enumerate(region.outputs)}
    if set(new.values()) & set(region.signature):
        return
    for value in (*region.values, *region.inputs.values()):
        value.hint = new.get(value.hint, value.hint)
    for output in region.outputs:
        output.name = new[output.name]
    region.inputs = {new.get(n, n): v for n, v in region.inputs.items()}
    region.signature = [new.get(n, n) for n in region.signature]
    region.views = [re.sub(r"\w+", lambda word: new.get(word[0], word[0]), view) for view in region.views]
    region.cuts = {
        new.get(n, n): dataclasses.replace(c, source=new.get(c.source, c.source)) for n, c in region.cuts.items()
    }
    region.inputs = in_order(region)
