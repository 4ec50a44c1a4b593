"""Runs a part of a model by itself on random numbers, and compares it with formulas."""

import copy
import types
from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilegym.integrate.formulas import Formula
from tilegym.integrate.trace import tensors

DTYPES = (torch.float32, torch.bfloat16)
# In units of the dtype's rounding of the largest result. fp32: sums in another order, functions in another form; a
# wrong constant or activation is off by thousands. bf16: a cast in another place, or none, shows within one unit.
LIMITS = {torch.float32: 64.0, torch.bfloat16: 2.0}


@dataclass(frozen=True)
class Match:
    """A formula that reproduces a part, what it stands for, and ``errors`` in units of each dtype's rounding."""

    formula: Formula
    errors: dict[str, float]
    what: Any = None


def numbers(*shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers, the same in every call, exact in bf16."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(torch.bfloat16).to(dtype)


def isolated(module: nn.Module, dtype: torch.dtype, scale: float = 1.0) -> nn.Module:
    """A copy of ``module`` with random weights and without hooks, in ``dtype``; the original is not touched."""
    hooks = [(m, m._forward_hooks, m._forward_pre_hooks) for m in module.modules()]
    for m, _, _ in hooks:
        m._forward_hooks, m._forward_pre_hooks = type(m._forward_hooks)(), type(m._forward_pre_hooks)()
    try:
        twin = copy.deepcopy(module)
    finally:
        for m, after, before in hooks:
            m._forward_hooks, m._forward_pre_hooks = after, before
    with torch.no_grad():
        for i, parameter in enumerate(twin.parameters()):
            spread = scale * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
            parameter.copy_(numbers(*parameter.shape, scale=spread, seed=i))
    return twin.to(dtype).eval()


def distance(got: Any, expected: Any) -> float:
    """The largest difference, in units of rounding of the largest magnitude; inf where shapes or dtypes differ."""
    got, expected = list(tensors(got)), list(tensors(expected))
    if len(got) != len(expected) or not got:
        return float("inf")
    worst = 0.0
    for g, e in zip(got, expected, strict=True):
        if g.shape != e.shape or g.dtype is not e.dtype:
            return float("inf")
        if not e.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(g, e) else float("inf"))
            continue
        finite = torch.isfinite(e)
        if not torch.equal(finite, torch.isfinite(g)):
            return float("inf")
        if finite.any():
            unit = torch.finfo(e.dtype).eps * max(e[finite].abs().max().item(), 1e-30)
            worst = max(worst, (g[finite].double() - e[finite].double()).abs().max().item() / unit)
    return worst


def attempt(run: Callable[[], Any]) -> Any:
    """What ``run()`` gives, or None if it raises: a candidate may not even accept the arguments."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return run()
    except Exception:  # whatever a stand-in argument makes foreign code do, it is no match
        return None


def best(
    outputs: dict[torch.dtype, Any],
    candidates: Iterable[tuple[Formula, Any]],
    inputs: Callable[[Formula, Any, torch.dtype], dict[str, Any]],
) -> Match | None:
    """The candidate that is closest to ``outputs`` in every dtype, or None if none is within rounding.

    Args:
        outputs: what the part gave, by dtype.
        candidates: formulas and what they stand for, the usual ones first.
        inputs: a formula's arguments in a dtype.
    """
    found: list[Match] = []
    for formula, what in candidates:
        errors = {}
        for dtype, expected in outputs.items():
            arguments = inputs(formula, what, dtype)
            got = attempt(lambda f=formula, a=arguments: f.run(**a))
            error = float("inf") if got is None else distance(got, expected)
            if not error <= LIMITS.get(dtype, 64.0):
                break
            errors[str(dtype).removeprefix("torch.")] = round(error, 3)
        else:
            found.append(Match(formula, errors, what))
            if not any(error > 0 for name, error in errors.items() if name != "float32"):
                break  # nothing can be closer
    return min(found, key=lambda match: match.errors.get("bfloat16", match.errors.get("float32", 0.0)), default=None)


def floats_of(module: nn.Module) -> dict[str, float]:
    """The numbers that an instance holds under names of its own, which may be constants of its formula."""
    return {name: float(v) for name, v in vars(module).items() if type(v) in (float, int) and not name.startswith("_")}


def own_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the module itself holds, without its children's."""
    return {name: p for name, p in module.named_parameters(recurse=False)}


def is_function(value: Any) -> bool:
    """Whether ``value`` is a plain Python function."""
    return isinstance(value, types.FunctionType)
