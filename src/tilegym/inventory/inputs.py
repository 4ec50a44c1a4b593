"""Inputs for a Definition, made up so that its constraints hold: small sizes, every branch of them, odd sizes too."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilegym.errors import InventoryError
from tilegym.inventory import constraints
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import TensorSpec

# Sizes that a variable axis is tried with: odd and even, powers of two and not.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)
ODD = tuple(size for size in SIZES if size % 2 and size > 1)
_TRIES = 4000


@dataclass(frozen=True)
class Case:
    """One call of a Definition: the sizes of its axes, and its inputs by name, in order."""

    axes: dict[str, int]
    inputs: dict[str, Any]

    def copies(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """The inputs again, in memory of their own; floating-point tensors in ``dtype`` if it is given."""
        return {
            name: _copy(value, dtype) if isinstance(value, torch.Tensor) else value
            for name, value in self.inputs.items()
        }

    def __str__(self) -> str:
        numbers = {k: v for k, v in self.inputs.items() if not isinstance(v, torch.Tensor)}
        return ", ".join(f"{name}={value}" for name, value in {**self.axes, **numbers}.items())


def _copy(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return value.to(dtype, copy=True) if dtype is not None and value.is_floating_point() else value.clone()


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a TensorSpec names.

    Raises:
        InventoryError: torch has none of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InventoryError(f"torch has no dtype {name!r}; nothing can be run with it")
    return dtype


def cases(definition: Definition, count: int = 2, dtype: torch.dtype | None = None, seed: int = 0) -> Iterator[Case]:
    """Calls of ``definition``: ``count`` for every combination of its boolean inputs and of its constraints' branches.

    Args:
        count: how many sets of sizes a branch is tried with: small, odd as far as constraints let them, then any.
        dtype: what floating-point inputs have instead of their own dtype.
        seed: the same seed gives the same calls.

    Raises:
        InventoryError: for some branch no sizes were found for which the constraints hold.
    """
    flags = [name for name, spec in definition.inputs.items() if spec.shape is None and spec.dtype == "bool"]
    branches = [constraints.alternatives(constraint) for constraint in definition.constraints]
    rng = random.Random(f"{definition.name} {seed}")
    missed = dict.fromkeys([f"{name}={value}" for name in flags for value in (False, True)])
    missed |= dict.fromkeys(alternative for alternatives in branches for alternative in alternatives)
    for values in itertools.product((False, True), repeat=len(flags)):
        for chosen in itertools.product(*branches):
            for index in range(count):
                case = _case(definition, dict(zip(flags, values, strict=True)), chosen, rng, dtype, index)
                if case is None:
                    break  # these branches exclude each other
                for way in (*(f"{name}={value}" for name, value in zip(flags, values, strict=True)), *chosen):
                    missed.pop(way, None)
                yield case
    if missed:
        raise InventoryError(f"{definition.name}: no sizes were found for which all constraints hold and {min(missed)}")


def _case(
    definition: Definition,
    flags: dict[str, bool],
    conditions: tuple[str, ...],
    rng: random.Random,
    dtype: torch.dtype | None,
    index: int,
) -> Case | None:
    conditions = (*conditions, *definition.constraints)
    for _ in range(4):
        numbers = _numbers(definition, flags, conditions, rng, index)
        if numbers is None:
            return None
        axes = {name: numbers[name] for name in definition.axes}
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        inputs = {
            name: numbers[name] if spec.shape is None else _tensor(name, spec, numbers, conditions, generator, dtype)
            for name, spec in definition.inputs.items()
        }
        values = {**axes, **inputs}
        for condition in conditions:
            constraints.settle(condition, values)
        if all(constraints.holds(c, values) for c in conditions if constraints.names(c) <= values.keys()):
            return Case(axes, inputs)
    return None


def _numbers(
    definition: Definition, flags: dict[str, bool], conditions: tuple[str, ...], rng: random.Random, index: int
) -> dict[str, Any] | None:
    """Sizes of all axes and values of all inputs that are numbers, or None if none were found that fit."""
    scalars = {name: spec for name, spec in definition.inputs.items() if spec.shape is None and name not in flags}
    unknown = [*definition.var_axes, *scalars]
    fixed = {name: right for c in conditions for name, right in constraints.equations(c) if name in unknown}
    known = definition.const_axes | flags
    relevant = [c for c in conditions if constraints.names(c) <= {*definition.axes, *scalars, *flags}]
    for attempt in range(_TRIES):
        values = dict(known)
        sizes = SIZES[:6] if index == 0 and attempt < _TRIES // 2 else SIZES
        # Some axis may have to be even: with every attempt fewer are odd.
        odd = 1.0 - 2 * attempt / _TRIES if index == 1 else 0.0
        waiting = sorted(unknown, key=lambda n: (n in fixed, n in scalars))
        while waiting:  # what an equation gives comes when all that it needs is there
            ready = (n for n in waiting if n not in fixed or constraints.names(fixed[n]) <= values.keys())
            name = next(ready, waiting[0])
            waiting.remove(name)
            among = ODD if odd > 0.0 and rng.random() < odd else sizes
            values[name] = _number(name, scalars.get(name), fixed.get(name), values, conditions, rng, among)
        if None not in values.values() and all(constraints.holds(c, values) for c in relevant):
            return values
    return None


def _number(
    name: str,
    spec: TensorSpec | None,
    equation: str | None,
    values: dict[str, Any],
    conditions: tuple[str, ...],
    rng: random.Random,
    sizes: tuple[int, ...],
) -> Any:
    if equation is not None and constraints.names(equation) <= values.keys():
        return _evaluate(equation, values)
    if spec is None:
        return rng.choice(sizes)
    whole = "int" in spec.dtype
    low, high = _range(name, values, conditions, whole)
    if whole:
        low = 1 if low is None else low
        return rng.randint(int(low), max(int(low), int(low + 7 if high is None else high)))
    low = 0.5 if low is None else low
    return rng.uniform(low, low + 1.0 if high is None else high)


def _evaluate(expression: str, values: dict[str, Any]) -> Any:
    try:
        return eval(expression, {"__builtins__": {}, "min": min, "max": max}, values)
    except Exception:  # a division by zero, say: these sizes do not fit
        return None


def _range(name: str, values: dict[str, Any], conditions: tuple[str, ...], whole: bool) -> tuple[Any, Any]:
    """The smallest and largest value that the conditions allow for ``name``; None where they say nothing.

    Args:
        whole: whether its values are integers, for which ``< 3`` ends at 2.
    """
    low = high = None
    for condition in conditions:
        for operator, expression in constraints.bounds(condition, name):
            limit = _evaluate(expression, values) if constraints.names(expression) <= values.keys() else None
            if limit is None:
                continue
            step = int(whole and operator in "<>")
            if operator[0] == ">":
                low = limit + step if low is None else max(low, limit + step)
            else:
                high = limit - step if high is None else min(high, limit - step)
    return low, high


def _tensor(
    name: str,
    spec: TensorSpec,
    values: dict[str, Any],
    conditions: tuple[str, ...],
    generator: torch.Generator,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    shape = [values[axis] for axis in spec.shape]
    own = torch_dtype(spec.dtype)
    low, high = _range(name, values, conditions, not own.is_floating_point)
    if own is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not own.is_floating_point:
        low, high = (0 if low is None else int(low)), (3 if high is None else int(high))
        return torch.randint(low, max(low, high) + 1, shape, generator=generator, dtype=own)
    if low is None and high is None:
        data = torch.randn(shape, generator=generator)
    else:
        low = (high - 2.0) if low is None else low
        high = (low + 2.0) if high is None else high
        data = low + (high - low) * torch.rand(shape, generator=generator)
    return data.to(dtype if dtype is not None else own)
