"""Atomic read-modify-write, compare-and-swap, and atomic reduction into a view."""

from __future__ import annotations

import threading

import torch

from . import _cutile
from ._cutile import AtomicRMWMode as Mode
from ._cutile import ops as O
from .ops_arithmetic import float_function
from .ops_arithmetic import integer_function
from .ops_memory import Window
from .ops_memory import addressed
from .ops_memory import check_window
from .ops_views import tile_steps
from .program import builds_step
from .program import dtype_of

# Blocks may run on several threads.
_lock = threading.Lock()

_NAMES = {
    Mode.BITWISE_AND: "and_",
    Mode.BITWISE_OR: "or_",
    Mode.BITWISE_XOR: "xor",
    Mode.ADD_INT: "add",
    Mode.ADD_FLOAT: "add",
    Mode.MAX_SIGNED_INT: "max",
    Mode.MIN_SIGNED_INT: "min",
    Mode.MAX_UNSIGNED_INT: "max",
    Mode.MIN_UNSIGNED_INT: "min",
}


def _combiner(mode, dtype):
    """New value of memory from its old value and the update."""
    if mode == Mode.EXCHANGE:
        return lambda old, update: update
    name = _NAMES[mode]
    return float_function(name, dtype) if _cutile.is_float(dtype) else integer_function(name, dtype)


def _lanes(offsets):
    """Positions of the lanes in rounds, such that no two lanes of a round have the same address."""
    flat = offsets.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ordered = flat[order]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    if bool(first.all()):
        return [order]
    begin = torch.cummax(torch.where(first, torch.arange(len(flat)), 0), 0).values
    rank = torch.arange(len(flat)) - begin
    return [order[rank == turn] for turn in range(int(rank.max()) + 1)]


def _apply(r, location, pointer, mask, shape, update, combine, fallback, out):
    """Runs ``combine(old, update)`` over every active lane, lanes of one address in order; returns the old values."""
    memory, offsets, active = addressed(location, r, pointer, mask, shape, "atomic access")
    old = fallback.expand(shape).clone().reshape(-1)
    lanes = offsets.reshape(-1)
    positions = torch.arange(lanes.numel()) if active is None else active.reshape(-1).nonzero().reshape(-1)
    flat_update = update.expand(shape).reshape(-1)
    with _lock:
        if r[0].sanitizer is not None:
            r[0].sanitizer.atomic(r[0], location, memory, lanes[positions], flat_update[positions])
        if positions.numel():
            for round_ in _lanes(lanes[positions]):
                chosen = positions[round_]
                current = memory.flat[lanes[chosen]]
                old[chosen] = current
                memory.flat[lanes[chosen]] = combine(current, flat_update[chosen], chosen)
    r[out] = old.reshape(shape)


@builds_step(O.TileAtomicRMW)
def atomic_rmw(builder, op):
    pointer, update = builder.slot(op.pointer), builder.tensor_slot(op.update)
    mask = None if op.mask is None else builder.tensor_slot(op.mask)
    shape, dtype = tuple(op.pointer.get_type().tensor_shape()), dtype_of(op.update)
    combine = _combiner(op.mode, dtype)
    out, location = builder.define(op.result_vars[0]), op.loc

    def step(r):
        value = r[update]
        fallback = torch.zeros((), dtype=value.dtype)
        _apply(r, location, pointer, mask, shape, value, lambda old, new, _: combine(old, new), fallback, out)

    return builder.numbered(step, op.result_vars[0])


@builds_step(O.TileAtomicCAS)
def atomic_cas(builder, op):
    pointer = builder.slot(op.pointer)
    expected, desired = builder.tensor_slot(op.expected), builder.tensor_slot(op.desired)
    mask = None if op.mask is None else builder.tensor_slot(op.mask)
    shape = tuple(op.pointer.get_type().tensor_shape())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    out, location = builder.define(op.result_vars[0]), op.loc

    def step(r):
        wanted = r[expected].expand(shape).reshape(-1)

        def swap(old, new, lanes):
            raw = bits[old.element_size()]  # the hardware compares bits: NaN equals itself, -0 is not 0
            return torch.where(old.view(raw) == wanted[lanes].contiguous().view(raw), new, old)

        _apply(r, location, pointer, mask, shape, r[desired], swap, r[expected], out)

    return builder.numbered(step, op.result_vars[0])


@builds_step(O.TileAtomicRedView)
def atomic_reduce_view(builder, op):
    ty = op.view.get_type()
    view, update = builder.slot(op.view), builder.tensor_slot(op.update)
    index = [builder.slot(var) for var in op.index]
    steps, tile_shape, location = tile_steps(ty), tuple(ty.tile_shape), op.loc
    combine = _combiner(op.mode, dtype_of(op.update))

    def step(r):
        array, state = r[view], r[0]
        starts = [r[slot] * n for slot, n in zip(index, steps, strict=True)]
        window = Window(array, starts, tile_shape)
        value = r[update]
        if not window.whole:
            check_window(location, state, array, window, starts, tile_shape, False, "atomic reduction")
            if window.empty:
                return
            value = value[window.slices]
        target = window.of(array)
        with _lock:
            if state.sanitizer is not None:
                state.sanitizer.view_atomic(state, location, array, window, value)
            target.copy_(combine(target, value))

    return step
