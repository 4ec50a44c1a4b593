"""The intermediate representation: a region as a graph of values over rows and columns.

All tensors of a region lie over one space of M rows, the leading dimensions together, and N columns, the last one. A
value has both (a tile), rows alone (a column: a statistic), columns alone (a vector: a weight), or neither. Values are
computed in fp32; where PyTorch would round to a narrower dtype stands an operation ``round``.
"""

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field

import torch

from tilegym.autokernel.generate.errors import Unsupported

REDUCTIONS = frozenset({"sum", "max", "min"})
INTEGERS = (torch.int32, torch.int64)


@dataclass(eq=False)
class Value:
    """The result of an operation of :mod:`operations`, or of one of these.

    ``input``: an array of the region. ``constant``: ``number``. ``columns``: N. ``round``: its argument in ``dtype``.
    ``detach``: its argument, which passes no gradient on. ``sum``, ``max``, ``min``: over the columns.
    ``shift``: its argument, an input, ``number`` columns further on; 0 beyond the input's ends. ``before``: whether a
    column's number is less than ``number``.

    Attributes:
        rows, cols: which of the two dimensions it has.
        dtype: of an input or a rounding; torch.bool for truth values, of integers theirs, else None.
        hint: what the region's source calls it.
        shape: of an input, as torch.export knows it.
        width: of an input, its columns, where those of all arrays are fixed since rows are put together from parts.
        steps: an input that is repeated over part of the rows: its row is r // a * b + r % b, with (a, b) the products
            of the leading sizes of a full input from ``steps[0]`` and from ``steps[1]`` on.
    """

    op: str
    args: tuple["Value", ...] = ()
    rows: bool = False
    cols: bool = False
    number: float | None = None
    dtype: torch.dtype | None = None
    hint: str | None = None
    shape: tuple = ()
    steps: tuple[int, int] | None = None
    width: int | None = None

    @property
    def is_tile(self) -> bool:
        return self.rows and self.cols

    @property
    def is_integer(self) -> bool:
        return self.dtype in INTEGERS


def is_constant(value: Value, number: float) -> bool:
    return value.op == "constant" and value.number == number


class Builder:
    """Makes values; equal ones are one."""

    def __init__(self, evaluate: Callable[..., float | None]):
        self._evaluate = evaluate
        self._values: dict[tuple, Value] = {}
        self.width: int | None = None  # of the rows, where they are put together from parts

    def constant(self, number: float, dtype: torch.dtype | None = None) -> Value:
        return self._unique(Value("constant", number=number, dtype=dtype))

    def columns(self) -> Value:
        return self._unique(Value("columns"))

    def rounded(self, value: Value, dtype: torch.dtype) -> Value:
        if value.op == "round":
            if value.dtype == dtype:
                return value
        return self._unique(Value("round", (value,), value.rows, value.cols, dtype=dtype))

    def before(self, number: int) -> Value:
        """Whether a column's number is less than ``number``, where rows have ``width`` columns."""
        if number <= 0 or number >= self.width:
            return self.constant(float(number > 0))
        return self._unique(Value("before", (), False, True, number=number, dtype=torch.bool))

    def shifted(self, value: Value, by: int) -> Value:
        """``value`` at the column that is ``by`` further on; arrays are 0 beyond their ends."""

        def leaf(value: Value) -> Value:
            if value.op == "before":
                return self.before(value.number - by)
            array, number = (value.args[0], value.number) if value.op == "shift" else (value, 0)
            if number + by == 0:
                return array
            return self._unique(Value("shift", (array,), array.rows, True, number=number + by, dtype=array.dtype))

        return self._mapped(value, leaf, {}) if by else value

    def joined(self, parts: list[tuple[int, Value]]) -> Value:
        """Values side by side, each with the column where it begins."""
        (begin, last), *others = reversed(parts)
        value = self.shifted(last, -begin)
        for first, part in others:
            value = self.make("where", self.before(begin), self.shifted(part, -first), value)
            begin = first
        return value

    def _chosen(self, condition: Value, x: Value, y: Value) -> tuple[Value, Value]:
        """What ``where`` chooses from, without the choices in it that its condition has settled."""
        if condition.op != "before":
            return x, y
        end = condition.number
        below = self._mapped(x, lambda v: self.constant(1.0) if v.op == "before" and v.number >= end else v, {})
        above = self._mapped(y, lambda v: self.constant(0.0) if v.op == "before" and v.number <= end else v, {})
        return below, above

    def _mapped(self, value: Value, leaf: Callable[[Value], Value], done: dict[Value, Value]) -> Value:
        """``value`` computed from other arrays and choices of columns; what has no columns stays."""
        if not value.cols:
            return value
        if value not in done:
            if value.op in ("input", "shift", "before"):
                done[value] = leaf(value)
            else:
                args = tuple(self._mapped(a, leaf, done) for a in value.args)
                if args == value.args:
                    done[value] = value
                elif value.op == "round":
                    done[value] = self.rounded(args[0], value.dtype)
                else:
                    done[value] = self.make(value.op, *args, dtype=value.dtype)
        return done[value]

    def reduce(self, op: str, value: Value) -> Value:
        if not value.cols:
            raise Unsupported(f"{op} over the columns of something that has none")
        return self._unique(Value(op, (value,), value.rows, False))

    def make(self, op: str, *args: Value | float, dtype: torch.dtype | None = None) -> Value:
        """``op`` of values and numbers, with what is known about constants made use of."""
        values = tuple(a if isinstance(a, Value) else self.constant(a) for a in args)
        if op in ("mul", "div") and is_constant(values[1], 1.0) or op in ("add", "sub") and is_constant(values[1], 0.0):
            return values[0]
        if op == "mul" and is_constant(values[0], 1.0) or op == "add" and is_constant(values[0], 0.0):
            return values[1]
        if op == "where":
            if values[0].op == "constant":
                return values[1] if values[0].number else values[2]
            values = (values[0], *self._chosen(*values))
            if values[1] is values[2]:
                return values[1]
        if dtype is None and values and all(v.op == "constant" for v in values):
            number = self._evaluate(op, *(v.number for v in values))
            if number is not None:
                return self.constant(number)
        rows, cols = any(v.rows for v in values), any(v.cols for v in values)
        return self._unique(Value(op, values, rows, cols, dtype=dtype))

    def _unique(self, value: Value) -> Value:
        key = (value.op, tuple(map(id, value.args)), repr(value.number), value.dtype)
        return self._values.setdefault(key, value)


@dataclass(eq=False)
class Output:
    """A result of a region.

    Attributes:
        like: the input whose leading sizes it has.
        shape: as torch.export knows it.
        vector: whether it is the value's sum over all rows, [N]: the gradient of a weight.
        width: its columns, where those of all arrays are fixed.
    """

    name: str
    value: Value
    dtype: torch.dtype
    like: Value
    shape: tuple = ()
    vector: bool = False
    width: int | None = None

    @property
    def keepdim(self) -> bool:
        return self.value.cols or len(self.shape) == len(self.like.shape)


@dataclass
class Linear:
    """``x @ weight.T`` with the region's left operand x. ``value`` stands for it in what follows."""

    value: Value
    weight: str


@dataclass(frozen=True)
class Cut:
    """Which columns of an argument, of ``width`` if that is fixed, an input is."""

    source: str
    columns: range
    width: int | None = None

    def of(self, name: str) -> str:
        """An expression for these columns of ``name``."""
        start, stop, step = self.columns.start, self.columns.stop, self.columns.step
        end = "" if self.width is not None and stop >= self.width else stop
        return f"{name}[..., {start or ''}:{end}{f':{step}' if step > 1 else ''}]"


@dataclass
class Region:
    """What is to be computed.

    Attributes:
        name: snake case.
        inputs: the arrays, by name.
        outputs: the results in order.
        signature: the names of the entry point's parameters in order; names of inputs, of what views are cut from, and
            of ``numbers``.
        views: statements by which the entry point cuts inputs out of its arguments.
        cuts: what ``views`` cut out, by name, where widths are known.
        numbers: arguments that are numbers, which the kernel is written for.
        dtype: the working dtype, in which generic inputs were traced.
        dtypes: the working dtypes for which PyTorch computes this graph.
        size: N, where the graph holds for it alone.
        width: N of the examples.
        builder: for further values of the same graph.
        linears, left: the matrix products, and their left operand.
        parts: where results lie over different rows: regions of their own, and the arguments that each is called with.
            The same region may come twice, with other arguments.
    """

    name: str
    inputs: dict[str, Value]
    outputs: list[Output]
    signature: list[str]
    builder: Builder
    dtype: torch.dtype
    views: list[str] = field(default_factory=list)
    cuts: dict[str, Cut] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = ()
    size: int | None = None
    width: int = 0
    linears: list[Linear] = field(default_factory=list)
    left: Value | None = None
    parts: list[tuple["Region", list[str]]] = field(default_factory=list)

    @property
    def different_parts(self) -> list["Region"]:
        """The regions among ``parts``, each once."""
        return list({id(part): part for part, _ in self.parts}.values())

    @property
    def values(self) -> list[Value]:
        return topological(o.value for o in self.outputs)


def topological(targets: Iterable[Value], known: Iterable[Value] = ()) -> list[Value]:
    """What ``targets`` are computed from and they themselves, arguments first; not what ``known`` has."""
    order: list[Value] = []
    seen = set(known)

    def visit(value: Value) -> None:
        if value in seen:
            return
        seen.add(value)
        for arg in value.args:
            visit(arg)
        order.append(value)

    for target in targets:
        visit(target)
    return order


def in_order(region: Region) -> dict[str, Value]:
    """The inputs in the order of the signature; what is cut from an argument in its place."""
    order = []
    for name in region.signature:
        cut = [v.partition(" = ")[0].split(", ") for v in region.views if v.partition(" = ")[2].startswith(f"{name}.")]
        cut += [v.partition(" = ")[0].split(", ") for v in region.views if v.partition(" = ")[2].startswith(f"{name}[")]
        order += [name, *(part for parts in cut for part in parts)]
    return {name: region.inputs[name] for name in order if name in region.inputs}


def structure(region: Region) -> str:
    """A text that is equal for graphs that compute the same but for the dtypes that they round to."""
    if region.parts:
        return "\n".join(f"{structure(part)} {arguments}" for part, arguments in region.parts)
    numbers: dict[Value, int] = {}
    lines = []

    def number(value: Value) -> int:
        if value.op == "round":
            return number(value.args[0])
        if value not in numbers:
            args = [number(a) for a in value.args]
            numbers[value] = len(numbers)
            name = value.hint if value.op == "input" else value.number
            lines.append(f"{numbers[value]} {value.op} {args} {name!r} {value.rows}{value.cols} {value.steps}")
        return numbers[value]

    left = None if region.left is None else number(region.left)
    results = [(o.name, number(o.value), o.like.hint, o.keepdim) for o in region.outputs]
    return "\n".join([*lines, str((left, [p.weight for p in region.linears], results))])
