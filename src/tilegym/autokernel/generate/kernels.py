"""Writes the kernels of a plan: for each kind, how its blocks go over the space, and what they load and store."""

from collections.abc import Callable
from collections.abc import Iterable

import torch

from tilegym.autokernel.generate.body import Body
from tilegym.autokernel.generate.body import array_of
from tilegym.autokernel.generate.body import as_float
from tilegym.autokernel.generate.body import call
from tilegym.autokernel.generate.graph import REDUCTIONS
from tilegym.autokernel.generate.graph import Output
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.graph import topological
from tilegym.autokernel.generate.operations import ATOM
from tilegym.autokernel.generate.plan import Kernel
from tilegym.autokernel.generate.plan import late_inputs
from tilegym.autokernel.generate.plan import stages

TILING = "tilegym.ops.cutile.tiling"
POINTWISE = "tilegym.ops.cutile.pointwise"
ROW_NORMS = "tilegym.ops.cutile.row_norms"
DOCS = {
    "flat": "One block a tile of elements, neighbours along a row.",
    "tiles": "One block a tile, neighbours along a row.",
    "rows": "Each block takes TILE_M whole rows.",
    "wide": "Each block takes one row, in tiles of TILE_N columns.",
    "striding": "Blocks stride over the rows; row ``bid`` of a sum over rows is that block's part.",
    "columns": "Blocks stride over the rows of one tile of columns; row ``bid`` of a sum is that block's part.",
}
CONSTANTS = {"flat": ["TILE_M", "TILE_N"], "wide": ["N", "TILE_N"]}


def constants(kind: str) -> list[str]:
    """The constants of a kernel of this kind, in order; behind them AT_ONCE where some inputs are late."""
    return CONSTANTS.get(kind, ["N", "TILE_M", "TILE_N"])


def repeats(kernel: Kernel) -> dict[tuple[int, int], str]:
    """How inputs are repeated over rows, and the first of those that are repeated so."""
    found: dict[tuple[int, int], str] = {}
    for name, value in kernel.inputs.items():
        if value.steps:
            found.setdefault(value.steps, name)
    return found


def repeated_sizes(kernel: Kernel) -> list[str]:
    """The parameters that say how inputs are repeated over rows."""
    return [f"{name}_{step}" for name in repeats(kernel).values() for step in ("outer", "inner")]


def rows_like(inputs: dict[str, Value]) -> str:
    """The name of an input that has all rows; of one with columns, if there is any."""
    full = [n for n, v in inputs.items() if v.rows and not v.steps]
    return next((n for n in full if inputs[n].cols), full[0])


def frontier(order: list[Value], inner: Callable[[Value], bool]) -> list[Value]:
    """What the values that are ``inner`` use of those that are not: it is computed once, before a loop."""
    outer = {a: None for v in order if inner(v) for a in v.args if not inner(a)}
    return [v for v in outer if v.op not in ("constant", "columns")]


class KernelWriter:
    """Writes one kernel; ``source`` is its text, ``imports`` (module, name) and ``helpers`` what it uses."""

    def __init__(self, kernel: Kernel, dtype: torch.dtype, backward: bool = False):
        self.kernel = kernel
        self.imports = {(TILING, "Int")}
        self.parameters = kernel.arrays
        self.early, self.late = late_inputs(kernel, dtype)
        self.halves = {n: (array, i) for array, pair in kernel.pairs.items() for i, n in enumerate(pair)}
        arrays = [n for n, v in kernel.inputs.items() if v.dtype == dtype]
        arrays += [o.name for o in kernel.outputs if o.dtype == dtype]
        arrays = [self.halves.get(n, (n,))[0] for n in arrays]
        working = f"{arrays[0]}.dtype" if dtype != torch.float32 and arrays else None
        rough = working is not None and (backward or all(o.dtype == dtype for o in kernel.outputs))
        self.own_helpers: set[str] = set()
        self.body = Body([*self.parameters, *self.halves], self.load, working, rough)
        self.body.stored_narrow = {self.stored(o) for o in kernel.outputs if o.dtype == dtype}
        getattr(self, f"_{kernel.kind}")()
        self.helpers = self.body.helpers | self.own_helpers
        self.imports |= self.body.imports

    @property
    def source(self) -> str:
        values = [*self.parameters, *repeated_sizes(self.kernel)]
        values += [f"{c}: Int" for c in constants(self.kernel.kind)]
        if self.late:
            values.append("AT_ONCE: Bool")
        head = call(f"def {self.kernel.name}", values, tail=":")
        return "\n".join(["@ct.kernel", head, f'    """{DOCS[self.kernel.kind]}"""', *self.body.lines, ""])

    def use(self, module: str, name: str) -> str:
        self.imports.add((module, name))
        return name

    # Memory.

    def load(self, value: Value) -> str:
        return as_float(self.loaded(value), array_of(value).dtype)

    def loaded(self, value: Value) -> str:
        """The expression that reads an input, as it is in memory."""
        cols, rows = "cols", "rows"
        if value.op == "shift":
            cols += f" {'+' if value.number > 0 else '-'} {abs(int(value.number))}"
        value = array_of(value)
        name = value.hint
        if value.steps:
            like = repeats(self.kernel)[value.steps]  # two divisions, which take longer than the rest: once for all
            if like not in self.body.rows_read:
                rows = self.body.rows_read[like] = self.body.new_name(f"{like}_rows")
                self.body.line(f"{rows} = rows // {like}_outer * {like}_inner + rows % {like}_inner")
            rows = self.body.rows_read[like]
        if name in self.halves:
            array, number = self.halves[name]
            self.own_helpers.add("half_of")
            text = f"half_of({array}_pairs, {number}, TILE_M, TILE_N)"
        elif self.kernel.kind == "flat":
            text = f"ct.gather({name}, place)"
        elif value.is_tile:
            text = f"{self.use(ROW_NORMS, 'load')}({name}, {rows}, {cols})"
        elif value.cols:
            text = f"ct.gather({name}, {cols})[None, :]"
        elif value.rows:
            text = f"ct.gather({name}, ({rows}[:, None], 0))"
        else:
            text = f"ct.load({name}, (0,), (1,))[None, :]"
        return text

    def stored(self, output: Output) -> Value:
        """What has to be computed for ``output``: the last rounding is done by what stores it."""
        value = output.value
        users = {a for v in topological(o.value for o in self.kernel.outputs) for a in v.args}
        return value.args[0] if value.op == "round" and value.dtype == output.dtype and value not in users else value

    def store(self, outputs: Iterable[Output]) -> None:
        body, outputs = self.body, list(outputs)
        stored = {o.name: self.stored(o) for o in outputs}
        for output in outputs:
            value = stored[output.name]
            if output.name in self.halves:
                array, number = self.halves[output.name]
                if number == 1:
                    self.own_helpers.add("paired")
                    both = [stored[n] for n in self.kernel.pairs[array]]
                    for part in both:
                        if not body.text(part).isidentifier():
                            body.keep(part)
                    parts = ", ".join(map(body.text, both))
                    text = f"paired({parts}, {array}.dtype, TILE_M, TILE_N)"
                    body.call("ct.scatter", array, "pairs", text)
            elif self.kernel.kind == "flat":
                body.call("ct.scatter", output.name, "place", f"{body.text(value, ATOM)}.astype({output.name}.dtype)")
            elif output.value.cols:
                body.call(self.use(ROW_NORMS, "store"), output.name, "rows", "cols", body.text(value))
            else:
                text = f"{body.text(value, ATOM)}.astype({output.name}.dtype)"
                body.call("ct.scatter", output.name, "(rows[:, None], 0)", text)

    def span(self, tile: str, size: str) -> str:
        return f"{self.use(TILING, 'span')}({tile}, {size})"

    # The kinds.

    def _emit_and_store(self, outputs: list[Output]) -> None:
        self.body.emit(self.stored(o) for o in outputs)
        self.store(outputs)

    def _flat(self) -> None:
        last = self.kernel.arrays[-1]
        self.body.line(f"place = {self.use(POINTWISE, 'indices')}({last}, TILE_M, TILE_N)")
        if self.kernel.pairs:
            self.own_helpers.add("pair_indices")
            self.body.line(f"pairs = pair_indices({next(iter(self.kernel.pairs))}, {last}, TILE_M, TILE_N)")
        for array, (first, _) in self.kernel.pairs.items():
            if first in self.kernel.inputs:
                self.body.taken.add(f"{array}_pairs")
                self.body.line(f"{array}_pairs = ct.gather({array}, pairs)")
        self._emit_and_store(list(self.kernel.outputs))

    def _tiles(self) -> None:
        self.body.line("across = ct.cdiv(N, TILE_N)")
        rows, cols = self.span("ct.bid(0) // across", "TILE_M"), self.span("ct.bid(0) % across", "TILE_N")
        self.body.line(f"rows, cols = {rows}, {cols}")
        self._emit_and_store(list(self.kernel.outputs))

    def _rows(self) -> None:
        self.body.line(f"rows, cols = {self.span('ct.bid(0)', 'TILE_M')}, {self.span('0', 'TILE_N')}")
        self._read_at_once()
        self._emit_and_store(list(self.kernel.outputs))

    def _read_at_once(self) -> None:
        """Reads what is needed behind the first reductions beside what they need."""
        if not self.late:
            return
        body = self.body
        names = {n: body.new_name(f"{n}_loaded") for n in (*self.late, self.early)}
        for name, loaded in names.items():
            body.assign(loaded, self.loaded(self.kernel.inputs[name]))
        self.own_helpers.add("behind")
        self.use(TILING, "Bool")
        body.line("if AT_ONCE:")
        body.indent += 4
        for name in self.late:
            body.line(f"{names[self.early]} = behind({names[self.early]}, {names[name]})")
        body.indent -= 4
        for name, loaded in names.items():
            value = self.kernel.inputs[name]
            text = as_float(loaded, value.dtype)
            body.scope[value] = text if text == loaded else body.new_name(body.read_name(value)), ATOM
            if text != loaded:
                body.assign(body.scope[value][0], text)

    def _striding(self) -> None:
        self._sum_over_rows("0")

    def _columns(self) -> None:
        self._sum_over_rows("ct.bid(1)")

    def _sum_over_rows(self, tile: str) -> None:
        body, sums = self.body, self.kernel.sums
        plain = [o for o in self.kernel.outputs if not o.vector]
        body.line(f"cols = {self.span(tile, 'TILE_N')}")
        order = topological(o.value for o in self.kernel.outputs)
        body.emit_before_loop(frontier(order, lambda v: v.rows))
        totals = {}
        for output in sums:
            totals[output] = body.new_name(f"{output.name}_sum")
            body.line(f"{totals[output]} = ct.zeros((TILE_M, TILE_N), ct.float32)")
        like = rows_like(self.kernel.inputs)
        count = f"{self.use(TILING, 'row_count')}({like})"
        body.line(f"for tile in range(ct.bid(0), ct.cdiv({count}, TILE_M), ct.num_blocks(0)):")
        body.indent = 8
        body.line(f"rows = {self.span('tile', 'TILE_M')}")
        body.emit(self.stored(o) for o in [*plain, *sums])
        self.store(plain)
        for output in sums:
            part = body.text(output.value)
            body.call(f"{totals[output]} = {totals[output]} + ct.where", f"rows[:, None] < {count}", part, "0.0")
        body.indent = 4
        for output in sums:
            total = f"ct.sum({totals[output]}, axis=0).astype({output.name}.dtype)"
            body.call("ct.scatter", output.name, "(ct.bid(0), cols)", total)

    def _wide(self) -> None:
        body, outputs = self.body, list(self.kernel.outputs)
        body.line(f"rows = {self.span('ct.bid(0)', '1')}")
        body.line("tiles = ct.cdiv(N, TILE_N)")
        order = topological(self.stored(o) for o in outputs)
        stage = stages(order)
        for step in range(1, max(stage.values()) + 1):
            values = [v for v in order if v.op in REDUCTIONS and stage[v] == step]
            body.emit_before_loop(frontier(topological(v.args[0] for v in values), lambda v: v.cols))
            start = [f"cols = {self.span('tile', 'TILE_N')}"]
            body.reduce_in_loop(values, "TILE_N", "for tile in range(tiles):", start)
        tiles = [o for o in outputs if o.value.cols]
        statistics = [o for o in outputs if not o.value.cols]
        body.emit_before_loop(frontier(order, lambda v: v.cols))
        body.emit(self.stored(o) for o in statistics)
        self.store(statistics)
        if tiles:
            body.line("for i in range(tiles):")
            body.indent = 8
            body.line(f"cols = {self.span('tiles - 1 - i', 'TILE_N')}  # what was read last is in the cache still")
            self._emit_and_store(tiles)
            body.indent = 4
