"""What a kernel's results may be: about as far from fp64's as PyTorch's, which wrote to nothing else.

The reference's own error in the call's dtype is the measure. That of a few numbers may be small by luck: what rounding
to the dtype takes is allowed besides, and what an op's case says.
"""

from typing import Any

import torch

from fuzz.arguments import memory
from fuzz.arguments import memory_bytes
from fuzz.arguments import named_tensors
from fuzz.drawing import Case

RATIO = 4.0  # the kernel may be so many times as far from fp64 as PyTorch is; the ops' own tests are stricter
SMALLEST = 1e-18  # no difference below matters: squares of such numbers vanish in fp32
SMALLEST_FP16 = 4 * 2.0**-24  # four times its smallest number
EDGE = 0.98  # of the dtype's largest number, from which on rounding decides what is infinite

Results = dict[str, torch.Tensor]


class Failure(Exception):
    """The backends differ, or a call did what it must not."""


def compare(case: Case, got: Results, reference: Results, oracle: Results) -> None:
    """Fails where results of a call differ; the reference's dtype is that of the call, the oracle's fp64."""
    if got.keys() != reference.keys():
        raise Failure(f"results {sorted(got.keys() ^ reference.keys())} on one side only")
    got, reference, oracle = dict(got), dict(reference), dict(oracle)
    if case.settle is not None:
        case.settle(got, reference, oracle, case.args)
    largest = _largest(case.args)
    for name, expected in reference.items():
        exact = oracle.get(name)
        if exact is None or exact.shape != expected.shape:
            exact = expected
        # Gradients may cancel: their error is that of the numbers they come from, of which those that arrive at the
        # outputs are about 1.
        size = case.cancelled * min(max(largest, 1e-2), 1e4) if name.startswith("gradient") else 0.0
        _compare_one(name, case, got[name], expected, exact, size)


def _largest(args: dict[str, Any]) -> float:
    sizes = [t.double().nan_to_num(0, 0, 0).abs().max().item() for _, t in named_tensors(args) if _has_numbers(t)]
    return max(sizes, default=1.0)


def _has_numbers(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.numel() > 0


def _compare_one(
    name: str, case: Case, got: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor, size: float
) -> None:
    for what in ("shape", "dtype", "device"):
        a, b = getattr(got, what), getattr(reference, what)
        if a != b:
            raise Failure(f"{name}: {what} {a}, pytorch's is {b}")
    if case.exact or not got.dtype.is_floating_point:
        _fail_where(got != reference, f"{name}: differs", got, reference, oracle)
        return
    if not got.numel():
        return
    g, r, o = got.double(), reference.double(), oracle.double()
    finite = r.isfinite() & o.isfinite()
    near_infinite = o.abs() > EDGE * torch.finfo(got.dtype).max
    _fail_where(finite & ~g.isfinite() & ~near_infinite, f"{name}: not finite", g, r, o)
    agreed = ~r.isfinite() & ~o.isfinite() & _same(r, o)
    _fail_where(agreed & ~_same(g, r), f"{name}: should not be finite", g, r, o)
    finite &= g.isfinite()
    if finite.any():
        _compare_numbers(name, case, finite, got.dtype, (g, r, o), size)


def _compare_numbers(
    name: str, case: Case, finite: torch.Tensor, dtype: torch.dtype, results: tuple[torch.Tensor, ...], size: float
) -> None:
    """Compares the largest error, the root mean square and, where the case says so, each row's largest error."""
    g, r, o = results
    zero = torch.zeros_like(o)
    error, reference_error, exact = (torch.where(finite, x, zero) for x in ((g - o).abs(), (r - o).abs(), o.abs()))
    eps = max(torch.finfo(dtype).eps, case.eps) + 4 * torch.finfo(torch.float32).eps
    floor = case.floor.get(name, case.floor.get("gradients", 0.0) if name.startswith("gradient") else 0.0)
    relative = max(eps, floor)
    smallest = SMALLEST_FP16 if dtype == torch.float16 else SMALLEST
    absolute = size * eps + smallest

    limit = RATIO * reference_error.max() + relative * exact.max() + absolute
    text = f"{name}: error {error.max():.3e}, pytorch's {reference_error.max():.3e}, limit {limit:.3e}"
    _fail_where((error == error.max()) & (error > limit), text, g, r, o)

    limit = RATIO * _rms(reference_error) + relative * _rms(exact) + absolute
    if _rms(error) > limit:
        text = f"{name}: rms error {_rms(error):.3e}, pytorch's {_rms(reference_error):.3e}, limit {limit:.3e}"
        raise Failure(text)

    if case.rowwise and g.dim() > 1 and not name.startswith("gradient"):
        limit = RATIO * reference_error.amax(-1) + 2 * relative * exact.amax(-1) + smallest
        rows = error.amax(-1) > limit
        _fail_where(rows, f"{name}: rows are off", error.amax(-1), reference_error.amax(-1), exact.amax(-1))


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean().sqrt()


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.isnan() & b.isnan()) | (a == b)


def _fail_where(bad: torch.Tensor, text: str, got: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor) -> None:
    """Fails if any of ``bad`` is true, and says what stands there."""
    if not bad.any():
        return
    i = bad.flatten().nonzero()[0].item()
    g, r, o = (f"{x.flatten()[i].item():.6g}" for x in (got, reference, oracle))
    raise Failure(f"{text}; {int(bad.sum())} of {bad.numel()}, first at flat index {i}: {g} for {r} (fp64 {o})")


def memory_of(args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The bytes of the memory of every tensor, copied."""
    return {name: memory_bytes(t).clone() for name, t in named_tensors(args) if t.numel()}


def check_unchanged(case: Case, given: dict[str, Any], before: dict[str, torch.Tensor], failed: bool = False) -> None:
    """Fails if memory changed that the op was not to write to; a call that failed was to write to none."""
    tensors = dict(named_tensors(given))
    for name, was in before.items():
        now = memory_bytes(tensors[name])
        if failed or name not in case.mutated:
            if not torch.equal(now, was):
                raise Failure(f"{name} was changed")
            continue
        size = tensors[name].element_size()
        kept = torch.ones(now.numel() // size, dtype=torch.bool, device=now.device)
        for other in (given[k] for k in case.mutated if given[k] is not None):
            if memory(other) == memory(tensors[name]):
                torch.as_strided(kept, other.shape, other.stride(), other.storage_offset()).fill_(False)
        now, was = (x[: kept.numel() * size].view(-1, size)[kept] for x in (now, was))
        if not torch.equal(now, was):
            raise Failure(f"memory beside {name} was written to")


def check_memory(
    outputs: list[torch.Tensor], given: dict[str, Any], expected: list[torch.Tensor], reference: dict[str, Any]
) -> None:
    """Fails if an output shares memory with an argument where the reference's does not."""
    if len(outputs) != len(expected):
        raise Failure(f"{len(outputs)} outputs, pytorch gives {len(expected)}")
    for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
        if _shares(a, given) and not _shares(b, reference):
            raise Failure(f"output {i} shares memory with an argument")


def _shares(output: torch.Tensor, args: dict[str, Any]) -> bool:
    return memory(output) in {memory(t) for _, t in named_tensors(args)} - {0}
