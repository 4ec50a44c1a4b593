"""What aten operators compute, in terms of :mod:`operations`.

An operator computes in fp32 and rounds once, at its end: what PyTorch's kernels do on GPUs and CPUs. Each handler takes
the importer and the node and returns the value before that rounding.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from torch.fx import Node

from tilegym.autokernel.generate.errors import Unsupported
from tilegym.autokernel.generate.graph import Value

if TYPE_CHECKING:
    from tilegym.autokernel.generate.importer import Importer

Handler = Callable[["Importer", Node], Value]
HANDLERS: dict[str, Handler] = {}
# These give their first argument's elements, maybe in another shape or dtype.
SAME = frozenset(
    "_to_copy alias clone contiguous detach detach_ expand expand_as float flatten lift_fresh_copy reshape "
    "squeeze to type_as unflatten unsqueeze view view_as".split()
)
UNARY = {name: name for name in "exp log sqrt rsqrt sin cos tanh abs sign relu sigmoid silu neg expm1".split()}
BINARY = {
    **{name: name for name in "mul div maximum minimum".split()},
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
}
LOGICAL = {
    f"{name}{op}{tail}": op for op in ("and", "or") for name, tail in (("logical_", ""), ("bitwise_", ""), ("__", "__"))
}


def handler(*names: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


def arguments(node: Node, *names: str) -> list[Any]:
    """The arguments of ``node`` by their names in its schema, defaults included."""
    schema = node.target._schema.arguments
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    found |= dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return [found.get(name) for name in names]


def _simple(op: str, count: int) -> Handler:
    def handle(imp: "Importer", node: Node) -> Value:
        dtype = imp.truth if node.meta["val"].dtype == imp.truth else None
        return imp.builder.make(op, *(imp.argument(a) for a in node.args[:count]), dtype=dtype)

    return handle


HANDLERS.update({name: _simple(op, 1) for name, op in UNARY.items()})
HANDLERS.update({name: _simple(op, 2) for name, op in BINARY.items()})


def _logical(op: str, count: int) -> Handler:
    def handle(imp: "Importer", node: Node) -> Value:
        values = [imp.argument(a) for a in node.args[:count]]
        if any(value.dtype != imp.truth for value in values):
            raise Unsupported(f"{node.target} of numbers")
        return imp.builder.make(op, *values, dtype=imp.truth)

    return handle


HANDLERS.update({name: _logical(op, 2) for name, op in LOGICAL.items()})
HANDLERS.update({name: _logical("not", 1) for name in ("logical_not", "bitwise_not")})


@handler("dropout")
def _dropout(imp: "Importer", node: Node) -> Value:
    p, train = arguments(node, "p", "train")
    if train and p:
        raise Unsupported("random numbers")
    return imp.argument(node.args[0])


@handler("div", "div_")
def _div(imp: "Importer", node: Node) -> Value:
    if node.kwargs.get("rounding_mode"):
        raise Unsupported("a division that rounds")
    return imp.builder.make("div", imp.argument(node.args[0]), imp.argument(node.args[1]))


@handler("add", "sub", "rsub")
def _add(imp: "Importer", node: Node) -> Value:
    x, y = imp.argument(node.args[0]), imp.argument(node.args[1])
    (alpha,) = arguments(node, "alpha")
    name = node.target.__name__.split(".")[0]
    if name == "rsub":
        x, y = y, x
    if alpha not in (None, 1):
        if name == "rsub":
            raise Unsupported("rsub with alpha")
        y = imp.builder.make("mul", y, float(alpha))
    return imp.builder.make("add" if name == "add" else "sub", x, y)


@handler("pow")
def _pow(imp: "Importer", node: Node) -> Value:
    b = imp.builder
    x, exponent = imp.argument(node.args[0]), node.args[1]
    if exponent in (2, 3):
        square = b.make("mul", x, x)
        return square if exponent == 2 else b.make("mul", square, x)
    special = {0.5: "sqrt", -0.5: "rsqrt"}
    if exponent in special:
        return b.make(special[exponent], x)
    if exponent == -1:
        return b.make("div", 1.0, x)
    return b.make("pow", x, imp.argument(exponent))


@handler("square")
def _square(imp: "Importer", node: Node) -> Value:
    x = imp.argument(node.args[0])
    return imp.builder.make("mul", x, x)


@handler("reciprocal")
def _reciprocal(imp: "Importer", node: Node) -> Value:
    return imp.builder.make("div", 1.0, imp.argument(node.args[0]))


@handler("gelu")
def _gelu(imp: "Importer", node: Node) -> Value:
    (approximate,) = arguments(node, "approximate")
    return imp.builder.make("gelu_tanh" if approximate == "tanh" else "gelu", imp.argument(node.args[0]))


@handler("softplus")
def _softplus(imp: "Importer", node: Node) -> Value:
    if tuple(arguments(node, "beta", "threshold")) != (1, 20):
        raise Unsupported("softplus with a beta or a threshold of its own")
    return imp.builder.make("softplus", imp.argument(node.args[0]))


@handler("max", "min")
def _extreme(imp: "Importer", node: Node) -> Value:
    name, *rest = node.target.__name__.split(".")
    if rest != ["other"]:
        raise Unsupported(f"{node.target} is not known")
    return imp.builder.make(f"{name}imum", imp.argument(node.args[0]), imp.argument(node.args[1]))


@handler("mish")
def _mish(imp: "Importer", node: Node) -> Value:
    x = imp.argument(node.args[0])
    return imp.builder.make("mul", x, imp.builder.make("tanh", imp.builder.make("softplus", x)))


@handler("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(imp: "Importer", node: Node) -> Value:
    value, name = imp.argument(node.args[0]), node.target.__name__.split(".")[0]
    bounds = {"clamp": ("min", "max"), "clamp_min": ("min", ""), "clamp_max": ("", "max")}
    low, high = arguments(node, *bounds.get(name, ("min_val", "max_val")))
    for op, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            value = imp.builder.make(op, value, imp.argument(bound))
    return value


@handler("where")
def _where(imp: "Importer", node: Node) -> Value:
    return imp.builder.make("where", *(imp.argument(a) for a in node.args))


@handler("masked_fill")
def _masked_fill(imp: "Importer", node: Node) -> Value:
    x, mask, value = (imp.argument(a) for a in node.args)
    return imp.builder.make("where", mask, value, x)


def _over_columns(imp: "Importer", node: Node, dim: Any) -> Value:
    """The argument of a reduction, which has to be one over the columns."""
    rank = node.args[0].meta["val"].dim()
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    if [d % rank for d in dims] != [rank - 1]:
        raise Unsupported(f"{node.target} over other dimensions than the last")
    return imp.whole(node.args[0])


def _mean(imp: "Importer", value: Value) -> Value:
    return imp.builder.make("div", imp.builder.reduce("sum", value), imp.builder.columns())


@handler("sum", "mean", "amax", "amin")
def _reduce(imp: "Importer", node: Node) -> Value:
    x = _over_columns(imp, node, arguments(node, "dim")[0])
    name = node.target.__name__.split(".")[0]
    if name == "mean":
        return _mean(imp, x)
    return imp.builder.reduce({"amax": "max", "amin": "min"}.get(name, name), x)


@handler("var")
def _var(imp: "Importer", node: Node) -> Value:
    b = imp.builder
    dim, correction, unbiased = arguments(node, "dim", "correction", "unbiased")
    x = _over_columns(imp, node, dim)
    correction = float(unbiased) if unbiased is not None else 1.0 if correction is None else float(correction)
    centered = b.make("sub", x, _mean(imp, x))
    return b.make("div", b.reduce("sum", b.make("mul", centered, centered)), b.make("sub", b.columns(), correction))


@handler("linalg_vector_norm", "norm")
def _norm(imp: "Importer", node: Node) -> Value:
    order, p, dim = arguments(node, "ord", "p", "dim")
    if (order if order is not None else p) not in (None, 2, 2.0):
        raise Unsupported("a norm that is not the Euclidean one")
    x = _over_columns(imp, node, dim)
    return imp.builder.make("sqrt", imp.builder.reduce("sum", imp.builder.make("mul", x, x)))


@handler("softmax", "_softmax", "log_softmax")
def _softmax(imp: "Importer", node: Node) -> Value:
    b = imp.builder
    x = _over_columns(imp, node, arguments(node, "dim")[0])
    # No gradient through the largest: the result does not depend on what is subtracted.
    top = b.make("detach", b.reduce("max", x))
    shifted = b.make("sub", x, top)
    power = b.make("exp", shifted)
    total = b.reduce("sum", power)
    if node.target.__name__.startswith("log"):
        return b.make("sub", shifted, b.make("log", total))
    return b.make("div", power, total)


def _scaled(imp: "Importer", value: Value, weight: Any, bias: Any) -> Value:
    if weight is not None:
        value = imp.builder.make("mul", value, imp.argument(weight))
    return value if bias is None else imp.builder.make("add", value, imp.argument(bias))


def _check_normalized(imp: "Importer", node: Node) -> Value:
    if len(node.args[1]) != 1:
        raise Unsupported("a normalisation over more than the last dimension")
    return imp.whole(node.args[0])


@handler("layer_norm")
def _layer_norm(imp: "Importer", node: Node) -> Value:
    b, x = imp.builder, _check_normalized(imp, node)
    weight, bias, eps = arguments(node, "weight", "bias", "eps")
    centered = b.make("sub", x, _mean(imp, x))
    variance = _mean(imp, b.make("mul", centered, centered))
    rstd = b.make("rsqrt", b.make("add", variance, float(eps)))
    return _scaled(imp, b.make("mul", centered, rstd), weight, bias)


@handler("rms_norm")
def _rms_norm(imp: "Importer", node: Node) -> Value:
    b, x = imp.builder, _check_normalized(imp, node)
    weight, eps = arguments(node, "weight", "eps")
    if eps is None:
        raise Unsupported("rms_norm without eps, which then depends on the dtype")
    rstd = b.make("rsqrt", b.make("add", _mean(imp, b.make("mul", x, x)), float(eps)))
    return _scaled(imp, b.make("mul", x, rstd), weight, None)


@handler("cat")
def _cat(imp: "Importer", node: Node) -> Value:
    tensors, dim = arguments(node, "tensors", "dim")
    rank = node.meta["val"].dim()
    if dim % rank != rank - 1:
        raise Unsupported("cat along another dimension than the last")
    parts, begin = [], 0
    for tensor in tensors:
        parts.append((begin, imp.argument(tensor)))
        begin += tensor.meta["val"].shape[-1]
    return imp.builder.joined(parts)


@handler("linear")
def _linear(imp: "Importer", node: Node) -> Value:
    weight, bias = arguments(node, "weight", "bias")
    product = imp.linear(node, node.args[0], weight)
    return product if bias is None else imp.builder.make("add", product, imp.argument(bias))
