"""Writes the statements of a kernel: values as expressions, named where a person would name them."""

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable

import torch

from tilegym.autokernel.generate.graph import INTEGERS
from tilegym.autokernel.generate.graph import REDUCTIONS
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.graph import topological
from tilegym.autokernel.generate.operations import ATOM
from tilegym.autokernel.generate.operations import COMPARISON
from tilegym.autokernel.generate.operations import HELPERS
from tilegym.autokernel.generate.operations import OPERATIONS
from tilegym.autokernel.generate.operations import PRODUCT
from tilegym.autokernel.generate.operations import REPEATS
from tilegym.autokernel.generate.operations import UNARY
from tilegym.autokernel.generate.operations import evaluate

LINE = 120
LONG = 80  # an expression of more characters gets a name
NEUTRAL = {"sum": "0.0", "max": "-math.inf", "min": "math.inf"}
# Names that the file of a kernel uses for other things.
RESERVED = frozenset(
    "ct math torch functools at load span store launch indices plan hinted empty rows cols place tile tiles i across N "
    "row_count rows_of size_of contiguous_like over_one_plus_exp small_or_flat pairs".split()
) | frozenset(HELPERS)


def array_of(value: Value) -> Value:
    """The input that a value reads."""
    return value.args[0] if value.op == "shift" else value


def suggest(value: Value) -> str:
    """What to call a value: as the region's source does, else by what it is."""
    if value.hint:
        return value.hint
    if value.op in ("round", "detach", "shift", "float"):
        return suggest(value.args[0])
    if value.op in REDUCTIONS:
        return {"max": "top", "min": "bottom"}.get(
            value.op, "sum_of_" + suggest(value.args[0]) if value.args else "total"
        )
    kinds = [a.op for a in value.args]
    if value.op == "mul":
        if value.args[0] is value.args[1]:
            return "square"
        if "rsqrt" in kinds:
            return "normed"
        if any(a.op == "input" and not a.rows for a in value.args):
            return "scaled"
    if value.op == "div" and kinds[1] == "columns":
        inner = value.args[0].args[0] if value.args[0].args else None
        return "mean_of_squares" if inner is not None and suggest(inner) == "square" else "mean"
    if value.op == "sub" and value.args[1].rows and not value.args[1].cols:
        return "centered"
    operation = OPERATIONS.get(value.op)
    return operation.name if operation else value.op


def padding(value: Value, known: dict[Value, float | None]) -> float | None:
    """What ``value`` is in columns beyond the last, where arrays read as 0; None if it cannot be told."""
    if value not in known:
        if value.op == "input":
            number = 0.0 if value.cols else None
        elif value.op == "constant":
            number = value.number
        elif value.op == "before":
            number = 0.0
        elif value.op == "shift":
            number = 0.0 if value.number > 0 else None
        elif value.op in ("round", "detach"):
            number = padding(value.args[0], known)
        elif value.op in OPERATIONS:
            args = [padding(a, known) for a in value.args]
            number = None if None in args else evaluate(value.op, *args)
        else:
            number = None
        known[value] = number
    return known[value]


def literal(number: float, dtype: torch.dtype | None = None) -> tuple[str, int]:
    if dtype in INTEGERS:
        return str(int(number)), UNARY if number < 0 else ATOM
    if math.isinf(number):
        return ("math.inf", ATOM) if number > 0 else ("-math.inf", UNARY)
    return repr(float(number)), UNARY if number < 0 else ATOM


def in_parentheses(text: str, binds: int, needs: int) -> str:
    return text if binds >= needs else f"({text})"


def as_float(text: str, dtype: torch.dtype) -> str:
    """The tile that ``text`` reads as kernels compute with it: fp32, integers, or truth values, which come as bytes."""
    if dtype == torch.bool:
        return f"{text} != 0"
    return text if dtype in (torch.float32, *INTEGERS) else f"{text}.astype(ct.float32)"


def call(head: str, args: Iterable[str], indent: int = 0, tail: str = "") -> str:
    """``head(args)tail`` on as few lines as the formatter would need."""
    args, space = list(args), " " * indent
    line = f"{space}{head}({', '.join(args)}){tail}"
    if len(line) <= LINE:
        return line
    inner = f"{space}    {', '.join(args)}"
    if len(inner) <= LINE and not head.endswith("= "):
        return f"{space}{head}(\n{inner}\n{space}){tail}"
    return f"{space}{head}(\n" + "".join(f"{space}    {a},\n" for a in args) + f"{space}){tail}"


class Body:
    """The statements of one kernel.

    Args:
        parameters: the kernel's, whose names are taken.
        load: the expression that reads an input.
        dtype: the expression of the working dtype, or None if that is fp32.
        rough: whether all ends in the working dtype, whatever it goes through.
    """

    columns, inside = "N", "cols[None, :] < N"  # the number of columns, and which ones of a tile are among them

    def __init__(self, parameters: Iterable[str], load: Callable[[Value], str], dtype: str | None, rough: bool):
        self.taken = {*parameters, *RESERVED}
        self.load, self.dtype, self.rough = load, dtype, rough
        self.stored_narrow: set[Value] = set()  # what is stored in the working dtype
        self.lines: list[str] = []
        self.indent = 4
        self.scope: dict[Value, tuple[str, int]] = {}
        self.imports: set[tuple[str, str]] = set()
        self.helpers: set[str] = set()
        self.padding: dict[Value, float | None] = {}
        self.rows_read: dict[str, str] = {}  # by array: what its rows are called, where it is repeated over rows

    def line(self, text: str) -> None:
        self.lines.append(" " * self.indent + text if text else "")

    def call(self, head: str, *args: str) -> None:
        self.lines.append(call(head, args, self.indent))

    def new_name(self, name: str) -> str:
        """A name like ``name`` that nothing else has."""
        if name in self.taken:
            stem = f"{name}_" if name[-1].isdigit() else name
            name = next(n for i in range(2, 1000) if (n := f"{stem}{i}") not in self.taken)
        self.taken.add(name)
        return name

    def text(self, value: Value, needs: int = COMPARISON) -> str:
        return in_parentheses(*self.scope[value], needs)

    def keep(self, value: Value) -> None:
        """Gives a value in scope a name."""
        text, _ = self.scope[value]
        self.scope[value] = self.new_name(suggest(value)), ATOM
        self.assign(self.scope[value][0], text)

    def emit(self, targets: Iterable[Value]) -> None:
        """Writes what ``targets`` need; afterwards :meth:`text` has them."""
        targets = list(targets)
        order = topological(targets, self.scope)
        uses = Counter(a for v in order if v.op != "shift" for a in v.args)
        uses.update(targets)
        repeated = {v.args[0] for v in order if v.op in REPEATS}
        self.rows_read.clear()
        narrow = self._narrow(order)
        for value in sorted(order, key=lambda v: v.op not in ("input", "shift")):
            if value.op == "input" and not uses[value]:
                continue  # it is only read from other columns on
            if value.op in ("input", "shift"):
                self.scope[value] = self.read(value), ATOM
                continue
            text, binds = self._expression(value, value in narrow)
            while len(text) > LINE - 24 and (longest := self._longest(value)) is not None:
                self.keep(longest)
                text, binds = self._expression(value, value in narrow)
            self.scope[value] = text, binds
            named = uses[value] > 1 or value in repeated or value.hint is not None or len(text) > LONG
            if named and value.op not in ("constant", "columns", "detach"):
                self.keep(value)

    def emit_before_loop(self, values: list[Value]) -> None:
        """Computes ``values`` once for all turns of a loop."""
        self.emit(values)
        for value in values:
            if value.op != "detach" and not self.scope[value][0].isidentifier():
                self.keep(value)

    def reduce_in_loop(self, values: list[Value], width: str, head: str, start: list[str]) -> None:
        """Computes reductions of rows that are read a tile of ``width`` columns at a time.

        Args:
            head: of the loop over tiles.
            start: the first statements in the loop.
        """
        totals = {v: self.new_name({"sum": "sums", "max": "tops", "min": "bottoms"}[v.op]) for v in values}
        for value, total in totals.items():
            self.line(f"{total} = ct.full((1, {width}), {NEUTRAL[value.op]}, ct.float32)")
        outer, taken = dict(self.scope), set(self.taken)
        self.line(head)
        self.indent += 4
        for text in start:
            self.line(text)
        self.emit(v.args[0] for v in values)
        for value, total in totals.items():
            operand = self.operand(value)
            if value.op == "sum":
                self.line(f"{total} = {total} + {operand}")
            else:
                self.call(f"{total} = ct.{value.op}imum", total, operand, "propagate_nan=True")
        self.indent -= 4
        self.scope, self.taken = outer, taken
        for value, total in totals.items():
            self.scope[value] = self.reduction(value.op, total), ATOM
            self.keep(value)

    def read(self, value: Value) -> str:
        """Reads an input, and returns the name for what was read."""
        name = self.new_name(self.read_name(value))
        self.assign(name, self.load(value))
        return name

    def read_name(self, value: Value) -> str:
        """What is read of an input is called like this."""
        suffix = "tile" if value.is_tile else "row" if value.cols else "column"
        if value.op == "shift":
            suffix = "ahead" if value.number > 0 else "behind"
        return f"{array_of(value).hint}_{suffix}"

    def assign(self, name: str, text: str) -> None:
        head, parenthesis, rest = text.partition("(")
        if len(name) + len(text) + self.indent + 3 > LINE and parenthesis and rest.endswith(")"):
            self.call(f"{name} = {head}", rest[:-1])
        else:
            self.line(f"{name} = {text}")

    def _longest(self, value: Value) -> Value | None:
        """The argument with the longest text, if one is more than a name."""
        longest = max(value.args, key=lambda a: len(self.scope[a][0]), default=None)
        return longest if longest is not None and len(self.scope[longest][0]) > LONG // 2 else None

    def _narrow(self, order: list[Value]) -> set[Value]:
        """The values that are rounded to the working dtype by all that use them."""
        users: dict[Value, list[Value]] = {}
        for value in order:
            for arg in value.args:
                users.setdefault(arg, []).append(value)
        rounded = {v for v in order if users.get(v) and all(u.op == "round" for u in users[v])}
        return rounded | {v for v in self.stored_narrow if v not in users}

    def _expression(self, value: Value, narrow: bool) -> tuple[str, int]:
        if value.op == "constant":
            return literal(value.number, value.dtype)
        if value.op == "columns":
            return self.columns, ATOM
        if value.op == "before":
            return f"cols[None, :] < {int(value.number)}", COMPARISON
        if value.op == "round":
            self.helpers.add("rounded")
            return f"rounded({self.text(value.args[0])}, {self.dtype})", ATOM
        if value.op in REDUCTIONS:
            return self.reduction(value.op, self.operand(value)), ATOM
        operation = OPERATIONS[value.op]
        if value.op == "div" and value.args[1].op == "columns":
            # As PyTorch's means on a GPU are computed; a quotient takes some ten instructions of every thread.
            return f"{self.text(value.args[0], PRODUCT)} * (1.0 / {self.columns})", PRODUCT
        args = [self.text(a, n) for a, n in zip(value.args, operation.needs, strict=True)]
        exact = self.dtype is None or not (narrow or self.rough)
        text = operation.text.format(*args, dtype="ct.float32" if exact else self.dtype)
        if operation.imports:
            self.imports.add((operation.imports, text.partition("(")[0]))
        if (helper := text.partition("(")[0]) in HELPERS:
            self.helpers.add(helper)
        return text, operation.binds

    def operand(self, value: Value) -> str:
        """What a reduction adds up or compares: neutral beyond the row's end."""
        arg, neutral = value.args[0], NEUTRAL[value.op]
        pad = padding(arg, self.padding)
        if pad is not None and literal(pad)[0] in (neutral, "-" + neutral if neutral == "0.0" else neutral):
            return self.text(arg)
        return f"ct.where({self.inside}, {self.text(arg)}, {neutral})"

    def reduction(self, op: str, text: str) -> str:
        keep = "" if op == "sum" else ", propagate_nan=True"
        return f"ct.{op}({text}, axis=1, keepdims=True{keep})"
