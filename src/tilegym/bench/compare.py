"""Is a patched model as right as the unpatched one?

Greedy tokens alone cannot tell: where two tokens are almost equally likely, rounding decides, and a kernel that is more
exact than PyTorch decides differently too. So both models are led along the unpatched model's tokens, step by step
through their caches, and their logits are compared with an oracle: the unpatched model in the next wider precision.
"""

import copy
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import torch

from tilegym.bench import generate
from tilegym.bench.models import free_memory
from tilegym.bench.prompts import Batch

CRITERION = (
    "the patched logits may be at most twice as far from the oracle as the unpatched ones, give or take one rounding "
    "of the largest logit, both in the worst case and in the mean square; tokens may differ only where the oracle's "
    "logits of the two are closer than these errors"
)
CRITERION_WITHOUT_ORACLE = (
    "without memory for an oracle, the patched logits may differ from the unpatched ones by at most three times as "
    "much as the unpatched model's cached decoding differs from its own full forward pass, give or take one rounding "
    "of the largest logit; tokens may differ only where the unpatched logits of the two are closer than that"
)
_LOGIT_BUDGET = 2 << 30  # bytes of logits kept for each model
_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@dataclass
class Deviation:
    """How far logits lie from others: the largest and the root mean square difference."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, logits: torch.Tensor, reference: torch.Tensor) -> None:
        """Takes in two tensors [B, T, vocab]."""
        for ours, theirs in zip(logits.flatten(0, 1), reference.flatten(0, 1), strict=True):
            difference = ours.double() - theirs.double()  # [vocab]: a row at a time, to need little memory
            # NaN must not vanish in a comparison: any non-finite difference is infinitely wrong.
            difference = torch.where(difference.isfinite(), difference, torch.inf)
            self.largest = max(self.largest, difference.abs().max().item())
            self.squares += difference.square().sum().item()
            self.count += difference.numel()

    @property
    def rms(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


@dataclass(frozen=True)
class Comparison:
    """Patched against unpatched, and whether that is good enough.

    ``token_agreement`` is the share of generated tokens that are equal, position by position; ``first_difference`` the
    earliest step at which a sequence differs, None if none does. Errors are against the oracle, where there was one.
    """

    passed: bool
    reason: str
    criterion: str
    oracle: str | None
    token_agreement: float
    sequences_equal: int
    sequences: int
    first_difference: int | None
    max_logit_difference: float
    max_logit: float
    steps_compared: int
    unpatched_max_error: float | None
    unpatched_rms_error: float | None
    patched_max_error: float | None
    patched_rms_error: float | None

    def summary(self) -> dict[str, Any]:
        return asdict(self)


def make_oracle(model: Any) -> Any | None:
    """A copy of ``model`` in the next wider precision, on its device, else the CPU; None if neither has the memory."""
    dtype = _WIDER[model.dtype]
    needed = 1.2 * model.num_parameters() * dtype.itemsize
    for device in dict.fromkeys([model.device, torch.device("cpu")]):
        free = free_memory(device)
        if free is None or needed < free:
            return _copy(model, device, dtype)
    return None


def _copy(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A deep copy whose tensors are converted one by one, so that there is never a second one in the old precision."""

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        return torch.nn.Parameter(new, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else new

    memo = {id(tensor): converted(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


def compared_steps(batches: list[Batch], output_length: int, vocab_size: int, dtype: torch.dtype) -> int:
    """How many steps' logits of all batches fit the budget; at least one."""
    a_step = sum(batch.size for batch in batches) * vocab_size * dtype.itemsize
    return max(1, min(output_length, _LOGIT_BUDGET // a_step))


def collect_logits(model: Any, batches: list[Batch], tokens: list[torch.Tensor], steps: int) -> list[torch.Tensor]:
    """For each batch the logits of cached decoding along ``tokens``, [B, steps, vocab] on the CPU."""
    return [
        torch.stack(generate.replay(model, batch, chosen[:, :steps]), dim=1)
        for batch, chosen in zip(batches, tokens, strict=True)
    ]


def compare(
    model: Any,
    batches: list[Batch],
    unpatched_tokens: list[torch.Tensor],
    patched_tokens: list[torch.Tensor],
    patched_logits: list[torch.Tensor],
) -> Comparison:
    """Judges a patched model.

    Args:
        model: the model, unpatched again.
        batches: the prompts.
        unpatched_tokens: what it generated, for each batch [B, T].
        patched_tokens: what it generated while patched.
        patched_logits: the patched model's :func:`collect_logits` along ``unpatched_tokens``, [B, steps, V] each.
    """
    steps = patched_logits[0].shape[1]
    unpatched_logits = collect_logits(model, batches, unpatched_tokens, steps)
    difference = Deviation()
    for ours, theirs in zip(patched_logits, unpatched_logits, strict=True):
        difference.add(ours, theirs)

    oracle = make_oracle(model)
    reference = [
        generate.forward_logits(oracle or model, batch, chosen[:, :steps])
        for batch, chosen in zip(batches, unpatched_tokens, strict=True)
    ]
    oracle_name = f"{str(oracle.dtype).removeprefix('torch.')} on {oracle.device}" if oracle is not None else None
    del oracle
    unpatched, patched = Deviation(), Deviation()
    for ours, theirs, exact in zip(patched_logits, unpatched_logits, reference, strict=True):
        unpatched.add(theirs, exact)
        patched.add(ours, exact)

    scale = max(max(exact.max().item(), -exact.min().item()) for exact in reference)
    rounding = torch.finfo(model.dtype).eps * scale
    if oracle_name is not None:
        judged, factor, judges, tie = patched, 2, reference, 2 * (unpatched.largest + patched.largest) + rounding
    else:
        judged, factor, judges, tie = difference, 3, unpatched_logits, 3 * unpatched.largest + rounding

    reason = _judge_logits(judged, unpatched, factor, rounding) or _judge_tokens(
        unpatched_tokens, patched_tokens, judges, tie
    )
    equal = [a == b for a, b in zip(unpatched_tokens, patched_tokens, strict=True)]
    wrong_steps = [(~rows).nonzero()[:, 1].min().item() for rows in equal if not rows.all()]
    return Comparison(
        passed=reason is None,
        reason=reason or "the patched model is as exact as the unpatched one",
        criterion=CRITERION if oracle_name is not None else CRITERION_WITHOUT_ORACLE,
        oracle=oracle_name,
        token_agreement=sum(rows.sum().item() for rows in equal) / sum(rows.numel() for rows in equal),
        sequences_equal=sum(rows.all(1).sum().item() for rows in equal),
        sequences=sum(rows.shape[0] for rows in equal),
        first_difference=min(wrong_steps) if wrong_steps else None,
        max_logit_difference=difference.largest,
        max_logit=scale,
        steps_compared=steps,
        unpatched_max_error=unpatched.largest if oracle_name is not None else None,
        unpatched_rms_error=unpatched.rms if oracle_name is not None else None,
        patched_max_error=patched.largest if oracle_name is not None else None,
        patched_rms_error=patched.rms if oracle_name is not None else None,
    )


def _judge_logits(judged: Deviation, yardstick: Deviation, factor: int, rounding: float) -> str | None:
    """Why the logits are too far off, or None."""
    if not judged.largest <= factor * yardstick.largest + rounding:
        return f"the patched logits are off by up to {judged.largest:.3g}, the unpatched by {yardstick.largest:.3g}"
    # A rounding moves a logit by up to half of its last place; in the mean square by a quarter of the largest's.
    if not judged.rms <= factor * yardstick.rms + rounding / 4:
        return f"the patched logits are off by {judged.rms:.3g} rms, the unpatched by {yardstick.rms:.3g}"
    return None


def _judge_tokens(
    unpatched: list[torch.Tensor], patched: list[torch.Tensor], logits: list[torch.Tensor], tie: float
) -> str | None:
    """Why the tokens differ by more than a tie, or None. After its first difference a sequence goes its own way."""
    for expected, got, values in zip(unpatched, patched, logits, strict=True):
        for row in range(expected.shape[0]):
            wrong = (expected[row] != got[row]).nonzero()
            if not len(wrong) or wrong[0].item() >= values.shape[1]:
                continue
            step = wrong[0].item()
            a, b = expected[row, step].item(), got[row, step].item()
            gap = (values[row, step, a] - values[row, step, b]).abs().item()
            if not gap <= tie:
                return (
                    f"at step {step + 1} the patched model chose token {b} instead of {a}, "
                    f"whose logits are {gap:.3g} apart"
                )
    return None
