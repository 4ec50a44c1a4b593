"""The pointwise operations: how they are written in a kernel, what they give for constants, and their derivatives."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tilegym.autokernel.generate.graph import Builder
from tilegym.autokernel.generate.graph import Value

# How tightly Python binds what a text consists of.
COMPARISON, SUM, PRODUCT, UNARY, ATOM = range(5)
Derivative = Callable[[Builder, Value, Value], list[Value | None]]


@dataclass(frozen=True)
class Operation:
    """An operation of tiles in fp32.

    Attributes:
        text: a format over the texts of its arguments, ``{dtype}`` the dtype that its result is rounded to.
        binds: how tightly the text binds.
        needs: how tightly each argument has to.
        evaluate: the same of numbers.
        derivative: from the gradient of the result, given the value, those of the arguments.
        names: what a result may be called.
        imports: modules of names that the text uses.
        exact: of numbers of a dtype it gives numbers of that dtype, which need no rounding.
    """

    text: str
    binds: int
    needs: tuple[int, ...]
    evaluate: Callable[..., float]
    derivative: Derivative | None = None
    name: str = "out"
    imports: str | None = None
    exact: bool = False


def _infix(sign: str, binds: int, evaluate: Callable, derivative: Derivative | None, name: str) -> Operation:
    return Operation(f"{{0}} {sign} {{1}}", binds, (binds, binds + 1), evaluate, derivative, name)


def _call(text: str, evaluate: Callable, derivative: Derivative | None, name: str, exact: bool = False, n: int = 1):
    return Operation(text, ATOM, (COMPARISON,) * n, evaluate, derivative, name, exact=exact)


def _compare(sign: str, evaluate: Callable) -> Operation:
    return Operation(f"{{0}} {sign} {{1}}", COMPARISON, (SUM, SUM), evaluate, None, "chosen")


def _mul(b: Builder, v: Value, g: Value) -> list[Value]:
    x, y = v.args
    if x is y:
        return [b.make("mul", g, b.make("mul", x, 2.0)), None]
    return [b.make("mul", g, y), b.make("mul", g, x)]


def _div(b: Builder, v: Value, g: Value) -> list[Value]:
    x, y = v.args
    dx = b.make("div", g, y)
    return [dx, b.make("neg", b.make("mul", dx, b.make("div", x, y)))]


def _sigmoid(b: Builder, v: Value, g: Value) -> list[Value]:
    return [b.make("mul", g, b.make("mul", v, b.make("sub", 1.0, v)))]


def _silu(b: Builder, v: Value, g: Value) -> list[Value]:
    sigmoid = b.make("sigmoid", v.args[0])
    inner = b.make("add", 1.0, b.make("mul", v.args[0], b.make("sub", 1.0, sigmoid)))
    return [b.make("mul", g, b.make("mul", sigmoid, inner))]


def _gelu(suffix: str) -> Derivative:
    def derivative(b: Builder, v: Value, g: Value) -> list[Value]:
        x = v.args[0]
        return [b.make("mul", g, b.make(f"gelu{suffix}_slope", x))]

    return derivative


def _gelu_number(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _gelu_tanh_number(x: float) -> float:
    return x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _select(b: Builder, v: Value, g: Value) -> list[Value | None]:
    condition = v.args[0]
    return [None, b.make("where", condition, g, 0.0), b.make("where", condition, 0.0, g)]


def _extreme(sign: str) -> Derivative:
    def derivative(b: Builder, v: Value, g: Value) -> list[Value]:
        x, y = v.args
        # PyTorch halves the gradient between equals; with a number (clamp) it passes it on.
        first = b.make("where", b.make(sign, x, y), g, 0.0)
        if y.op == "constant":
            return [b.make("where", b.make(sign + "_equal", x, y), g, 0.0), None]
        half = b.make("where", b.make("equal", x, y), b.make("mul", g, 0.5), 0.0)
        second = b.make("where", b.make(sign, y, x), g, 0.0)
        return [b.make("add", first, half), b.make("add", second, half)]

    return derivative


OPERATIONS: dict[str, Operation] = {
    "add": _infix("+", SUM, lambda x, y: x + y, lambda b, v, g: [g, g], "total"),
    "sub": _infix("-", SUM, lambda x, y: x - y, lambda b, v, g: [g, b.make("neg", g)], "difference"),
    "mul": _infix("*", PRODUCT, lambda x, y: x * y, _mul, "product"),
    "div": _infix("/", PRODUCT, lambda x, y: x / y, _div, "quotient"),
    "neg": Operation("-{0}", UNARY, (UNARY,), lambda x: -x, lambda b, v, g: [b.make("neg", g)], "negative", exact=True),
    "exp": _call("ct.exp({0})", math.exp, lambda b, v, g: [b.make("mul", g, v)], "power"),
    "log": _call("ct.log({0})", math.log, lambda b, v, g: [b.make("div", g, v.args[0])], "log"),
    "sqrt": _call("ct.sqrt({0})", math.sqrt, lambda b, v, g: [b.make("div", b.make("mul", g, 0.5), v)], "root"),
    "rsqrt": _call(
        "ct.rsqrt({0})",
        lambda x: x**-0.5,
        lambda b, v, g: [b.make("mul", b.make("mul", g, -0.5), b.make("mul", v, b.make("mul", v, v)))],
        "rstd",
    ),
    "sin": _call("ct.sin({0})", math.sin, lambda b, v, g: [b.make("mul", g, b.make("cos", v.args[0]))], "sine"),
    "cos": _call(
        "ct.cos({0})",
        math.cos,
        lambda b, v, g: [b.make("neg", b.make("mul", g, b.make("sin", v.args[0])))],
        "cosine",
    ),
    "tanh": _call(
        "ct.tanh({0})",
        math.tanh,
        lambda b, v, g: [b.make("mul", g, b.make("sub", 1.0, b.make("mul", v, v)))],
        "tanh",
    ),
    "abs": _call(
        "ct.abs({0})",
        abs,
        lambda b, v, g: [b.make("mul", g, b.make("sign", v.args[0]))],
        "size",
        exact=True,
    ),
    "sign": _call(
        "ct.where({0} > 0.0, 1.0, ct.where({0} < 0.0, -1.0, 0.0))", lambda x: (x > 0) - (x < 0), None, "sign"
    ),
    # A comparison with NaN is false; ct.maximum would turn NaN into 0.
    "relu": _call(
        "ct.where({0} <= 0.0, 0.0, {0})",
        lambda x: max(x, 0.0),
        lambda b, v, g: [b.make("where", b.make("greater", v.args[0], 0.0), g, 0.0)],
        "relu",
        exact=True,
    ),
    "sigmoid": Operation(
        "over_one_plus_exp(1.0, {0}, {dtype})",
        ATOM,
        (COMPARISON,),
        lambda x: 1 / (1 + math.exp(-x)),
        _sigmoid,
        "sigmoid",
        imports="tilegym.ops.cutile.pointwise",
    ),
    "silu": Operation(
        "over_one_plus_exp({0}, {0}, {dtype})",
        ATOM,
        (COMPARISON,),
        lambda x: x / (1 + math.exp(-x)),
        _silu,
        "silu",
        imports="tilegym.ops.cutile.pointwise",
    ),
    "softplus": _call(
        "softplus({0})",
        lambda x: math.log1p(math.exp(x)),
        lambda b, v, g: [b.make("mul", g, b.make("sigmoid", v.args[0]))],
        "smooth",
    ),
    "expm1": _call("expm1({0})", math.expm1, lambda b, v, g: [b.make("mul", g, b.make("exp", v.args[0]))], "power"),
    "gelu": _call("gelu({0}, {dtype}, False)", _gelu_number, _gelu(""), "activated"),
    "gelu_tanh": _call("gelu({0}, {dtype}, True)", _gelu_tanh_number, _gelu("_tanh"), "activated"),
    "gelu_slope": _call("gelu_slope({0}, {dtype}, False)", lambda x: 0.5 if x == 0 else math.nan, None, "slope"),
    "gelu_tanh_slope": _call("gelu_slope({0}, {dtype}, True)", lambda x: 0.5 if x == 0 else math.nan, None, "slope"),
    "maximum": _call("ct.maximum({0}, {1}, propagate_nan=True)", max, _extreme("greater"), "larger", n=2, exact=True),
    "minimum": _call("ct.minimum({0}, {1}, propagate_nan=True)", min, _extreme("less"), "smaller", n=2, exact=True),
    "pow": _call("ct.pow({0}, {1})", lambda x, y: x**y, None, "power", n=2),
    "where": _call("ct.where({0}, {1}, {2})", lambda c, x, y: x if c else y, _select, "chosen", exact=True, n=3),
    "greater": _compare(">", lambda x, y: x > y),
    "greater_equal": _compare(">=", lambda x, y: x >= y),
    "less": _compare("<", lambda x, y: x < y),
    "less_equal": _compare("<=", lambda x, y: x <= y),
    "equal": _compare("==", lambda x, y: x == y),
    "not_equal": _compare("!=", lambda x, y: x != y),
    # An integer as a number in fp32.
    "float": Operation("{0}.astype(ct.float32)", ATOM, (ATOM,), float, lambda b, v, g: [None], "number"),
    # What passes no gradient on: the texts of its argument and of it are the same.
    "detach": Operation("{0}", ATOM, (ATOM,), lambda x: x, lambda b, v, g: [None], "top", exact=True),
    "not": Operation("~{0}", UNARY, (UNARY,), lambda x: not x, None, "outside"),
    "and": Operation("{0} & {1}", COMPARISON, (ATOM, ATOM), lambda x, y: x and y, None, "both"),
    "or": Operation("{0} | {1}", COMPARISON, (ATOM, ATOM), lambda x, y: x or y, None, "either"),
}
# Arguments that a text has twice are named first, so that they are written, and computed, once.
REPEATS = frozenset({"relu", "silu", "sign"})
TRUTHS = frozenset({"greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "not", "and", "or"})
# What is computed of integers as of integers: the texts hold for both.
OF_INTEGERS = frozenset({"add", "sub", "mul", "neg", "where", *TRUTHS} - {"not", "and", "or"})

# Functions that texts call, written into the file that needs them.
HELPERS = {
    "rounded": '''def rounded(value, dtype):
    """In a kernel: ``value`` as PyTorch keeps it between two steps, in fp32."""
    return value.astype(dtype).astype(ct.float32)
''',
    "behind": '''def behind(first, other):
    """In a kernel: ``first``, once ``other`` has been read, too.

    A compiler puts what is read where it is used: behind a reduction memory would be waited for a second time.
    """
    bits = ct.uint32 if first.dtype == ct.float32 else ct.uint16
    zero = ct.bid(1).astype(bits)  # which no compiler knows
    return ct.bitcast(ct.bitcast(first, bits) | (ct.bitcast(other, bits) & zero), first.dtype)
''',
    "pair_indices": '''def pair_indices(pairs, single, TILE_M: Int, TILE_N: Int):
    """In a kernel: what indexes the pairs of elements of ``pairs`` that belong to this block's tile of ``single``."""
    across = ct.cdiv(single.shape[single.ndim - 1], TILE_N)
    cols = span(ct.bid(0) % across, 2 * TILE_N)[None, :]
    return at(pairs, span(ct.bid(0) // across, TILE_M)[:, None], cols)
''',
    "half_of": '''def half_of(tile, NUMBER: Int, TILE_M: Int, TILE_N: Int):
    """In a kernel: the first (0) or the second (1) of each pair of columns."""
    pairs = tile.reshape((TILE_M, TILE_N, 2))
    return ct.extract(pairs, (0, 0, NUMBER), (TILE_M, TILE_N, 1)).reshape((TILE_M, TILE_N))
''',
    "paired": '''def paired(first, second, dtype, TILE_M: Int, TILE_N: Int):
    """In a kernel: the columns of two tiles in turns."""
    shape = (TILE_M, TILE_N, 1)
    pairs = ct.cat((first.astype(dtype).reshape(shape), second.astype(dtype).reshape(shape)), 2)
    return pairs.reshape((TILE_M, 2 * TILE_N))
''',
    "softplus": '''def softplus(x):
    """In a kernel: log(1 + exp(x)), x itself beyond 20, as PyTorch has it."""
    e = ct.exp(x)
    sum = 1.0 + e
    # What is lost in the sum is made up for; where the sum is 1 the logarithm is e.
    log = ct.where(sum == 1.0, e, ct.log(sum) * e / (sum - 1.0))
    return ct.where(x > 20.0, x, log)
''',
    "expm1": '''def expm1(x):
    """In a kernel: exp(x) - 1."""
    e = ct.exp(x)
    # What is lost in the difference is made up for; far from 0 nothing is.
    near = ct.where(e == 1.0, x, (e - 1.0) * x / ct.log(e))
    return ct.where(ct.abs(x) < 1.0, near, e - 1.0)
''',
    "gelu": '''def gelu(x, dtype, TANH: Bool):
    """In a kernel: x times the distribution function of the normal distribution."""
    p, _ = _gate(x, dtype, TANH)
    return x * p
''',
    "gelu_slope": '''def gelu_slope(x, dtype, TANH: Bool):
    """In a kernel: the derivative of gelu."""
    p, slope = _gate(x, dtype, TANH)
    return p + x * slope
''',
}
HELPER_IMPORTS = {
    "rounded": (),
    "behind": (),
    "pair_indices": tuple(("tilegym.ops.cutile.tiling", name) for name in ("Int", "at", "span")),
    "half_of": (("tilegym.ops.cutile.tiling", "Int"),),
    "paired": (("tilegym.ops.cutile.tiling", "Int"),),
    "softplus": (),
    "expm1": (),
    "gelu": (("tilegym.ops.cutile.geglu", "_gate"), ("tilegym.ops.cutile.tiling", "Bool")),
    "gelu_slope": (("tilegym.ops.cutile.geglu", "_gate"), ("tilegym.ops.cutile.tiling", "Bool")),
}


def evaluate(op: str, *numbers: float) -> float | None:
    """``op`` of numbers; None where it has no value."""
    try:
        return OPERATIONS[op].evaluate(*numbers)
    except (ArithmeticError, ValueError):
        return None
