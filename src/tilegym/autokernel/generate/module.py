"""Puts a generated file together: kernels, plans, launch functions, autograd, entry point."""

import dataclasses
import keyword
import re

import torch

from tilegym.autokernel.generate.body import LINE
from tilegym.autokernel.generate.body import call
from tilegym.autokernel.generate.cuts import Wholes
from tilegym.autokernel.generate.cuts import gradient_name
from tilegym.autokernel.generate.cuts import pairs_of
from tilegym.autokernel.generate.cuts import wholes_of
from tilegym.autokernel.generate.errors import Unsupported
from tilegym.autokernel.generate.formula import formulas
from tilegym.autokernel.generate.gradient import gradient_region
from tilegym.autokernel.generate.gradient import is_differentiable
from tilegym.autokernel.generate.graph import Output
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.graph import topological
from tilegym.autokernel.generate.kernels import ROW_NORMS
from tilegym.autokernel.generate.kernels import KernelWriter
from tilegym.autokernel.generate.launches import LIBRARY
from tilegym.autokernel.generate.launches import Imports
from tilegym.autokernel.generate.launches import empty
from tilegym.autokernel.generate.launches import launch_lines
from tilegym.autokernel.generate.launches import plan_source
from tilegym.autokernel.generate.launches import returned_values
from tilegym.autokernel.generate.operations import HELPER_IMPORTS
from tilegym.autokernel.generate.operations import HELPERS
from tilegym.autokernel.generate.plan import Kernel
from tilegym.autokernel.generate.plan import Tuning
from tilegym.autokernel.generate.plan import plan_kernels
from tilegym.autokernel.generate.products import ProductWriter
from tilegym.autokernel.generate.products import argument_names
from tilegym.autokernel.generate.products import product_checks

ERRORS = ("tilegym.errors", "UnsupportedError")


def import_lines(imports: Imports) -> str:
    """Import statements, sorted as isort does with one name a line."""
    standard = sorted(name for module, name in imports if not module)
    own = sorted(imports - {(m, n) for m, n in imports if not m}, key=lambda i: (i[0], _isort_key(i[1])))
    blocks = [[f"import {n}" for n in standard], ["import cuda.tile as ct", "import torch"]]
    blocks.append([f"from {module} import {name}" for module, name in own])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _isort_key(name: str) -> tuple[int, str]:
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


def class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def tensors(names: list[str], extra: list[str] = ()) -> list[str]:
    return [*(f"{n}: torch.Tensor" for n in names), *extra]


def returned(count: int) -> str:
    return "torch.Tensor" if count == 1 else f"tuple[{', '.join(['torch.Tensor'] * count)}]"


class ModuleWriter:
    """Writes the file of a region without matrix products; ``source`` is its text."""

    def __init__(self, region: Region, tuning: Tuning, trains: bool = True, prefix: str = ""):
        self.region, self.tuning, self.trains, self.prefix = region, tuning, trains, prefix
        self.imports: Imports = {ERRORS}
        self.helpers: set[str] = set()
        self.sections: list[str] = []
        self.launchers: list[str] = []
        self.kernels: list[Kernel] = []
        self.names: list[str] = []
        self.wholes = Wholes()
        self.gradient, self.why_not = None, "gradients are not asked for"
        if trains and not region.parts:
            try:
                self.gradient = gradient_region(region)
            except Unsupported as error:
                self.why_not = str(error)
        self.write()

    # Kernels and launch functions.

    def write(self) -> None:
        region = self.region
        if region.parts:
            self._write_parts()
            return
        if region.linears:
            products = ProductWriter(region, self.tuning, self.imports)
            self.left_input = products.x
            self.sections += products.sections()
            self.helpers |= products.helpers
            self.names = products.names
            self.sections.append(self._entry())
            return
        inner = self._backward()
        self._pass(region, f"{region.name}_forward", f"{self.prefix}plan", f"_{region.name}_outputs", False)
        if self.gradient is not None:
            if inner is not None:
                self._pass(inner, inner.name, f"{self.prefix}backward_plan", f"_{region.name}_gradients", True)
            self.sections.append(self._function())
        self.sections.append(self._entry())

    def _backward(self) -> Region | None:
        """What the backward pass computes, if it computes anything; settles what is passed on as a whole."""
        region = self.region
        if self.gradient is None:
            self.wholes = pairs_of(region)
            return None
        self.passed = [o for o in self.gradient.outputs if o.value.op == "input" and not o.vector]
        self.computed = [o for o in self.gradient.outputs if o not in self.passed]
        # The gradient of two inputs is written once, unless it goes to two places of a whole.
        alone = [o for o in self.computed if o.name not in map(gradient_name, region.cuts)]
        self.shared = {o.name: next(p for p in alone if _is_same(o, p)).name for o in alone}
        self.computed = [o for o in self.computed if self.shared.get(o.name, o.name) == o.name]
        if not self.computed:
            return None
        inner = Region(**{**vars(self.gradient), "outputs": self.computed})
        used = {*_used(self.computed), *(o.like for o in self.computed)}
        inner.inputs = {n: v for n, v in inner.inputs.items() if v in used}
        self.gradient.inputs = inner.inputs
        self.wholes = wholes_of(region, inner.inputs, self.computed)
        return inner

    def _write_parts(self) -> None:
        """Each part with an entry point of its own, and one that calls them."""
        region = self.region
        parts = region.different_parts
        prefixes = [f"{p.name}_" if len(parts) > 1 else "" for p in parts]
        writers = [ModuleWriter(p, self.tuning, self.trains, x) for p, x in zip(parts, prefixes, strict=True)]
        for writer in writers:
            self.imports |= writer.imports
            self.helpers |= writer.helpers
            self.sections += writer.sections
            self.names += writer.names
        self.gradient = writers[0].gradient if all(w.gradient is not None for w in writers) else None
        self.why_not = next((w.why_not for w in writers if w.gradient is None), "")
        calls = [f"{part.name}({', '.join(arguments)})" for part, arguments in region.parts]
        self.sections.append("\n".join([*self._head(), returned_values(calls), ""]))

    def _pass(self, region: Region, function: str, plan: str, fake: str, backward: bool) -> None:
        """The kernels of a region, and the function that launches them."""
        kernels, width = plan_kernels(region, backward), region.builder.width
        self.kernels += kernels
        self.names += [f"{k.name} ({k.kind})" for k in kernels]
        body, known = [], set()
        wholes = self.wholes
        cuts, names = wholes.views(list(region.inputs)), wholes.merged(list(region.inputs))
        made, views = wholes.allocated(
            region.outputs, lambda o: empty(o, region.inputs, region.dtype, self.imports), self.imports
        )
        head = call(f"def {function}", tensors(names), tail=f" -> {returned(len(made))}:")
        summed = [o.name for o in region.outputs if o.vector]
        outputs = ", ".join(made)
        if len(made) == 1 and not summed:
            body.append(f"    {outputs} = {fake}({', '.join(names)})")
        else:
            body += [f"    {name} = {text}" for name, text in made.items() if name not in summed]
        start = len(body)
        for i, kernel in enumerate(kernels):
            kernel = dataclasses.replace(kernel, pairs=wholes.pairs(kernel))
            writer = KernelWriter(kernel, region.dtype, backward)
            self.imports |= writer.imports
            self.helpers |= writer.helpers
            self.sections.append(writer.source)
            name = plan if i == len(kernels) - 1 else f"{plan}_statistics"
            text = plan_source(kernel, name, self.tuning, self.imports, bool(writer.late))
            if text:
                self.launchers.append(text)
            named, late = name if text else "plan", bool(writer.late)
            lines = launch_lines(kernel, named, region.dtype, known, self.imports, width=width, late=late)
            if i < len(kernels) - 1:
                body += lines[:2]
                body += [f"    {o.name} = rows.new_empty(m, 1, dtype=torch.float32)" for o in kernel.outputs]
                body += lines[2:]
                known |= {"rows", *(o.name for o in kernel.outputs)}
            else:
                body += lines
        self.imports.add((LIBRARY, "compilable"))
        body[start:start] = _needed(views, body[start:])
        body[:0] = _needed(cuts, body)
        result = returned_values(list(made.values()))
        fake_source = "\n".join([f"def {fake}({', '.join(names)}):", *_needed(cuts, [result]), result, ""])
        launcher = f"@compilable(fake={fake})\n{head}\n" + "\n".join(body) + f"\n    return {outputs}\n"
        self.launchers += [fake_source, launcher]
        self.sections += self.launchers
        self.launchers = []

    # Autograd.

    def _function(self) -> str:
        region, gradient = self.region, self.gradient
        wholes = self.wholes
        names = wholes.merged(list(region.inputs))
        upstream = [gradient_name(o.name) for o in region.outputs]
        saved = wholes.merged([n for n in gradient.inputs if n in region.inputs])
        taken = wholes.merged(list(gradient.inputs))
        made = wholes.merged_gradients([o.name for o in self.computed])
        results = {o.name: o.value.hint for o in self.passed} | self.shared | {name: name for name in made}
        fixed = {n for n, v in region.inputs.items() if not is_differentiable(v)}
        grads = [None if n in fixed else results.get(gradient_name(n)) for n in names]
        lines = [f"class {class_name(region.name)}(torch.autograd.Function):", "    @staticmethod"]
        lines += [f"    def forward(ctx, {', '.join(names)}):"]
        if saved:
            lines.append(f"        ctx.save_for_backward({', '.join(saved)})")
        lines += [f"        return {region.name}_forward({', '.join(names)})", "", "    @staticmethod"]
        lines += [f"    def backward(ctx, {', '.join(upstream)}):", "        if torch.is_grad_enabled():"]
        lines += ['            raise UnsupportedError("there is no second derivative")']
        if self.computed:
            args = [n for n in taken if n not in saved]
            passes = [*args, *(["*ctx.saved_tensors"] if saved else [])]
            if taken != [*args, *saved]:
                raise AssertionError("gradients come before what was saved")
            text = f"{gradient.name}({', '.join(passes)})"
            if grads == made:
                return "\n".join([*lines, f"        return {text}", ""])
            lines.append(f"        {', '.join(made)} = {text}")
        lines.append(f"        return {', '.join(map(str, grads))}")
        return "\n".join([*lines, ""])

    # The entry point.

    def _checks(self) -> list[str]:
        region = self.region
        like = region.outputs[0].like
        lines = []
        working = [n for n, v in region.inputs.items() if v.dtype == region.dtype]
        wrong = [f"{n}.dtype not in DTYPES" for n in working[:1]]
        wrong += [f"{n}.dtype != {working[0]}.dtype" for n in working[1:]]
        wrong += [f"{p.weight}.dtype != {working[0]}.dtype" for p in region.linears]
        fixed = [(n, v) for n, v in region.inputs.items() if v.dtype != region.dtype]
        wrong += [f"{n}.dtype != {v.dtype}" for n, v in fixed]
        lines += _refuse(wrong, "a dtype is none that the kernels are for")
        if region.linears:
            shapes = product_checks(region, self.left_input)
            return lines + _refuse(shapes, "the shapes or strides are not those of the region")
        shapes = []
        if region.size is not None and like.is_tile:
            shapes.append(f"{like.hint}.shape[-1] != {like.width or region.size}")
        if not like.shape[:-1] or len(like.shape) < 2:
            raise Unsupported("its inputs have no rows")
        shapes += [text for v in region.inputs.values() if v is not like for text in _shape_checks(v, like)]
        shapes = list(dict.fromkeys([*shapes, *self.wholes.checks()]))
        lines += _refuse(shapes, "the shapes are not those of the region") if shapes else []
        if region.size is None and any(k.kind == "rows" for k in self.kernels):
            lines += self._refuse_long(like, "MAX_CACHED")
        numbers = [f"{n} != {x!r}" for n, x in region.numbers.items()]
        return lines + (_refuse(numbers, "a number is not the one that the kernels are for") if numbers else [])

    def _refuse_long(self, like: Value, limit: str) -> list[str]:
        self.imports.add((ROW_NORMS, limit))
        return _refuse([f"{like.hint}.shape[-1] > {limit}"], "a row is longer than a block holds")

    def _head(self) -> list[str]:
        """The first lines of the entry point."""
        region = self.region
        annotated = [
            f"{n}: {type(region.numbers[n]).__name__ if n in region.numbers else 'torch.Tensor'}"
            for n in region.signature
        ]
        head = call(f"def {region.name}", annotated, tail=f" -> {returned(len(region.outputs))}:")
        return [head, f'    """{self._summary()}', "", *_described(region), '    """']

    def _entry(self) -> str:
        region = self.region
        lines = [*self._head(), *(f"    {view}" for view in region.views)]
        lines += self._checks()
        names = argument_names(region) if region.linears else list(region.inputs)
        floats = [n for n, v in region.inputs.items() if v.dtype.is_floating_point]
        if self.gradient is not None:
            differentiable = [n for n in floats if is_differentiable(region.inputs[n])]
            others = [n for n in floats if n not in differentiable]
        else:
            differentiable, others = [], [n for n in names if n in floats or n not in region.inputs]
        if others:
            lines += _condition(*(f"{n}.requires_grad" for n in others), unless="torch.is_grad_enabled()")
            lines.append('        raise UnsupportedError("there is no gradient of one of its inputs")')
        if differentiable:
            differentiable = self.wholes.merged(differentiable)
            lines += _condition(*(f"{n}.requires_grad" for n in differentiable), unless="torch.is_grad_enabled()")
            if region.size is None and any(k.kind == "striding" for k in self.kernels):
                lines += _indented(self._refuse_long(region.outputs[0].like, "MAX_CACHED_BACKWARD"))
            lines.append(f"        return {class_name(region.name)}.apply({', '.join(self.wholes.merged(names))})")
        names = names if region.linears else self.wholes.merged(names)
        lines.append(f"    return {region.name}_forward({', '.join(names)})")
        return "\n".join([*lines, ""])

    def _summary(self) -> str:
        if self.region.parts:
            return "Computes its results, one after the other, as at the top of this file."
        return f"Computes {' and '.join(f'``{o.name}``' for o in self.region.outputs)} as at the top of this file."

    # The file.

    @property
    def source(self) -> str:
        dtypes = ", ".join(str(d) for d in self.region.dtypes)
        for helper in sorted(self.helpers):
            self.imports.update(HELPER_IMPORTS[helper])
        helpers = [HELPERS[h] for h in sorted(self.helpers)]
        head = f"DTYPES = ({dtypes}{',' if len(self.region.dtypes) == 1 else ''})\n"
        text = "\n".join([*self.sections])
        if "math." in text:
            self.imports.add(("", "math"))
        parts = [f"{header(self.region)}\n{import_lines(self.imports)}\n{head}", *helpers, *self.sections]
        return "\n\n".join(parts)


def header(region: Region) -> str:
    text = [f'"""``{region.name}``, with PyTorch\'s rounding at every step. Without it:', ""]
    for part in region.different_parts or [region]:
        text += formulas(part)
    return "\n".join([*text, '"""', ""])


def _described(region: Region) -> list[str]:
    """The arguments, with shapes and dtypes."""
    lines = ["    Args:"]
    known = {}
    for part, names in region.parts or [(region, region.signature)]:
        arrays = zip(names, map(part.inputs.get, part.signature), strict=True)
        known |= {name: (value, part) for name, value in arrays if value is not None}
    weights = {p.weight for p in region.linears}
    before = topological([region.left]) if region.left is not None else []
    cut = {n for view in region.views for n in re.findall(r"= (\w+)", view)}
    for name in region.signature:
        if name in known:
            value, part = known[name]
            shape = _shape_text(value, part.outputs[0].like)
            if value in before:
                shape = shape.replace("N", "K")
            lines.append(f"        {name}: {shape}, {_dtype_text(value.dtype, part.dtype)}.")
        elif name in weights:
            lines.append(f"        {name}: [N, K], in one of DTYPES.")
        elif name in cut:
            lines.append(f"        {name}: what is cut along its last dimension.")
        elif name in region.numbers:
            lines.append(f"        {name}: {region.numbers[name]!r}.")
        else:
            lines.append(f"        {name}: not used.")
    lines += ["", "    Raises:", "        UnsupportedError: the kernels do not serve these arguments."]
    return lines


def _shape_text(value: Value, like: Value) -> str:
    n = value.width or "N"
    if value.is_tile:
        return f"[..., {n}]" if value.steps is None else f"[..., {n}], repeated over leading dimensions"
    if value.cols:
        return f"[{n}]" if len(value.shape) == 1 else f"[1, ..., {n}]"
    if value.rows:
        return "[..., 1]" if value.shape[-1] == 1 and len(value.shape) == len(like.shape) else "[...]"
    return "one number"


def _dtype_text(dtype: torch.dtype, working: torch.dtype) -> str:
    return "in one of DTYPES" if dtype == working else str(dtype).removeprefix("torch.")


def _shape_checks(value: Value, like: Value) -> list[str]:
    name, base = value.hint, like.hint
    if value.steps:
        first, last = value.steps
        rank = len(like.shape)
        leading = rank - len(value.shape)
        ones = ["1"] * (last - max(first, leading))
        before = [f"*{base}.shape[{leading or ''}:{first}]"] if first > leading else []
        if value.cols and value.width == like.width:
            after = [f"*{base}.shape[{last}:]"]
        else:
            after = [f"*{base}.shape[{last}:-1]", str(value.width or 1)]
        sizes = [*before, *ones, *after]
        return [f"{base}.dim() != {rank}", f"{name}.shape != ({', '.join(sizes)})"]
    if value.shape == like.shape:
        return [f"{name}.shape != {base}.shape"]
    if value.width and (not value.rows or value.width != like.width):
        return [f"{name}.shape != ({f'*{base}.shape[:-1], {value.width}' if value.rows else f'{value.width},'})"]
    if value.is_tile:
        return [f"{name}.shape[-1] != {base}.shape[-1]", f"{name}.numel() != {base}.numel()"]
    if value.cols:
        return [f"{name}.numel() != {base}.shape[-1]" if len(value.shape) > 1 else f"{name}.shape != {base}.shape[-1:]"]
    if value.rows and value.shape == (*like.shape[:-1], 1):
        return [f"{name}.shape != (*{base}.shape[:-1], 1)"]
    if value.rows and value.shape == like.shape[:-1]:
        return [f"{name}.shape != {base}.shape[:-1]"]
    if value.rows and not like.is_tile:
        return [f"{name}.numel() != {base}.numel()"]
    if value.rows:
        return [f"{name}.numel() * {base}.shape[-1] != {base}.numel()"]
    return [f"{name}.numel() != 1"]


def _condition(*conditions: str, unless: str = "") -> list[str]:
    """``if`` one of ``conditions`` holds, with ``unless`` before them, on as few lines as the formatter needs."""
    either = " or ".join(conditions)
    first = f"{unless} and (" if unless and len(conditions) > 1 else f"{unless} and " if unless else ""
    line = f"    if {first}{either}{')' if first.endswith('(') else ''}:"
    if len(line) <= LINE:
        return [line]
    inner = [f"        {either}"]
    if len(inner[0]) > LINE:
        inner = [f"        {'or ' if i else ''}{c}" for i, c in enumerate(conditions)]
    return [f"    if {first or '('}", *inner, "    ):"]


def _refuse(conditions: list[str], reason: str) -> list[str]:
    return [*_condition(*conditions), f'        raise UnsupportedError("{reason}")']


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _is_same(a: Output, b: Output) -> bool:
    """Whether two results are the same tensor."""
    return (a.value, a.dtype, a.shape, a.width, a.vector) == (b.value, b.dtype, b.shape, b.width, b.vector)


def _needed(statements: list[str], lines: list[str]) -> list[str]:
    """Those of ``statements``, assignments to a name, whose names ``lines`` have."""
    words = set(re.findall(r"\w+", " ".join(lines)))
    return [f"    {s}" for s in statements if s.partition(" = ")[0] in words]


def _used(outputs: list[Output]) -> set[Value]:
    return set(topological(o.value for o in outputs))


def identifier(text: str) -> str:
    """``text`` as a name in snake case."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    name = re.sub(r"\W+", "_", name).strip("_").lower() or "region"
    return f"{name}_" if keyword.iskeyword(name) or name[0].isdigit() else name
