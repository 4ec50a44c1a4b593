"""Whether a provider computes the op: against an oracle in fp64, by the error that PyTorch itself makes.

A provider may be at most ``RATIO`` times as far from the oracle as PyTorch in the working dtype, plus half a unit in
the last place, which is what rounding the exact result costs and PyTorch may avoid by luck.
"""

from dataclasses import dataclass
from typing import Any

import torch

RATIO = 2.0
CHUNK = 1 << 27  # elements compared at a time: 1 GiB of fp64 beside the results
# A peer whose largest error alone is too large, by this factor at most, is timed all the same, and said to be inexact.
NEAR = 4.0
# PyTorch's own error is the measure of all others, so it must be one of rounding: a wrong oracle shows here.
MAX_BASELINE_ULPS = 16.0


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from the oracle, relative to the oracle's root mean square."""

    rms: float
    largest: float


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a provider's result.

    Raises:
        TypeError: it is neither a tensor nor several.
    """
    found = result if isinstance(result, list | tuple) else (result,)
    if not all(isinstance(part, torch.Tensor) for part in found):
        raise TypeError(f"it returned {', '.join(type(part).__name__ for part in found)}: return a tensor, or several")
    return tuple(found)


def _size(oracle: torch.Tensor) -> float:
    """The root mean square of an oracle's tensor; one where all of it is zero."""
    total = sum(part.square().sum() for part in oracle.reshape(-1).split(CHUNK))
    return float(total / oracle.numel()) ** 0.5 or 1.0


def deviation(got: torch.Tensor, oracle: torch.Tensor) -> Deviation:
    """The errors of ``got``; infinite where its shape is not the oracle's, or it is not finite where the oracle is."""
    if got.shape != oracle.shape:
        return Deviation(float("inf"), float("inf"))
    if oracle.numel() == 0:
        return Deviation(0.0, 0.0)
    squares, peaks = [], []
    for part, exact in zip(got.detach().reshape(-1).split(CHUNK), oracle.reshape(-1).split(CHUNK), strict=True):
        error = (part.to(oracle.dtype) - exact).abs_()
        peaks.append(error.max())
        squares.append(error.square_().sum())
    largest = float(torch.stack(peaks).max())
    if not largest < float("inf"):
        return Deviation(float("inf"), float("inf"))
    scale = _size(oracle)
    return Deviation(float(torch.stack(squares).sum() / oracle.numel()) ** 0.5 / scale, largest / scale)


@dataclass(frozen=True)
class Verdict:
    """The worst deviation of a provider's results; what is wrong with them, or None; whether only little is."""

    worst: Deviation
    wrong: str | None
    near: bool = False


@dataclass(frozen=True)
class Judge:
    """Judges providers at one shape: the oracle's tensors, and for each what is allowed."""

    oracle: tuple[torch.Tensor, ...]
    allowed: tuple[Deviation, ...]
    names: tuple[str, ...] = ()  # of the oracle's tensors, for what is wrong

    @classmethod
    def of(
        cls,
        oracle: tuple[torch.Tensor, ...],
        baseline: tuple[torch.Tensor, ...],
        dtype: torch.dtype,
        names: tuple[str, ...] = (),
    ) -> "Judge":
        """Allows what PyTorch's results in ``dtype`` allow.

        Raises:
            ValueError: the baseline itself is not within rounding of the oracle.
        """
        half_ulp = torch.finfo(dtype).eps / 2
        allowed = []
        for got, exact in zip(baseline, oracle, strict=True):
            own = deviation(got, exact)
            # Gradients of what attends to one key are zero: PyTorch's are what rounding leaves.
            if exact.any() and not own.rms <= MAX_BASELINE_ULPS * 2 * half_ulp:
                raise ValueError(f"PyTorch's own error against the fp64 oracle is {own.rms:.1e} of its size")
            peak = max(map(abs, map(float, exact.aminmax()))) / _size(exact) if exact.numel() else 0.0
            allowed.append(Deviation(RATIO * own.rms + half_ulp, RATIO * own.largest + half_ulp * peak))
        return cls(oracle, tuple(allowed), names)

    def check(self, results: tuple[torch.Tensor, ...], first: int | None = None) -> Verdict:
        """Whether a provider's results are as near to the oracle as they have to be: all, or the ``first`` alone."""
        oracle, allowed = self.oracle[:first], self.allowed[:first]
        if len(results) != len(oracle):
            infinite = Deviation(float("inf"), float("inf"))
            return Verdict(infinite, f"{len(results)} tensors instead of {len(oracle)}")
        worst, wrong, near = Deviation(0.0, 0.0), None, True
        for index, (got, exact, limit) in enumerate(zip(results, oracle, allowed, strict=True)):
            own = deviation(got, exact)
            worst = Deviation(max(worst.rms, own.rms), max(worst.largest, own.largest))
            near = near and own.rms <= limit.rms and own.largest <= NEAR * limit.largest
            # "not <=": a NaN is wrong too.
            if wrong is None and not (own.rms <= limit.rms and own.largest <= limit.largest):
                found = (
                    f"shape {list(got.shape)} instead of {list(exact.shape)}"
                    if got.shape != exact.shape
                    else f"error {own.rms:.1e} rms, {own.largest:.1e} largest, "
                    f"allowed {limit.rms:.1e}, {limit.largest:.1e}"
                )
                wrong = f"{self.names[index] if self.names else f'result {index}'}: {found}"
        return Verdict(worst, wrong, near)
