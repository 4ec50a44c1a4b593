"""The regions of a model: the stretches of its forwards that are plain tensor computation, and how to replace them.

A forward is cut at whatever is more than computation: calls of parts with weights of their own (projections,
attention), caches, branches. What lies between two cuts is a region. Calls of parts that only compute are followed, so
that a residual addition and the norm behind it are one region. Linear layers are regions of their own; with the regions
before and behind them, as far as none needs another's result, they are larger ones, which compete with their parts.
Only the source of the modeling file is read; nothing is traced, so that a region is right for all shapes.
"""

import ast
import inspect
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import nn

from tilegym.autokernel.cutting import Piece
from tilegym.autokernel.cutting import cut_of
from tilegym.autokernel.cutting import rewrapped
from tilegym.autokernel.purity import function_tree
from tilegym.integrate.source_regions import source_of
from tilegym.integrate.trace import modeling_files
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

LINEAR = """def run(x, weight{bias}):
    y = torch.nn.functional.linear(x, weight{bias})
    return y"""


@dataclass
class Region:
    """A stretch of computation, the same in all ``modules``.

    Attributes:
        key: unique in the model, the same in every process: class, lines, and which group of the class's instances.
        modules: the paths of the modules in whose forward it stands.
        inputs: the names of its inputs, in order: of ``run``'s parameters.
        outputs: the names of what it returns.
        source: Python: helpers and ``run``.
        url: where it is written.
        index, last: the first and the last of its pieces in the forward; None for a layer of torch's that is a region
            as a whole.
    """

    key: str
    modules: list[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    url: str
    index: int | None = None
    last: int | None = None
    signature: tuple = field(default=(), repr=False)

    @property
    def grouped(self) -> bool:
        """Whether there are regions inside it."""
        return self.index != self.last


def find_regions(model: nn.Module) -> list[Region]:
    """The regions of ``model``, in the order of its modules."""
    found: dict[tuple, Region] = {}
    inlined: set[str] = set()
    own = {file.__name__ for file in modeling_files(model)}
    counts: dict[str, int] = {}
    for path, module in model.named_modules():
        if path in inlined:
            continue
        for signature, make in _regions_of(path, module, own, inlined):
            if signature not in found:
                base, region = make()
                counts[base] = counts.get(base, -1) + 1
                region.key, region.signature = f"{base}@{counts[base]}", signature
                found[signature] = region
            found[signature].modules.append(path)
    return list(found.values())


def _regions_of(path: str, module: nn.Module, own: set[str], inlined: set[str]) -> Iterator[tuple[tuple, Callable]]:
    if type(module) is nn.Linear:
        weight = module.weight
        signature = ("linear", tuple(weight.shape), weight.dtype, module.bias is not None)
        yield signature, lambda: ("torch.nn.Linear", _linear_region(module))
        return
    if type(module).__module__ not in own or "forward" in vars(module):
        return
    cut = cut_of(module)
    inlined.update(f"{path}.{part}" for part in cut.parts)
    for piece in cut.pieces:
        if piece.pure is not None:
            inlined.update(f"{path}.{p.rpartition('.')[0]}" for p in piece.tensors if "." in p)
    spans = {(index, index): piece for index, piece in enumerate(cut.pieces) if piece.pure is not None}
    for span, piece in (spans | cut.groups).items():
        shapes = tuple((tuple(t.shape), t.dtype) for t in (_tensor(module, p) for p in piece.tensors))
        source = _source(piece)
        yield (type(module), span, shapes, source), lambda p=piece, i=span, s=source: _code_region(module, p, i, s)


def _linear_region(module: nn.Linear) -> Region:
    names = ("x", "weight", "bias") if module.bias is not None else ("x", "weight")
    source = "import torch\n\n\n" + LINEAR.format(bias=", bias" * (module.bias is not None)) + "\n"
    return Region("", [], names, ("y",), source, source_of(nn.Linear.forward).url)


def _code_region(module: nn.Module, piece: Piece, span: tuple[int, int], source: str) -> tuple[str, Region]:
    whole = source_of(type(module))
    tree = function_tree(inspect.unwrap(type(module).forward))
    nodes = [n for s in piece.statements for n in ast.walk(s) if getattr(n, "lineno", 0)]
    # The forward's own lines, if there are any: those of parts that were inlined stand elsewhere.
    nodes = [n for n in nodes if tree.lineno <= n.lineno <= tree.end_lineno] or nodes
    first, last = min(n.lineno for n in nodes), max(n.end_lineno for n in nodes)
    base = (whole.url or whole.file).partition("#")[0]
    region = Region(
        "", [], (*piece.arguments, *piece.tensors.values()), piece.outputs, source, f"{base}#L{first}-L{last}", *span
    )
    return f"{type(module).__module__}.{type(module).__qualname__}:{first}-{last}", region


def _source(piece: Piece) -> str:
    names = [*piece.arguments, *piece.tensors.values()]
    lines = [ast.unparse(ast.fix_missing_locations(s)) for s in piece.pure]
    results, hidden = [], [name for name in piece.outputs if name.startswith("_")]
    for name in piece.outputs:
        result = f"{name}_out" if not name.startswith("_") else "y" if len(hidden) == 1 else f"y{hidden.index(name)}"
        results.append(result)
        lines.append(f"{result} = {name}")
    body = "\n".join("    " + line for text in (*lines, f"return {', '.join(results)}") for line in text.split("\n"))
    parts = ["import torch", *piece.helpers.values(), f"def run({', '.join(names)}):\n{body}"]
    return "\n\n\n".join(parts) + "\n"


def _tensor(module: nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def install(
    model: nn.Module,
    chosen: dict[str, Callable],
    around: dict[str, Callable] | None = None,
    maker: str = __name__,
) -> PatchSet:
    """Puts functions in the place of regions: ``chosen`` has them by the region's key.

    Each takes the region's inputs by position and returns its output, or a tuple of its outputs. Where a region and one
    inside it are chosen, the larger one is taken. ``around`` has functions that return a context manager, in which the
    region runs.

    Returns:
        The patches, which can be reverted.
    """
    patches = PatchSet(model, maker=maker)
    around = around or {}
    by_module: dict[str, list[Region]] = {}
    for region in find_regions(model):
        if region.key in chosen or region.key in around:
            for path in region.modules:
                by_module.setdefault(path, []).append(region)
    # All before the first is replaced: a layer with another forward is no part of a region any more.
    forwards = {p: _rewritten(model.get_submodule(p), found, chosen, around) for p, found in by_module.items()}
    with patches.all_or_nothing():
        for path, regions in by_module.items():
            entry = Entry(path, ", ".join(region.key for region in regions if region.key in chosen), "cutile")
            patches.replace_forward(model.get_submodule(path), forwards[path], entry)
    return patches


def _rewritten(
    module: nn.Module, regions: list[Region], chosen: dict[str, Callable], around: dict[str, Callable]
) -> Callable:
    """A forward like the module's own in which regions are calls of functions."""
    if regions[0].index is None:
        function, biased = chosen[regions[0].key], module.bias is not None
        return lambda self, input: function(input, self.weight, *((self.bias,) if biased else ()))
    forward = inspect.unwrap(type(module).forward)
    tree = function_tree(forward)
    own, cut = next(iter(inspect.signature(forward).parameters)), cut_of(module)
    names: dict[str, Any] = {}
    replaced = sorted((r for r in regions if r.key in chosen), key=lambda r: r.index - r.last)  # the largest first
    by_index: dict[int, Region] = {}
    for region in replaced:
        if not any(index in by_index for index in range(region.index, region.last + 1)):
            by_index |= dict.fromkeys(range(region.index, region.last + 1), region)

    def statements(index: int) -> list[ast.stmt]:
        if index not in by_index:
            return cut.pieces[index].statements
        region = by_index[index]
        if index != region.index:
            return []
        span = (region.index, region.last)
        piece = cut.groups[span] if region.grouped else cut.pieces[index]
        arguments = [*piece.arguments, *(f"{own}.{path}" for path in piece.tensors)]
        names[f"_region_{index}"] = chosen[region.key]
        return ast.parse(f"{', '.join(piece.outputs)} = _region_{index}({', '.join(arguments)})").body

    wrapped = {r.index: r for r in regions if r.key in around}
    body, index = [], 0
    while index < len(cut.pieces):
        region = wrapped.get(index)
        last = region.last if region else index
        part = [statement for i in range(index, last + 1) for statement in statements(i)]
        if region:
            names[f"_around_{index}"] = around[region.key]
            (block,) = ast.parse(f"with _around_{index}():\n    pass").body
            block.body, part = part, [block]
        body += part
        index = last + 1
    tree.body, tree.decorator_list = body, []
    for argument in (*tree.args.args, *tree.args.kwonlyargs, tree.args.vararg, tree.args.kwarg):
        if argument is not None:
            argument.annotation = None
    tree.returns = None
    names = dict(forward.__globals__) | names
    code = compile(ast.fix_missing_locations(ast.Module([tree], [])), f"<regions of {type(module).__name__}>", "exec")
    exec(code, names)
    return rewrapped(type(module).forward, forward, names[tree.name])
