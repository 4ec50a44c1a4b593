"""Constraints of a Definition: Python expressions over its axes and inputs."""

import ast
import functools
from collections.abc import Mapping
from typing import Any

import torch

from tilegym.errors import InventoryError

_FUNCTIONS = {"abs": abs, "all": all, "any": any, "len": len, "max": max, "min": min, "sum": sum}


class _PairwiseComparisons(ast.NodeTransformer):
    """Turns ``a <= x < b`` into ``_holds(a <= x) and _holds(x < b)``, which works for tensors too."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        operands = [node.left, *node.comparators]
        pairs = [
            ast.Call(ast.Name("_holds", ast.Load()), [ast.Compare(left, [operator], [right])], [])
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False)
        ]
        return pairs[0] if len(pairs) == 1 else ast.BoolOp(ast.And(), pairs)


def _holds(value: Any) -> bool:
    return bool(value.all()) if isinstance(value, torch.Tensor) else bool(value)


@functools.lru_cache(maxsize=1024)
def _compiled(constraint: str) -> Any:
    tree = _PairwiseComparisons().visit(ast.parse(constraint.strip(), mode="eval"))
    return compile(ast.fix_missing_locations(tree), f"<constraint {constraint}>", "eval")


@functools.lru_cache(maxsize=1024)
def names(constraint: str) -> frozenset[str]:
    """The axes and inputs that ``constraint`` speaks of.

    Raises:
        SyntaxError: it is not an expression.
    """
    tree = ast.parse(constraint.strip(), mode="eval")
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - _FUNCTIONS.keys()


def holds(constraint: str, values: Mapping[str, Any]) -> bool:
    """Whether ``constraint`` holds for these sizes, numbers and tensors; of tensors, for all elements.

    Raises:
        InventoryError: it cannot be evaluated.
    """
    try:
        return _holds(eval(_compiled(constraint), {"__builtins__": {}, "_holds": _holds, **_FUNCTIONS}, dict(values)))
    except Exception as error:
        raise InventoryError(f"constraint {constraint!r} cannot be evaluated: {error}") from error


@functools.lru_cache(maxsize=1024)
def conjuncts(constraint: str) -> list[ast.expr]:
    """The expressions that ``and`` joins in ``constraint``."""
    tree = ast.parse(constraint.strip(), mode="eval").body
    return tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]


def alternatives(constraint: str) -> list[str]:
    """The expressions that ``or`` joins in ``constraint``: the branches that it leaves open."""
    tree = ast.parse(constraint.strip(), mode="eval").body
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.Or):
        return [ast.unparse(value) for value in tree.values]
    return [constraint]


@functools.lru_cache(maxsize=1024)
def equations(constraint: str) -> list[tuple[str, str]]:
    """What ``constraint`` fixes: (name, expression) for ``name == expression`` and ``expression == name``."""
    found = []
    for node in conjuncts(constraint):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            for one, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
                if isinstance(one, ast.Name):
                    found.append((one.id, ast.unparse(other)))
    return found


def bounds(constraint: str, name: str) -> list[tuple[str, str]]:
    """What ``constraint`` says of the size of ``name``: pairs of ">=", ">", "<=" or "<" and an expression."""
    operators = {ast.GtE: ">=", ast.Gt: ">", ast.LtE: "<=", ast.Lt: "<"}
    mirrored = {">=": "<=", ">": "<", "<=": ">=", "<": ">"}
    found = []
    for node in conjuncts(constraint):
        if not isinstance(node, ast.Compare):
            continue
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            symbol = operators.get(type(operator))
            if symbol and isinstance(left, ast.Name) and left.id == name:
                found.append((symbol, ast.unparse(right)))
            elif symbol and isinstance(right, ast.Name) and right.id == name:
                found.append((mirrored[symbol], ast.unparse(left)))
    return found


def settle(constraint: str, values: dict[str, Any]) -> None:
    """Writes to tensors in ``values`` what ``constraint`` says of parts of them.

    That is ``name[part] == expression``, whose left side is assigned to, and ``name[:-1] <= name[1:]``, which sorts.
    """
    for node in conjuncts(constraint):
        if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.left, ast.Subscript):
            continue
        name, right = ast.unparse(node.left.value), node.comparators[0]
        if not isinstance(values.get(name), torch.Tensor):
            continue
        if isinstance(node.ops[0], ast.Eq):
            statement = f"{ast.unparse(node.left)} = {ast.unparse(right)}"
            exec(statement, {"__builtins__": {}, **_FUNCTIONS}, dict(values))
        elif ast.unparse(node) == f"{name}[:-1] <= {name}[1:]":
            values[name].copy_(values[name].sort().values)
