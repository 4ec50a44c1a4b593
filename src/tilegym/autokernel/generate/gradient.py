"""Reverse-mode differentiation of a region: another region, whose inputs are the first one's and its gradients.

Values of the forward pass are computed again, rounded as they were; the gradients themselves stay in fp32 until they
are stored. What PyTorch rounds between two steps of its backward pass is not.
"""

from tilegym.autokernel.generate.body import padding
from tilegym.autokernel.generate.body import suggest
from tilegym.autokernel.generate.errors import Unsupported
from tilegym.autokernel.generate.graph import Builder
from tilegym.autokernel.generate.graph import Output
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.graph import topological
from tilegym.autokernel.generate.operations import OPERATIONS


def gradient_region(region: Region) -> Region:
    """The region that computes the gradients of all floating-point inputs which ``region`` is differentiable in.

    Raises:
        Unsupported: there is no derivative of one of its operations, or of its kind of inputs.
    """
    if region.linears:
        raise Unsupported("matrix products are not differentiated")
    builder = region.builder
    gradients: dict[Value, list[Value]] = {}
    upstream: dict[str, Value] = {}
    for output in region.outputs:
        name = f"d{output.name}" if len(output.name) == 1 else f"d_{output.name}"
        value = output.value
        g = Value("input", (), value.rows, value.cols, dtype=output.dtype, hint=name, shape=output.shape)
        g.width = output.width
        upstream[name] = g
        gradients.setdefault(value, []).append(g)
    order = topological(o.value for o in region.outputs)
    for value in reversed(order):
        if value not in gradients or value.op == "input":
            continue
        g = _total(builder, gradients[value])
        if g.hint is None and g.op not in ("input", "constant"):
            g.hint = f"d_{suggest(value)}"
        for arg, d in zip(value.args, _derivatives(builder, value, g), strict=True):
            if d is not None and arg.op not in ("constant", "columns") and not _is_truth(arg):
                gradients.setdefault(arg, []).append(_over_columns(builder, d, value, arg))
    outputs: list[Output] = []
    shapes = {g.shape: g for g in upstream.values() if g.is_tile}
    for name, value in region.inputs.items():
        if value in gradients and is_differentiable(value):
            total = _total(builder, gradients[value])
            tiles = [v for v in (*region.inputs.values(), *upstream.values()) if v.is_tile]
            like = value if value.is_tile else tiles[0]
            like = shapes.get(like.shape, like)
            if value.width and like not in upstream.values():  # what is there anyhow has the rows, too
                like = next((g for g in upstream.values() if g.is_tile and g.shape[:-1] == like.shape[:-1]), like)
            name = f"d{name}" if len(name) == 1 else f"d_{name}"
            outputs.append(Output(name, total, value.dtype, like, value.shape, not value.rows, value.width))
    if not outputs:
        raise Unsupported("it is differentiable in none of its inputs")
    used = {*topological(o.value for o in outputs), *(o.like for o in outputs)}
    inputs = {n: v for n, v in (upstream | region.inputs).items() if v in used}
    result = Region(f"{region.name}_backward", inputs, outputs, list(inputs), builder, region.dtype)
    result.dtypes, result.size, result.width = region.dtypes, region.size, region.width
    return result


def is_differentiable(value: Value) -> bool:
    """Whether the gradient of an input is computed: not of those repeated over rows, nor of single numbers."""
    return value.dtype.is_floating_point and value.steps is None and (value.rows or value.cols)


def _is_truth(value: Value) -> bool:
    return value.op == "input" and not value.dtype.is_floating_point


def _total(builder: Builder, parts: list[Value]) -> Value:
    total = parts[0]
    for part in parts[1:]:
        total = builder.make("sub", total, *part.args) if part.op == "neg" else builder.make("add", total, part)
    return total


def _over_columns(builder: Builder, d: Value, value: Value, arg: Value) -> Value:
    """A contribution to the gradient of ``arg`` from ``value``, over the columns where only the latter has them.

    Sums over rows wait until the end: a vector's own derivatives are the same in all of them.
    """
    if arg.cols or not value.cols:
        return d
    return builder.reduce("sum", d) if d.cols else builder.make("mul", d, builder.columns())


def _shifted_back(builder: Builder, g: Value, by: int) -> Value:
    """The gradient of an array that was looked at ``by`` columns further on: 0 in columns that nobody looked at."""
    back = builder.shifted(g, -by)
    if padding(g, {}) == 0.0:
        return back
    if by > 0:
        return builder.make("where", builder.before(by), 0.0, back)
    return builder.make("where", builder.before(builder.width + by), back, 0.0)


def _derivatives(builder: Builder, value: Value, g: Value) -> list[Value | None]:
    if value.op in ("round", "sum"):
        return [g]
    if value.op == "shift":
        return [_shifted_back(builder, g, int(value.number))]
    operation = OPERATIONS.get(value.op)
    if operation is None or operation.derivative is None:
        if value.op == "pow" and value.args[1].op == "constant":
            x, exponent = value.args[0], value.args[1].number
            lower = builder.make("pow", x, exponent - 1.0)
            return [builder.make("mul", g, builder.make("mul", lower, exponent)), None]
        raise Unsupported(f"{value.op} is not differentiated")
    return operation.derivative(builder, value, g)
