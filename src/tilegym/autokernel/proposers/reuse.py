"""Proposes kernels of the catalog that compute a region, with the few lines that adapt the call."""

import functools

from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task
from tilegym.bench.deadline import Late
from tilegym.bench.deadline import at_most
from tilegym.errors import InventoryError
from tilegym.inventory import BuildSpec
from tilegym.inventory import Definition
from tilegym.inventory import Match
from tilegym.inventory import Solution
from tilegym.inventory import SourceFile
from tilegym.inventory import match
from tilegym.inventory.adapters import Give
from tilegym.inventory.adapters import Take
from tilegym.inventory.adapters import View
from tilegym.inventory.schema import CUDA_TILE

_PACKAGE = "src/tilegym/"
_SECONDS = 15.0  # for the search of one region's kernel; with many inputs it would take minutes


class Reuse:
    """Goes through what the inventory finds for a Definition, the best first."""

    name = "reuse"

    def propose(self, task: Task) -> Proposal | None:
        """The best Solution that was not tried; None if there is none."""
        tried = {_target(a.files) for a in task.history if a.proposer == self.name}
        for found in _matches(task.definition.to_json()):
            proposal = adapted(task, found)
            if proposal is not None and _target(proposal.files) not in tried:
                return proposal
        return None


def _target(files: dict[str, str]) -> tuple:
    return tuple(sorted(files.values()))


@functools.lru_cache(maxsize=256)
def _matches(definition: str) -> tuple[Match, ...]:
    try:
        with at_most(_SECONDS):
            return tuple(match(Definition.from_json(definition)))
    except (InventoryError, Late):  # its reference cannot be run on made-up inputs, or there are too many ways to try
        return ()


def adapted(task: Task, found: Match) -> Proposal | None:
    """A match as a proposal: a file that calls the Solution's entry point.

    None if the call would copy or convert tensors, or the Solution is no cuTile kernel of this package.
    """
    spec, definition = found.solution.spec, task.definition
    if spec.language != CUDA_TILE or not spec.entry_file.startswith(_PACKAGE) or spec.destination_passing_style:
        return None
    adapter = found.adapter
    views = [t.view for t in adapter.takes.values()] + [g.view for g in adapter.gives.values()]
    if adapter.copies or found.assumes or any(v.dtype for v in views):
        return None
    module = spec.entry_file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    arguments = [_take(definition, take) for take in adapter.takes.values()]
    lines = [f"    result = {spec.entry_function}({', '.join(arguments)})"]
    if len(found.target.outputs) > 1:
        results = [f"result[{give.indices[0]}]" for give in adapter.gives.values()]
    else:
        results = ["result"]
    gives = zip(definition.outputs, adapter.gives.values(), results, strict=True)
    lines.append("    return " + ", ".join(_give(definition, name, give, text) for name, give, text in gives))
    name = f"{definition.name}_{found.solution.name}"
    text = (
        f'"""{definition.name}, computed by {found.solution.name}."""\n\n'
        f"from {module} import {spec.entry_function}\n\n\n"
        f"def run({', '.join(definition.inputs)}):\n" + "\n".join(lines) + "\n"
    )
    path = f"{task.folder}/kernels/{definition.name}.py"
    solution = Solution(
        name=name,
        definition=definition.name,
        author="tilegym",
        spec=BuildSpec(
            language=CUDA_TILE,
            target_hardware=spec.target_hardware,
            entry_point=f"{path}::run",
            dependencies=spec.dependencies,
            destination_passing_style=False,
        ),
        sources=[SourceFile(path=path)],
    )
    steps = "; ".join(found.steps) or "called as it is"
    return Proposal(definition, solution, {path: text}, f"{found.solution.name}, {found.kind}: {steps}")


def _take(definition: Definition, take: Take) -> str:
    if not take.names:
        if not isinstance(take.constant, str):
            return repr(take.constant)
        text = take.constant
        for axis in sorted(definition.axes, key=len, reverse=True):
            text = text.replace(axis, _size(definition, axis))
        return text
    return _viewed(take.names[0], take.view)


def _viewed(text: str, view: View) -> str:
    if view.part is not None:
        dim, index, parts = view.part
        text += f".chunk({parts}, {dim})[{index}]"
    if view.permutation is not None:
        text += f".permute({', '.join(map(str, view.permutation))})"
    if view.merged > 1:
        text += f".flatten(0, {view.merged - 1})"
    return text + ".unsqueeze(0)" * view.added


def _give(definition: Definition, name: str, give: Give, text: str) -> str:
    if give.reshaped:
        sizes = [_size(definition, axis) for axis in definition.outputs[name].shape or ()]
        text += f".reshape({', '.join(sizes)})"
    return _viewed(text, give.view)


def _size(definition: Definition, axis: str) -> str:
    """An axis's size as an expression over the inputs."""
    if axis in definition.const_axes:
        return str(definition.const_axes[axis])
    for name, spec in definition.inputs.items():
        if axis in (spec.shape or ()):
            return f"{name}.shape[{spec.shape.index(axis)}]"
    return "-1"
