"""Blocks of a grid, loops, branches, print and assert."""

from __future__ import annotations

import itertools
import re
import sys

from . import _cutile
from ._cutile import control_flow_ops as F
from ._cutile import core_ops as C
from ._cutile import ops as O
from .dtypes import as_numpy
from .dtypes import is_whole
from .errors import KernelAssertionError
from .program import builds_step
from .program import describe
from .program import dtype_of
from .program import result_type
from .values import constant
from .values import decode
from .values import padding_number

# What a step returns to end the blocks around it.
CONTINUE, BREAK, RETURN, END = "continue", "break", "return", "end"


class BlockState:
    """What a running block knows beside its registers.

    ``garbage`` picks what undetermined padding holds: 0 for zero, from 1 on for kinds of poison. A ``silent`` block
    prints nothing.
    """

    __slots__ = ("index", "grid", "sanitizer", "garbage", "silent", "read_padding")

    def __init__(self, index, grid, sanitizer=None, garbage=0, silent=False):
        self.index = index
        self.grid = grid
        self.sanitizer = sanitizer
        self.garbage = garbage
        self.silent = silent
        self.read_padding = []

    def undetermined(self, dtype, location, array: str):
        """The poison for padding, noting where it was read."""
        self.read_padding.append((location, array))
        return constant(padding_number(_UNDETERMINED, dtype, self.garbage), (), dtype)


_UNDETERMINED = _cutile.ct.PaddingMode.UNDETERMINED


@builds_step(O.TileBid)
def tile_bid(builder, op):
    axis, out = op.axis, builder.define(op.result_vars[0])

    def step(r):
        r[out] = r[0].index[axis]

    return step


@builds_step(O.TileNumBlocks)
def tile_num_blocks(builder, op):
    axis, out = op.axis, builder.define(op.result_vars[0])

    def step(r):
        r[out] = r[0].grid[axis]

    builder.emit(step, op.loc, (), (out,))


@builds_step(O.MakeToken, O.JoinTokens, O.GridDependencyControlWait, O.GridDependencyControlLaunchDependents)
def nothing(builder, op):
    """Ordering that the program's own order gives."""


@builds_step(C.Assign)
def assign(builder, op):
    if builder.has_slot(op.value):
        builder.slots[op.result_vars[0].name] = builder.slot(op.value)


@builds_step(F.MakeDummy)
def make_dummy(builder, op):
    """The value of a variable on a path where the kernel does not set it."""
    ty = result_type(op)
    if isinstance(ty, _cutile.TokenTy):
        return
    out = builder.define(op.result_vars[0])
    if out in builder.numbers:
        value = 0
    elif isinstance(ty, _cutile.TileTy) and not _cutile.is_pointer_dtype(ty.dtype):
        value = constant(0, tuple(ty.shape), ty.dtype)
    else:
        value = None

    def step(r):
        r[out] = value

    builder.emit(step, op.loc, (), (out,))


# Branches and loops


def _move(sources, targets):
    """A function that copies registers, reading all before writing any."""
    if not sources:
        return lambda r: None
    if len(sources) == 1:
        (source,), (target,) = sources, targets

        def move(r):
            r[target] = r[source]

        return move

    def move(r):
        values = [r[slot] for slot in sources]
        for slot, value in zip(targets, values, strict=True):
            r[slot] = value

    return move


def _slots(builder, variables) -> list:
    return [builder.slot(var) for var in variables if builder.has_slot(var)]


def _definitions(builder, variables) -> list:
    return [builder.define(var) for var in variables if builder.has_slot(var)]


@builds_step(F.IfElse)
def if_else(builder, op):
    condition = builder.slot(op.cond)
    results = _definitions(builder, op.result_vars)
    builder.branches.append(results)
    then, otherwise = builder.block(op.then_block), builder.block(op.else_block)
    builder.branches.pop()

    def step(r):
        jump = (then if r[condition] else otherwise).run(r)
        return None if jump is END else jump

    return step


@builds_step(F.EndBranch)
def end_branch(builder, op):
    if builder.branches:
        move = _move(_slots(builder, op.outputs), builder.branches[-1])
    else:  # the end of a reduction's body
        builder.lifted_results = [builder.tensor_slot(var) for var in op.outputs]
        return None

    def step(r):
        move(r)
        return END

    return step


@builds_step(F.Loop)
def loop(builder, op):
    bounds = [builder.slot(var) for var in (op.start, op.stop, op.step)] if op.is_for_loop else None
    initial = _slots(builder, op.initial_values)
    induction = builder.define(op.induction_var) if op.is_for_loop else None
    carried = _definitions(builder, op.body_vars)
    results = _definitions(builder, op.result_vars)
    branches, builder.branches = builder.branches, []
    builder.loops.append((carried, results))
    body = builder.block(op.body)
    builder.loops.pop()
    builder.branches = branches
    enter, leave = _move(initial, carried), _move(carried, results)

    def run_for(r):
        start, stop, stride = (r[slot] for slot in bounds)
        enter(r)
        for position in range(start, stop, stride) if stride > 0 else ():
            r[induction] = position
            body.run(r)  # ends in continue: break and return inside a for loop have become flags in the front end
        leave(r)

    def run_while(r):
        enter(r)
        for _ in itertools.count():
            jump = body.run(r)
            if jump is BREAK:
                return None
            if jump is RETURN:
                return RETURN

    return run_for if op.is_for_loop else run_while


@builds_step(F.Continue)
def continue_(builder, op):
    carried, _ = builder.loops[-1]
    move = _move(_slots(builder, op.values), carried)

    def step(r):
        move(r)
        return CONTINUE

    return step


@builds_step(F.Break)
def break_(builder, op):
    _, results = builder.loops[-1]
    move = _move(_slots(builder, op.values), results)

    def step(r):
        move(r)
        return BREAK

    return step


@builds_step(F.Return)
def return_(builder, op):
    return lambda r: RETURN


# Print and assert


@builds_step(O.TileAssert)
def tile_assert(builder, op):
    condition, message = builder.tensor_slot(op.cond), op.message

    def step(r):
        if not bool(r[condition].all()):
            raise KernelAssertionError(message or "assertion failed", location=describe(op.loc))

    return step


_CONVERSION = re.compile(r"%(?:%|([0 #+-]*[0-9]*(?:\.[0-9]+)?)(hh|h|ll|l)?([diuoxXeEfFgGaA]))")


@builds_step(C.TilePrintf)
def printf(builder, op):
    arguments = [(builder.tensor_slot(var), dtype_of(var)) for var in op.args]

    def step(r):
        if r[0].silent:
            return
        remaining = iter(arguments)

        def replace(match):
            if match.group(0) == "%%":
                return "%"
            slot, dtype = next(remaining)
            return _format_values(_python_values(r[slot], dtype), match.group(1), match.group(3), dtype)

        sys.stdout.write(_CONVERSION.sub(replace, op.format))
        sys.stdout.flush()

    return step


def _python_values(tile, dtype):
    """A tile as a number or nested lists of numbers."""
    if is_whole(dtype):
        values = as_numpy(tile, dtype)
        return (values.astype(int) if _cutile.is_boolean(dtype) else values).tolist()
    return decode(tile, dtype).tolist()


def _format_values(value, flags: str, kind: str, dtype) -> str:
    """C's printf of one number, applied to every element of a tile."""
    if isinstance(value, list):
        return "[" + ", ".join(_format_values(item, flags, kind, dtype) for item in value) + "]"
    if kind in "aA":
        return float(value).hex()
    if kind in "uoxX" and value < 0:
        value &= (1 << dtype.bitwidth) - 1
    if kind == "u":
        kind = "d"
    return ("%" + flags + kind) % value
