"""Gate 0: what can be said of a proposal without running it."""

import ast
import functools
import importlib.util
import sys
import types
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
_TUNING = "autotuner tuning tuning_bench tuning_cache tuning_key".split()
_NOT_BELOW = ("tilegym.ops.pytorch", *(f"tilegym.backend.cutile.{name}" for name in _TUNING))
_TORCH = frozenset(
    "Tensor Size device dtype empty empty_like empty_strided zeros zeros_like autograd is_grad_enabled finfo "
    "iinfo promote_types".split()
) | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_TORCH_AUTOGRAD = frozenset({"Function"})
_BUILTINS = frozenset(
    "eval exec compile open input breakpoint globals locals vars getattr setattr delattr __import__ memoryview "
    "dir type super __builtins__ __loader__ __spec__".split()
)
# What reads or replaces a tensor's memory past PyTorch's operators, which are watched.
_PAST_OPERATORS = frozenset(
    "apply_ map_ map2_ numpy set_ share_memory_ storage tolist typed_storage untyped_storage".split()
)
# What leads from a function that runs to those that called it, and to their variables.
_FRAMES = frozenset(
    "ag_frame cr_frame gi_frame f_back f_builtins f_globals f_locals f_trace tb_frame tb_next ag_code cr_code gi_code "
    "f_code".split()
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
    modules = imported_modules(tree)
    for node in ast.walk(tree):
        for message in (*_check_node(node, bases), *_check_member(node, modules)):
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
                yield from _check_origin(node.module or "", alias.name)
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
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name.startswith("__"):
        yield f"the definition of {node.name} is not allowed"
    elif isinstance(node, ast.Match):
        yield "match is not allowed: its patterns read attributes of any name"


def _check_attribute(node: ast.Attribute) -> Iterator[str]:
    if node.attr.startswith("_"):
        yield f"the private attribute {node.attr} is not allowed"
    if node.attr in _FRAMES:
        yield f".{node.attr} is not allowed: a kernel does not look at who calls it"
    if node.attr in _PAST_OPERATORS:
        yield f".{node.attr} is not allowed: the kernel has to do the work"
    if not isinstance(node.ctx, ast.Load) and not (isinstance(node.value, ast.Name) and node.value.id == "ctx"):
        yield f"an attribute {node.attr} is set: a kernel changes nothing but its results"
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


def imported_modules(tree: ast.Module) -> dict[str, str]:
    """The modules that a file imports, by what it calls them; torch, of which all is checked by name, is left out."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if _is_module(name := f"{node.module}.{alias.name}"):
                    found[alias.asname or alias.name] = name
    return {alias: name for alias, name in found.items() if name != "torch"}


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _check_member(node: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """What is wrong with a member of an imported module: ``modules`` by what the file calls them."""
    if not isinstance(node, ast.Attribute):
        return
    chain, base = [node.attr], node.value
    while isinstance(base, ast.Attribute):
        chain.insert(0, base.attr)
        base = base.value
    if not isinstance(base, ast.Name) or base.id not in modules:
        return
    module = modules[base.id]
    while len(chain) > 1 and _is_module(f"{module}.{chain[0]}"):
        module = f"{module}.{chain.pop(0)}"
    if _is_module(name := f"{module}.{chain[0]}"):
        if not any(_is_below(allowed, name) for allowed in IMPORTS):  # on the way to one of these
            yield from _check_import(name)
    else:
        yield from _check_origin(module, chain[0])


def _check_origin(module: str, name: str) -> Iterator[str]:
    """What is wrong with ``name`` of an allowed module: it may be one that the module has imported."""
    if name == "*":
        yield f"from {module} import * is not allowed"
    elif module.partition(".")[0] == "tilegym":
        origin = _origins(module).get(name)
        if origin is None or origin == (module, name):
            return
        if origin[0] == "torch" and origin[1]:
            yield from _check_torch(origin[1])
        elif _is_below(origin[0], "torch"):
            yield f"{'.'.join(filter(None, origin))} of {module} is not allowed: import torch"
        elif origin[1] and not _is_module(".".join(origin)):
            yield from _check_import(origin[0])
            yield from _check_origin(*origin)
        else:
            yield from _check_import(".".join(filter(None, origin)))
    elif module in sys.modules and isinstance(found := getattr(sys.modules[module], name, None), types.ModuleType):
        yield from _check_import(found.__name__)


@functools.cache
def _origins(module: str) -> dict[str, tuple[str, str]]:
    """(module, name in it) of what a module of TileGym imports, by what it calls it; its name is "" for a module."""
    spec = importlib.util.find_spec(module) if _is_module(module) else None
    if spec is None or spec.origin is None:
        return {}
    found = {}
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    own = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0]: (a.name, "") for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}
    return {name: origin for name, origin in found.items() if name not in own}


def _is_shipped_kernel(name: str) -> bool:
    """Whether ``name`` is the module of a kernel that came with a model family, and so passed the gates before."""
    parts = name.split(".")
    if len(parts) != 5 or parts[:2] != ["tilegym", "transformers"] or parts[3] != "kernels":
        return False
    return (FAMILIES / parts[2] / "kernels" / f"{parts[4]}.py").is_file()


def _is_below(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
