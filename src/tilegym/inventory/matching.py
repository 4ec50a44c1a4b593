"""Which Solutions compute a Definition: found by what the references compute, not by names.

For every Definition of the catalog, all ways to make its inputs out of those that are required are tried that the
shapes allow: as they are; permuted, with dimensions merged or added; split or packed; numbers from the reference's own
constants. Each is run: both references get random inputs, several sizes and every branch. What agrees in fp32, and in
the declared dtypes as far as rounding goes, matches.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import torch

from tilegym.errors import InventoryError
from tilegym.inventory import candidates
from tilegym.inventory import constraints
from tilegym.inventory import reference
from tilegym.inventory.adapters import Adapter
from tilegym.inventory.adapters import Give
from tilegym.inventory.adapters import Take
from tilegym.inventory.adapters import View
from tilegym.inventory.inputs import Case
from tilegym.inventory.inputs import cases
from tilegym.inventory.loading import Catalog
from tilegym.inventory.loading import load
from tilegym.inventory.schema import AxisConst
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import Solution
from tilegym.inventory.schema import TensorSpec
from tilegym.inventory.verify import difference
from tilegym.inventory.verify import outputs_of

EXACT = "exact"
COMPATIBLE = "compatible"
# fp32 sums in another order differ by this much of their size; other formulas differ by far more.
_TOLERANCE = 1e-4
_MAX_TRIALS = 3000  # calls of one reference; shapes leave few, this bounds what they do not
_MAX_LATE_TRIALS = 16  # with the last and most ways to make tensors, whose calls can be large
_BIG_AXIS = 16  # constant axes beyond this are tried small first
_MAX_ELEMENTS = 1 << 24  # of an input whose axes cannot be made small: more would take minutes


@dataclass(frozen=True)
class Match:
    """A Solution that computes a Definition.

    Attributes:
        kind: EXACT: called as it is. COMPATIBLE: through ``adapter``.
        target: the Definition that ``solution`` was written for.
        adapter: makes the call: ``adapter.wrap(load_solution(solution))`` takes the inputs that were required.
        steps: what the adapter does, in words, and where axes and dtypes are not the declared ones.
        same_rounding: whether the references agree bit for bit in the declared dtypes.
        assumes: constraints of ``target`` that the Definition does not promise.
    """

    kind: str
    definition: Definition
    target: Definition
    solution: Solution
    adapter: Adapter
    steps: tuple[str, ...]
    same_rounding: bool
    assumes: tuple[str, ...] = ()

    @property
    def rank(self) -> tuple:
        """What matches are sorted by; the best is the smallest."""
        return (
            self.kind != EXACT,
            not self.same_rounding,
            len(self.assumes),
            self.adapter.copies,
            len(self.steps),
            self.target.op_type != self.definition.op_type,
            self.solution.spec.language != "cuda-tile",
            self.solution.name,
        )


def match(definition: Definition, catalog: Catalog | None = None) -> list[Match]:
    """The Solutions in ``catalog`` (by default the shipped one) that compute ``definition``, the best first.

    Raises:
        InventoryError: the reference of ``definition`` does not run, or no inputs fit its constraints.
    """
    catalog = load() if catalog is None else catalog
    keep = {v for d in catalog.definitions.values() for v in d.const_axes.values()}
    required, as_written = _Required(definition, keep), None
    large = set(required.originals.values())
    found = []
    for target in catalog.definitions.values():
        solutions = catalog.solutions_of(target.name)
        if not solutions:
            continue
        if large and large <= set(reference.numbers(target.reference)):
            # The very same numbers stand in the target: nothing is to be set.
            as_written = as_written or _Required(definition, keep, as_written=True)
            result = _fit(as_written, target)
        else:
            result = _fit(required, target)
        if result is None:
            continue
        adapter, same_rounding, assumes = result
        steps = (*adapter.steps, *adapter.axes, *adapter.dtypes, *["round at other places"] * (not same_rounding))
        kind = COMPATIBLE if steps or assumes else EXACT
        found += [Match(kind, definition, target, s, adapter, steps, same_rounding, assumes) for s in solutions]
    return sorted(found, key=lambda m: m.rank)


class _Misshapen(Exception):
    """No view of the results has the shapes that are required."""


class _Required:
    """What is required, with calls of it and their results."""

    def __init__(self, definition: Definition, keep: set[int], as_written: bool = False) -> None:
        self.definition = definition
        written = set(reference.numbers(definition.reference))
        sizes = set(definition.const_axes.values())
        linked = {size for size in sizes if size in written or size // 2 in written}
        # A window of 4096 keys would not show in calls of a few keys: in trials it is a small number.
        self.trial, self.originals = definition, {}
        if not as_written:
            self.trial, self.originals = _with_small_numbers(definition, linked | {size // 2 for size in linked})
        self.run = reference.load(self.trial.reference, definition.name)
        try:
            self.trial = _with_small_axes(self.trial, keep | linked)
            self.samples = self._samples(self.trial)
        except Exception as error:  # the reference counts on the real sizes
            self.trial = self.trial.model_copy(update={"axes": definition.axes})
            if _largest_tensor(self.trial) > _MAX_ELEMENTS:
                raise InventoryError(f"{definition.name} can only be tried on tensors that are too large") from error
            self.samples = self._samples(self.trial)

    def _samples(self, definition: Definition) -> list[tuple[Case, tuple, tuple, tuple]]:
        """Calls, and their results in fp32, in fp64 and as declared; those that tell the axes apart come first."""
        made, failure = [], None
        for case in sorted(cases(definition, count=10), key=_ambiguity):
            try:
                results = [self._call(case, dtype) for dtype in (torch.float32, torch.float64, None)]
            except InventoryError as error:  # sizes that a draft's constraints should have left out
                failure = error
                continue
            made.append((case, *results))
        if failure is not None and not made:
            raise failure
        # The first of every combination of flags, and a few more.
        first: dict[tuple, Any] = {}
        for sample in made:
            first.setdefault(tuple(v for v in sample[0].inputs.values() if isinstance(v, bool)), sample)
        chosen = [*first.values(), *made[:5]]
        with contextlib.suppress(InventoryError):
            # Bounds such as a soft cap show in large numbers; rounding is not compared there.
            large = _scaled(made[0][0], self.definition)
            chosen.append((large, self._call(large, torch.float32), self._call(large, torch.float64), None))
        return sorted({id(s): s for s in chosen}.values(), key=lambda s: _ambiguity(s[0]))

    def restored(self, takes: dict[str, Take]) -> dict[str, Take]:
        """``takes`` with the numbers of the reference itself for those of the trials."""
        return {
            name: replace(take, constant=self.originals.get(take.constant, take.constant))
            if type(take.constant) is int
            else take
            for name, take in takes.items()
        }

    def _call(self, case: Case, dtype: torch.dtype | None) -> tuple:
        try:
            return outputs_of(self.definition, self.run(*case.copies(dtype).values()))
        except InventoryError:
            raise
        except Exception as error:
            raise InventoryError(f"the reference of {self.definition.name!r} fails for {case}: {error}") from error


def _with_small_numbers(definition: Definition, keep: set[int]) -> tuple[Definition, dict[int, int]]:
    """``definition`` with small integers for large ones in its reference, and what they stand for."""
    written = set(reference.numbers(definition.reference))
    large = sorted(v for v in written if type(v) is int and v > _BIG_AXIS and v not in keep)
    unused = (
        v for v in (3, 5, 7, 6, 9, 10, 11, 12, 13) if v not in written and v not in definition.const_axes.values()
    )
    small = dict(zip(large, unused, strict=False))
    text = reference.with_numbers(definition.reference, small) if small else definition.reference
    return definition.model_copy(update={"reference": text}), {value: key for key, value in small.items()}


def _scaled(case: Case, definition: Definition) -> Case:
    """``case`` with larger numbers in the tensors that no constraint speaks of."""
    bound = {name for constraint in definition.constraints for name in constraints.names(constraint)}
    inputs = {
        name: value * 16
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in bound
        else value
        for name, value in case.inputs.items()
    }
    return Case(case.axes, inputs)


def _ambiguity(case: Case) -> tuple[int, int]:
    """How many axes of a call cannot be told apart by their size, or have size 1; then how large it is."""
    sizes = list(case.axes.values())
    return len(sizes) - len(set(sizes) - {1}), math.prod(sizes)


def _with_small_axes(definition: Definition, keep: set[int]) -> Definition:
    """``definition`` with small sizes for its large constant axes; axes of one size stay of one size."""
    large = sorted({size for size in definition.const_axes.values() if size > _BIG_AXIS and size not in keep})
    unused, small = iter((10, 14, 22, 26, 34, 38, 46, 58)), {}
    for size in large:
        # What is twice another axis, such as a packed one, stays so.
        double = 2 * small[size // 2] if size % 2 == 0 and size // 2 in small else None
        small[size] = double or next(unused, size)
    axes = {
        name: AxisConst(value=small.get(axis.value, axis.value)) if isinstance(axis, AxisConst) else axis
        for name, axis in definition.axes.items()
    }
    return definition.model_copy(update={"axes": axes})


def _largest_tensor(definition: Definition) -> int:
    """The number of elements of the largest input, along its constant axes."""
    sizes = definition.const_axes
    shapes = [spec.shape for spec in definition.inputs.values() if spec.shape is not None]
    return max((math.prod(sizes.get(axis, 1) for axis in shape) for shape in shapes), default=1)


def _fit(required: _Required, target: Definition) -> tuple[Adapter, bool, tuple[str, ...]] | None:
    """The first adapter from what is required to ``target`` that works, the plainest being tried first."""
    run = reference.load(target.reference, target.name)
    choices, trials = list(candidates.number_choices(required.trial, target)), 0
    for level in range(4) if choices else ():
        before = trials
        for takes in candidates.assignments(required.trial, target, required.samples[0][0], level):
            for numbers in choices:
                ordered = {name: takes[name] if name in takes else numbers[name] for name in target.inputs}
                trials += 1
                if trials > (_MAX_TRIALS if level < 3 else before + _MAX_LATE_TRIALS):
                    return None
                try:
                    if result := _try(required, target, run, ordered):
                        return result
                except _Misshapen:  # whatever the numbers are
                    break
    return None


def _try(
    required: _Required, target: Definition, run: Any, takes: dict[str, Take]
) -> tuple[Adapter, bool, tuple[str, ...]] | None:
    """The adapter with these ``takes``, if the references agree through it in every call."""
    adapter = Adapter(required.trial, target, takes, {})
    assumes: dict[str, None] = {}
    same_rounding, agreed = True, 0
    for case, single, exact, declared in required.samples:
        try:
            values = adapter.inputs(case.copies(torch.float32))
            axes = _axes_of(target, values)
            if axes is None:
                return None
            if not _constraints_hold(target, {**axes, **values}, assumes):
                continue
            results = outputs_of(target, run(*values.values()))
            if not agreed:
                gives = _gives(required, target, results, single, case)
                if gives is None:
                    return None
                adapter = Adapter(required.trial, target, takes, gives)
            if not all(map(_close, _given(adapter, results, case), single)):
                return None
            agreed += 1
            if declared is None:
                continue
            results = outputs_of(target, run(*adapter.inputs(case.copies()).values()))
            for got, own, oracle in zip(_given(adapter, results, case), declared, exact, strict=True):
                if isinstance(own, torch.Tensor) and not torch.equal(got.nan_to_num(), own.nan_to_num()):
                    same_rounding = False
                    if difference(got.to(own.dtype), own, oracle) is not None:
                        return None
        except _Misshapen:
            raise
        except Exception:  # whatever the reference does with inputs that it was not written for, it does not match
            return None
    if agreed < min(2, len(required.samples)):
        return None
    adapter = Adapter(required.definition, target, required.restored(takes), adapter.gives)
    return adapter, same_rounding, tuple(assumes)


def _given(adapter: Adapter, results: tuple, case: Case) -> tuple:
    given = adapter.outputs(results, case.inputs)
    return given if isinstance(given, tuple) else (given,)


def _axes_of(target: Definition, values: dict[str, Any]) -> dict[str, int] | None:
    sizes: dict[str, int] | None = dict(target.const_axes)
    for name, spec in target.inputs.items():
        if spec.shape is not None and sizes is not None:
            sizes = candidates.bind(spec.shape, tuple(values[name].shape), sizes)
    return sizes


def _constraints_hold(target: Definition, values: dict[str, Any], assumes: dict[str, None]) -> bool:
    """Whether the constraints on sizes and numbers hold; those that do not hold are added to ``assumes``."""
    tensors = {name for name, spec in target.inputs.items() if spec.shape is not None}
    fits = True
    for constraint in target.constraints:
        names = constraints.names(constraint)
        if not names <= values.keys() or constraints.holds(constraint, values):
            continue  # an axis of the outputs alone is for the comparison of the results
        assumes[constraint] = None
        fits = fits and bool(names & tensors)
    return fits


def _gives(
    required: _Required, target: Definition, results: tuple, expected: tuple, case: Case
) -> dict[str, Give] | None:
    """Where each required output is found among the results of ``target``."""
    gives: dict[str, Give] = {}
    used: set[int] = set()
    for (name, spec), value in zip(required.definition.outputs.items(), expected, strict=True):
        options = list(_give_options(results, value, spec))
        if not options:
            raise _Misshapen
        for give in options:
            if len(give.indices) == 1 and give.view.part is None and give.indices[0] in used:
                continue
            got = give(results, tuple(value.shape) if isinstance(value, torch.Tensor) else None)
            if _close(got, value):
                gives[name] = give
                used |= set(give.indices)
                break
        else:
            return None
    return gives


def _give_options(results: tuple, value: Any, spec: TensorSpec) -> Iterator[Give]:
    tensors = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor)]
    if not isinstance(value, torch.Tensor):
        yield from (Give((i,)) for i in range(len(results)))
        return
    cast = spec.dtype if not value.is_floating_point() else None
    for i in tensors:
        own = results[i]
        view = View(dtype=cast if cast and own.dtype != value.dtype else None)
        if own.shape == value.shape:
            yield Give((i,), view=view)
        if own.dim() == value.dim():
            for one, other in itertools.combinations(range(own.dim()), 2):
                order = list(range(own.dim()))
                order[one], order[other] = other, one
                if View(permutation=tuple(order)).shape(tuple(own.shape)) == tuple(value.shape):
                    yield Give((i,), view=View(permutation=tuple(order)))
            for parts in (2, 3):
                for index in range(parts):
                    view = View(part=(-1, index, parts))
                    if view.shape(tuple(own.shape)) == tuple(value.shape):
                        yield Give((i,), view=view)
        elif own.numel() == value.numel():
            yield Give((i,), reshaped=True)
    for count in (2, 3):
        for group in itertools.permutations(tensors, count):
            if candidates.packed_shape([tuple(results[i].shape) for i in group], -1) == tuple(value.shape):
                yield Give(group)


def _close(got: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return type(got) is type(expected) and got == expected
    if got.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(got, expected)
    got, expected = got.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        return False
    if not finite.any():
        return True
    return bool((got[finite] - expected[finite]).abs().max() <= _TOLERANCE * (expected[finite].abs().max() + 1e-3))
