"""The regions of a model: the stretches of its forwards that are plain tensor computation, and how to replace them.

A forward is cut at whatever is more than computation: calls of parts with weights of their own (projections,
attention), caches, branches. What lies between two cuts is a region. Calls of parts that only compute are followed, so
that a residual addition and the norm behind it are one region. Linear layers are regions of their own. Only the source
of the modeling file is read; nothing is traced, so that a region is right for all shapes.
"""

import ast
import copy
import inspect
import types
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import nn

from tilegym.autokernel.purity import VIEWS
from tilegym.autokernel.purity import Impure
from tilegym.autokernel.purity import Reader
from tilegym.autokernel.purity import function_tree
from tilegym.autokernel.purity import targets_of
from tilegym.integrate.source_regions import source_of
from tilegym.integrate.trace import modeling_files
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

_RESULT = "_result"
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
        index: its place in the forward; None for a layer of torch's that is a region as a whole.
    """

    key: str
    modules: list[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    url: str
    index: int | None = None
    signature: tuple = field(default=(), repr=False)


@dataclass
class _Piece:
    """Statements of a forward: a region's, or others. ``pure`` are the region's in its own terms."""

    statements: list[ast.stmt]
    pure: list[ast.stmt] | None = None
    computes: bool = False
    arguments: tuple[str, ...] = ()
    tensors: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    returns: bool = False


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
    pieces = pieces_of(module)
    for index, piece in enumerate(pieces):
        if piece.pure is None:
            continue
        shapes = tuple((tuple(t.shape), t.dtype) for t in (_tensor(module, p) for p in piece.tensors))
        inlined.update(f"{path}.{p.rpartition('.')[0]}" for p in piece.tensors if "." in p)
        source = _source(piece)
        yield (type(module), index, shapes, source), lambda p=piece, i=index, s=source: _code_region(module, p, i, s)


def _linear_region(module: nn.Linear) -> Region:
    names = ("x", "weight", "bias") if module.bias is not None else ("x", "weight")
    source = "import torch\n\n\n" + LINEAR.format(bias=", bias" * (module.bias is not None)) + "\n"
    return Region("", [], names, ("y",), source, source_of(nn.Linear.forward).url)


def _code_region(module: nn.Module, piece: _Piece, index: int, source: str) -> tuple[str, Region]:
    whole = source_of(type(module))
    lines = [n.lineno for s in piece.statements for n in ast.walk(s) if getattr(n, "lineno", 0)]
    ends = [n.end_lineno for s in piece.statements for n in ast.walk(s) if getattr(n, "lineno", 0)]
    first, last = min(lines), max(ends)
    base = (whole.url or whole.file).partition("#")[0]
    region = Region(
        "", [], (*piece.arguments, *piece.tensors.values()), piece.outputs, source, f"{base}#L{first}-L{last}", index
    )
    return f"{type(module).__module__}.{type(module).__qualname__}:{first}-{last}", region


def _source(piece: _Piece) -> str:
    names = [*piece.arguments, *piece.tensors.values()]
    lines = [ast.unparse(ast.fix_missing_locations(s)) for s in piece.pure]
    results = []
    for name in piece.outputs:
        result = "y" if name.startswith("_") else f"{name}_out"
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


def pieces_of(module: nn.Module) -> list[_Piece]:
    """The forward of ``module`` cut into pieces; empty if it cannot be rewritten."""
    wrapped = type(module).forward
    forward = inspect.unwrap(wrapped)
    if getattr(forward, "__closure__", None) or _rewrapped(wrapped, forward, forward) is None:
        return []
    try:
        tree = function_tree(forward)
    except Impure:
        return []
    cutter = _Cutter(forward, module)
    for statement in tree.body:
        cutter.add(statement)
    return cutter.finish()


class _Cutter:
    """Takes the statements of a forward one by one, and groups them."""

    def __init__(self, forward: Callable, module: nn.Module) -> None:
        self.forward, self.module = forward, module
        self.temporaries = 0
        self.steps: list[tuple[ast.stmt, bool]] = []
        self.names = set(forward.__code__.co_varnames[1:])  # without the instance

    def _reader(self) -> Reader:
        reader = Reader(self.forward, self.module)
        reader.locals |= self.names
        return reader

    def _pure(self, node: ast.expr) -> bool:
        try:
            self._reader().read(node)
        except Impure:
            return False
        return True

    def add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.AnnAssign) and statement.simple and statement.value is not None:
            statement = ast.copy_location(ast.Assign([statement.target], statement.value), statement)
        simple = isinstance(statement, ast.Return) and statement.value is not None or targets_of(statement)
        if not simple:
            self.steps.append((statement, False))
            return
        value = self._lift(statement.value)
        pure = self._pure(value)
        if isinstance(statement, ast.Return):
            if pure:
                self._emit(_assign(_RESULT, value), True)
                self.names.add(_RESULT)
                value = ast.copy_location(ast.Name(_RESULT, ast.Load()), value)
            self._emit(ast.copy_location(ast.Return(value), statement), False)
            return
        self._emit(ast.copy_location(ast.Assign(statement.targets, value), statement), pure)

    def _emit(self, statement: ast.stmt, pure: bool) -> None:
        self.steps.append((ast.fix_missing_locations(statement), pure))

    def _lift(self, node: ast.expr) -> ast.expr:
        """``node`` with calls that are cuts assigned to temporaries before it, and computation in their arguments too.

        Such calls keep their order; what is pure may move past them.
        """
        if self._pure(node) or not _liftable(node):
            return node
        if isinstance(node, ast.Call):
            node = copy.copy(node)
            node.args = [self._argument(a) for a in node.args]
            node.keywords = [ast.copy_location(ast.keyword(k.arg, self._argument(k.value)), k) for k in node.keywords]
            if isinstance(node.func, ast.Attribute):
                node.func = copy.copy(node.func)
                node.func.value = self._part(node.func.value)
            return node
        node = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and not isinstance(value, ast.Slice):
                setattr(node, name, self._part(value))
            elif isinstance(value, list) and all(isinstance(v, ast.expr) for v in value):
                setattr(node, name, [self._part(v) for v in value])
        return node

    def _part(self, node: ast.expr) -> ast.expr:
        """A part of an expression: a cut within it becomes a temporary."""
        if self._pure(node) or not _liftable(node):
            return node
        lifted = self._lift(node)
        return self._temporary(lifted, False) if isinstance(lifted, ast.Call) and not self._pure(lifted) else lifted

    def _argument(self, node: ast.expr) -> ast.expr:
        """An argument of a cut: computation in it becomes a temporary."""
        if isinstance(node, ast.Starred):
            return node
        lifted = self._part(node)
        reader = self._reader()
        try:
            reader.read(lifted)
        except Impure:
            return lifted
        return self._temporary(lifted, True) if reader.computes else lifted

    def _temporary(self, value: ast.expr, pure: bool) -> ast.expr:
        name = f"_value_{self.temporaries}"
        self.temporaries += 1
        self.names.add(name)
        self._emit(_assign(name, value), pure)
        return ast.copy_location(ast.Name(name, ast.Load()), value)

    def finish(self) -> list[_Piece]:
        pieces: list[_Piece] = []
        run: list[ast.stmt] = []
        for statement, pure in (*self.steps, (None, False)):
            if pure:
                run.append(statement)
                continue
            pieces += self._region(run)
            run = []
            if statement is not None:
                pieces.append(_Piece([statement]))
        for index, piece in enumerate(pieces):
            if piece.pure is not None:
                later = {n for p in pieces[index + 1 :] for s in p.statements for n in _loads(s)}
                bound = dict.fromkeys(n for s in piece.statements for n in targets_of(s))
                piece.outputs = tuple(n for n in bound if n in later)
                if not piece.outputs:
                    piece.pure = None
        return pieces

    def _region(self, statements: list[ast.stmt]) -> list[_Piece]:
        """The pieces of a run of pure statements: views at its ends are no part of the region."""
        before, after = [], []
        while statements and _is_view(statements[0]):
            before.append(_Piece([statements.pop(0)]))
        while statements and _is_view(statements[-1]):
            after.insert(0, _Piece([statements.pop()]))
        if not statements:
            return [*before, *after]
        reader = self._reader()
        pure = [reader.statement(s) for s in statements]
        if not reader.computes:
            return [*before, _Piece(statements), *after]
        bound: set[str] = set()
        arguments: dict[str, None] = {}
        for statement in statements:
            arguments |= dict.fromkeys(n for n in _loads(statement) if n in reader.locals and n not in bound)
            bound |= set(targets_of(statement))
        piece = _Piece(statements, pure, True, tuple(arguments), dict(reader.tensors), dict(reader.helpers))
        return [*before, piece, *after]


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), value)


def _liftable(node: ast.expr) -> bool:
    """Whether all parts of ``node`` are evaluated, once, from left to right."""
    return isinstance(node, (ast.Call, ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript, ast.Tuple))


def _loads(statement: ast.stmt) -> list[str]:
    nodes = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return [n.id for n in sorted(nodes, key=lambda n: (n.lineno, n.col_offset))]


def _is_view(statement: ast.stmt) -> bool:
    """Whether an assignment only renames, unpacks or looks at memory in another way; sizes and dtypes do not count."""
    value = statement.value
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in VIEWS:
        value = value.func.value
    return isinstance(value, (ast.Name, ast.Tuple))


def install(model: nn.Module, chosen: dict[str, Callable], maker: str = __name__) -> PatchSet:
    """Puts functions in the place of regions: ``chosen`` has them by the region's key.

    Each takes the region's inputs by position and returns its output, or a tuple of its outputs.

    Returns:
        The patches, which can be reverted.
    """
    patches = PatchSet(model, maker=maker)
    by_module: dict[str, list[tuple[Region, Callable]]] = {}
    for region in find_regions(model):
        if region.key in chosen:
            for path in region.modules:
                by_module.setdefault(path, []).append((region, chosen[region.key]))
    with patches.all_or_nothing():
        for path, replaced in by_module.items():
            module = model.get_submodule(path)
            entry = Entry(path, ", ".join(region.key for region, _ in replaced), "cutile")
            patches.replace_forward(module, _rewritten(module, replaced), entry)
    return patches


def _rewritten(module: nn.Module, replaced: list[tuple[Region, Callable]]) -> Callable:
    """A forward like the module's own in which regions are calls of functions."""
    if replaced[0][0].index is None:
        function, biased = replaced[0][1], module.bias is not None
        return lambda self, input: function(input, self.weight, *((self.bias,) if biased else ()))
    forward = inspect.unwrap(type(module).forward)
    tree = function_tree(forward)
    by_index = {region.index: number for number, (region, _) in enumerate(replaced)}
    own, body = next(iter(inspect.signature(forward).parameters)), []
    for index, piece in enumerate(pieces_of(module)):
        if index not in by_index:
            body += piece.statements
            continue
        arguments = [*piece.arguments, *(f"{own}.{path}" for path in piece.tensors)]
        call = f"{', '.join(piece.outputs)} = _region_{by_index[index]}({', '.join(arguments)})"
        body += ast.parse(call).body
    tree.body, tree.decorator_list = body, []
    for argument in (*tree.args.args, *tree.args.kwonlyargs, tree.args.vararg, tree.args.kwarg):
        if argument is not None:
            argument.annotation = None
    tree.returns = None
    names = dict(forward.__globals__) | {f"_region_{n}": function for n, (_, function) in enumerate(replaced)}
    code = compile(ast.fix_missing_locations(ast.Module([tree], [])), f"<regions of {type(module).__name__}>", "exec")
    exec(code, names)
    return _rewrapped(type(module).forward, forward, names[tree.name])


def _rewrapped(wrapper: Callable, inner: Callable, new: Callable) -> Callable | None:
    """``wrapper``, a decorated ``inner``, with ``new`` in it; None if the decorators do not hold it in a cell."""
    if wrapper is inner:
        return new
    if not isinstance(wrapper, types.FunctionType):
        return None
    cells, found = [], False
    for cell in wrapper.__closure__ or ():
        value = cell.cell_contents
        inside = value is not wrapper and isinstance(value, types.FunctionType) and inspect.unwrap(value) is inner
        replacement = _rewrapped(value, inner, new) if inside else None
        cells.append(cell if replacement is None else types.CellType(replacement))
        found = found or replacement is not None
    if not found:
        return None
    copied = types.FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells)
    )
    copied.__kwdefaults__ = wrapper.__kwdefaults__
    copied.__dict__.update(wrapper.__dict__)
    return copied
