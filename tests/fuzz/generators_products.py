"""Calls of matrix products, and of those with a norm before them or a sum behind them."""

import torch

from fuzz.drawing import F8
from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates
from fuzz.generators_common import eps_of
from fuzz.generators_common import norm_options


def rows(draw: Draw) -> tuple[int, ...]:
    """Leading dimensions of what is multiplied: often one row, or few."""
    return draw.choices.choices([(), (1,), (1, 1), draw.lead(16), draw.lead(90)], [1, 3, 2, 4, 3])[0]


def extent(draw: Draw, zero: float = 0.02) -> int:
    """A number of rows or columns of a matrix."""
    return draw.size(2100 if draw.gpu else 270, zero)


def dtype_or_fp8(draw: Draw) -> torch.dtype:
    """The case's dtype, now and then one of fp8."""
    return draw.one(*F8) if draw.chance(0.15) else draw.dtype


@generates
def rms_norm_linear(draw: Draw) -> Case:
    k, lead, n = extent(draw, 0.0), rows(draw), draw.choices.randint(1, 4)
    weights = [draw.weight(extent(draw), k, scale=k**-0.5) for _ in range(n)]
    args = {
        "x": draw.tensor(*lead, k, nan=True),
        "norm_weight": draw.weight(k) if draw.chance(0.75) else None,
        "eps": eps_of(draw),
        "weights": weights,
        "biases": [draw.weight(w.shape[0]) for w in weights] if draw.chance(0.4) else None,
        **norm_options(draw),
    }
    return Case(args, ("x", "norm_weight", "weights", "biases"))


@generates
def rms_norm_swiglu(draw: Draw) -> Case:
    k, lead, n = extent(draw, 0.0), rows(draw), extent(draw)
    gate, up = draw.weight(n, k, scale=k**-0.5), draw.weight(n, k, scale=k**-0.5)
    if draw.chance(0.3):
        both = draw.weight(2 * n, k, scale=k**-0.5, expand=False)
        gate, up = both[:n], both[n:]
    args = {
        "x": draw.tensor(*lead, k, nan=True),
        "norm_weight": draw.weight(k) if draw.chance(0.75) else None,
        "eps": eps_of(draw),
        "gate_weight": gate,
        "up_weight": up,
        "activation": draw.one("silu", "gelu_tanh", "gelu"),
        **norm_options(draw),
    }
    return Case(args, ("x", "norm_weight", "gate_weight", "up_weight"), floor={"output 0": 1e-6})


@generates
def linear_add(draw: Draw) -> Case:
    k, lead, n = extent(draw), rows(draw), extent(draw)
    args = {
        "x": draw.tensor(*lead, k, nan=True),
        "weight": draw.weight(n, k, scale=max(k, 1) ** -0.5),
        "residual": draw.tensor(*lead, n),
        "bias": draw.tensor(n) if draw.chance(0.4) else None,
        "scale": draw.one(1.0, 1.0, 0.22, -2.0, 0.0),
    }
    return Case(args, ("x", "weight", "residual", "bias"))


@generates
def linear(draw: Draw) -> Case:
    k, lead, n = extent(draw), rows(draw), extent(draw)
    out_dtype = draw.one(None, None, draw.dtype, torch.float32)
    args = {
        "x": draw.tensor(*lead, k, nan=True),
        "weight": draw.weight(n, k, scale=max(k, 1) ** -0.5),
        "bias": draw.tensor(n) if draw.chance(0.4) else None,
        "out_dtype": out_dtype,
        "settled": draw.chance(0.2),
    }
    return Case(args, ("x", "weight", "bias"), oracle={"out_dtype": None})


@generates
def quantized_linear(draw: Draw) -> Case:
    k, lead, n = extent(draw), rows(draw), extent(draw)
    kind, how = draw.one(torch.int8, torch.float8_e4m3fn), draw.one("one", "rows", "column", "blocks")
    numbers = draw.tensor(n, k, dtype=torch.float32, expand=False).mul(30).clamp(-127, 127)
    block = (64 * draw.choices.randint(1, 2), 128) if how == "blocks" else None
    shape = {"one": (), "rows": (n,), "column": (n, 1), "blocks": block and (-(-n // block[0]), -(-k // 128))}[how]
    args = {
        "x": draw.tensor(*lead, k, nan=True),
        "weight": numbers.to(kind),
        "scale": draw.tensor(*shape, dtype=draw.one(torch.float32, draw.dtype)).abs() / 30 * max(k, 1) ** -0.5,
        "bias": draw.tensor(n) if draw.chance(0.4) else None,
        "block_size": block,
        "residual": draw.tensor(*lead, n) if draw.chance(0.3) else None,
    }
    return Case(args, (), oracle={"weight": args["weight"]})


@generates
def matmul(draw: Draw) -> Case:
    m, n, k = extent(draw), extent(draw), extent(draw)
    ta, tb, kind = draw.chance(0.5), draw.chance(0.5), dtype_or_fp8(draw)
    if kind in F8:
        draw.limit(30.0)

    def make(*shape: int) -> torch.Tensor:
        return draw.tensor(*shape, dtype=kind, nan=kind not in F8)

    args = {
        "a": make(*((k, m) if ta else (m, k))),
        "b": make(*((n, k) if tb else (k, n))),
        "trans_a": ta,
        "trans_b": tb,
        "static_persistent": draw.one(None, True, False),
        "use_tma": draw.one(None, True, False),
    }
    return Case(args, () if kind in F8 else ("a", "b"))


@generates
def bmm(draw: Draw) -> Case:
    m, n, k = draw.size(140), draw.size(140), draw.size(140)
    ta, tb, kind = draw.chance(0.5), draw.chance(0.5), dtype_or_fp8(draw)
    b = draw.size(4)
    if kind in F8:
        draw.limit(30.0)

    def make(*shape: int) -> torch.Tensor:
        return draw.tensor(*shape, dtype=kind)

    args = {
        "a": make(b, *((k, m) if ta else (m, k))),
        "b": make(b, *((n, k) if tb else (k, n))),
        "transpose_a": ta,
        "transpose_b": tb,
        "static_persistent": draw.one(None, True, False),
    }
    return Case(args, () if kind in F8 else ("a", "b"))


@generates
def group_gemm(draw: Draw) -> Case:
    count, tb = draw.size(5), draw.chance(0.5)
    if draw.chance(0.25):
        m, k, n = draw.size(64), draw.size(64), draw.size(64)
        first, second = draw.tensor(count, m, k), draw.tensor(count, *((n, k) if tb else (k, n)))
        return Case({"group_A": first, "group_B": second, "transpose_b": tb}, ("group_A", "group_B"))
    first, second = [], []
    for _ in range(count):
        m, k, n = draw.size(130), draw.size(130), draw.size(130)
        first.append(draw.tensor(m, k))
        second.append(draw.tensor(*((n, k) if tb else (k, n))))
    return Case({"group_A": first, "group_B": second, "transpose_b": tb}, ("group_A", "group_B"))


@generates
def ragged_group_gemm(draw: Draw) -> Case:
    t, k, n, e, tb = draw.size(200), draw.size(130), draw.size(130), draw.size(9), draw.chance(0.6)
    offsets = torch.randint(0, t + 1, (e + 1,), generator=draw.generator).sort().values
    if draw.chance(0.5):
        offsets[0], offsets[-1] = 0, t
    if e == 0:
        offsets[:] = 0
    args = {
        "a": draw.tensor(t, k),
        "b": draw.weight(e, *((n, k) if tb else (k, n)), scale=max(k, 1) ** -0.5),
        "offsets": draw.laid_out(offsets.to(draw.one(torch.int32, torch.int64)), expand=False),
        "transpose_b": tb,
        "bias": draw.tensor(e, n) if draw.chance(0.4) else None,
    }
    return Case(args, ("a", "b", "bias"))
