"""What the kernels of cross entropy share: powers of logits, relative to a maximum."""

import math

import cuda.tile as ct

from tilegym.ops.cutile.tiling import Float

LOG2E = math.log2(math.e)


def capped(x, SOFTCAP: Float):
    return x if SOFTCAP == 0.0 else SOFTCAP * ct.tanh(x / SOFTCAP)


def unit_of(dtype):
    """What a logit is multiplied with before its power is taken: that of 2 is the faster one, and exact enough for
    results that 16 bits determine."""
    return 1.0 if dtype == ct.float32 else LOG2E


def power_of(x, dtype):
    return ct.exp(x) if dtype == ct.float32 else ct.exp2(x, flush_to_zero=True)


def base_of(top):
    # While all seen so far is -inf, differences to it would be NaN.
    return ct.where(top == -math.inf, 0.0, top)


def above(logit, base, unit):
    """``logit * unit - base`` in one rounding, as in the sum of powers; and zero for the maximum itself."""
    return ct.where(logit * unit >= base, 0.0, logit * unit - base)


def state_of(part, dtype):
    """The maximum of a part of a row, in units, and the sum of its powers relative to it; x has this dtype."""
    unit = unit_of(dtype)
    # In the dtype of x: two values of 16 bits are compared at once.
    largest = ct.max(part).astype(ct.float32)
    top = largest * unit
    total = ct.sum(power_of(part.astype(ct.float32) * unit - base_of(top), dtype))
    if dtype != ct.float32:
        # The power of the largest itself is 1, not that of what the product's rounding leaves: a sure prediction's
        # loss would be that.
        total = ct.where(top == -math.inf, total, (total - power_of(largest * unit - top, dtype)) + 1.0)
    return top, total
