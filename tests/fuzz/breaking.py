"""Makes an argument of some cases odd or wrong: then both backends have to raise the same error, or none."""

import math
from typing import Any

import torch

from fuzz.drawing import DTYPES
from fuzz.drawing import F8
from fuzz.drawing import Case
from fuzz.drawing import Draw

OPTIONAL = ("window_size", "soft_cap", "sliding_window", "scaling", "sm_scale")
COUNTS = ("block_size", "num_experts", "normalized_shape", "chunk_size", "top_k", "num_groups", "topk_groups")
KEPT = ("max_seqlen_q", "max_seqlen_k", "ignore_index")  # promises of the caller, which nothing checks
CHANGES = ("dtype", "integers", "size", "squeeze", "unsqueeze", "double", "same")


def break_argument(draw: Draw, case: Case) -> None:
    """Changes at most one argument, mostly none."""
    if draw.data.random() < 0.06:
        _odd_option(draw, case)
    elif draw.data.random() < 0.08:
        _other_tensor(draw, case)
    _keep_defined(draw, case)


def _note(draw: Draw, case: Case, text: str) -> None:
    case.broken = text
    draw.notes.append(text)


def _odd_option(draw: Draw, case: Case) -> None:
    """Gives a number or a name a value that is odd, or not allowed."""
    names = [k for k, v in case.args.items() if type(v) in (int, float, str) and k not in KEPT]
    names += [k for k in OPTIONAL if k in case.args]
    if not names:
        return
    name = draw.data.choice(names)
    old = case.args[name]
    if isinstance(old, str):
        case.args[name] = "bogus"
    elif name in COUNTS:
        case.args[name] = draw.data.choice([0, -1, 1, 3])
    elif isinstance(old, int) or name in ("window_size", "sliding_window"):
        case.args[name] = draw.data.choice([0, -1, 1, 2, 3, 2**31 - 1, 2**31, 2**40])
    else:
        odd = [0.0, -1.0, 1.0, 2.0, 1e-30]
        if "scal" not in name and name not in ("offset", "soft_cap", "limit"):
            # Infinity times 0 is NaN: then it would show whether what a mask hides is computed, and in which order.
            odd += [math.inf, math.nan]
        case.args[name] = draw.data.choice(odd)
    _note(draw, case, f"{name}: {old} to {case.args[name]}")


def _other_tensor(draw: Draw, case: Case) -> None:
    """Gives a tensor another dtype or shape, or passes the same tensor twice."""
    tensors = {k: v for k, v in case.args.items() if _is_floating(v)}
    if not tensors:
        return
    name, change = draw.data.choice(list(tensors)), draw.data.choice(CHANGES)
    t = tensors[name]
    if change == "same":
        twins = [k for k, v in tensors.items() if k != name and v.shape == t.shape and v.dtype == t.dtype]
        if twins and name not in case.mutated and twins[0] not in case.mutated:
            case.args[twins[0]] = t
            draw.notes.append(f"{twins[0]} is {name}")
        return
    if change == "dtype":
        t = t.to(draw.data.choice([d for d in DTYPES if d != t.dtype]))
    elif change == "double":
        t = t.double()
    elif change == "integers":
        t = t.nan_to_num().clamp(-100, 100).to(torch.int32)
        case.grad = [k for k in case.grad if k != name]
    elif change == "size" and t.dim():
        dim = draw.data.randrange(t.dim())
        t = torch.cat((t, t.narrow(dim, 0, min(1, t.shape[dim]))), dim)
    elif change == "squeeze" and t.dim():
        t = t.select(0, 0) if t.shape[0] else t
    else:
        t = t.unsqueeze(0)
    case.args[name] = t
    _note(draw, case, f"{name}: {change}")


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype not in F8


def _keep_defined(draw: Draw, case: Case) -> None:
    """Gives norms that subtract the mean no rows whose values are all equal: only rounding is left of such a row.

    Rows of zeros, and of one value, are exact; they need an eps.
    """
    x = case.args.get("input")
    if draw.op not in ("layer_norm", "group_norm") or not _is_floating(x) or not x.numel():
        return
    rows = x.reshape(*x.shape[:1], -1)
    if draw.op == "layer_norm":
        shape = case.args["normalized_shape"]
        dims = 1 if isinstance(shape, int) else len(shape)
        rows = x.flatten(-dims) if x.dim() >= dims else rows
    elif x.dim() > 1 and case.args["num_groups"] > 0 and x.shape[1] % case.args["num_groups"] == 0:
        rows = x.reshape(x.shape[0], case.args["num_groups"], -1)
    if not (rows.amax(-1) == rows.amin(-1)).any():
        return
    if rows.shape[-1] > 1 and x.any():
        case.args["input"] = draw.numbers(x.shape).to(x)
    elif 0.0 <= case.args["eps"] < 1e-6:
        case.args["eps"] = 1e-6
