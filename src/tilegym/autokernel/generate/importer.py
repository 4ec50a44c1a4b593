"""Reads the aten graph of torch.export into the intermediate representation."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tilegym.autokernel.generate.aten import HANDLERS
from tilegym.autokernel.generate.aten import SAME
from tilegym.autokernel.generate.aten import arguments
from tilegym.autokernel.generate.errors import Unsupported
from tilegym.autokernel.generate.graph import INTEGERS
from tilegym.autokernel.generate.graph import Builder
from tilegym.autokernel.generate.graph import Cut
from tilegym.autokernel.generate.graph import Linear
from tilegym.autokernel.generate.graph import Output
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.graph import in_order
from tilegym.autokernel.generate.nodes import ancestors
from tilegym.autokernel.generate.nodes import assigned_names
from tilegym.autokernel.generate.nodes import common_dtype
from tilegym.autokernel.generate.nodes import is_tensor
from tilegym.autokernel.generate.nodes import last_line
from tilegym.autokernel.generate.nodes import results_of
from tilegym.autokernel.generate.nodes import sizes
from tilegym.autokernel.generate.nodes import target_name
from tilegym.autokernel.generate.operations import OF_INTEGERS
from tilegym.autokernel.generate.operations import OPERATIONS
from tilegym.autokernel.generate.operations import evaluate

CUTS = ("chunk", "split", "split_with_sizes", "slice")
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.bool, *INTEGERS)


class Importer:
    """One reading of one exported program.

    Args:
        names: the parameters, in the order of the program's inputs.
        inputs: their example values.
        dtype: the working dtype.
        chosen: which results are read; all if None.
    """

    truth = torch.bool

    def __init__(
        self,
        program: ExportedProgram,
        names: Sequence[str],
        inputs: Sequence[Any],
        dtype: torch.dtype,
        name: str,
        chosen: Sequence[int] | None = None,
    ):
        self.builder = Builder(evaluate)
        self.nodes = list(program.graph.nodes)
        self.values: dict[Node, Value] = {}
        self.statements: list[str] = []
        self.cuts: dict[str, Cut] = {}
        self.linears: list[Linear] = []
        self.left: Node | None = None
        self.name, self.names, self.dtype = name, list(names), dtype
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        if len(placeholders) != len(names):
            raise Unsupported("it uses tensors that are not among its inputs")
        self.arguments = dict(zip(placeholders, names, strict=True))
        self.numbers = {n: x for n, x in zip(names, inputs, strict=True) if not isinstance(x, torch.Tensor)}
        if any(not isinstance(x, bool | int | float) for x in self.numbers.values()):
            raise Unsupported("an input is neither a tensor nor a number")
        self.results = results_of(program)
        if chosen is not None:
            self.results = [self.results[i] for i in chosen]
            used = ancestors(self.results)
            self.names = [n for node, n in self.arguments.items() if node in used or n in self.numbers]
            self.nodes = [node for node in self.nodes if node in used]
        # Rows that are put together from parts: every array has a width of its own, which has to be known.
        self.joins = any(n.op == "call_function" and target_name(n) == "cat" for n in self.nodes)
        self.looked_at: dict[str, Node] = {}
        self.common: torch.dtype | None = None
        self.inputs: dict[str, Value] = {}
        self.hints = self._names_of_lines()
        self.before_linear = self._prologue()
        self.lead, self.width = self._space(self.results)
        fixed = {size for size in self.lead if isinstance(size, int)} - {1, self.width}
        for node, argument in self.arguments.items():
            if is_tensor(node) and node.users and sizes(node) and sizes(node)[-1] in fixed:
                raise Unsupported(
                    f"{argument}, whose last size, one of the rows, would be compiled in as one of columns"
                )
        if self.joins:
            if not isinstance(self.width, int) or self.before_linear:
                raise Unsupported("rows that are put together from parts of variable sizes, or beside a matrix product")
            self.builder.width = self.width

    # Rows and columns.

    def _prologue(self) -> set[Node]:
        """The nodes that the left operand of matrix products is computed from."""
        products = [n for n in self.nodes if n.op == "call_function" and target_name(n) == "linear"]
        before: set[Node] = set()
        pending = [n.args[0] for n in products]
        while pending:
            node = pending.pop()
            if node not in before and node not in products:
                before.add(node)
                pending += node.all_input_nodes
        return before

    def _space(self, results: list[Node]) -> tuple[tuple, Any]:
        """The leading sizes that all rows lie over, and the number of columns."""
        made = [n for n in self.nodes if is_tensor(n) and n.users and sizes(n)]
        read = [n for n in made if n in self.arguments or target_name(n) in ("linear", "slice", "getitem")]
        widths = {sizes(n)[-1] for n in (results if self.joins else read) if n not in self.before_linear} - {1}
        shapes = [sizes(r) for r in results]
        columns = [s[-1] for s in shapes if len(s) > 1 and s[-1] in widths]
        columns = columns or [s[-1] for s in sorted(map(sizes, read), key=len) if s[-1] != 1][-1:]
        if not columns:
            raise Unsupported("it has no columns")
        leads = [s[:-1] for s in [*shapes, *map(sizes, made)] if s and s[-1] == columns[0]]
        return max(leads, key=lambda s: (len(s), sum(size != 1 for size in s))), columns[0]

    def _extent(self, node: Node) -> tuple[bool, bool, tuple[int, int] | None]:
        """(rows, cols, dimensions it is repeated over) of a tensor."""
        shape = sizes(node)
        width = sizes(self.left_of(node))[-1] if node in self.before_linear else self.width
        if not shape or (all(s == 1 for s in shape) and len(shape) < 2):
            return False, bool(shape) and width == 1, None
        cols = shape[-1] == width
        if not cols and shape[-1] != 1:
            # A statistic without its last dimension.
            if math.prod(shape) == math.prod(self.lead):
                return True, False, None
            if not self.joins or not isinstance(shape[-1], int) or shape[-1] > width:
                raise Unsupported(f"a tensor of {list(shape)} among rows of {width} columns")
            cols = True
        lead = shape[:-1]
        if math.prod(lead) == math.prod(self.lead) and lead:
            return True, cols, None
        lead = (1,) * (len(self.lead) - len(lead)) + lead
        if all(s == 1 for s in lead):
            return False, cols, None
        if len(lead) == len(self.lead) and all(a in (b, 1) for a, b in zip(lead, self.lead, strict=True)):
            repeated = [i for i, (a, b) in enumerate(zip(lead, self.lead, strict=True)) if a != b]
            first, last = repeated[0], repeated[-1] + 1
            if all(s == 1 for s in lead[first:last]):
                return True, cols, (first, last)
        raise Unsupported(f"a tensor of {list(shape)} over rows of {list(self.lead)}")

    def _example(self, size: Any) -> int:
        """What a size is in the examples."""
        if isinstance(size, int):
            return size
        found = (s for n in self.nodes if is_tensor(n) for s in n.meta["val"].shape if isinstance(s, torch.SymInt))
        return next(s.node.hint for s in found if s.node.expr == size)

    def left_of(self, node: Node) -> Node:
        """The left operand of the matrix products behind ``node``."""
        return next(n.args[0] for n in self.nodes if n.op == "call_function" and target_name(n) == "linear")

    # Names.

    def _names_of_lines(self) -> dict[Node, str]:
        """The nodes that a source line assigns to a name: the last ones made on their line."""
        last: dict[str, Node] = {}
        for node in self.nodes:
            if node.op == "call_function" and is_tensor(node):
                last[node.meta.get("stack_trace") or node.name] = node
        named = {node: assigned_names(last_line(node)) for node in last.values()}
        # What is assigned to an argument's name again is called by what it is.
        return {
            node: names[0] for node, names in named.items() if len(names) == 1 and names[0] not in (None, *self.names)
        }

    def _new_name(self, name: str) -> str:
        taken = {*self.names, *self.inputs}
        return name if name not in taken else next(n for i in range(99) if (n := f"{name}_{i}") not in taken)

    # Reading.

    def argument(self, node: Any) -> Value:
        """The value of a node, or of a number."""
        if isinstance(node, bool | int | float):
            return self.builder.constant(float(node), self.common if self.common in INTEGERS else None)
        if node in self.values or (is_tensor(node) and node in self.arguments):
            value = self.values[node] if node in self.values else self._input(node, self.arguments[node])
            return self._as_number(value) if value.is_integer and self.common is not None else value
        what = node.target if isinstance(node, Node) else repr(node)
        raise Unsupported(f"a value that depends on the number of rows or columns, or is no tensor: {what}")

    def _as_number(self, value: Value) -> Value:
        """An integer in the dtype in which a node's arguments meet."""
        if self.common in INTEGERS:
            return value
        value = self.builder.make("float", value)
        return value if self.common == torch.float32 else self.builder.rounded(value, self.common)

    def whole(self, node: Node) -> Value:
        """The value of a node that has all of the rows' columns, over which there can be a reduction."""
        if self.joins and sizes(node)[-1] != self.width:
            raise Unsupported("a reduction over a part of the columns")
        return self.argument(node)

    def _input(self, node: Node, name: str) -> Value:
        dtype = node.meta["val"].dtype
        if dtype not in INPUT_DTYPES:
            raise Unsupported(f"{name} is {dtype}")
        rows, cols, steps = self._extent(node)
        value = Value("input", (), rows, cols, dtype=dtype, hint=name, shape=sizes(node), steps=steps)
        value.width = value.shape[-1] if self.joins and cols else None
        self.values[node] = self.inputs[name] = value
        return value

    def linear(self, node: Node, x: Node, weight: Any) -> Value:
        """The product of a matrix product, before a bias is added."""
        if self.left not in (None, x):
            raise Unsupported("matrix products of different left operands")
        if weight not in self.arguments:
            raise Unsupported("a weight that is computed")
        self.left = x
        if sizes(x)[:-1] != sizes(node)[:-1] or math.prod(sizes(x)[:-1]) != math.prod(self.lead):
            raise Unsupported("a matrix product of other rows")
        name = self.hints.get(node) or f"{self.arguments[weight].removesuffix('_weight')}_acc"
        value = Value("input", (), True, True, dtype=torch.float32, hint=self._new_name(name))
        self.linears.append(Linear(value, self.arguments[weight]))
        return value

    def region(self) -> Region:
        """Reads all of it.

        Raises:
            Unsupported: something in it is not served.
        """
        for node in self.nodes:
            if node.op == "call_function":
                self._read(node)
        left = self.argument(self.left) if self.left is not None else None
        outputs = [self._output(i, node) for i, node in enumerate(self.results)]
        region = Region(self.name, self.inputs, outputs, self.names, self.builder, self.dtype)
        region.views, region.numbers, region.linears = self.statements, self.numbers, self.linears
        region.left, region.cuts = left, self.cuts
        region.inputs = in_order(region)
        region.size = int(self.width) if isinstance(self.width, int) else None
        region.width = self._example(self.width)
        return region

    def _read(self, node: Node) -> None:
        name = target_name(node)
        if self.joins and (node.target is operator.getitem or name in CUTS):
            self._part(node, name)
            return
        if node.target is operator.getitem or name == "_assert_tensor_metadata" or node in self.values:
            return
        if not is_tensor(node) and name not in CUTS:
            return  # a size; argument() refuses it where it is used
        if name == "unsqueeze" and self._looked_at(node):
            return
        self.common = common_dtype(node)
        if name in CUTS and node.args[0] in self.arguments:
            self._cut(node, name)
            return
        if name in SAME:
            self.values[node] = self._rounded(node, self._cast(node, self._viewed(node)))
        elif name in HANDLERS:
            self.values[node] = self._rounded(node, HANDLERS[name](self, node))
        else:
            raise Unsupported(f"{node.target} is not known")
        made, hint = self.values[node], self.hints.get(node)
        if any(a.is_integer for a in made.args) and made.op != "float":
            if made.op not in OF_INTEGERS or any(not a.is_integer and a.dtype != torch.bool for a in made.args):
                raise Unsupported(f"{node.target} of integers")
        if hint and made.hint is None and made.op not in ("input", "constant", "shift"):
            made.hint = hint

    def _viewed(self, node: Node) -> Value:
        value = self.argument(node.args[0])
        if value.op != "constant":
            rows, cols, _ = self._extent(node)
            # Being repeated (expand) needs nothing done; anything else would move elements.
            if (value.rows and not rows) or (value.cols and not cols):
                raise Unsupported(f"{node.target} to {list(sizes(node))} mixes rows and columns")
        return value

    def _cast(self, node: Node, value: Value) -> Value:
        """``value`` as the type of ``node`` has it, but for rounding."""
        dtype = node.meta["val"].dtype
        if dtype == torch.bool and value.dtype != torch.bool:
            zero = self.builder.constant(0.0, value.dtype if value.is_integer else None)
            return self.builder.make("not_equal", value, zero, dtype=torch.bool)
        whole = value.is_integer or (value.op == "constant" and float(value.number).is_integer())
        if dtype in INTEGERS and not whole:
            raise Unsupported(f"numbers cut off to {dtype}")
        return value

    def _rounded(self, node: Node, value: Value) -> Value:
        """``value`` as PyTorch keeps it."""
        dtype = node.meta["val"].dtype
        if dtype in (torch.bool, torch.float32) or value.op == "constant":
            return value
        if dtype in INTEGERS:
            if value.dtype not in (None, dtype):
                raise Unsupported(f"{value.dtype} as {dtype}")
            value.dtype = dtype
            return value
        if dtype != self.dtype:
            raise Unsupported(f"a value in {dtype} where the inputs are {self.dtype}")
        operation = OPERATIONS.get(value.op)
        exact = value.op in ("max", "min") or (operation and operation.exact)
        if value.dtype == dtype or (exact and all(_is_of(a, dtype) for a in value.args)):
            value.dtype = dtype
            return value
        return self.builder.rounded(value, dtype)

    def _looked_at(self, node: Node) -> bool:
        """Reads an argument that lies over the rows only with a dimension more, which the entry point gives it."""
        source, dim = node.args
        name = self.arguments.get(source)
        if name is None or source in self.values or self._lies_over_rows(source):
            return False
        known = self.looked_at.setdefault(name, node)
        if known is not node and known.args != node.args:
            raise Unsupported(f"{name} in two shapes")
        if known is node:
            self.statements.append(f"{name} = {name}.unsqueeze({dim})")
        self.values[node] = self.argument(known) if known is not node else self._input(node, name)
        return True

    def _lies_over_rows(self, node: Node) -> bool:
        try:
            self._extent(node)
        except Unsupported:
            return False
        return True

    def _part(self, node: Node, name: str) -> None:
        """Reads some of the columns of a value: it is looked at from another column on."""
        if not is_tensor(node):
            return  # several of them, which getitem takes
        source, begin = node.args[0], 0
        if name == "slice":
            dim, first, step = arguments(node, "dim", "start", "step")
            if sizes(node) == sizes(source):
                self.values[node] = self.argument(source)
                return
            if dim % source.meta["val"].dim() != source.meta["val"].dim() - 1 or step != 1:
                raise Unsupported("a slice along another dimension than the last, or with a step")
            begin = (first or 0) + (sizes(source)[-1] if (first or 0) < 0 else 0)
        else:
            pieces, source = [int(v.shape[-1]) for v in source.meta["val"]], source.args[0]
            if sum(pieces) != sizes(source)[-1]:
                raise Unsupported(f"{node.target} along another dimension than the last")
            begin = sum(pieces[: node.args[1]])
        if sizes(node)[-1] == 1:
            raise Unsupported("a part of a single column")
        self.common = None
        self.values[node] = self.builder.shifted(self.argument(source), begin)

    def _cut(self, node: Node, name: str) -> None:
        """Reads what cuts an argument along its columns: the entry point will do it, by a view."""
        source = self.arguments[node.args[0]]
        rank = node.args[0].meta["val"].dim()
        position = 1 if name == "slice" else 2
        dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
        if dim not in (-1, rank - 1):
            raise Unsupported(f"{name} along another dimension than the last")
        if name == "slice":
            text = _slice_text(*node.args[2:])
            part = self._new_name(self.hints.get(node) or f"{source}_part")
            self.statements.append(f"{part} = {source}[..., {text}]")
            self._input(node, part)
            first, last, step = (*node.args[2:], None, None, None)[:3]
            self._note_cut(part, source, sizes(node.args[0])[-1], slice(first, last, step))
            return
        users = {user.args[1]: user for user in node.users}
        count = len(node.meta["val"])
        unpacked = [assigned_names(last_line(user)) for user in users.values()]
        given = next((names for names in unpacked if len(names) == count), [None] * count)
        names = [self._new_name(given[i] or f"{source}_{i}") if i in users else "_" for i in range(count)]
        how = node.args[1] if name == "chunk" else [int(v.shape[-1]) for v in node.meta["val"]]
        self.statements.append(
            f"{', '.join(names)} = {source}.{'chunk' if name == 'chunk' else 'split'}({how}, dim=-1)"
        )
        for i, user in users.items():
            self._input(user, names[i])
            begin = sum(v.shape[-1] for v in node.meta["val"][:i])
            end = begin + node.meta["val"][i].shape[-1]
            self._note_cut(names[i], source, sizes(node.args[0])[-1], slice(begin, end))

    def _note_cut(self, name: str, source: str, width: Any, part: slice) -> None:
        if not all(isinstance(i, int | None) for i in (part.start, part.stop, part.step)):
            return
        if isinstance(width, int):
            self.cuts[name] = Cut(source, range(width)[part], width)
        elif (part.start or 0) >= 0 and 0 <= (-1 if part.stop is None else part.stop) < 2**62:
            self.cuts[name] = Cut(source, range(part.start or 0, part.stop, part.step or 1))

    def _output(self, i: int, node: Node) -> Output:
        self.common = None
        value = self.argument(node)
        if value in self.inputs.values() or not value.rows:
            raise Unsupported("it returns an input, or something that has no rows")
        name = self.hints.get(node) or ("y" if len(self.results) == 1 else f"y{i}")
        name = self._new_name(name)
        shape, dtype = sizes(node), node.meta["val"].dtype
        if self.joins and value.cols and shape[-1] != self.width:
            raise Unsupported("results of different widths")
        tiles = [
            v for v in self.inputs.values() if v.is_tile and v.steps is None and v.shape[:-1] in (shape[:-1], shape)
        ]
        if self.joins:  # the nearest in width; or what has the rows alone
            tiles = sorted(tiles, key=lambda v: v.shape != shape)
            tiles += [v for v in self.inputs.values() if v.rows and not v.cols and v.shape == shape[:-1]]
        if tiles:
            return Output(name, value, dtype, tiles[0], shape, width=self.width if self.joins and value.cols else None)
        raise Unsupported(f"a result of {list(shape)}, whose rows no input has")


def _is_of(value: Value, dtype: torch.dtype) -> bool:
    """Whether a value is one of ``dtype``, or only chooses between some."""
    if value.op == "constant":
        return torch.tensor(value.number, dtype=dtype).item() == value.number
    return value.dtype in (dtype, torch.bool)


def _slice_text(first: int | None = None, last: int | None = None, step: int | None = 1) -> str:
    if not all(isinstance(i, int | None) for i in (first, last, step)):
        raise Unsupported("a slice that depends on sizes")
    start, end = (str(first) if first else ""), ("" if last is None or last >= 2**62 else str(last))
    return f"{start}:{end}" + (f":{step}" if step not in (None, 1) else "")
