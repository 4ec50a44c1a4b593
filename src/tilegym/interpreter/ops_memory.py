"""Load and store: tiles of views, gather and scatter, accesses through pointers."""

from __future__ import annotations

import torch
from cuda.tile import PaddingMode
from cuda.tile import int64

from . import _cutile
from ._cutile import ops as O
from .dtypes import wrap
from .errors import OutOfBoundsError
from .memory import Pointer
from .memory import View
from .ops_views import accessible
from .ops_views import tile_steps
from .program import builds_step
from .program import describe
from .program import result_dtype
from .program import result_shape
from .values import constant
from .values import padding_number

# Tiles


class Window:
    """The part of a tile that lies inside its view."""

    __slots__ = ("offset", "shape", "slices", "whole", "empty")

    def __init__(self, view: View, starts: list, tile_shape: tuple):
        self.whole = True
        offset = view.offset
        for start, n, size, stride in zip(starts, tile_shape, view.shape, view.strides, strict=True):
            if start < 0 or start + n > size:
                self.whole = False
            offset += start * stride
        if self.whole:
            self.offset, self.shape, self.slices, self.empty = offset, tile_shape, None, False
            return
        lows = [max(start, 0) for start in starts]
        highs = [min(start + n, size) for start, n, size in zip(starts, tile_shape, view.shape, strict=True)]
        self.empty = any(low >= high for low, high in zip(lows, highs, strict=True))
        self.offset = view.offset + sum(low * stride for low, stride in zip(lows, view.strides, strict=True))
        self.shape = tuple(high - low for low, high in zip(lows, highs, strict=True))
        self.slices = tuple(
            slice(low - start, high - start) for low, high, start in zip(lows, highs, starts, strict=True)
        )

    def of(self, view: View) -> torch.Tensor:
        return view.memory.flat.as_strided(self.shape, view.strides, self.offset)


def check_window(location, state, view: View, window: Window, starts, tile_shape, unchecked: bool, what: str) -> None:
    """Errors for tiles outside their view, where cuTile leaves the behaviour undefined."""
    if window.whole:
        return
    if unchecked:
        problem = f"{what} with check_bounds=False of a tile that reaches outside the array"
    elif window.empty and state.sanitizer is not None:
        problem = f"{what} of a tile that lies entirely outside the array"
    else:
        return
    last = tuple(start + n - 1 for start, n in zip(starts, tile_shape, strict=True))
    raise OutOfBoundsError(
        f"{problem}: elements {tuple(starts)} to {last} of shape {view.shape}",
        location=describe(location),
        array=view.memory.name,
        index=tuple(starts),
    )


@builds_step(O.TileLoad)
def tile_load(builder, op):
    ty = op.view.get_type()
    if isinstance(ty, _cutile.GatherScatterViewTy):
        return _gather_view_load(builder, op, ty)
    view, index = builder.slot(op.view), [builder.slot(var) for var in op.index]
    steps, tile_shape = tile_steps(ty), tuple(ty.tile_shape)
    dtype, mode, unchecked = result_dtype(op), ty.padding_mode, any(op.inbounds)
    out = builder.define(op.result_vars[0])
    padding = constant(padding_number(mode, dtype), (), dtype)
    location = op.loc

    def step(r):
        array, state = r[view], r[0]
        starts = [r[slot] * n for slot, n in zip(index, steps, strict=True)]
        window = Window(array, starts, tile_shape)
        if window.whole:
            r[out] = window.of(array).clone()
            return
        check_window(location, state, array, window, starts, tile_shape, unchecked, "load")
        fill = padding
        if state.garbage and mode == PaddingMode.UNDETERMINED:
            fill = state.undetermined(dtype, location, array.memory.name)
        tile = fill.expand(tile_shape).clone()
        if not window.empty:
            tile[window.slices] = window.of(array)
        r[out] = tile

    return builder.numbered(step, op.result_vars[0])


@builds_step(O.TileStore)
def tile_store(builder, op):
    ty = op.view.get_type()
    if isinstance(ty, _cutile.GatherScatterViewTy):
        return _scatter_view_store(builder, op, ty)
    view, tile = builder.slot(op.view), builder.tensor_slot(op.tile)
    index = [builder.slot(var) for var in op.index]
    steps, tile_shape, unchecked, location = tile_steps(ty), tuple(ty.tile_shape), any(op.inbounds), op.loc

    def step(r):
        array, state = r[view], r[0]
        starts = [r[slot] * n for slot, n in zip(index, steps, strict=True)]
        window = Window(array, starts, tile_shape)
        value = r[tile]
        if not window.whole:
            check_window(location, state, array, window, starts, tile_shape, unchecked, "store")
            if window.empty:
                return
            value = value[window.slices]
        if state.sanitizer is not None:
            state.sanitizer.view_store(state, location, array, window, value)
        window.of(array).copy_(value)

    return step


# Gather and scatter along one dimension of a view


def _sparse_offsets(array: View, ty, index: list) -> tuple:
    """Flat offsets of the elements of a gather/scatter tile, and which of them are in bounds."""
    rank = len(index)
    offsets, inside = torch.tensor(array.offset), torch.tensor(True)
    for axis, position in enumerate(index):
        if axis == ty.sparse_dim:
            elements = position.to(torch.int64)
        else:
            elements = int(position) + torch.arange(ty.tile_shape[axis])
        elements = elements.reshape([-1 if axis == other else 1 for other in range(rank)])
        offsets = offsets + elements * array.strides[axis]
        inside = inside & (elements >= 0) & (elements < array.shape[axis])
    shape = tuple(ty.tile_shape)
    return offsets.expand(shape), inside.expand(shape)


def _gather_view_load(builder, op, ty):
    view, index = builder.slot(op.view), [builder.slot(var) for var in op.index]
    dtype, mode, location = result_dtype(op), ty.padding_mode, op.loc
    padding = constant(padding_number(mode, dtype), (), dtype)
    out = builder.define(op.result_vars[0])

    def step(r):
        array, state = r[view], r[0]
        offsets, inside = _sparse_offsets(array, ty, [r[slot] for slot in index])
        fill = padding
        if state.garbage and mode == PaddingMode.UNDETERMINED and not bool(inside.all()):
            fill = state.undetermined(dtype, location, array.memory.name)
        r[out] = _gather(array.memory.flat, offsets, inside, fill)

    return step


def _scatter_view_store(builder, op, ty):
    view, tile = builder.slot(op.view), builder.tensor_slot(op.tile)
    index, location = [builder.slot(var) for var in op.index], op.loc

    def step(r):
        array, state = r[view], r[0]
        offsets, inside = _sparse_offsets(array, ty, [r[slot] for slot in index])
        offsets, values = offsets[inside], r[tile][inside]
        if state.sanitizer is not None:
            state.sanitizer.scatter(state, location, array.memory, offsets, values)
        array.memory.flat[offsets] = values

    return step


def _gather(flat, offsets, inside, fill, safe=False):
    """The elements at ``offsets`` that are ``inside``, elsewhere ``fill``; safe: the others may be read, too."""
    if flat.numel() == 0:
        return fill.expand(offsets.shape)
    return torch.where(inside, flat[offsets if safe else torch.where(inside, offsets, 0)], fill)


# Pointers


@builds_step(O.PointerOffset)
def pointer_offset(builder, op):
    pointer, offset = builder.slot(op.pointer), builder.slot(op.offset)
    out = builder.define(op.result_vars[0])

    def step(r):
        base, distance = r[pointer], r[offset]
        # A negative index is a large unsigned one by now.
        distance = wrap(distance, int64) if isinstance(distance, int) else distance.to(torch.int64)
        r[out] = Pointer(base.memory, base.offset + distance)

    builder.emit(step, op.loc, (pointer, offset), (out,))


def addressed(location, r, pointer, mask, shape, what: str) -> tuple:
    """Offsets (a tensor of ``shape``, some that may be read where the mask is false) and mask (or None) of an access
    through pointers, checked against the memory."""
    target = r[pointer]
    memory, offsets = target.memory, target.offset
    offsets = torch.tensor(offsets) if isinstance(offsets, int) else offsets
    offsets = offsets.expand(shape)
    active = None if mask is None else r[mask].expand(shape)
    low, high = accessible(r[0], memory)
    safe = offsets if active is None else torch.where(active, offsets, low)
    least, most = torch.aminmax(safe)
    wrong = least.item() < low or most.item() > high
    if wrong and active is not None and low > high:  # nothing is there, which is wrong only if something is wanted
        wrong = bool(active.any())
    if wrong:
        wrong = (offsets < low) | (offsets > high)
        if active is not None:
            wrong = wrong & active
        offset = int(offsets[wrong].reshape(-1)[0])
        raise OutOfBoundsError(
            f"{what} outside the array of shape {memory.shape}, {offset - memory.start} elements from its first one",
            location=describe(location),
            array=memory.name,
            index=memory.index_of(offset),
        )
    return memory, safe, active


@builds_step(O.LoadPointer)
def load_pointer(builder, op):
    pointer = builder.slot(op.pointer)
    mask = None if op.mask is None else builder.tensor_slot(op.mask)
    padding = None if op.padding_value is None else builder.tensor_slot(op.padding_value)
    shape, dtype, location = result_shape(op), result_dtype(op), op.loc
    out = builder.define(op.result_vars[0])
    zero = constant(0, (), dtype)

    def step(r):
        memory, offsets, active = addressed(location, r, pointer, mask, shape, "gather")
        if active is None:
            tile = memory.flat[offsets]
        else:
            fill = zero if padding is None else r[padding]
            if padding is None and r[0].garbage and not bool(active.all()):
                fill = r[0].undetermined(dtype, location, memory.name)
            tile = _gather(memory.flat, offsets, active, fill, True)
        r[out] = tile

    return builder.numbered(step, op.result_vars[0])


@builds_step(O.StorePointer)
def store_pointer(builder, op):
    pointer, value = builder.slot(op.pointer), builder.tensor_slot(op.value)
    mask = None if op.mask is None else builder.tensor_slot(op.mask)
    shape, location = tuple(op.pointer.get_type().tensor_shape()), op.loc

    def step(r):
        memory, offsets, active = addressed(location, r, pointer, mask, shape, "scatter")
        values = r[value].expand(shape)
        if active is not None:
            offsets, values = offsets[active], values[active]
        if r[0].sanitizer is not None:
            r[0].sanitizer.scatter(r[0], location, memory, offsets, values)
        memory.flat[offsets] = values

    return step
