"""Writes the file of a region with matrix products of one left operand, and what comes before and behind them.

One row: a single kernel in which each block computes what comes before for itself, as ``fused_gemv.py`` does. More
rows: a kernel for what comes before, and a GEMM that ends in what comes behind, both as the ops have them.
"""

import dataclasses

import torch

from tilegym.autokernel.generate.body import Body
from tilegym.autokernel.generate.body import as_float
from tilegym.autokernel.generate.body import call
from tilegym.autokernel.generate.body import suggest
from tilegym.autokernel.generate.errors import Unsupported
from tilegym.autokernel.generate.graph import REDUCTIONS
from tilegym.autokernel.generate.graph import Output
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.graph import topological
from tilegym.autokernel.generate.kernels import TILING
from tilegym.autokernel.generate.kernels import KernelWriter
from tilegym.autokernel.generate.kernels import frontier
from tilegym.autokernel.generate.launches import LAUNCH
from tilegym.autokernel.generate.launches import LIBRARY
from tilegym.autokernel.generate.launches import as_rows
from tilegym.autokernel.generate.launches import launch_lines
from tilegym.autokernel.generate.launches import plan_source
from tilegym.autokernel.generate.launches import returned_values
from tilegym.autokernel.generate.operations import ATOM
from tilegym.autokernel.generate.plan import Tuning
from tilegym.autokernel.generate.plan import plan_kernels
from tilegym.autokernel.generate.plan import reductions
from tilegym.autokernel.generate.plan import stages

MATMUL = "tilegym.ops.cutile.matmul"
LINEAR = "tilegym.ops.cutile.linear"
LOOP = "for k in range(ct.cdiv(K, TILE_K)):"


class ProductKernel:
    """What the GEMM and the kernel for one row share: parameters, and the steps behind the products."""

    def __init__(self, region: Region, inputs: dict[str, Value], outputs: list[Output], constants: list[str]):
        self.region, self.outputs = region, [o for o in outputs if behind_product(region, o)]
        self.weights = [p.weight for p in region.linears]
        self.parameters = [*inputs, *self.weights, *(o.name for o in outputs)]
        self.constants = constants
        self.imports: set[tuple[str, str]] = {(TILING, "Int")}
        dtype = None if region.dtype == torch.float32 else f"{self.outputs[0].name}.dtype"
        rough = dtype is not None and all(o.dtype == region.dtype for o in self.outputs)
        self.body = Body(self.parameters, self.load, dtype, rough)
        self.body.taken |= {"m", "n", "k"}
        self.body.stored_narrow = {self.stored(o) for o in self.outputs}

    def load(self, value: Value) -> str:
        raise NotImplementedError

    def stored(self, output: Output) -> Value:
        value = output.value
        users = {a for v in topological(o.value for o in self.region.outputs) for a in v.args}
        return value.args[0] if value.op == "round" and value.dtype == output.dtype and value not in users else value

    def finish(self, place: str) -> None:
        """The steps behind the products, and the stores."""
        self.body.emit(self.stored(o) for o in self.outputs)
        for output in self.outputs:
            text = f"{self.body.text(self.stored(output), ATOM)}.astype({output.name}.dtype)"
            self.body.call("ct.store", output.name, place, text)

    def source(self, name: str, doc: str) -> str:
        head = call(f"def {name}", [*self.parameters, *self.constants], tail=":")
        return "\n".join(["@ct.kernel", head, f'    """{doc}"""', *self.body.lines, ""])


def in_fp32(value: Value) -> torch.dtype:
    """The dtype of an input that a helper has read as fp32: that, or still truth values."""
    return torch.bool if value.dtype == torch.bool else torch.float32


def behind_product(region: Region, output: Output) -> bool:
    """Whether a result depends on the products; others are made on the way to their left operand."""
    return bool({p.value for p in region.linears} & set(topological([output.value])))


class GemmKernel(ProductKernel):
    """Tiles of the results; the left operand is an array."""

    def __init__(self, region: Region, inputs: dict[str, Value], left: str):
        outputs = [o for o in region.outputs if behind_product(region, o)]
        super().__init__(region, {left: None, **inputs}, outputs, ["TILE_M: Int", "TILE_N: Int", "TILE_K: Int"])
        body, weight = self.body, self.weights[0]
        self.imports |= {(MATMUL, name) for name in ("GROUP_M", "load_tile", "tile_of_block")}
        tiles = [f"ct.cdiv({left}.shape[0], TILE_M)", f"ct.cdiv({weight}.shape[0], TILE_N)"]
        body.call("m, n = tile_of_block", "ct.bid(0)", *tiles, "GROUP_M")
        sums = {p.value: body.new_name(p.value.hint) for p in region.linears}
        for name in sums.values():
            body.line(f"{name} = ct.zeros((TILE_M, TILE_N), ct.float32)")
        body.line(f"for k in range(ct.cdiv({left}.shape[1], TILE_K)):")
        body.indent = 8
        tile = body.new_name(f"{left}_tile")
        body.line(f"{tile} = load_tile({left}, m, k, TILE_M, TILE_K, False, True)")
        for product, name in zip(region.linears, sums.values(), strict=True):
            other = f"load_tile({product.weight}, k, n, TILE_K, TILE_N, True, True)"
            body.call(f"{name} = ct.mma", tile, other, name)
            body.scope[product.value] = name, ATOM
        body.indent = 4
        self.finish("(m, n)")

    def load(self, value: Value) -> str:
        dtype = value.dtype
        if value.is_tile:
            text = f"load_tile({value.hint}, m, n, TILE_M, TILE_N, False, True)"
        elif value.cols:
            self.imports.add((MATMUL, "load_bias"))
            text, dtype = f"load_bias({value.hint}, n, TILE_N)", in_fp32(value)
        elif value.rows:
            text = f"load_tile({value.hint}, m, 0, TILE_M, 1, False, True)"
        else:
            text = f"ct.load({value.hint}, (0,), (1,))[None, :]"
        return as_float(text, dtype)


class GemvKernel(ProductKernel):
    """One row: the products are added up, and what comes before them is computed on the way."""

    def __init__(self, region: Region, inputs: dict[str, Value]):
        constants = ["K: Int", "TILE_N: Int", "TILE_K: Int", "OVERLAP: Bool"]
        super().__init__(region, inputs, region.outputs, constants)
        body, self.before = self.body, True
        self.imports |= {(TILING, "Bool"), (TILING, "begin"), (LINEAR, "weight_tile")}
        body.columns = "K"
        body.line("n = ct.bid(0)")
        body.line("begin(OVERLAP)")
        left = region.left
        beside = [o for o in region.outputs if o not in self.outputs]
        order = topological([left, *(o.value for o in beside)])
        if any(v.op in REDUCTIONS for v in order):
            self.imports.add((TILING, "span"))
            body.inside = "span(k, TILE_K)[None, :] < K"
        stage = stages(order)
        for step in range(1, stage[left] + 1):
            values = [v for v in order if v.op in REDUCTIONS and stage[v] == step]
            body.emit_before_loop(frontier(topological(v.args[0] for v in values), lambda v: v.cols))
            body.reduce_in_loop(values, "TILE_K", LOOP, [])
        ends = (left, *(o.value for o in beside))
        body.emit_before_loop(frontier([*order, Value("end", ends, True, True)], lambda v: v.cols))
        sums = {p.value: body.new_name(f"{p.value.hint}_sums") for p in region.linears}
        for name in sums.values():
            body.line(f"{name} = ct.zeros((TILE_N, TILE_K), ct.float32)")
        outer = dict(body.scope)
        body.line(LOOP)
        body.indent = 8
        body.emit([left, *(o.value for o in beside)])
        if not body.text(left).isidentifier():
            body.keep(left)
        if beside:  # every block has them: the first writes them
            body.line("if n == 0:")
            body.indent = 12
            for output in beside:
                text = f"{body.text(output.value, ATOM)}.astype({output.name}.dtype)"
                body.call("ct.store", output.name, "(0, k)", text)
            body.indent = 8
        for product, name in zip(region.linears, sums.values(), strict=True):
            body.line(f"{name} = {name} + weight_tile({product.weight}, n, k, TILE_N, TILE_K) * {body.text(left)}")
        body.indent, body.scope, self.before = 4, outer, False
        for product, name in zip(region.linears, sums.values(), strict=True):
            total = body.new_name(product.value.hint)
            body.line(f"{total} = ct.sum({name}, axis=1).reshape((1, TILE_N))")
            body.scope[product.value] = total, ATOM
        # An input may be needed again, now over the columns of the results.
        body.scope = {v: t for v, t in body.scope.items() if v.op != "input" or not v.cols or v in sums}
        self.finish("(0, n)")

    def load(self, value: Value) -> str:
        place, size = ("k", "TILE_K") if self.before else ("n", "TILE_N")
        if value.is_tile:
            text, dtype = f"weight_tile({value.hint}, 0, {place}, 1, {size})", in_fp32(value)
        elif value.cols:
            self.imports.add((MATMUL, "load_bias"))
            text, dtype = f"load_bias({value.hint}, {place}, {size})", in_fp32(value)
        elif value.rows:
            text, dtype = f"weight_tile({value.hint}, 0, 0, 1, 1)", in_fp32(value)
        else:
            text, dtype = f"ct.load({value.hint}, (0,), (1,))[None, :]", value.dtype
        return as_float(text, dtype)


GEMM_PLAN = '''@functools.lru_cache(maxsize=1024)
def gemm_plan(m: int, n: int, bits: int, device: int) -> tuple[ct.kernel, tuple[int], int, int, int]:
    """(kernel, grid, TILE_M, TILE_N, TILE_K) for results of [m, n] on CUDA device ``device`` (-1: CPU)."""
    if device < 0:
        tile_m, tile_n, tile_k = 32, 32, 32
    else:
        tile_m, tile_n = max(16, min({tile_m}, next_power_of_2(m))), {tile_n}
        # Rather smaller tiles than idle multiprocessors; with more of a row at a time, to have as much under way.
        while 2 * ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n) <= sm_count(device) and max(tile_m, tile_n) > 64:
            tile_m, tile_n = (tile_m // 2, tile_n) if tile_m >= tile_n else (tile_m, tile_n // 2)
        tile_k = {k_bits} // bits * (2 if tile_m * tile_n <= 4096 else 1)
    kernel = hinted({kernel}, num_worker_warps={warps})
    return kernel, (ct.cdiv(m, tile_m) * ct.cdiv(n, tile_n),), tile_m, tile_n, tile_k
'''
GEMV_PLAN = '''@functools.lru_cache(maxsize=1024)
def gemv_plan(n: int, k: int, bits: int, device: int) -> tuple[ct.kernel, tuple[int], int, int, bool]:
    """(kernel, grid, TILE_N, TILE_K, OVERLAP) for one row of k and results of n on CUDA device ``device`` (-1: CPU)."""
    if device < 0:
        return {kernel}, (ct.cdiv(n, 8),), 8, 64, False
    kernel = hinted({kernel}, occupancy={occupancy})
    return kernel, (ct.cdiv(n, {tile_n}),), {tile_n}, min({k_bits} // bits, next_power_of_2(k)), overlaps(device)
'''


class ProductWriter:
    """The kernels and launch functions of a region with matrix products; the region is not differentiated."""

    def __init__(self, region: Region, tuning: Tuning, imports: set[tuple[str, str]]):
        self.region, self.tuning, self.imports = region, tuning, imports
        self.helpers: set[str] = set()
        self.names: list[str] = []  # of the kernels
        main = [o for o in region.outputs if behind_product(region, o)]
        self.beside = [o for o in region.outputs if not behind_product(region, o)]
        behind = topological(o.value for o in main)
        before = topological([region.left])
        products = {p.value for p in region.linears}
        if reductions(main) or any(v.op not in ("input", "constant") for v in set(before) & set(behind) - products):
            raise Unsupported("steps behind a matrix product that are more than elementwise")
        if not main or any(o.value not in before or not o.value.is_tile for o in self.beside):
            raise Unsupported("a result that neither depends on the matrix product nor is a step to its left operand")
        if any(v.steps for v in (*before, *behind)):
            raise Unsupported("an input that is repeated over rows, beside a matrix product")
        self.before = {n: v for n, v in region.inputs.items() if v in before}
        self.behind = {n: v for n, v in region.inputs.items() if v in behind}
        tiles = [n for n, v in self.before.items() if v.is_tile and v.dtype != torch.bool]
        if not tiles:
            raise Unsupported("a left operand that is computed from no tensor of numbers")
        self.x = tiles[0]

    def sections(self) -> list[str]:
        region, tuning = self.region, self.tuning
        gemv = GemvKernel(region, region.inputs)
        left = region.left.hint if region.left.op == "input" else suggest(region.left)
        left = f"{left}_rows" if region.left.op != "input" and left in {*region.inputs, *region.signature} else left
        gemm = GemmKernel(region, self.behind, left)
        gemv_name, gemm_name = f"{region.name}_gemv_kernel", f"{region.name}_gemm_kernel"
        sections = [
            gemv.source(gemv_name, "One row; a block computes TILE_N elements of the result."),
            gemm.source(gemm_name, "One block a tile of the result; ``matmul.py`` says in which order."),
        ]
        for kernel in (gemv, gemm):
            self.imports |= kernel.imports | kernel.body.imports
            self.helpers |= kernel.body.helpers
        prologue, lines = self._prologue(left)
        # Two accumulators of 128 x 128 need the registers of 8 warps.
        warps = 4 if tuning.warps == 4 and len(region.linears) == 1 else "8 if tile_m == 128 else 4"
        gemm_sizes = {"tile_m": tuning.tile_m, "tile_n": tuning.tile_n, "k_bits": 8 * tuning.tile_k_bytes}
        gemv_sizes = {"tile_n": tuning.gemv_n, "k_bits": 8 * tuning.gemv_k_bytes, "occupancy": tuning.gemv_occupancy}
        self.imports |= {(TILING, n) for n in ("hinted", "next_power_of_2", "overlaps", "rows_of", "sm_count")}
        self.imports |= {("", "functools"), (LAUNCH, "launch"), (LIBRARY, "compilable")}
        self.names += [gemv_name, gemm_name]
        return [
            *prologue,
            *sections,
            GEMV_PLAN.format(kernel=gemv_name, **gemv_sizes),
            GEMM_PLAN.format(kernel=gemm_name, warps=warps, **gemm_sizes),
            *self._launch(left, lines),
        ]

    def _prologue(self, left: str) -> tuple[list[str], list[str]]:
        """What comes before a GEMM: sections of the file, and statements that launch it."""
        region = self.region
        if region.left.op == "input":
            return [], []
        if region.left.dtype != region.dtype and region.dtype != torch.float32:
            raise Unsupported("a left operand that is not in the working dtype")
        outputs = [Output(left, region.left, region.dtype, self.before[self.x])]
        outputs += [dataclasses.replace(o, name=f"{o.name}_rows") for o in self.beside]
        inner = Region(f"{region.name}_prologue", self.before, outputs, list(self.before), region.builder, region.dtype)
        inner.width = region.width
        (kernel,) = plan_kernels(inner, False)
        kernel = dataclasses.replace(kernel, kind="tiles" if kernel.kind == "flat" else kernel.kind)
        writer = KernelWriter(kernel, region.dtype)
        self.imports |= writer.imports
        self.helpers |= writer.helpers
        late = bool(writer.late)
        plan = plan_source(kernel, "prologue_plan", self.tuning, self.imports, late)
        self.names.append(kernel.name)
        name = "prologue_plan" if plan else "plan"
        known = {"rows", *(o.name for o in outputs)}
        lines = launch_lines(kernel, name, region.dtype, known, self.imports, "k", late=late)
        arrays = [f"    {left} = rows.new_empty(m, k)"]
        arrays += [f"    {o.name}_rows = {o.name}.view(m, k)" for o in self.beside]
        return [writer.source, *([plan] if plan else [])], [*arrays, *lines]

    def _launch(self, left: str, prologue: list[str]) -> list[str]:
        region, x = self.region, self.x
        names = argument_names(region)
        weights = [p.weight for p in region.linears]
        fake, outputs = f"_{region.name}_outputs", [o.name for o in region.outputs]
        value = f"{x}.new_empty(*{x}.shape[:-1], {weights[0]}.shape[0])"
        values = [f"{x}.new_empty({x}.shape)" if o in self.beside else value for o in region.outputs]
        made = [
            text if o.dtype == region.dtype else text[:-1] + f", dtype={o.dtype})"
            for text, o in zip(values, region.outputs, strict=True)
        ]
        count = len(outputs)
        results = "torch.Tensor" if count == 1 else f"tuple[{', '.join(['torch.Tensor'] * count)}]"
        parameters = [f"{n}: torch.Tensor" for n in names]
        head = call(f"def {region.name}_forward", parameters, tail=f" -> {results}:")
        arrays = {n: as_rows(n, v, self.imports) for n, v in region.inputs.items()}
        arrays[x] = "rows"
        views = [f"{o.name}.view(m, {'k' if o in self.beside else 'n'})" for o in region.outputs]
        behind = [v for v, o in zip(views, region.outputs, strict=True) if o not in self.beside]
        body = [
            f"    {', '.join(outputs)} = {fake}({', '.join(names)})",
            f"    rows, bits, device = rows_of({x}), {x}.dtype.itemsize * 8, {x}.get_device()",
            f"    (m, k), n = rows.shape, {weights[0]}.shape[0]",
            "    if m == 1:",
            "        kernel, grid, tile_n, tile_k, overlap = gemv_plan(n, k, bits, device)",
            call("arrays = ", [*arrays.values(), *weights, *views], 8),
            f"        launch({x}, grid, kernel, (*arrays, k, tile_n, tile_k, overlap), overlap)",
            f"        return {', '.join(outputs)}",
            *prologue,
            "    kernel, grid, tile_m, tile_n, tile_k = gemm_plan(m, n, bits, device)",
        ]
        operand = left if prologue else "rows"
        rest = [arrays[n] for n in self.behind]
        body.append(call("arrays = ", [operand, *rest, *weights, *behind], 4))
        body.append(f"    launch({x}, grid, kernel, (*arrays, tile_m, tile_n, tile_k))")
        fake_source = f"def {fake}({', '.join(names)}):\n{returned_values(made)}\n"
        launcher = f"@compilable(fake={fake})\n{head}\n" + "\n".join(body) + f"\n    return {', '.join(outputs)}\n"
        return [fake_source, launcher]


def argument_names(region: Region) -> list[str]:
    """What the launch function takes, in the order of the signature."""
    weights = [p.weight for p in region.linears]
    return [*(n for n in region.signature if n in region.inputs or n in weights), *_cut(region)]


def _cut(region: Region) -> list[str]:
    return [n for n in region.inputs if n not in region.signature]


def product_checks(region: Region, x: str) -> list[str]:
    """Conditions under which the shapes are not those of the region."""
    weights, first = [p.weight for p in region.linears], region.linears[0].weight
    wrong = [f"{first}.dim() != 2", f"{first}.shape[1] != {x}.shape[-1]"]
    wrong += [f"{w}.shape != {first}.shape" for w in weights[1:]]
    before = set(topological([region.left]))
    for name, value in region.inputs.items():
        if name == x:
            continue
        width = f"{x}.shape[-1]" if value in before else f"{first}.shape[0]"
        if value.is_tile:
            wrong.append(f"{name}.shape != {f'{x}.shape' if value in before else f'(*{x}.shape[:-1], {width})'}")
        elif value.cols:
            wrong.append(f"{name}.shape != ({width},)")
        elif value.rows:
            wrong.append(f"{name}.shape != (*{x}.shape[:-1], 1)")
        else:
            wrong.append(f"{name}.numel() != 1")
    contiguous = [n for n, v in region.inputs.items() if v.is_tile] + weights
    return wrong + [f"not {n}.is_contiguous()" for n in contiguous]
