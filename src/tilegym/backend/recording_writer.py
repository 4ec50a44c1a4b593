"""Writes the function that repeats what a call was seen to do; :mod:`tilegym.backend.recording` says when.

Launches are repeated as they were made. Where it is asked for and each of them can be repeated by the addresses of its
tensors alone, that is what is done, and the views among these are never made: calls for which this does not hold take
the other way.
"""

import operator
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import torch

from tilegym.backend import allocation
from tilegym.backend import recording_source

ALIGNMENT = 16  # bytes: what holds of the arguments' addresses when a launch by addresses is prepared, it may rely on


class NotRepeatable(Exception):
    pass


class Submission(NamedTuple):
    """A way to launch kernels."""

    submit: Callable[..., None]  # of device, grid, kernel, args, overlap
    # Of the same, behind a launch with them: its repetition by addresses, a function of these which returns 0 unless it
    # launched nothing, and the positions of the tensors in args; or None.
    prepare: Callable[..., tuple[Callable[..., int], tuple[int, ...]] | None] | None


class Recorded:
    """What a call with ``tensors`` (None among them for those not given) has done."""

    def __init__(self, tensors: tuple) -> None:
        self.inputs = tensors
        # By a tensor's id, itself (so that no other gets this id), and the input, allocation or loan it is part of.
        self.parts = {id(t): (t, t) for t in tensors if t is not None}
        self.lent: list[tuple[Callable, tuple[torch.Tensor, ...]]] = []
        self.launches: list[tuple[Submission, int, tuple, Any, tuple, bool]] = []


def write(seen: Recorded, result: Any, by_address: bool) -> Callable[..., Any]:
    """A function of tensors like the inputs that does what was seen of the call that has returned ``result``.

    ``by_address``: whether launches are prepared for that, if they can be.

    Raises :class:`NotRepeatable`.
    """
    as_made = _Writer(seen, result)
    for how, *where, args, overlap in seen.launches:
        names = [as_made.argument(arg) for arg in args]
        as_made.source.launch(how.submit, *where, names, overlap)
    repeat = as_made.function()
    if not by_address or any(t is not None and t.data_ptr() % ALIGNMENT for t in seen.inputs):
        return repeat
    prepared = []
    for how, *launch in seen.launches:
        try:
            prepared.append(how.prepare and how.prepare(*launch))
        except Exception:  # the call is served, and can be repeated as it was
            return repeat
        if not prepared[-1]:
            return repeat
    writer = _Writer(seen, result)
    for i, ((submit, positions), launch) in enumerate(zip(prepared, seen.launches, strict=True)):
        addresses = [writer.address(launch[4][position]) for position in positions]
        writer.source.launch_at(submit, addresses, repeat if i == 0 else None)
    writer.source.look(ALIGNMENT, repeat)
    return writer.function()


class _Writer:
    """Of one function."""

    def __init__(self, seen: Recorded, result: Any) -> None:
        self.source = recording_source.Repeat(len(seen.inputs))
        self._parts = seen.parts
        self._devices = [t.device for t in seen.inputs if t is not None]
        # Names and geometries by id, of inputs, allocations and loans.
        self._memory = {id(t): (f"t{i}", _geometry(t, t)) for i, t in enumerate(seen.inputs) if t is not None}
        for give, given in seen.lent:
            for tensor, name in zip(given, self.source.lent(give, len(given)), strict=True):
                self._memory[id(tensor)] = name, _geometry(tensor, tensor)
        self._slots: dict[tuple, str] = {}  # names, by the id of what it is part of and the geometry
        outputs = result if type(result) in (tuple, list) else (result,)
        # Outputs first: they shall be allocations themselves, and no views of some.
        names = [self._slot(output) for output in outputs]
        self._result = recording_source.several(names, type(result)) if outputs is result else names[0]

    def function(self) -> Callable[..., Any]:
        return self.source.returning(self._result)

    def argument(self, value: Any) -> str:
        """The name of an argument of a kernel."""
        if isinstance(value, torch.Tensor):
            return self._slot(value)
        if type(value) is list and all(isinstance(v, torch.Tensor) for v in value):
            return recording_source.several([self._slot(v) for v in value], list)
        if not _is_plain(value):
            raise NotRepeatable
        return self.source.constant(value)

    def address(self, tensor: torch.Tensor) -> str:
        """The address of what a tensor of the call will be."""
        root = self._parts[id(tensor)][1]
        if id(root) not in self._memory:
            self._memory[id(root)] = self._allocate(root, root)
        return self.source.address(self._memory[id(root)][0], tensor.data_ptr() - root.data_ptr())

    def _slot(self, tensor: Any) -> str:
        """The name of what a tensor of the call, or None, will be: it is an input, or made now."""
        if tensor is None:
            return "None"
        if id(tensor) not in self._parts:
            raise NotRepeatable
        root = self._parts[id(tensor)][1]
        wanted = _geometry(root, tensor)
        if (id(root), wanted) not in self._slots:
            if id(root) not in self._memory:
                self._memory[id(root)] = self._allocate(root, tensor)
            slot, geometry = self._memory[id(root)]
            if wanted != geometry:
                slot = self.source.make(slot, _view(geometry, wanted))
            self._slots[id(root), wanted] = slot
        return self._slots[id(root), wanted]

    def _allocate(self, root: torch.Tensor, tensor: torch.Tensor) -> tuple[str, tuple]:
        """Makes what ``root`` is, laid out as ``tensor``, its first use, where that is all of it; name and geometry."""
        if root.dtype == tensor.dtype and _is_dense(tensor) and tensor.numel() == root.numel() and _is_dense(root):
            geometry = _geometry(root, tensor)
        else:
            geometry = _geometry(root, root)
        if root.device not in self._devices:
            raise NotRepeatable
        dtype, shape, strides, _ = geometry
        return self.source.allocate(allocation.empty_on(root.device), tuple(shape), strides, dtype), geometry


def _geometry(root: torch.Tensor, tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset() - root.storage_offset()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor takes as many elements in memory as it has."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 0 or last + 1 == tensor.numel()


def _view(of: tuple, wanted: tuple) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from a tensor of geometry ``of`` to its view of the other geometry."""
    dtype, shape, strides, offset = wanted
    if dtype.itemsize != of[0].itemsize:
        raise NotRepeatable
    if dtype == of[0] and offset == of[3]:
        return operator.methodcaller("as_strided", shape, strides)
    ahead = offset - of[3]
    if dtype == of[0]:
        return lambda tensor: tensor.as_strided(shape, strides, tensor.storage_offset() + ahead)
    return lambda tensor: tensor.view(dtype).as_strided(shape, strides, tensor.storage_offset() + ahead)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
