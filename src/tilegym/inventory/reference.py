"""The reference of a Definition: Python source with a global ``run`` and the lines that say where it comes from."""

import ast
import functools
import itertools
import linecache
import re
from collections.abc import Callable
from collections.abc import Iterator

from tilegym.errors import InventoryError

_SOURCE = re.compile(r"# Source: (\S+)")
# A commit never changes; a branch or a tag can.
_PERMALINK = re.compile(
    r"https://(?:github\.com|huggingface\.co)/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/[^\s#]+#L([1-9]\d*)(?:-L([1-9]\d*))?"
)
PERMALINK_FORM = "https://github.com/OWNER/REPOSITORY/blob/COMMIT/PATH#L10-L20, with the commit's 40 digits"


def sources(reference: str) -> list[str]:
    """The addresses in the ``# Source:`` lines that ``reference`` begins with."""
    matches = (_SOURCE.fullmatch(line.strip()) for line in reference.splitlines())
    return [match[1] for match in itertools.takewhile(bool, matches)]


def has_sources_below(reference: str) -> bool:
    """Whether there are ``# Source:`` lines behind those that ``reference`` begins with, which nobody reads."""
    return sum(bool(_SOURCE.fullmatch(line.strip())) for line in reference.splitlines()) > len(sources(reference))


def is_permalink(url: str) -> bool:
    """Whether ``url`` names lines of a file at one commit, on GitHub or (remote code) on the Hugging Face Hub."""
    match = _PERMALINK.fullmatch(url)
    return match is not None and int(match[1]) <= int(match[2] or match[1])


def run_functions(reference: str) -> list[ast.FunctionDef]:
    """The definitions of ``run`` at the top level.

    Raises:
        SyntaxError: the reference is not Python.
    """
    return [node for node in ast.parse(reference).body if isinstance(node, ast.FunctionDef) and node.name == "run"]


def parameters(function: ast.FunctionDef) -> list[str] | None:
    """The names of the parameters, or None if there are others than plain ones without a default."""
    arguments = function.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults or arguments.posonlyargs:
        return None
    return [argument.arg for argument in arguments.args]


def returns(function: ast.FunctionDef) -> list[list[str] | None]:
    """For each ``return`` of the function itself, the names that it returns, or None if it returns anything else."""
    return [_names(node.value) for node in _own_nodes(function) if isinstance(node, ast.Return)]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


def _names(value: ast.expr | None) -> list[str] | None:
    elements = value.elts if isinstance(value, ast.Tuple) else [value]
    return [e.id for e in elements] if all(isinstance(e, ast.Name) for e in elements) else None


@functools.lru_cache(maxsize=256)
def load(reference: str, name: str = "reference") -> Callable:
    """The function ``run`` of ``reference``; ``name`` is what tracebacks call its file.

    Raises:
        InventoryError: the source does not run, or defines no ``run``.
    """
    file = f"<{name}>"
    scope = {"__name__": name}
    try:
        exec(compile(reference, file, "exec"), scope)  # noqa: S102
    except (Exception, SystemExit) as error:
        raise InventoryError(f"the reference of {name!r} cannot be loaded: {error!r}") from error
    if not callable(scope.get("run")):
        raise InventoryError(f"the reference of {name!r} defines no function 'run'; add one that takes the inputs")
    linecache.cache[file] = (len(reference), None, reference.splitlines(True), file)
    return scope["run"]


@functools.lru_cache(maxsize=256)
def numbers(reference: str) -> list[bool | int | float]:
    """The numbers written in ``reference``, each once, negated where a minus stands before them.

    Raises:
        InventoryError: it is no Python.
    """
    found: dict[tuple[type, float], bool | int | float] = {}
    try:
        tree = ast.parse(reference)
    except (SyntaxError, ValueError) as error:
        raise InventoryError(f"a Definition's reference is no Python: {error}") from error
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            value = node.operand.value
            value = -value if isinstance(value, int | float) else None
        if isinstance(value, bool | int | float):
            found[type(value), value] = value
    return list(found.values())


def with_numbers(reference: str, replaced: dict[int, int]) -> str:
    """``reference`` with other positive integers for some that are written in it."""

    class Replace(ast.NodeTransformer):
        def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
            return node if isinstance(node.op, ast.USub) else self.generic_visit(node)

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Constant(replaced.get(node.value, node.value)) if type(node.value) is int else node

    return ast.unparse(ast.fix_missing_locations(Replace().visit(ast.parse(reference)))) + "\n"
