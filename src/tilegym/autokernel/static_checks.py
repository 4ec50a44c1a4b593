"""Gate 0: what can be said of a proposal without running it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task
from tilegym.inventory import rules
from tilegym.inventory.loading import FAMILIES
from tilegym.inventory.schema import CUDA_TILE

MAX_FILES = 8
MAX_BYTES = 200_000
# What a kernel file may import: these modules, and what is below them; besides, kernels that model families ship.
IMPORTS = (
    "cuda.tile",
    "functools",
    "math",
    "tilegym.backend.cutile",
    "tilegym.errors",
    "tilegym.inventory.catalog.entry_points",
    "tilegym.ops",
    "torch",
)
_NOT_BELOW = ("tilegym.ops.pytorch", "tilegym.backend.cutile.autotuner", "tilegym.backend.cutile.tuning")
_TORCH = frozenset(
    "Tensor Size device dtype empty empty_like empty_strided zeros zeros_like autograd is_grad_enabled finfo "
    "iinfo promote_types".split()
) | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_TORCH_AUTOGRAD = frozenset({"Function"})
_BUILTINS = frozenset(
    "eval exec compile open input breakpoint globals locals vars getattr setattr delattr __import__ memoryview "
    "__builtins__ __loader__ __spec__".split()
)


def check(task: Task, proposal: Proposal, root: Path) -> list[str]:
    """What is wrong with a proposal whose files lie below ``root``; empty if nothing is."""
    found = [*_files(task, proposal)]
    if found:
        return found
    if proposal.definition != task.definition:
        found.append("the Definition is not the task's: a proposal computes what was asked for")
    solution = proposal.solution
    if solution.definition != task.definition.name:
        found.append(f"the Solution is of {solution.definition!r}, the task's Definition is {task.definition.name!r}")
    if solution.spec.language != CUDA_TILE:
        found.append(f"the language is {solution.spec.language!r}, it has to be {CUDA_TILE!r}")
    if solution.spec.destination_passing_style:
        found.append("destination_passing_style is true: return the outputs")
    if any(source.content is not None for source in solution.sources):
        found.append("a source is embedded: hand it in as a file")
    if solution.spec.entry_file not in proposal.files:
        found.append(f"the entry point's file {solution.spec.entry_file!r} is not among the files")
    for field, message, _ in rules.check_solution(solution, {task.definition.name: task.definition}, root):
        found.append(f"Solution: {field}: {message}")
    for path, text in proposal.files.items():
        found += [f"{path}: {message}" for message in check_source(text)]
    return found


def _files(task: Task, proposal: Proposal) -> Iterator[str]:
    if not 1 <= len(proposal.files) <= MAX_FILES:
        yield f"{len(proposal.files)} files, allowed are 1 to {MAX_FILES}"
    if sum(len(text) for text in proposal.files.values()) > MAX_BYTES:
        yield f"more than {MAX_BYTES} characters of source"
    for path in proposal.files:
        parts = path.split("/")
        if not path.startswith(f"{task.folder}/") or ".." in parts or "\\" in path or "" in parts:
            yield f"the file {path!r} is not below {task.folder}"
        elif not path.endswith(".py"):
            yield f"the file {path!r} is no Python"


def check_source(text: str) -> list[str]:
    """What a kernel file does that it may not, by line."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return [f"not Python: {error}"]
    found = []
    bases = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        for message in _check_node(node, bases):
            found.append(f"line {getattr(node, 'lineno', 0)}: {message}")
    return found


def _check_node(node: ast.AST, bases: set[int]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _check_import(alias.name)
            if alias.name.startswith("torch") and (alias.asname or "." in alias.name):
                yield f"import {alias.name} is written in another way: import torch"
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            yield "a relative import"
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if node.module == "torch":
                yield from _check_torch(alias.name)
            elif (node.module or "").startswith("torch."):
                yield f"{node.module} is not allowed"
            else:
                yield from _check_import(name if name in IMPORTS else node.module or "")
                yield from (f"{name} is not allowed" for denied in _NOT_BELOW if _is_below(name, denied))
    elif isinstance(node, ast.Attribute):
        yield from _check_attribute(node)
    elif isinstance(node, ast.Name):
        if node.id in _BUILTINS or (node.id.startswith("__") and node.id != "__name__"):
            yield f"{node.id} is not allowed"
        elif node.id == "torch" and id(node) not in bases:
            yield "torch is passed on as a value"
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield "global state is not allowed: a kernel remembers nothing"


def _check_attribute(node: ast.Attribute) -> Iterator[str]:
    if node.attr.startswith("_"):
        yield f"the private attribute {node.attr} is not allowed"
    if isinstance(node.value, ast.Name) and node.value.id == "torch":
        yield from _check_torch(node.attr)
    text = ast.unparse(node.value) if isinstance(node.value, (ast.Name, ast.Attribute)) else ""
    if text == "torch.autograd" and node.attr not in _TORCH_AUTOGRAD:
        yield f"torch.autograd.{node.attr} is not allowed"
    if text.partition(".")[0] == "tilegym":
        name = f"{text}.{node.attr}"
        yield from (f"{name} is not allowed" for denied in _NOT_BELOW if _is_below(name, denied))


def _check_torch(name: str) -> Iterator[str]:
    if name not in _TORCH:
        yield f"torch.{name} is not allowed: the kernel has to do the work"


def _check_import(name: str) -> Iterator[str]:
    if _is_shipped_kernel(name):
        return
    if not any(_is_below(name, allowed) for allowed in IMPORTS) or any(_is_below(name, d) for d in _NOT_BELOW):
        yield f"the import of {name} is not allowed; allowed are {', '.join(IMPORTS)}"


def _is_shipped_kernel(name: str) -> bool:
    """Whether ``name`` is the module of a kernel that came with a model family, and so passed the gates before."""
    parts = name.split(".")
    if len(parts) != 5 or parts[:2] != ["tilegym", "transformers"] or parts[3] != "kernels":
        return False
    return (FAMILIES / parts[2] / "kernels" / f"{parts[4]}.py").is_file()


def _is_below(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
