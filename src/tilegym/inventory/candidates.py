"""Ways to make the inputs of one Definition out of those of another, as far as shapes and dtypes allow."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tilegym.inventory import constraints
from tilegym.inventory import reference
from tilegym.inventory.adapters import Take
from tilegym.inventory.adapters import View
from tilegym.inventory.inputs import Case
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import TensorSpec

Sizes = dict[str, int]
_MAX_VISITED = 1000  # of the ways at level 3, whole or begun: where many tensors are alike there are very many


def assignments(required: Definition, target: Definition, case: Case, level: int) -> Iterator[dict[str, Take]]:
    """Ways to make the tensors of ``target`` whose shapes fit each other for ``case``; every tensor of it is used.

    Args:
        level: 0: as they are; 1: with dimensions permuted, merged or added; 2: split or packed besides; 3: two halves
            of one tensor, or two tensors packed, merged or with dimensions added; or elements that alternate.
    """
    slots = [(name, spec) for name, spec in target.inputs.items() if spec.shape is not None]
    wanted = {name for name, spec in required.inputs.items() if spec.shape is not None}
    if level < 2 and len(slots) != len(wanted):
        return
    if level == 3 and abs(len(slots) - len(wanted)) != 1:
        return
    options = [list(_takes(required, spec, case, level)) for _, spec in slots]
    if not all(options):
        return

    visited = itertools.count()

    def place(index: int, sizes: Sizes, used: tuple[Take, ...]) -> Iterator[dict[str, Take]]:
        if level == 3 and next(visited) > _MAX_VISITED:
            return
        if index == len(slots):
            if {name for take in used for name in take.names} == wanted and (level < 3 or any(map(_is_late, used))):
                yield dict(zip((name for name, _ in slots), used, strict=True))
            return
        for take, shape in options[index]:
            if any(_overlap(take, other) for other in used):
                continue
            bound = bind(slots[index][1].shape, shape, sizes)
            if bound is not None:
                yield from place(index + 1, bound, (*used, take))

    yield from place(0, dict(target.const_axes), ())


def _overlap(one: Take, other: Take) -> bool:
    """Whether both use the same tensor, or the same part of it."""
    if not set(one.names) & set(other.names):
        return False
    a, b = one.view.part, other.view.part
    kinds = [(view.part[0], view.part[2], view.in_turn) if view.part else None for view in (one.view, other.view)]
    return a is None or b is None or kinds[0] != kinds[1] or a[1] == b[1]


def bind(axes: list[str], shape: tuple[int, ...], sizes: Sizes) -> Sizes | None:
    """``sizes`` with what ``shape`` says of ``axes``, or None if the two contradict each other."""
    bound = dict(sizes)
    for axis, size in zip(axes, shape, strict=True):
        if bound.setdefault(axis, size) != size:
            return None
    return bound


def _is_late(take: Take) -> bool:
    """Whether it is among those that level 3 has and level 2 has not."""
    divided = take.view.part is not None or len(take.names) > 1
    return take.view.in_turn or (divided and (take.view.added > 0 or take.view.merged > 1))


def _takes(required: Definition, spec: TensorSpec, case: Case, level: int) -> Iterator[tuple[Take, tuple[int, ...]]]:
    """Ways to make one tensor, and its shapes."""
    rank, family = len(spec.shape), _family(spec.dtype)
    names = [n for n, own in required.inputs.items() if own.shape is not None and _family(own.dtype) == family]
    for name in names:
        own = required.inputs[name].dtype
        cast = spec.dtype if family == "int" and own != spec.dtype else None
        sizes = tuple(case.inputs[name].shape)
        for view in _views(len(sizes), rank, level, cast):
            shape = view.shape(sizes)
            if shape is not None and len(shape) == rank:
                yield Take((name,), view=view), shape
    if level >= 2:
        for count, dim in itertools.product((2, 3), (-1, 0)):
            for group in itertools.permutations(names, count):
                packed = packed_shape([tuple(case.inputs[name].shape) for name in group], dim)
                if packed is not None and (len(packed) == rank or (level == 3 and (count, dim) == (2, -1))):
                    for view in _reshapings(len(packed), rank):
                        yield Take(group, dim, view), view.shape(packed)


def _family(dtype: str) -> str:
    return "float" if "float" in dtype else "bool" if dtype == "bool" else "int"


def _views(rank: int, wanted: int, level: int, cast: str | None) -> Iterator[View]:
    if rank == wanted:
        yield View(dtype=cast)
    if level == 0:
        return
    if rank == wanted:
        for one, other in itertools.combinations(range(rank), 2):
            order = list(range(rank))
            order[one], order[other] = other, one
            yield View(permutation=tuple(order), dtype=cast)
    else:
        yield from (replace(view, dtype=cast) for view in _reshapings(rank, wanted))
    if level >= 2 and rank == wanted:
        for parts, dim in itertools.product((2, 3), (-1, 0)):
            yield from (View(part=(dim, index, parts), dtype=cast) for index in range(parts))
    if level == 3:
        for view in _reshapings(rank, wanted):
            for in_turn in (True,) if rank == wanted else (False, True):
                yield from (replace(view, part=(-1, i, 2), in_turn=in_turn, dtype=cast) for i in range(2))


def _reshapings(rank: int, wanted: int) -> Iterator[View]:
    """How a tensor of ``rank`` dimensions becomes one of ``wanted``, in their order."""
    if rank == wanted:
        yield View()
    elif rank > wanted > 0:
        yield View(merged=rank - wanted + 1)
    elif 0 < rank < wanted:
        yield View(added=wanted - rank)


def packed_shape(shapes: list[tuple[int, ...]], dim: int) -> tuple[int, ...] | None:
    """The shape of the concatenation, or None if these do not go together."""
    first = list(shapes[0])
    if not first or any(len(s) != len(first) for s in shapes):
        return None
    total = sum(s[dim] for s in shapes)
    rests = {tuple(s[:-1] if dim == -1 else s[1:]) for s in shapes}
    if len(rests) != 1:
        return None
    first[dim] = total
    return tuple(first)


def _allowed(name: str, definition: Definition) -> Iterator[int]:
    """The integers that an input may be, where the constraints list them: ``x == -100 or x == 0``."""
    for alternative in itertools.chain.from_iterable(map(constraints.alternatives, definition.constraints)):
        for left, right in constraints.equations(alternative):
            if left == name and right.removeprefix("-").isdecimal():
                yield int(right)


def number_choices(required: Definition, target: Definition) -> Iterator[dict[str, Take]]:
    """Ways to set the numbers among the inputs of ``target``: required numbers, and constants of the reference."""
    names, options = [], []
    numbers = [name for name, spec in required.inputs.items() if spec.shape is None]
    written = reference.numbers(required.reference)
    for name, spec in target.inputs.items():
        if spec.shape is not None:
            continue
        family = _family(spec.dtype)
        own = [Take((n,)) for n in numbers if _family(required.inputs[n].dtype) == family]
        if family == "bool":
            constants = [False, True]
        elif family == "int":
            constants = [c for c in written if isinstance(c, int) and not isinstance(c, bool)]
            constants += required.axes
            # What a function of PyTorch takes by default stands in no reference.
            constants += _allowed(name, target)
        else:
            constants = [float(c) for c in written if not isinstance(c, bool)]
            constants += [f"{axis} ** -0.5" for axis in required.axes]
        names.append(name)
        options.append([*own, *(Take(constant=c) for c in dict.fromkeys(constants))])
    for chosen in itertools.product(*options):
        taken = [n for take in chosen for n in take.names]
        if len(taken) == len(set(taken)) == len(numbers):
            yield dict(zip(names, chosen, strict=True))
