"""Checks for what the hardware leaves undefined.

- Undetermined padding: a block that read some runs again from the same memory, with other kinds of poison in the
  padding. What it stores must not differ.
- Write conflicts: every element remembers which block wrote it in this launch, and whether atomically.
- Bounds: accesses through pointers are checked against the array argument, not only against its storage, and tiles
  may not lie entirely outside their array.

Claims of divisibility, indices of lists and sub-tiles, and accesses with ``check_bounds=False`` are checked in every
launch, since they cost nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass

import torch

from .control import BlockState
from .errors import UndeterminedValueError
from .errors import WriteConflictError
from .memory import Memory
from .program import describe
from .values import NUM_POISONS

_enabled = contextvars.ContextVar("tilegym_interpreter_sanitize", default=False)
_SEVERAL = 2**62
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sanitizing() -> bool:
    """Whether launches are checked where they do not say so themselves."""
    return _enabled.get()


@contextlib.contextmanager
def sanitize(enabled: bool = True):
    """Checks every launch made in the ``with`` block, also those that library calls make inside."""
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


@dataclass
class _Write:
    location: object
    memory: Memory
    offsets: torch.Tensor
    values: torch.Tensor
    before: torch.Tensor


class Sanitizer:
    """The checks of one launch, whose blocks run one after the other."""

    def __init__(self):
        # storage -> per element: 0, or 1 + number of the block that wrote, negative if only atomically
        self._writers = {}
        self._log = []

    def run_block(self, program, registers: list, block: tuple, grid: tuple) -> None:
        """Runs the program for one block, again with each other poison if the block read undetermined padding."""
        self._log = []
        state = BlockState(block, grid, self, garbage=1)
        program.body.run([state, *registers[1:]])
        if not state.read_padding:
            return
        first = self._log
        for garbage in range(2, NUM_POISONS + 1):
            for write in reversed(self._log):
                write.memory.flat[write.offsets] = write.before
            self._log = []
            program.body.run([BlockState(block, grid, self, garbage, silent=True), *registers[1:]])
            problem = _first_difference(first, self._log)
            if problem is None:
                continue
            where, write, offset = problem
            source, array = state.read_padding[0]
            raise UndeterminedValueError(
                f"{where} depends on undetermined padding of array {array!r}, loaded at {describe(source)}"
                " (give that load a padding_mode, or mask what it pads)",
                location=describe(write.location),
                array=write.memory.name,
                index=None if offset is None else write.memory.index_of(offset),
            )

    def view_store(self, state, location, array, window, value) -> None:
        """Called before ``value`` is stored to the part of a view that ``window`` is."""
        self._write(state, location, array.memory, _offsets(window, array.strides), value.reshape(-1), False)

    def scatter(self, state, location, memory, offsets, values) -> None:
        """Called before ``values`` are stored at flat ``offsets``."""
        _check_lanes(location, memory, offsets.reshape(-1), values.reshape(-1))
        self._write(state, location, memory, offsets.reshape(-1), values.reshape(-1), False)

    def atomic(self, state, location, memory, offsets, updates) -> None:
        """Called before an atomic operation at flat ``offsets``."""
        self._write(state, location, memory, offsets, updates, True)

    def view_atomic(self, state, location, array, window, updates) -> None:
        """Called before an atomic reduction into the part of a view that ``window`` is."""
        self._write(state, location, array.memory, _offsets(window, array.strides), updates.reshape(-1), True)

    def _write(self, state, location, memory, offsets, values, atomic: bool) -> None:
        self._log.append(_Write(location, memory, offsets, values, memory.flat[offsets]))
        key = memory.address, memory.flat.element_size(), memory.packed is None
        writers = self._writers.get(key)
        if writers is None:
            writers = self._writers[key] = torch.zeros(memory.flat.numel(), dtype=torch.int64)
        x, y, z = state.index
        mine = 1 + x + state.grid[0] * (y + state.grid[1] * z)
        previous = writers[offsets]
        if not atomic and not bool(previous.any()):
            writers[offsets] = mine
            return
        conflict = (previous != 0) & (previous.abs() != mine)
        if atomic:
            conflict &= previous > 0  # atomics of several blocks go together
        if bool(conflict.any()):
            lane = int(conflict.nonzero()[0])
            writer = _writer_name(int(previous[lane]), state.grid)
            raise WriteConflictError(
                f"an element that {writer} wrote is written again, not every time by an atomic operation",
                location=describe(location),
                array=memory.name,
                index=memory.index_of(int(offsets[lane])),
            )
        if atomic:
            alone = torch.where(previous.abs() == mine, previous, -mine)  # its plain store stays one
            writers[offsets] = torch.where((previous == 0) | (previous.abs() == mine), alone, -_SEVERAL)
        else:
            writers[offsets] = mine


def _writer_name(writer: int, grid: tuple) -> str:
    if abs(writer) == _SEVERAL:
        return "several blocks"
    rows, x = divmod(abs(writer) - 1, grid[0])
    z, y = divmod(rows, grid[1])
    return f"block {(x, y, z)}"


def _offsets(window, strides) -> torch.Tensor:
    """Flat offsets of a window's elements, in row-major order."""
    offsets = torch.tensor([window.offset])
    for size, stride in zip(window.shape, strides, strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).reshape(-1)
    return offsets


def _check_lanes(location, memory, offsets, values) -> None:
    """Errors where one scatter writes different values to one address."""
    if offsets.numel() < 2 or bool((offsets[1:] > offsets[:-1]).all()):
        return
    order = torch.argsort(offsets, stable=True)
    ordered, raw = offsets[order], _bits(values)[order]
    clash = (ordered[1:] == ordered[:-1]) & (raw[1:] != raw[:-1])
    if bool(clash.any()):
        raise WriteConflictError(
            "lanes of one scatter write different values to one element",
            location=describe(location),
            array=memory.name,
            index=memory.index_of(int(ordered[1:][clash][0])),
        )


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(_RAW[values.element_size()])


def _first_difference(first: list, second: list):
    """What differs between two logs of writes: (description, write, offset or None), or None."""
    for one, other in zip(first, second, strict=False):
        if one.location != other.location:
            return "the order of stores", one, None
        if not torch.equal(one.offsets, other.offsets):
            return "the place of a store", one, None
        differs = _bits(one.values) != _bits(other.values)
        if one.values.is_floating_point():
            differs &= ~(one.values.isnan() & other.values.isnan())
        if bool(differs.any()):
            return "a stored value", one, int(one.offsets[differs][0])
    if len(first) != len(second):
        longer = first if len(first) > len(second) else second
        return "whether a store happens", longer[min(len(first), len(second))], None
    return None
