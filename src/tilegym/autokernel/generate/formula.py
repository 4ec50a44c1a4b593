"""A region as formulas, for docstrings: what is computed, without tiles and without where it is rounded."""

import re

from tilegym.autokernel.generate.body import Body
from tilegym.autokernel.generate.body import array_of
from tilegym.autokernel.generate.graph import REDUCTIONS
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.operations import ATOM
from tilegym.autokernel.generate.operations import COMPARISON

PLAIN = (
    (r"over_one_plus_exp\(1\.0, (.*), \S+\)$", r"sigmoid(\1)"),
    (r"over_one_plus_exp\((\w+), \1, \S+\)$", r"silu(\1)"),
    (r"gelu\((.*), \S+, (True|False)\)$", r"gelu(\1)"),
    (r"ct\.where\((.*) <= 0\.0, 0\.0, \1\)$", r"relu(\1)"),
    (r" \* \(1\.0 / (\w)\)", r" / \1"),
    (r", propagate_nan=True", ""),
    (r"ct\.", ""),
)


class _Formula(Body):
    def read(self, value: Value) -> str:
        if value.op == "shift":
            return f"{array_of(value).hint}[column {'+' if value.number > 0 else '-'} {abs(int(value.number))}]"
        return value.hint

    def keep(self, value: Value) -> None:
        if value.op != "float":
            super().keep(value)

    def _expression(self, value: Value, narrow: bool) -> tuple[str, int]:
        if value.op in ("round", "detach", "float"):
            return self.scope[value.args[0]]
        if value.op == "before":
            return f"column < {int(value.number)}", COMPARISON
        if value.op in REDUCTIONS:
            return f"{value.op}({self.text(value.args[0])})", ATOM
        text, binds = super()._expression(value, narrow)
        for pattern, plain in PLAIN:
            text = re.sub(pattern, plain, text)
        return text, binds


def formulas(region: Region) -> list[str]:
    """Assignments, the last ones to the region's outputs."""
    body = _Formula([*region.inputs, *(o.name for o in region.outputs)], lambda value: value.hint, None, False)
    body.indent = 0
    if region.left is not None:
        body.columns = "K"
        body.emit([region.left])
        body.columns = "N"
    for product in region.linears:
        body.scope[product.value] = f"linear({body.text(region.left)}, {product.weight})", ATOM
    body.emit(o.value for o in region.outputs)
    lines = [*body.lines, *(f"{o.name} = {body.text(o.value)}" for o in region.outputs)]
    for output in region.outputs:
        text = body.text(output.value)
        if text.isidentifier() and lines.count(f"{output.name} = {text}") == 1 and text not in region.inputs:
            lines.remove(f"{output.name} = {text}")  # it has a name of its own, which becomes the result's
            lines = [re.sub(rf"\b{text}\b", output.name, line) for line in lines]
    return [line for text in lines for line in text.split("\n")]
