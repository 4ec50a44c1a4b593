"""Calls of what reduces rows: softmax, argmax, losses, and the sum of attention's splits."""

import math

import torch

from fuzz.drawing import Case
from fuzz.drawing import Draw
from fuzz.drawing import generates
from fuzz.generators_common import shape_any


def some_inf(draw: Draw, x: torch.Tensor) -> torch.Tensor:
    """``x``, now and then with -inf: logits that a processor has forbidden."""
    if draw.data.random() < 0.15:
        x = x.masked_fill(torch.rand(x.shape, generator=draw.generator) < draw.data.choice([0.1, 0.9]), -math.inf)
        draw.notes.append("-inf")
    return x


def targets(draw: Draw, lead: tuple[int, ...], v: int, ignore: int) -> torch.Tensor:
    """Classes below ``v``, some, none or all of them ``ignore``."""
    target = torch.randint(0, v, lead, generator=draw.generator)
    share = draw.data.choice([0.0, 0.2, 0.2, 1.0]) if draw.data.random() < 0.7 else 0.0
    target = target.masked_fill(torch.rand(lead, generator=draw.generator) < share, ignore)
    return draw.laid_out(target.to(draw.one(torch.int64, torch.int32)), expand=False)


@generates
def softmax(draw: Draw) -> Case:
    shape = list(shape_any(draw, 70000 if draw.gpu else 4500))
    if math.prod(shape) > 40000 and not draw.gpu:
        shape[-1] = 17
    if draw.chance(0.4):
        draw.choices.shuffle(shape)
    x = draw.numbers(shape, draw.magnitude)
    if draw.data.random() < 0.3 and x.numel():
        x = x.masked_fill(torch.rand(x.shape, generator=draw.generator) < draw.data.choice([0.3, 0.9, 1.0]), -math.inf)
        draw.notes.append("-inf")
    dim = draw.choices.randrange(-len(shape), len(shape))
    return Case({"x": draw.tensor(*shape, values=x), "dim": dim}, ("x",), rowwise=dim in (-1, len(shape) - 1))


@generates
def argmax(draw: Draw) -> Case:
    shape = [*draw.lead(9), draw.size(70000 if draw.gpu else 5000, 0.0)]
    x = draw.numbers(shape, draw.magnitude)
    if draw.data.random() < 0.3:
        x = x.round()
    if draw.data.random() < 0.3 and x.numel():
        flat = x.view(-1)
        for _ in range(draw.data.randint(1, 4)):
            flat[draw.data.randrange(flat.numel())] = draw.data.choice([math.nan, math.inf, -math.inf])
    if draw.data.random() < 0.05:
        x = torch.full(shape, -math.inf)
    args = {"x": draw.tensor(*shape, values=x)}
    if draw.chance(0.3):
        args["out"] = torch.full(shape[:-1], -1, dtype=torch.int64, device=draw.device)
    return Case(args, (), ("out",) if "out" in args else (), exact=True)


@generates
def cross_entropy(draw: Draw) -> Case:
    lead, v = draw.lead(60 if draw.gpu else 12), draw.size(140000 if draw.gpu else 9000, 0.0)
    ignore = draw.one(-100, -100, 0, v - 1, -1)
    draw.limit(30.0)
    x = some_inf(draw, draw.numbers((*lead, v), draw.magnitude))
    if draw.data.random() < 0.1 and x.numel():
        x.view(-1, v)[0] = math.nan
    args = {
        "logits": draw.tensor(*lead, v, values=x),
        "target": targets(draw, lead, v, ignore),
        "ignore_index": ignore,
        "label_smoothing": draw.one(0.0, 0.0, 0.1, 1.0),
        "softcap": draw.one(None, None, 30.0, 1.0),
        "z_loss": draw.one(0.0, 0.0, 1e-4, 0.5),
        "reduction": draw.one("mean", "sum", "none"),
    }
    return Case(args, ("logits",))


@generates
def fused_linear_cross_entropy(draw: Draw) -> Case:
    lead, v = draw.lead(60 if draw.gpu else 20), draw.size(5000 if draw.gpu else 300, 0.0)
    h = draw.size(500 if draw.gpu else 70, 0.0)
    ignore = draw.one(-100, -100, 0, v - 1, -1)
    draw.limit(30.0)
    args = {
        "hidden_states": draw.tensor(*lead, h),
        "weight": draw.weight(v, h, scale=h**-0.5),
        "target": targets(draw, lead, v, ignore),
        "bias": draw.weight(v) if draw.chance(0.4) else None,
        "ignore_index": ignore,
        "chunk_size": draw.one(4096, 4096, 1, 3, 16, 5000),
        "reduction": draw.one("mean", "sum", "none"),
    }
    # A sum's error may be small by luck; the logits are rounded to the dtype.
    floor = {} if draw.dtype == torch.float32 else {"output 0": torch.finfo(draw.dtype).eps / 4}
    return Case(args, ("hidden_states", "weight", "bias"), floor=floor)


@generates
def splitk_reduce(draw: Draw) -> Case:
    b, h, splits, d = draw.size(3), draw.size(9), draw.size(40, 0.03), draw.size(260)
    lse = draw.numbers((b, h, splits), draw.data.choice([1.0, 20.0, 300.0]))
    partial = draw.numbers((b, h, splits, d))
    hidden = torch.rand(lse.shape, generator=draw.generator) < draw.data.choice([0.0, 0.3, 0.9])
    lse = lse.masked_fill(hidden, -math.inf)
    if draw.data.random() < 0.5:
        partial = partial.masked_fill(hidden[..., None], math.nan)
    args = {
        "partial": draw.tensor(*partial.shape, dtype=torch.float32, values=partial, expand=False),
        "dtype": draw.dtype,
        "lse": draw.tensor(*lse.shape, dtype=torch.float32, values=lse, expand=False),
        "sinks": draw.weight(h, dtype=draw.one(draw.dtype, torch.float32)) if draw.chance(0.4) else None,
    }
    return Case(args, (), oracle={"dtype": torch.float64})
