"""Comparison of two results of one kernel, by bits or within units in the last place."""

import torch

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHOWN = 4


def raw(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x.view(torch.uint8 if x.dtype == torch.bool else _RAW[x.element_size()])


def is_float(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).to(torch.float64) if x.element_size() == 1 else x.to(torch.float64)


def wrong(got: torch.Tensor, want: torch.Tensor, ulps: float) -> torch.Tensor:
    """Where ``got`` is neither ``want``'s bits, nor as NaN as it, nor within ``ulps`` of it."""
    differs = raw(got) != raw(want)
    if not is_float(got):
        return differs
    left, right = widened(got), widened(want)
    differs &= ~(left.isnan() & right.isnan())
    if ulps:
        info = torch.finfo(got.dtype)
        _, exponent = torch.frexp(right)
        unit = torch.pow(2.0, (exponent - 1).to(torch.float64)) * info.eps
        unit = unit.clamp(min=info.smallest_normal * info.eps)
        differs &= ~((left - right).abs() <= ulps * unit)
        differs &= ~(left == right)
    return differs


def describe_difference(name: str, got: torch.Tensor, want: torch.Tensor, ulps: float) -> list[str]:
    """A line that says how ``got`` differs from ``want``, or nothing."""
    differs = wrong(got, want, ulps)
    if not bool(differs.any()):
        return []
    examples = []
    for index in differs.nonzero()[:SHOWN].tolist():
        one, other = got[tuple(index)], want[tuple(index)]
        if is_float(got):
            one, other = widened(one), widened(other)
        examples.append(f"{index}: {one.item()!r} instead of {other.item()!r}")
    count = int(differs.sum())
    allowed = f"{ulps} ulps allowed" if ulps else "exact"
    return [f"{name}: {count} of {differs.numel()} differ ({allowed}); {'; '.join(examples)}"]
