"""The cos and sin of a rotary embedding for many steps at once, of which each step takes its rows."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch import nn

_PARAMETERS = ["self", "x", "position_ids"]
_BY_TYPE = [*_PARAMETERS, "layer_type"]  # as Gemma 3's


def rotary_of(rotary: nn.Module, x: Tensor, positions: Tensor, kind: tuple[str, ...] = ()) -> Any:
    """What a rotary embedding gives for ``positions`` [1, S], of which some take three alike only."""
    try:
        return rotary.forward(x, positions, *kind)
    except IndexError:  # as Qwen3.5's in transformers 5.17
        return rotary.forward(x, positions.expand(3, *positions.shape), *kind)


class RotaryRows:
    """Within it a rotary embedding does not compute what ``fill`` has computed: one launch instead of ten or so.

    That is where it is asked for ``positions`` themselves in ``dtype``, or for three of them alike, as Qwen3.5 asks. It
    stays as it is where its forward has other parameters than ``x``, ``position_ids`` and maybe ``layer_type``, or rows
    depend on each other.

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
        known = [] if rotary is None else [*inspect.signature(type(rotary).forward).parameters]
        self._rotary = rotary if known in (_PARAMETERS, _BY_TYPE) else None
        # What it is called with besides: the types of the layers, or nothing.
        self._types = [(kind,) for kind in getattr(rotary, "layer_types", ())] if known == _BY_TYPE else [()]
        self._positions, self._slot, self._capacity = positions, slot, capacity
        self._like = torch.empty(0, dtype=dtype, device=positions.device)
        # By type [2, capacity, D], cos and sin, or [1, capacity, D] of complex numbers.
        self._rows: dict[tuple[str, ...], Tensor] = {}
        self._alone = False  # whether what is returned is these, and no tuple
        self._three = False  # whether three positions alike give what one gives
        self._replaced: Any = None

    def fill(self, start: int, stop: int) -> None:
        """For the tokens ``start`` to ``stop`` of the cache, of which ``positions`` holds the first one's."""
        if self._rotary is None or stop <= start:
            return
        steps = self._positions + torch.arange(stop - start, device=self._positions.device)
        if not self._rows:
            try:
                tried = {kind: self._tried(steps, kind) for kind in self._types}
            except Exception:  # whatever a class of the caller's may want
                self._rotary = None
                return
            self._three = all(self._of_three(steps[:, :1], kind) for kind in self._types)
            self._rows = {k: rows.new_empty(len(rows), self._capacity, rows.shape[-1]) for k, rows in tried.items()}
        for kind, rows in self._rows.items():
            rows[:, start:stop] = self._computed(steps, kind)[:, 0]

    def _computed(self, steps: Tensor, kind: tuple[str, ...]) -> Tensor:
        """[1 or 2, 1, S, D] for ``steps`` [1, S]."""
        rows = rotary_of(self._rotary, self._like, steps, kind)
        self._alone = isinstance(rows, Tensor)
        return (rows[None] if self._alone else torch.stack(rows)).to(self._like.device)  # it may be elsewhere

    def _tried(self, steps: Tensor, kind: tuple[str, ...]) -> Tensor:
        """The rows, where the first and the last of ``steps`` [1, S] get what they get alone; else an error. It waits
        for the device."""
        ends = [self._computed(t, kind) for t in (steps[:, :1], steps[:, -1:])]
        rows = self._computed(steps, kind)
        parts = 1 if self._alone else 2
        if rows.shape[:-1] != (parts, *steps.shape) or not torch.equal(rows[:, :, [0, -1]], torch.cat(ends, 2)):
            raise ValueError("rows depend on each other")
        return rows

    def _of_three(self, step: Tensor, kind: tuple[str, ...]) -> bool:
        try:
            return torch.equal(self._computed(step.expand(3, 1, 1), kind), self._computed(step, kind))
        except Exception:  # most take no such positions
            return False

    def _are_positions(self, positions: Tensor) -> bool:
        own = self._positions
        if positions is own or not self._three:
            return positions is own
        alike = positions.shape == (3, *own.shape) and positions.stride(0) == 0
        return alike and positions.dtype is own.dtype and positions.data_ptr() == own.data_ptr()

    def __enter__(self) -> None:
        if not self._rows:
            return
        compute, rows = self._rotary.forward, self._rows
        self._replaced = vars(self._rotary).get("forward")

        def forward(x: Tensor, position_ids: Tensor, *kind: str, **named: str) -> Tensor | tuple[Tensor, ...]:
            kept = rows.get((*kind, *named.values()))
            if kept is None or not self._are_positions(position_ids) or x.dtype is not self._like.dtype:
                return compute(x, position_ids, *kind, **named)
            row = kept.index_select(1, self._slot)
            return row if self._alone else row.split(1)

        self._rotary.forward = forward

    def __exit__(self, *_) -> None:
        if not self._rows:
            return
        if self._replaced is None:
            del self._rotary.forward
        else:
            self._rotary.forward = self._replaced
