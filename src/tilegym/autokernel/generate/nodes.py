"""What is asked of the nodes of an exported graph."""

import ast
import builtins
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tilegym.autokernel.generate.errors import Unsupported


def last_line(node: Node) -> str:
    """The innermost source line that made ``node``, empty if it is not known."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def assigned_names(line: str) -> list[str | None]:
    """What a source line assigns to: one name, or those of a tuple; empty if it assigns to none."""
    try:
        statement = ast.parse(line).body[0]
    except (SyntaxError, IndexError):
        return []
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target = statement.targets[0]
    elements = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [e.id if isinstance(e, ast.Name) else None for e in elements]
    return [None if n is None or hasattr(builtins, n) else n for n in names]


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def sizes(node: Node) -> tuple:
    """The sizes of a tensor as integers and expressions, which are equal only if they are so for all calls."""
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in node.meta["val"].shape)


def target_name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]


def results_of(program: ExportedProgram) -> list[Node]:
    """The tensors that a program returns."""
    results = list(list(program.graph.nodes)[-1].args[0])
    if not results or not all(map(is_tensor, results)):
        raise Unsupported("it returns something else than tensors")
    return results


def ancestors(nodes: Sequence[Node]) -> set[Node]:
    """``nodes`` and all that they are computed from."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def common_dtype(node: Node) -> torch.dtype | None:
    """The dtype in which the arguments of a node meet: its own; of a comparison, that which they are promoted to."""
    if not is_tensor(node):
        return None
    dtype = node.meta["val"].dtype
    if dtype != torch.bool:
        return dtype
    values = [a.meta["val"] if is_tensor(a) else a for a in node.args if is_tensor(a) or isinstance(a, int | float)]
    return torch.result_type(*values) if len(values) == 2 else None
