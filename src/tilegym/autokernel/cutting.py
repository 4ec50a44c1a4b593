"""Cuts a forward into pieces: stretches of plain computation, linear layers, and what is more than either."""

import ast
import copy
import inspect
import types
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from torch import nn

from tilegym.autokernel.purity import VIEWS
from tilegym.autokernel.purity import Impure
from tilegym.autokernel.purity import Reader
from tilegym.autokernel.purity import function_tree
from tilegym.autokernel.purity import is_linear
from tilegym.autokernel.purity import targets_of

RESULT = "_result"


@dataclass
class Piece:
    """Statements of a forward: a region's, or others. ``pure`` are the region's in its own terms."""

    statements: list[ast.stmt]
    pure: list[ast.stmt] | None = None
    computes: bool = False
    arguments: tuple[str, ...] = ()
    tensors: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    linear: bool = False


@dataclass
class Cut:
    """A forward in pieces; ``groups``: larger regions by their first and last piece; ``parts``: what was inlined."""

    pieces: list[Piece] = field(default_factory=list)
    groups: dict[tuple[int, int], Piece] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)


def cut_of(module: nn.Module) -> Cut:
    """The forward of ``module`` cut into pieces; none if it cannot be rewritten."""
    wrapped = type(module).forward
    forward = inspect.unwrap(wrapped)
    if getattr(forward, "__closure__", None) or rewrapped(wrapped, forward, forward) is None:
        return Cut()
    try:
        tree = function_tree(forward)
    except Impure:
        return Cut()
    cutter = _Cutter(forward, module)
    for statement in tree.body:
        cutter.add(statement)
    return cutter.finish()


class _Cutter:
    """Takes the statements of a forward one by one, and groups them."""

    def __init__(self, forward: Callable, module: nn.Module) -> None:
        self.forward, self.module = forward, module
        self.temporaries = 0
        self.parts: list[str] = []
        self.steps: list[tuple[ast.stmt, bool]] = []
        self.names = set(forward.__code__.co_varnames[1:])  # without the instance

    def _reader(self, linear: bool = False) -> Reader:
        reader = Reader(self.forward, self.module, linear=linear)
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
                self._emit(_assign(RESULT, value), True)
                self.names.add(RESULT)
                value = ast.copy_location(ast.Name(RESULT, ast.Load()), value)
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
            return self._inlined(node) or node
        node = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and not isinstance(value, ast.Slice):
                setattr(node, name, self._part(value))
            elif isinstance(value, list) and all(isinstance(v, ast.expr) for v in value):
                setattr(node, name, [self._part(v) for v in value])
        return node

    def _inlined(self, node: ast.Call) -> ast.expr | None:
        """What a call gives whose module is nothing but linear layers and computation: its statements are added here.

        None if it is anything else, or its arguments are not names.
        """
        found, part = self._reader().try_static(node.func)
        if not found or node.keywords or not all(isinstance(a, ast.Name) for a in node.args):
            return None
        body = straight_line(part, type(self.module).__module__)
        if body is None or len(body.args.args) != len(node.args) + 1:
            return None
        parameters = [a.arg for a in body.args.args]
        self.parts.append(ast.unparse(node.func).partition(".")[2])
        rename = _Rename(f"_part_{len(self.parts)}_", parameters[0], node.func)
        for name, argument in zip(parameters[1:], node.args, strict=True):
            if any(name in targets_of(s) for s in body.body):
                self.add(ast.copy_location(_assign(rename.name(name), argument), node))
            else:
                rename.known[name] = argument.id
        *statements, last = body.body
        result = last.value
        if statements and isinstance(result, ast.Name) and targets_of(statements[-1]) == [result.id]:
            result = statements.pop().value  # without a name, so that what follows is behind it at once
        for statement in statements:
            self.names |= {rename.name(name) for name in targets_of(statement)}
            self.add(rename.visit(statement))
        return self._lift(rename.visit(result))

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

    def finish(self) -> Cut:
        pieces: list[Piece] = []
        run: list[ast.stmt] = []
        for statement, pure in (*self.steps, (None, False)):
            if pure:
                run.append(statement)
                continue
            pieces += self._region(run)
            run = []
            if statement is not None:
                pieces.append(Piece([statement], linear=self._is_linear(statement)))
        for index, piece in enumerate(pieces):
            if piece.pure is not None:
                piece.outputs = _needed(piece.statements, pieces[index + 1 :])
                if not piece.outputs:
                    piece.pure = None
        groups = {}
        for first, last in _spans(pieces):
            statements = [s for p in pieces[first : last + 1] for s in p.statements]
            group = self._piece(statements, self._reader(linear=True))
            group.outputs = _needed(statements, pieces[last + 1 :])
            if group.outputs:
                groups[first, last] = group
        return Cut(pieces, groups, self.parts)

    def _is_linear(self, statement: ast.stmt) -> bool:
        """Whether a statement assigns what a linear layer makes of a name."""
        value = statement.value if targets_of(statement) else None
        if not isinstance(value, ast.Call) or len(value.args) != 1 or value.keywords:
            return False
        named = isinstance(value.args[0], ast.Name) and isinstance(statement.targets[0], ast.Name)
        return named and is_linear(self._reader().try_static(value.func)[1])

    def _region(self, statements: list[ast.stmt]) -> list[Piece]:
        """The pieces of a run of pure statements: views at its ends are no part of the region."""
        before, after = [], []
        while statements and _is_view(statements[0]):
            before.append(Piece([statements.pop(0)]))
        while statements and _is_view(statements[-1]):
            after.insert(0, Piece([statements.pop()]))
        if not statements:
            return [*before, *after]
        reader = self._reader()
        piece = self._piece(statements, reader)
        return [*before, piece if reader.computes else Piece(statements), *after]

    def _piece(self, statements: list[ast.stmt], reader: Reader) -> Piece:
        pure = [reader.statement(s) for s in statements]
        bound: set[str] = set()
        arguments: dict[str, None] = {}
        for statement in statements:
            arguments |= dict.fromkeys(n for n in _loads(statement) if n in reader.locals and n not in bound)
            bound |= set(targets_of(statement))
        return Piece(statements, pure, True, tuple(arguments), dict(reader.tensors), dict(reader.helpers))


class _Rename(ast.NodeTransformer):
    """A copy of statements in which the instance is ``owner``, and locals have names that start with ``prefix``."""

    def __init__(self, prefix: str, self_name: str, owner: ast.expr) -> None:
        self.prefix, self.self_name, self.owner = prefix, self_name, owner
        self.known: dict[str, str] = {}

    def name(self, name: str) -> str:
        """What a local is called now."""
        return self.known.setdefault(name, f"{self.prefix}{name}")

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return super().generic_visit(copy.copy(node))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.self_name:
            owner = copy.deepcopy(self.owner)
            for part in ast.walk(owner):
                ast.copy_location(part, node)
            return owner
        if isinstance(node.ctx, ast.Store):
            self.name(node.id)
        return ast.copy_location(ast.Name(self.known.get(node.id, node.id), node.ctx), node)


def straight_line(part: Any, file: str) -> ast.FunctionDef | None:
    """The forward of a part that is nothing but linear layers and computation in a row; None if it is more.

    ``file``: the name of the Python module in which it has to be written.
    """
    if not isinstance(part, nn.Module) or type(part).__module__ != file or "forward" in vars(part):
        return None
    if part._forward_hooks or part._forward_pre_hooks or not any(map(is_linear, part.children())):
        return None
    forward = type(part).forward
    if inspect.unwrap(forward) is not forward or forward.__closure__:
        return None
    reader = Reader(forward, part, linear=True)
    try:
        tree = function_tree(forward)
        tree.body = [s for s in tree.body if not isinstance(s, ast.Expr) or not isinstance(s.value, ast.Constant)]
        for number, statement in enumerate(tree.body):
            reader.statement(statement, last=number == len(tree.body) - 1)
    except Impure:
        return None
    arguments = tree.args
    plain = not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs)
    return tree if plain and isinstance(tree.body[-1], ast.Return) else None


def _spans(pieces: list[Piece]) -> Iterator[tuple[int, int]]:
    """First and last of the pieces that make a larger region: linear layers and the regions around them.

    No layer in it needs the result of another one in it: that would be two products, one behind the other.
    """
    group: list[int] = []
    made: set[str] = set()  # by the group's layers, or from what they made
    for index, piece in enumerate((*pieces, Piece([]))):
        reads = {n for s in piece.statements for n in _loads(s)}
        ends = piece.pure is None and not piece.linear
        if ends or piece.linear and reads & made:
            if len(group) > 1 and any(pieces[i].linear for i in group) and any(pieces[i].pure for i in group):
                yield group[0], group[-1]
            group, made = [], set()
        if not ends:
            group.append(index)
            if piece.linear or reads & made:
                made |= {n for s in piece.statements for n in targets_of(s)}


def _needed(statements: list[ast.stmt], later: list[Piece]) -> tuple[str, ...]:
    """What ``statements`` bind that ``later`` pieces read before they bind it again."""
    bound = dict.fromkeys(n for s in statements for n in targets_of(s))
    left, needed = set(bound), set()
    for statement in (s for piece in later for s in piece.statements):
        needed |= left & set(_loads(statement))
        left -= set(targets_of(statement))
    return tuple(n for n in bound if n in needed)


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


def rewrapped(wrapper: Callable, inner: Callable, new: Callable) -> Callable | None:
    """``wrapper``, a decorated ``inner``, with ``new`` in it; None if the decorators do not hold it in a cell."""
    if wrapper is inner:
        return new
    if not isinstance(wrapper, types.FunctionType):
        return None
    cells, found = [], False
    for cell in wrapper.__closure__ or ():
        value = cell.cell_contents
        inside = value is not wrapper and isinstance(value, types.FunctionType) and inspect.unwrap(value) is inner
        replacement = rewrapped(value, inner, new) if inside else None
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
