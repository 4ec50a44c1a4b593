"""Operations that move elements without computing: reshape, broadcast, permute, cat, extract, insert, bit casts."""

from __future__ import annotations

import torch

from . import _cutile
from ._cutile import arithmetic_ops as A
from ._cutile import ops as O
from .dtypes import carrier
from .dtypes import wrap
from .errors import OutOfBoundsError
from .memory import Pointer
from .program import builds_step
from .program import describe
from .program import dtype_of
from .program import evaluates
from .program import evaluates_scalars
from .program import result_dtype
from .program import result_shape


def _pointer_offsets(function):
    """Applies a shape function to the offsets of a tile of pointers."""

    def compute(pointer):
        offset = pointer.offset
        offset = torch.tensor(offset) if isinstance(offset, int) else offset
        return Pointer(pointer.memory, function(offset))

    return compute


@builds_step(A.TileReshape, A.TileBroadcast)
def reshape_or_broadcast(builder, op):
    shape = result_shape(op)
    operand_shape = tuple(op.x.get_type().tensor_shape())
    expand = isinstance(op, A.TileBroadcast)
    if builder.lifted and operand_shape == () and shape == ():
        builder.slots[op.result_vars[0].name] = builder.slot(op.x)
        return
    if _cutile.is_pointer_dtype(dtype_of(op.x)):
        source = builder.slot(op.x)
        function = _pointer_offsets(lambda offset: offset.expand(shape) if expand else offset.reshape(shape))
    else:
        source = builder.tensor_slot(op.x)
        function = (lambda x: x.expand(shape)) if expand else (lambda x: x.reshape(shape))
    out = builder.define(op.result_vars[0])

    def step(r):
        r[out] = function(r[source])

    builder.emit(builder.numbered(step, op.result_vars[0]), op.loc, (source,), (out,))


@evaluates(O.TilePermute)
def permute(op):
    axes = op.axes
    return lambda x: x.permute(axes)


@evaluates(O.TileCat)
def cat(op):
    axis = op.axis
    return lambda x, y: torch.cat((x, y), axis)


def _corner(location, index, whole, part) -> tuple:
    """The slices of tile ``index`` of the grid of ``part``-shaped tiles of a ``whole``-shaped one."""
    if any(not 0 <= i < size // n for i, size, n in zip(index, whole, part, strict=True)):
        counts = tuple(size // n for size, n in zip(whole, part, strict=True))
        raise OutOfBoundsError(
            f"tile index {tuple(index)} is outside the grid of {counts} sub-tiles",
            location=describe(location),
            index=tuple(index),
        )
    return tuple(slice(i * n, i * n + n) for i, n in zip(index, part, strict=True))


@builds_step(O.TileExtract)
def extract(builder, op):
    x, index = builder.slot(op.x), [builder.slot(var) for var in op.index]
    whole, part = tuple(op.x.get_type().shape), tuple(op.shape)
    out, location = builder.define(op.result_vars[0]), op.loc

    def step(r):
        r[out] = r[x][_corner(location, [r[slot] for slot in index], whole, part)]

    return step


@builds_step(O.TileInsert)
def insert(builder, op):
    x, value, index = builder.slot(op.x), builder.slot(op.value), [builder.slot(var) for var in op.index]
    whole, part = tuple(op.x.get_type().shape), tuple(op.value.get_type().shape)
    out, location = builder.define(op.result_vars[0]), op.loc

    def step(r):
        result = r[x].clone(memory_format=torch.contiguous_format)
        result[_corner(location, [r[slot] for slot in index], whole, part)] = r[value]
        r[out] = result

    return step


def _pairs_to_bytes(codes):
    low, high = codes.reshape(-1, 2).unbind(1)
    return low | (high << 4)


def _bytes_to_pairs(x):
    return torch.stack((x & 15, x >> 4), -1).reshape(-1)


@evaluates(O.TileBitCast)
def bitcast(op):
    target = carrier(result_dtype(op))
    return lambda x: x.contiguous().view(target)


@evaluates_scalars(O.TileBitCast)
def bitcast_number(op):
    source, target = dtype_of(op.x), result_dtype(op)
    if _cutile.is_boolean(source) or _cutile.is_boolean(target):
        return None
    return lambda a: wrap(a, target)


@evaluates(O.TilePack)
def pack(op):
    if dtype_of(op.x).bitwidth == 4:
        return _pairs_to_bytes
    return lambda x: x.contiguous().view(torch.uint8)


@evaluates(O.TileUnpack)
def unpack(op):
    dtype = result_dtype(op)
    if dtype.bitwidth == 4:
        return _bytes_to_pairs
    target = carrier(dtype)
    return lambda x: x.contiguous().view(target)
