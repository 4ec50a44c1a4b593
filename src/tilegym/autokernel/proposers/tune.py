"""Proposes other tile shapes, warps, occupancies and CTAs for a kernel that was right and too slow."""

import ast
import re
from collections.abc import Iterator

from tilegym.autokernel.protocol import Attempt
from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task
from tilegym.inventory import Solution

# In the order in which they are tried; other numbers of warps need tileiras 13.5.
_HINTS = {"num_worker_warps": (4, 8), "occupancy": (1, 2, 4, 8), "num_ctas": (1, 2)}
_TILE = re.compile(r"(?:[A-Z]+_)*(?:TILE|BLOCK)(?:_[A-Z]+)*")
_SLOW = ("G7", "G8", "keep")


class Tune:
    """Changes one number at a time in the last proposal that was only too slow.

    The nearest values of all numbers come first; of these tiles, and CTAs last, which cost the most to try: they seldom
    help a kernel that is not written for them.

    It knows module-level constants called ``TILE...`` or ``BLOCK...``, and the keywords ``num_worker_warps``,
    ``occupancy`` and ``num_ctas``.
    """

    name = "tune"

    def propose(self, task: Task) -> Proposal | None:
        """A variant that has not been tried; None if nothing was too slow, or all has been tried."""
        slow = [a for a in task.history if a.status == "discard" and a.gate in _SLOW and a.solution]
        tried = {tuple(sorted(a.files.items())) for a in task.history}
        for attempt in reversed(slow):
            for files, what in _variants(attempt):
                if tuple(sorted(files.items())) not in tried:
                    return Proposal(task.definition, Solution.from_json(attempt.solution), files, what)
        return None


def _variants(attempt: Attempt) -> Iterator[tuple[dict[str, str], str]]:
    """An attempt's files with one number changed, and what was changed, in the order in which they are tried."""
    found = []
    for path, text in attempt.files.items():
        for name, node in numbers(text):
            order = [*_HINTS].index(name) if name in _HINTS else -1
            for value in _values(name, node.value):
                distance = max(value, node.value) / max(min(value, node.value), 1)
                found.append((distance, order, (path, node, name, value)))
    for _, _, (path, node, name, value) in sorted(found, key=lambda f: f[:2]):
        changed = replaced(attempt.files[path], node, value)
        yield {**attempt.files, path: changed}, f"{name} {node.value} to {value}"


def numbers(text: str) -> list[tuple[str, ast.Constant]]:
    """The numbers in a file that can be tuned, with their names."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_number(node.value):
            if _TILE.fullmatch(node.targets[0].id):
                found.append((node.targets[0].id, node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in _HINTS and _is_number(node.value):
            found.append((node.arg, node.value))
    return found


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _values(name: str, value: int) -> list[int]:
    if name not in _HINTS:
        return [v for v in (value // 2, value * 2) if v >= 1]
    return [v for v in _HINTS[name] if v != value]


def replaced(text: str, node: ast.Constant, value: int) -> str:
    """``text`` with another number in the place of ``node``."""
    lines = text.encode().splitlines(keepends=True)  # columns are in bytes
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = line[: node.col_offset] + str(value).encode() + line[node.end_col_offset :]
    return b"".join(lines).decode()
