"""What kernels share whose blocks hold a part each of a row or a group, and pass on what the others need of it.

A part's state is 64 bits, never 0, in ``states``, int64, one for each part of all rows, zeros before. A block publishes
its own and looks for those of its row's other parts. If it has looked often in vain, because their blocks do not run,
it computes them itself: no block depends on which others run at the same time.
"""

import cuda.tile as ct

from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import span

PATIENCE = 1000  # looks; about a millisecond
CLEARED = 1024  # states that a block clears


@ct.kernel
def clear_kernel(states, TILE: Int, OVERLAP: Bool):
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    ct.scatter(states, span(ct.bid(0), TILE), ct.zeros((TILE,), ct.int64))


def bits(value):
    """An fp32 number's bits as the low half of a state."""
    return ct.bitcast(value, ct.int32).astype(ct.int64) & 0xFFFFFFFF


def low(state):
    """The fp32 number that a state's low half holds."""
    return ct.bitcast(state.astype(ct.int32), ct.float32)


def high(state):
    """The fp32 number that a state's high half holds."""
    return low(state >> 32)


def publish(states, number, state):
    """Passes on the state of part ``number`` of all."""
    ct.atomic_xchg(states, number, state, memory_order=ct.MemoryOrder.RELAXED)


def look(states, first, parts, PARTS: Int):
    """The states of a row's parts, [PARTS], of which the first one is number ``first``, and how many are missing."""
    index = ct.arange(PARTS, dtype=ct.int32)
    place, zeros = ct.where(index < parts, first + index, -1), ct.zeros((PARTS,), ct.int64)
    # Atomics that change nothing: loads could be moved out of loops, and threads could see different values.
    found = ct.atomic_add(states, place, zeros, memory_order=ct.MemoryOrder.RELAXED)
    return found, ct.sum(ct.where((index < parts) & (found == 0), 1, 0))


def wait(states, first, parts, patience, PARTS: Int):
    """As :func:`look`, again until none is missing, ``patience`` times at most."""
    found, missing = look(states, first, parts, PARTS)
    looked = 0
    while (missing > 0) & (looked < patience):
        found, missing = look(states, first, parts, PARTS)
        looked += 1
    return found, missing
