"""Reductions and scans, with the combining function given as IR.

The function is evaluated on whole slices at once, in log2(n) rounds. A reduction halves its operands along the axis
until one slice is left: first within runs of four, which a GPU's thread holds, then across the runs. A scan doubles
the span of each prefix. cuTile leaves the order open: a function for which it matters may differ on a GPU.
"""

from __future__ import annotations

import torch

from ._cutile import arithmetic_ops as A
from ._cutile import control_flow_ops as F
from ._cutile import ops as O
from .program import builds_step
from .program import dtype_of

_RUN = 4


def _combiner(builder, op):
    """A function (registers, left values, right values) -> combined values, from the body of a reduction or scan."""
    outer_lifted, builder.lifted = builder.lifted, True
    slots = [builder.define(param) for param in op.body.params]
    left_slots, right_slots = slots[0::2], slots[1::2]
    branches, builder.branches = builder.branches, []
    code = builder.block(op.body)
    results, builder.branches, builder.lifted = builder.lifted_results, branches, outer_lifted

    def combine(r, left, right):
        for slot, value in zip(left_slots, left, strict=True):
            r[slot] = value
        for slot, value in zip(right_slots, right, strict=True):
            r[slot] = value
        code.run(r)
        return tuple(r[slot].expand(value.shape) for slot, value in zip(results, left, strict=True))

    return combine


def _simple_function(op):
    """The name of the binary function when the body is just that, on floats and without flush or rounding."""
    steps = list(op.body)
    if len(op.xs) != 1 or len(steps) != 2 or not isinstance(steps[1], F.EndBranch):
        return None
    first = steps[0]
    if not isinstance(first, A.RawBinaryArithmeticOperation) or first.rounding_mode or first.flush_to_zero:
        return None
    names = {var.name for var in op.body.params}
    same = {first.lhs.name, first.rhs.name} == names and steps[1].outputs[0].name == first.result_vars[0].name
    return (first.fn, first.propagate_nan) if same else None


def _fast_reduction(op):
    """A torch reduction that gives what the halving tree gives, up to the order of float32 sums."""
    simple, dtype = _simple_function(op), dtype_of(op.xs[0])
    axis = op.axis
    if simple is None or dtype.name not in ("float32", "float64"):
        return None
    name, propagate_nan = simple
    if name == "add":
        return lambda x: x.sum(axis)
    if name in ("max", "min"):
        reduce_ = torch.amax if name == "max" else torch.amin

        def compute(x):
            result = reduce_(x, axis)
            if not propagate_nan and bool(result.isnan().any()):
                return None  # torch's lets NaN through, the kernel's ignores it
            return result

        return compute
    return None


@builds_step(O.TileReduce)
def reduce(builder, op):
    operands = [builder.tensor_slot(var) for var in op.xs]
    axis, combine, fast = op.axis, _combiner(builder, op), _fast_reduction(op)
    out = [builder.define(var) for var in op.result_vars]

    def halve(r, values, axis):
        size = values[0].shape[axis]
        while size > 1:
            size //= 2
            left = [value.narrow(axis, 0, size) for value in values]
            right = [value.narrow(axis, size, size) for value in values]
            values = combine(r, left, right)
        return [value.squeeze(axis) for value in values]

    def step(r):
        values = [r[slot] for slot in operands]
        if fast is not None:
            result = fast(values[0])
            if result is not None:
                r[out[0]] = result
                return
        size = values[0].shape[axis]
        if size > _RUN:
            values = halve(r, [value.unflatten(axis, (size // _RUN, _RUN)) for value in values], axis + 1)
        for slot, value in zip(out, halve(r, values, axis), strict=True):
            r[slot] = value

    for var in op.result_vars:
        step = builder.numbered(step, var)
    return step


@builds_step(O.TileScan)
def scan(builder, op):
    operands = [builder.tensor_slot(var) for var in op.xs]
    axis, reverse, combine = op.axis, op.reverse, _combiner(builder, op)
    out = [builder.define(var) for var in op.result_vars]

    def step(r):
        values = [r[slot] for slot in operands]
        size = values[0].shape[axis]
        span = 1
        while span < size:
            low = [value.narrow(axis, 0, size - span) for value in values]
            high = [value.narrow(axis, span, size - span) for value in values]
            # Position i takes in the span before it (after it, in reverse); earlier elements come first.
            combined = combine(r, high, low) if reverse else combine(r, low, high)
            if reverse:
                ends = [value.narrow(axis, size - span, span) for value in values]
                values = [torch.cat(pair, axis) for pair in zip(combined, ends, strict=True)]
            else:
                ends = [value.narrow(axis, 0, span) for value in values]
                values = [torch.cat(pair, axis) for pair in zip(ends, combined, strict=True)]
            span *= 2
        for slot, value in zip(out, values, strict=True):
            r[slot] = value

    return step
