"""Memory through which the blocks of one launch pass parts of a result to the last of them, which puts them together.

They count themselves: a block stores its part, then adds one to a counter by ``ct.atomic_add``, whose order and scope
(acquire and release, of the device) show what the block has stored to whoever counts later. The block that finds all
others counted reads their parts, and sets the counter back to zero for the next launch.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilegym.backend import recording

# As in launch.py: torch.cuda's own functions for these cost as much as a launch.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
COUNTERS = 4096
MAX_PARTS = 2**22  # numbers, 16 MB, that a stream keeps
MAX_SHAPES = 1024
# Of these a launch uses one and clears the others. Two would do if every launch that memory was given for took place,
# in the order in which it was given: an exception may come between, and two threads may share a stream.
TURNS = 4
SPACING = 16  # kernels are compiled anew for sizes that are no multiples of it
MAX_STATES = 2**15  # of one turn, 1 MB for all; launches of more take so long that to clear them does not show
MAX_NUMBERS = 32


class _Workspace:
    """What the launches on one stream, which run one after the other, share."""

    def __init__(self, index: int, numbers: int) -> None:
        with _disable_current_modes():  # such as those that only follow shapes
            self.numbers = torch.empty(numbers, dtype=torch.float32, device=_device(index))
            self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=_device(index))
        self.of_shape: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}


_workspaces: dict[tuple[int, int], _Workspace] = {}


def _device(index: int) -> torch.device:
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def workspace(like: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """For one launch on the current stream of the device of ``like``: parts of ``shape`` in fp32, with any content, and
    COUNTERS zeros in int32, which the launch leaves zeros.

    None while a CUDA graph is captured, which may be replayed on any stream, and if it is too much to keep.
    """
    index = like.get_device()
    if torch.Size(shape).numel() > MAX_PARTS or (index >= 0 and recording.ask(functools.partial(_captures, index))):
        return None
    return recording.lent(functools.partial(_of_current_stream, index, shape))


def _captures(index: int) -> bool:
    # Nothing is captured on the default stream, which takes a fifth of the time to find out.
    return _raw_stream(index) != 0 and _capturing()


def _of_current_stream(index: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    stream = index, -1 if index < 0 else _raw_stream(index)
    kept = _workspaces.get(stream)
    if kept is not None and (found := kept.of_shape.get(shape)) is not None:
        return found
    numbers = torch.Size(shape).numel()
    if kept is None or kept.numbers.numel() < numbers:
        kept = _Workspace(index, max(numbers, 0 if kept is None else 2 * kept.numbers.numel()))
        if index >= 0:  # the interpreter's launches of several threads run at the same time
            _workspaces[stream] = kept
    if len(kept.of_shape) >= MAX_SHAPES:
        kept.of_shape.clear()
    with _disable_current_modes():
        found = kept.of_shape[shape] = kept.numbers[:numbers].view(shape), kept.counters
    return found


_turns: dict[tuple[int, int], dict[int, Callable[[], tuple[torch.Tensor]]]] = {}


def shared_states(like: torch.Tensor, number: int) -> tuple[torch.Tensor] | None:
    """For one launch on the current stream of the device of ``like``, which is not to overlap with the one before:
    int64, for each turn ``number`` of them. Whose turn it is shows in how many more there are, SPACING for each turn
    before and less than SPACING besides: a number that the launch would have to load it would have to wait for.

    With turn i, those from i * number are zeros; the launch may leave anything there, and leaves zeros in those of all
    other turns. None where launches cannot share them: as for :func:`workspace`, and in the interpreter.
    """
    index = like.get_device()
    if index < 0 or number > MAX_STATES or recording.ask(functools.partial(_captures, index)):
        return None
    return recording.lent(functools.partial(_next_turn, index, number), varies=True)


def _next_turn(index: int, number: int) -> tuple[torch.Tensor]:
    if recording.is_replaced():  # whoever is given this may not launch anything: that is no turn
        return _turns_of(index, number)[0]
    stream = index, -1 if index < 0 else _raw_stream(index)
    of_stream = _turns.setdefault(stream, {})
    found = of_stream.get(number)
    if found is None:
        if len(of_stream) >= MAX_NUMBERS:
            of_stream.clear()
        given = itertools.cycle(_turns_of(index, number))
        found = of_stream[number] = given.__next__  # no two threads get the same one
    return found()


def _turns_of(index: int, number: int) -> list[tuple[torch.Tensor]]:
    """New memory, as it is given in each turn."""
    with _disable_current_modes():
        least = -(-TURNS * number // SPACING) * SPACING
        memory = torch.zeros(least + TURNS * SPACING, dtype=torch.int64, device=_device(index))
        return [(memory[: least + turn * SPACING],) for turn in range(TURNS)]


def forget_states() -> None:
    """Of launches of which it is not known whether they took place."""
    _turns.clear()
