"""The cos and sin of a rotary embedding for many steps at once, of which each step takes its rows."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch import nn

_PARAMETERS = ["self", "x", "position_ids"]


class RotaryRows:
    """Within it a rotary embedding does not compute what ``fill`` has computed: one launch instead of ten or so.

    That is where it is asked for ``positions`` themselves in ``dtype``. It stays as it is where its forward has other
    parameters than ``x`` and ``position_ids``, or rows depend on each other.

    Args:
        rotary: the module, [1, S] positions to cos and sin [1, S, D] each, or to complex numbers; None for none.
        positions: [1, 1] int64, the position of a step's token, which whoever makes steps counts up.
        slot: [1] int64, where in the cache it goes, counted up too.
        capacity: of the cache.
        dtype: of hidden states.
    """

    def __init__(
        self, rotary: nn.Module | None, positions: Tensor, slot: Tensor, capacity: int, dtype: torch.dtype
    ) -> None:
        known = rotary is not None and [*inspect.signature(type(rotary).forward).parameters] == _PARAMETERS
        self._rotary = rotary if known else None
        self._positions, self._slot, self._capacity = positions, slot, capacity
        self._like = torch.empty(0, dtype=dtype, device=positions.device)
        self._rows: Tensor | None = None  # [2, capacity, D]: cos and sin; [1, capacity, D] of complex numbers
        self._alone = False  # whether what is returned is these, and no tuple
        self._replaced: Any = None

    def fill(self, start: int, stop: int) -> None:
        """For the tokens ``start`` to ``stop`` of the cache, of which ``positions`` holds the first one's."""
        if self._rotary is None or stop <= start:
            return
        steps = self._positions + torch.arange(stop - start, device=self._positions.device)
        if self._rows is None:
            try:
                tried = self._tried(steps)
            except Exception:  # whatever a class of the caller's may want
                self._rotary = None
                return
            self._rows = tried.new_empty(len(tried), self._capacity, tried.shape[-1])
        self._rows[:, start:stop] = self._computed(steps)[:, 0]

    def _computed(self, steps: Tensor) -> Tensor:
        """[1 or 2, 1, S, D] for ``steps`` [1, S]."""
        rows = self._rotary.forward(self._like, steps)
        self._alone = isinstance(rows, Tensor)
        return rows[None] if self._alone else torch.stack(rows)

    def _tried(self, steps: Tensor) -> Tensor:
        """The rows, where the first and the last of ``steps`` [1, S] get what they get alone; else an error. It waits
        for the device."""
        ends = [self._computed(t) for t in (steps[:, :1], steps[:, -1:])]
        rows = self._computed(steps)
        parts = 1 if self._alone else 2
        if rows.shape[:-1] != (parts, *steps.shape) or not torch.equal(rows[:, :, [0, -1]], torch.cat(ends, 2)):
            raise ValueError("rows depend on each other")
        return rows

    def __enter__(self) -> None:
        if self._rows is None:
            return
        compute, rows = self._rotary.forward, self._rows
        self._replaced = vars(self._rotary).get("forward")

        def forward(x: Tensor, position_ids: Tensor) -> Tensor | tuple[Tensor, ...]:
            if position_ids is not self._positions or x.dtype is not self._like.dtype:
                return compute(x, position_ids)
            row = rows.index_select(1, self._slot)
            return row if self._alone else row.split(1)

        self._rotary.forward = forward

    def __exit__(self, *_) -> None:
        if self._rows is None:
            return
        if self._replaced is None:
            del self._rotary.forward
        else:
            self._rotary.forward = self._replaced
