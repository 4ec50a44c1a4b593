"""The fusion plan: which kernels a region becomes, and how their blocks go over rows and columns."""

import dataclasses
from dataclasses import dataclass

import torch

from tilegym.autokernel.generate.body import suggest
from tilegym.autokernel.generate.graph import REDUCTIONS
from tilegym.autokernel.generate.graph import Output
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.graph import topological

# Rows of up to this many elements are held in the registers of a block: see row_norms.py.
MAX_CACHED = 16384
MAX_CACHED_BACKWARD = 8192


@dataclass(frozen=True)
class Tuning:
    """What may be chosen without a change of the result.

    Attributes:
        elements: of a tile of a pointwise kernel, or of the short rows that share a block.
        eight_warps: a block of at least so many elements gets 8 warps, else 4.
        registers: elements that the blocks of a multiprocessor hold at a time: the occupancy is this over a block's.
        wide, wide_warps, wide_occupancy: of rows that are too long for registers, a tile of so many columns at a time.
        tile_m, tile_n, tile_k_bytes, warps: of a GEMM.
        gemv_n, gemv_k_bytes, gemv_occupancy: of a product with one row.
    """

    elements: int = 4096
    eight_warps: int = 8192
    registers: int = 16384
    wide: int = 4096
    wide_warps: int = 8
    wide_occupancy: int = 2
    tile_m: int = 128
    tile_n: int = 128
    tile_k_bytes: int = 128
    warps: int = 4
    gemv_n: int = 4
    gemv_k_bytes: int = 1024
    gemv_occupancy: int = 4


@dataclass(frozen=True)
class Kernel:
    """One kernel of a region.

    Attributes:
        name: of the function.
        kind: how blocks go over the space.
            ``flat``: tiles of elements, all arrays of one shape. ``tiles``: tiles of rows and columns.
            ``rows``: whole rows in registers. ``wide``: a row at a time, a tile of columns at a time.
            ``striding``: whole rows, blocks striding over them, to sum over rows.
            ``columns``: blocks striding over the rows of a tile of columns, to sum over rows.
        inputs: arrays it reads, by name.
        outputs: what it writes.
        pairs: arrays whose columns are two inputs' or two outputs' in turns, by name, and the names of the two. The
            kernel takes them in the place of the two, and before all others: they are the largest.
    """

    name: str
    kind: str
    inputs: dict[str, Value]
    outputs: tuple[Output, ...]
    pairs: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> list[str]:
        """The names of the arrays it takes, in order."""
        halves = {n for pair in self.pairs.values() for n in pair}
        return [*self.pairs, *(n for n in (*self.inputs, *(o.name for o in self.outputs)) if n not in halves)]

    @property
    def sums(self) -> list[Output]:
        """The outputs that are sums over rows."""
        return [o for o in self.outputs if o.vector]


def reductions(outputs: list[Output] | tuple[Output, ...]) -> list[Value]:
    """The reductions over columns, those that others need first."""
    return [v for v in topological(o.value for o in outputs) if v.op in REDUCTIONS]


def stages(values: list[Value]) -> dict[Value, int]:
    """How many reductions lie, one behind the other, before each value. ``values``: arguments first."""
    stage: dict[Value, int] = {}
    for value in values:
        below = max((stage[a] for a in value.args), default=0)
        stage[value] = below + (value.op in REDUCTIONS)
    return stage


def late_inputs(kernel: Kernel, dtype: torch.dtype) -> tuple[str, list[str]]:
    """(an input that the first reductions of whole rows need, those in ``dtype`` that are needed behind them alone).

    The compiler asks for these where they are used, behind the reductions: memory is waited for twice. Without any of
    either kind: ("", []).
    """
    order = topological(o.value for o in kernel.outputs)
    stage = stages(order)
    first = set(topological(v.args[0] for v in order if v.op in REDUCTIONS and stage[v] == 1))
    read = {n: v for n, v in kernel.inputs.items() if v.op == "input" and v.cols and v.dtype == dtype and not v.steps}
    shifted = {v.args[0] for v in order if v.op == "shift"}
    early = next((n for n, v in read.items() if v in first and v.is_tile and v not in shifted), "")
    late = [n for n, v in read.items() if v not in first and v not in shifted]
    return (early, late) if kernel.kind == "rows" and early and late else ("", [])


def _inputs_of(region: Region, outputs: tuple[Output, ...], extra: dict[str, Value]) -> dict[str, Value]:
    used = topological(o.value for o in outputs)
    return {n: v for n, v in (region.inputs | extra).items() if v in used}


def plan_kernels(region: Region, backward: bool) -> list[Kernel]:
    """The kernels of a region without matrix products, in the order of their launches."""
    outputs = tuple(region.outputs)
    statistics = reductions(outputs)
    sums = any(o.vector for o in outputs)
    name, extra = f"{region.name}_kernel", {}
    wide = region.width > (MAX_CACHED_BACKWARD if backward else MAX_CACHED)
    inputs = _inputs_of(region, outputs, extra)
    if sums and statistics and not wide:
        return [Kernel(name, "striding", inputs, outputs)]
    if sums and statistics:
        return _split_statistics(region, outputs)
    if sums:
        return [Kernel(name, "columns", inputs, outputs)]
    if statistics:
        return [Kernel(name, "wide" if wide else "rows", inputs, outputs)]
    arrays = [*inputs.values(), *(o.value for o in outputs)]
    flat = region.builder.width is None and all(a.is_tile and a.steps is None for a in arrays)
    return [Kernel(name, "flat" if flat else "tiles", inputs, outputs)]


def _split_statistics(region: Region, outputs: tuple[Output, ...]) -> list[Kernel]:
    """For sums over the rows of rows that are too long for registers: statistics first, in fp32, then tiles."""
    like = next(v for v in region.inputs.values() if v.is_tile)
    order = topological(o.value for o in outputs)
    users = {a for v in order if v.is_tile for a in v.args} | {o.value for o in outputs if not o.value.cols}
    needed = [v for v in order if v.rows and not v.cols and v.op != "input" and v in users]
    known: dict[Value, Value] = {}
    first = []
    for value in needed:
        stem = suggest(value)
        taken = {*region.inputs, *(o.name for o in outputs), *(o.name for o in first)}
        name = stem if stem not in taken else next(n for i in range(2, 99) if (n := f"{stem}{i}") not in taken)
        first.append(Output(name, value, torch.float32, like))
        known[value] = Value("input", (), True, False, dtype=torch.float32, hint=name)
    second = substitute(outputs, known)
    extra = {v.hint: v for v in known.values()}
    return [
        Kernel(f"{region.name}_statistics_kernel", "wide", _inputs_of(region, tuple(first), {}), tuple(first)),
        Kernel(f"{region.name}_kernel", "columns", _inputs_of(region, second, extra), second),
    ]


def substitute(outputs: tuple[Output, ...], known: dict[Value, Value]) -> tuple[Output, ...]:
    """``outputs`` computed from what ``known`` has in the place of some values."""
    done = dict(known)
    for v in topological((o.value for o in outputs), known):
        args = tuple(done[a] for a in v.args)
        done[v] = v if args == v.args else dataclasses.replace(v, args=args)
    return tuple(dataclasses.replace(o, value=done[o.value]) for o in outputs)
