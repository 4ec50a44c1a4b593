"""What kernels share whose blocks hold a part each of a row or a group, and pass on what the others need of it.

A part's state is 64 bits, never 0, in ``states``, int64, one for each part of all rows, zeros before. A block publishes
its own and looks for those of its row's other parts. If it has looked often in vain, because their blocks do not run,
it computes them itself: no block depends on which others run at the same time.

Launches on one stream share memory for TURNS times as many states, which they use in turn: each clears what it does not
use itself. Where they cannot share, a launch of its own clears the states.
"""

from typing import Any

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import span
from tilegym.ops.cutile.workspace import SPACING
from tilegym.ops.cutile.workspace import TURNS
from tilegym.ops.cutile.workspace import forget_states
from tilegym.ops.cutile.workspace import shared_states

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
    """Passes on the state of part ``number`` of all, if nobody has: of one part all blocks see the same."""
    ct.atomic_cas(states, number, 0, state, memory_order=ct.MemoryOrder.RELAXED)


def _places(first, parts, PARTS: Int):
    """Which states are those of a row's parts, of which the first one is number ``first``, and which of them exist."""
    index = ct.arange(PARTS, dtype=ct.int32)
    return ct.where(index < parts, first + index, -1), index < parts


def look(states, first, parts, PARTS: Int):
    """The states of a row's parts, [PARTS], of which the first one is number ``first``, and how many are missing."""
    place, there = _places(first, parts, PARTS)
    # Atomics that change nothing: loads could be moved out of loops, and threads could see different values.
    found = ct.atomic_add(states, place, ct.zeros((PARTS,), ct.int64), memory_order=ct.MemoryOrder.RELAXED)
    return found, ct.sum(ct.where(there & (found == 0), 1, 0))


def exchange(states, first, number, parts, state, patience, PARTS: Int):
    """Passes on the state of part ``number`` of a row, and looks as :func:`look` does, until none is missing, up to
    ``patience`` times more."""
    place, there = _places(first, parts, PARTS)
    # One atomic to publish and to look for the first time: a block waits for an atomic's result, used or not.
    own = place == first + number
    mine = ct.where(own, state, 0)
    seen = ct.atomic_cas(states, place, ct.zeros((PARTS,), ct.int64), mine, memory_order=ct.MemoryOrder.RELAXED)
    found = ct.where(own & (seen == 0), mine, seen)
    missing = ct.sum(ct.where(there & (found == 0), 1, 0))
    looked = 0
    while (missing > 0) & (looked < patience):
        found, missing = look(states, first, parts, PARTS)
        looked += 1
    return found, missing


def turn_of(states, count, TURNS: Int):
    """Whose turn it is of states for ``count`` parts each: see :func:`tilegym.ops.cutile.workspace.shared_states`."""
    return (states.shape[0] - TURNS * count) // SPACING if TURNS > 1 else 0


def clear_others(states, turn, number, count, TURNS: Int):
    """Clears the states of part ``number`` of all ``count`` where it is not their turn."""
    if TURNS > 1:
        turns = ct.arange(TURNS, dtype=ct.int32)
        place = ct.where(turns == turn, -1, turns * count + number)
        ct.scatter(states, place, ct.zeros((TURNS,), ct.int64))


def parts_of(n: int, tile_n: int) -> tuple[int, int]:
    """How many parts of ``tile_n`` columns a row of n has, and how many more, EXTRA, one of their blocks takes: what is
    left over and does not fill a 16th of a part. A block of its own would hold registers and wait for all the others.
    """
    left = n % tile_n
    if n > tile_n and 0 < left <= tile_n // 16:
        return n // tile_n, max(32, next_power_of_2(left))
    return ct.cdiv(n, tile_n), 0


def forward_tile(n: int, size: int) -> tuple[int, int, int]:
    """(columns of a part, warps, blocks a multiprocessor) for rows of n logits of ``size`` bytes that are read once and
    written once.

    The fastest on an H200, where blocks have 8 warps by four a multiprocessor in brackets: softmax in bf16 512x262208
    139 us (146), 4096x262208 1061 (1114), in fp32 2228 (2363); cross entropy with its gradient in bf16 512x262208 147
    (156), 8192x262208 2122 (2244), 8192x128256 1042 (1067). Narrower parts where more than a tenth of all columns would
    be idle: 8192x50304 436 us instead of 443, and 512x102400 softmax 57.6 instead of 58.7.
    """
    wide = {2: 16384, 4: 8192}[size]
    if size == 2 and 10 * wide * ct.cdiv(n, wide) > 11 * n and not parts_of(n, wide)[1]:
        return 8192, 4, 8
    return wide, 4, 5


def launch_parts(
    like: torch.Tensor,
    grid: tuple[int, int, int],
    kernel: ct.kernel,
    arrays: tuple[Any, ...],
    constants: tuple[Any, ...],
    after_one: bool = False,
    more: int = 0,
) -> None:
    """Launches ``kernel`` with a block for each part of a row along axis 1 of ``grid``, and for each row along axis 2.

    Its arguments: ``arrays``, states, patience, ``constants``, OVERLAP, TURNS.

    Args:
        after_one: the launch before it is one that began when all before had ended.
        more: parts without a block of their own, whose states there are, too.
    """
    parts, overlap = grid[1] * grid[2] + more, overlaps(like.get_device())
    given = shared_states(like, parts)
    if given is None:
        states = torch.empty(parts, dtype=torch.int64, device=like.device)
        launch(like, (ct.cdiv(parts, CLEARED),), clear_kernel, (states, CLEARED, overlap))
        launch(like, grid, kernel, (*arrays, states, PATIENCE, *constants, overlap, 1), overlap=overlap)
        return
    try:
        # Without overlap: what the last launch of these has left is cleared while its blocks run.
        args = (*arrays, *given, PATIENCE, *constants, overlap, TURNS)
        launch(like, grid, kernel, args, overlap=overlap and after_one)
    except BaseException:
        forget_states()
        raise
