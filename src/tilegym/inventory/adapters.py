"""Adapters: how a call of one Definition becomes a call of another one's Solution."""

import math
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilegym.inventory import constraints
from tilegym.inventory.inputs import torch_dtype
from tilegym.inventory.schema import Definition


@dataclass(frozen=True)
class View:
    """What is done to a tensor between the two Definitions; in this order.

    Attributes:
        part: (dim, index, parts): one of equal parts along a dimension.
        in_turn: the parts' elements alternate.
        permutation: of the dimensions.
        merged: how many leading dimensions become one.
        added: how many dimensions of size 1 are put in front.
        dtype: what it is cast to.
    """

    part: tuple[int, int, int] | None = None
    in_turn: bool = False
    permutation: tuple[int, ...] | None = None
    merged: int = 1
    added: int = 0
    dtype: str | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.part is not None:
            dim, index, parts = self.part
            x = x.unflatten(dim, (-1, parts)).select(dim, index) if self.in_turn else x.chunk(parts, dim)[index]
        if self.permutation is not None:
            x = x.permute(self.permutation)
        if self.merged > 1:
            x = x.flatten(0, self.merged - 1)
        if self.added:
            x = x[(None,) * self.added]
        return x if self.dtype is None else x.to(torch_dtype(self.dtype))

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape that a tensor of these sizes gets, or None if this cannot be done to it."""
        sizes = list(sizes)
        if self.part is not None:
            dim, _, parts = self.part
            if dim >= len(sizes) or -dim > len(sizes) or sizes[dim] % parts:
                return None
            sizes[dim] //= parts
        if self.permutation is not None:
            if len(self.permutation) != len(sizes):
                return None
            sizes = [sizes[dim] for dim in self.permutation]
        if self.merged > len(sizes):
            return None
        sizes[: self.merged] = [math.prod(sizes[: self.merged])]
        return (*(1,) * self.added, *sizes) if self.merged > 1 or self.added or sizes else ()

    def steps(self, name: str) -> list[str]:
        """What is done, in words; nothing for the view that changes nothing."""
        said = []
        if self.part is not None:
            dim, index, parts = self.part
            which = f"{index + 1} of every {parts}" if self.in_turn else f"part {index + 1} of {parts}"
            said.append(f"split {name}: {which} along dimension {dim}")
        if self.permutation is not None:
            said.append(f"permute {name} to {list(self.permutation)}")
        if self.merged > 1:
            said.append(f"merge the first {self.merged} dimensions of {name}")
        if self.added:
            said.append(f"put {self.added} dimension{'s' * (self.added > 1)} in front of {name}")
        if self.dtype is not None:
            said.append(f"cast {name} to {self.dtype}")
        return said


@dataclass(frozen=True)
class Take:
    """Where an input of the Solution comes from: inputs of the Definition (several are packed), or a constant.

    Attributes:
        names: the inputs; empty for a constant.
        dim: the dimension along which several are packed.
        view: what is done to the result.
        constant: a number, or an expression over the Definition's axes.
    """

    names: tuple[str, ...] = ()
    dim: int = -1
    view: View = View()
    constant: bool | int | float | str | None = None

    def __call__(self, values: Mapping[str, Any], axes: Mapping[str, int]) -> Any:
        if not self.names:
            return eval(self.constant, {}, dict(axes)) if isinstance(self.constant, str) else self.constant
        first = values[self.names[0]]
        if not isinstance(first, torch.Tensor):
            return first
        return self.view(first if len(self.names) == 1 else torch.cat([values[n] for n in self.names], self.dim))

    def steps(self, target: str) -> list[str]:
        """What is done, in words, to make the input ``target``."""
        if not self.names:
            return [f"{target} = {self.constant}"]
        if len(self.names) > 1:
            return [f"pack {' and '.join(self.names)} along dimension {self.dim} as {target}", *self.view.steps(target)]
        return self.view.steps(self.names[0])


@dataclass(frozen=True)
class Give:
    """Where an output of the Definition comes from: outputs of the Solution by index, several of them packed.

    Attributes:
        reshaped: whether the result gets the shape that the Definition says, dimensions merged or added undone.
    """

    indices: tuple[int, ...]
    dim: int = -1
    view: View = View()
    reshaped: bool = False

    def __call__(self, results: tuple[Any, ...], shape: tuple[int, ...] | None) -> Any:
        first = results[self.indices[0]]
        if not isinstance(first, torch.Tensor):
            return first
        x = first if len(self.indices) == 1 else torch.cat([results[i] for i in self.indices], self.dim)
        if self.reshaped:
            x = x.reshape(shape)
        return self.view(x)

    def steps(self, name: str) -> list[str]:
        """What is done, in words, to make the output ``name``."""
        said = [f"pack the outputs {list(self.indices)} along dimension {self.dim} as {name}"] * (len(self.indices) > 1)
        return [*said, *[f"give {name} its shape back"] * self.reshaped, *self.view.steps(name)]


def axis_sizes(definition: Definition, values: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the axes, from the inputs of a call; of axes in outputs alone where a constraint gives them."""
    sizes = dict(definition.const_axes)
    for name, spec in definition.inputs.items():
        if spec.shape is not None and isinstance(values[name], torch.Tensor):
            sizes |= dict(zip(spec.shape, values[name].shape, strict=False))
    for _ in definition.constraints:  # one may need what another gives
        for constraint in definition.constraints:
            for axis, expression in constraints.equations(constraint):
                if axis in definition.axes and axis not in sizes and constraints.names(expression) <= sizes.keys():
                    sizes[axis] = eval(expression, {"__builtins__": {}}, dict(sizes))
    return sizes


@dataclass(frozen=True)
class Adapter:
    """Calls the Solution of ``target`` with the inputs of ``definition``, and gives its outputs back.

    Attributes:
        takes: for each input of ``target``, in order, where it comes from.
        gives: for each output of ``definition``, in order.
    """

    definition: Definition
    target: Definition
    takes: dict[str, Take]
    gives: dict[str, Give]

    def inputs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of ``target``, by name, for a call with ``values``."""
        axes = axis_sizes(self.definition, values)
        return {name: take(values, axes) for name, take in self.takes.items()}

    def outputs(self, results: Any, values: Mapping[str, Any]) -> Any:
        """The outputs of ``definition``, one or a tuple, from what the Solution returned for ``values``."""
        results = tuple(results) if isinstance(results, tuple | list) else (results,)
        axes = axis_sizes(self.definition, values)
        given = []
        for name, give in self.gives.items():
            names = self.definition.outputs[name].shape or ()
            shape = tuple(axes.get(axis, -1) for axis in names) if give.reshaped else None
            given.append(give(results, shape))
        return given[0] if len(given) == 1 else tuple(given)

    def wrap(self, function: Callable) -> Callable:
        """A function with the parameters of ``definition`` that calls ``function``, a Solution of ``target``.

        ``function`` returns its outputs (no destination passing).
        """
        names = list(self.definition.inputs)

        def run(*args, **kwargs):
            values = dict(zip(names, args, strict=False)) | kwargs
            if len(args) + len(kwargs) != len(names) or values.keys() != set(names):
                raise TypeError(f"{self.definition.name} takes {', '.join(names)}")
            return self.outputs(function(*self.inputs(values).values()), values)

        return run

    @property
    def steps(self) -> list[str]:
        """What the adapter does, in words; empty if the Solution is called as it is."""
        said = [step for name, take in self.takes.items() for step in take.steps(name)]
        direct = [take.names[0] for take in self.takes.values() if len(take.names) == 1]
        direct = list(dict.fromkeys(direct))
        if direct != [name for name in self.definition.inputs if name in direct]:
            said.append(f"inputs in the order {', '.join(direct)}")
        indices = [index for give in self.gives.values() for index in give.indices]
        if len(self.target.outputs) > len(set(indices)):
            said.append(f"outputs {indices} of {len(self.target.outputs)}")
        elif indices != sorted(indices):
            said.append(f"outputs in the order {indices}")
        return said + [step for name, give in self.gives.items() for step in give.steps(name)]

    @property
    def copies(self) -> int:
        """How many tensors are packed, which takes a copy of them, where views are free."""
        return sum(len(take.names) > 1 for take in self.takes.values()) + sum(
            len(give.indices) > 1 for give in self.gives.values()
        )

    @property
    def axes(self) -> list[str]:
        """Axes that are constant here and variable in ``target``, in words."""
        said = []
        for name, take in self.takes.items():
            if len(take.names) != 1 or take.view != View():
                continue
            here, there = self.definition.inputs[take.names[0]].shape, self.target.inputs[name].shape
            for own, other in zip(here or (), there or (), strict=False):
                size = self.definition.const_axes.get(own)
                if size is not None and other not in self.target.const_axes:
                    said.append(f"constant {own} = {size} for variable {other}")
        return list(dict.fromkeys(said))

    @property
    def dtypes(self) -> list[str]:
        """Floating-point inputs whose dtype is not the one that ``target`` declares, in words; they are not cast."""
        said = []
        for name, take in self.takes.items():
            if take.names and take.view.dtype is None:
                own, other = self.definition.inputs[take.names[0]].dtype, self.target.inputs[name].dtype
                if own != other and self.target.inputs[name].shape is not None:
                    said.append(f"{take.names[0]} is {own}, declared for {other}")
        return said
