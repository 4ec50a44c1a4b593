"""Arrays and views of them: slices, tiled views, lists of arrays, and what a kernel claims of sizes and addresses."""

from __future__ import annotations

import math

from . import _cutile
from ._cutile import ops as O
from .errors import DivisibilityError
from .errors import OutOfBoundsError
from .memory import Pointer
from .memory import View
from .program import builds_step
from .program import describe


def accessible(state, memory) -> tuple:
    """First and last offset that may be accessed: of the storage, or of the array itself when sanitized."""
    return (0, memory.flat.numel() - 1) if state.sanitizer is None else memory.extent()


@builds_step(O.MakeTensorView)
def make_tensor_view(builder, op):
    base = builder.slot(op.base_ptr)
    shape, strides = ([builder.slot(var) for var in values] for values in (op.shape, op.strides))
    out, location = builder.define(op.result_vars[0]), op.loc

    def step(r):
        pointer = r[base]
        memory, sizes = pointer.memory, tuple(r[slot] for slot in shape)
        steps = tuple(r[slot] for slot in strides)
        last = pointer.offset + sum((size - 1) * stride for size, stride in zip(sizes, steps, strict=True))
        low, high = accessible(r[0], memory)
        if 0 not in sizes and not low <= pointer.offset <= last <= high:
            raise OutOfBoundsError(
                f"array of shape {sizes} reaches outside its memory",
                location=describe(location),
                array=memory.name,
                index=memory.index_of(pointer.offset if pointer.offset < low else last),
            )
        r[out] = View(memory, pointer.offset, sizes, steps)

    _emit_at_top(builder, op, step, (base, *shape, *strides), out)


def _emit_at_top(builder, op, step, reads, out):
    """A step that may fail moves to the prologue only from code that every block runs."""
    if builder.depth == 1:
        builder.emit(step, op.loc, reads, (out,))
    else:
        builder.code.add(step, op.loc)


@builds_step(O.MakePartitionView, O.MakeStridedView)
def make_tiled_view(builder, op):
    array, order = builder.slot(op.array), tuple(op.result_vars[0].get_type().order)
    out = builder.define(op.result_vars[0])

    def step(r):
        r[out] = r[array].permuted(order)

    builder.emit(step, op.loc, (array,), (out,))


@builds_step(O.MakeGatherScatterView)
def make_gather_scatter_view(builder, op):
    builder.slots[op.result_vars[0].name] = builder.slot(op.array)


@builds_step(O.MakeListView)
def make_list_view(builder, op):
    builder.slots[op.result_vars[0].name] = builder.slot(op.base_ptr)


@builds_step(O.ForeignPointerCast)
def foreign_pointer_cast(builder, op):
    builder.slots[op.result_vars[0].name] = builder.slot(op.pointer)


@builds_step(O.GetArrayListItem)
def get_array_list_item(builder, op):
    arrays, index = builder.slot(op.x), builder.slot(op.index)
    out, location = [builder.define(var) for var in op.result_vars], op.loc

    def step(r):
        i = r[index]
        if not 0 <= i < len(r[arrays]):
            name = r[arrays][0].flat_values()[0].memory.name.rpartition("[")[0]
            raise OutOfBoundsError(
                f"list index {i} of {len(r[arrays])} arrays", location=describe(location), array=name, index=(i,)
            )
        for slot, value in zip(out, r[arrays][i].flat_values(), strict=True):
            r[slot] = value

    return step


@builds_step(O.NumTiles)
def num_tiles(builder, op):
    view, steps = builder.slot(op.view), tile_steps(op.view.get_type())
    out = [builder.define(var) for var in op.result_vars]

    def step(r):
        for slot, size, n in zip(out, r[view].shape, steps, strict=True):
            r[slot] = -(-size // n)

    builder.emit(step, op.loc, (view,), out)


def tile_steps(ty) -> tuple:
    """By how many elements each tile index moves."""
    return tuple(ty.traversal_steps if isinstance(ty, _cutile.StridedViewTy) else ty.tile_shape)


@builds_step(O.AssumeDivBy)
def assume_divisible(builder, op):
    source, divisor = builder.slot(op.x), op.divisor
    out, location = builder.define(op.result_vars[0]), op.loc

    def step(r):
        value = r[source]
        if isinstance(value, Pointer):
            memory = value.memory
            bits = memory.dtype.bitwidth
            claimed, array = value.offset * bits // 8 + memory.address, memory.name
        else:
            claimed, array = value, None
        wrong = claimed % divisor != 0
        if wrong if isinstance(wrong, bool) else bool(wrong.any()):
            what = "address" if array is not None else f"value {claimed}"
            raise DivisibilityError(f"{what} is not divisible by {divisor}", location=describe(location), array=array)
        r[out] = value

    _emit_at_top(builder, op, step, (source,), out)


@builds_step(O.AssumeBounded)
def assume_bounded(builder, op):
    source = builder.slot(op.x)
    out, location = builder.define(op.result_vars[0]), op.loc
    low = -math.inf if op.lower_bound is None else op.lower_bound
    high = math.inf if op.upper_bound is None else op.upper_bound

    def step(r):
        value = r[source]
        inside = (low <= value <= high) if isinstance(value, int) else bool(((value >= low) & (value <= high)).all())
        if not inside:
            raise DivisibilityError(f"value {value} is not within {low} to {high}", location=describe(location))
        r[out] = value

    _emit_at_top(builder, op, step, (source,), out)
