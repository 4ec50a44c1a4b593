"""Is a patched model as right as the unpatched one?

Greedy tokens alone cannot tell: where two tokens are almost equally likely, rounding decides, and a kernel that is more
exact than PyTorch decides differently too. So both models are led along the unpatched model's tokens, step by step
through their caches, and their logits are compared with an oracle: the unpatched model, computing in the next wider
precision.
"""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import torch

from tilegym.bench import generate
from tilegym.bench import images
from tilegym.bench.models import is_out_of_memory
from tilegym.bench.prompts import Batch
from tilegym.errors import ModelError

CRITERION = (
    "the patched logits may be at most twice as far from the oracle as the unpatched ones, give or take one rounding "
    "of the largest logit, both in the worst case and in the mean square; tokens may differ only where the oracle's "
    "logits of the two are closer than these errors"
)
_LOGIT_BUDGET = 2 << 30  # bytes of logits kept for each model
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


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
            difference[ours == theirs] = 0.0  # -inf for a token that a model never gives
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
    earliest step at which a sequence differs, None if none does. After that step two texts are compared that have
    little in common; ``choice_agreement`` is the share of the compared steps at which both models, given the unpatched
    model's text up to there, choose the same token. Errors are against the oracle, whose precision is ``oracle``.
    """

    passed: bool
    reason: str
    criterion: str
    oracle: str
    token_agreement: float
    choice_agreement: float
    sequences_equal: int
    sequences: int
    first_difference: int | None
    max_logit_difference: float
    max_logit: float
    steps_compared: int
    unpatched_max_error: float
    unpatched_rms_error: float
    patched_max_error: float
    patched_rms_error: float

    def summary(self) -> dict[str, Any]:
        """Plain data. JSON has no infinity, so an infinite error is the text ``"inf"``."""
        return plain(asdict(self))


def plain(value: Any) -> Any:
    """``value``, numbers that JSON does not have as texts: "inf", "nan"."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def widened(model: Any, at_once: bool = False) -> Iterator[torch.dtype]:
    """Lets ``model`` compute in the next wider precision within the block, and yields that precision.

    Every module's own weights are converted while it runs and no longer, so that a model which barely fits its device
    needs little more there than its largest layer; ``at_once`` all of them together.
    """
    wide = WIDER[model.dtype]
    narrow: dict[torch.nn.Parameter, torch.Tensor] = {}
    running: list[list[torch.nn.Parameter]] = []

    def convert(module: torch.nn.Module, args: Any) -> None:
        # One that is tied to a parameter of the module around this one is wide already.
        running.append([p for p in module.parameters(recurse=at_once) if p not in narrow])
        for parameter in running[-1]:
            narrow[parameter] = parameter.data
            parameter.data = parameter.data.to(wide)

    def restore(module: torch.nn.Module, args: Any, output: Any) -> None:
        for parameter in running.pop():
            parameter.data = narrow.pop(parameter)

    handles = []
    for module in () if at_once else model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_forward_pre_hook(convert))
            handles.append(module.register_forward_hook(restore))
    try:
        if at_once:
            convert(model, ())
        yield wide
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in narrow.items():  # of a module that failed
            parameter.data = data


@contextlib.contextmanager
def experts_in_turn(model: Any) -> Iterator[None]:
    """Lets the experts of ``model`` run within the block as their class is written, one after the other.

    Of transformers' faster ways ``grouped_mm`` takes no float64, and ``batched_mm`` copies the weights of the experts
    of every token.
    """
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    before = [(c, c._experts_implementation) for c in configs.values() if getattr(c, "_experts_implementation", None)]
    for config, _ in before:
        config._experts_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, name in before:
            config._experts_implementation_internal = name


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

    Raises:
        ModelError: the unpatched model's own logits are not finite: no others could be further from the oracle.
    """
    steps = patched_logits[0].shape[1]
    unpatched_logits = collect_logits(model, batches, unpatched_tokens, steps)
    difference = Deviation()
    for ours, theirs in zip(patched_logits, unpatched_logits, strict=True):
        difference.add(ours, theirs)

    choices = [a.argmax(-1) == b.argmax(-1) for a, b in zip(patched_logits, unpatched_logits, strict=True)]

    wide, oracle = _oracle(model, batches, [chosen[:, :steps] for chosen in unpatched_tokens])
    unpatched, patched = Deviation(), Deviation()
    for ours, theirs, exact in zip(patched_logits, unpatched_logits, oracle, strict=True):
        unpatched.add(theirs, exact)
        patched.add(ours, exact)

    if not math.isfinite(unpatched.largest):
        raise ModelError(
            f"the unpatched model's logits are not finite in {str(model.dtype)[6:]}, so that nothing "
            "can be compared with them: take a --precision of more range, float32 or bfloat16, or leave out --compare"
        )
    scale = max(exact[exact.isfinite()].abs().max().item() for exact in oracle)
    rounding = torch.finfo(model.dtype).eps * scale
    tie = 2 * (unpatched.largest + patched.largest) + rounding
    reason = judge_logits(patched, unpatched, rounding) or judge_tokens(unpatched_tokens, patched_tokens, oracle, tie)
    equal = [a == b for a, b in zip(unpatched_tokens, patched_tokens, strict=True)]
    wrong_steps = [(~rows).nonzero()[:, 1].min().item() for rows in equal if not rows.all()]
    return Comparison(
        passed=reason is None,
        reason=reason or "the patched model is as exact as the unpatched one",
        criterion=CRITERION,
        oracle=str(wide).removeprefix("torch."),
        token_agreement=sum(rows.sum().item() for rows in equal) / sum(rows.numel() for rows in equal),
        choice_agreement=sum(c.sum().item() for c in choices) / sum(c.numel() for c in choices),
        sequences_equal=sum(rows.all(1).sum().item() for rows in equal),
        sequences=sum(rows.shape[0] for rows in equal),
        first_difference=min(wrong_steps) if wrong_steps else None,
        max_logit_difference=difference.largest,
        max_logit=scale,
        steps_compared=steps,
        unpatched_max_error=unpatched.largest,
        unpatched_rms_error=unpatched.rms,
        patched_max_error=patched.largest,
        patched_rms_error=patched.rms,
    )


def _oracle(model: Any, batches: list[Batch], tokens: list[torch.Tensor]) -> tuple[torch.dtype, list[torch.Tensor]]:
    """The wider precision, and the logits along ``tokens`` in it, [B, T, V] for each batch.

    Raises:
        ModelError: the device has too little memory, even for a sequence at a time.
    """
    at_once = alone = False
    while True:
        release(model.device)
        try:
            with experts_in_turn(model), widened(model, at_once) as wide:
                return wide, [_wide_logits(model, *pair, alone) for pair in zip(batches, tokens, strict=True)]
        except (RuntimeError, MemoryError) as error:
            # A forward that reads weights of modules within it, as Mamba's does, finds both precisions.
            if not is_out_of_memory(error):
                if at_once:
                    raise
                at_once = True
            elif alone or all(batch.size == 1 for batch in batches):
                wide = str(WIDER[model.dtype]).removeprefix("torch.")
                raise ModelError(
                    f"out of memory on {model.device} for the model in {wide} that logits are compared with, "
                    f"{'all its weights' if at_once else 'the weights of a module'} and a sequence at a time: "
                    "take shorter prompts or a smaller --output_length, or leave out --compare"
                ) from error
            else:
                alone = True


def _wide_logits(model: Any, batch: Batch, tokens: torch.Tensor, alone: bool) -> torch.Tensor:
    """``forward_logits``, of one sequence after the other if ``alone``."""
    if batch.media and (tokens == images.token_of(model.config)).any():
        # Random weights choose that, too. In one pass it would stand for an image that is not there.
        return torch.stack(generate.replay(model, batch, tokens), dim=1)
    if not alone:
        return generate.forward_logits(model, batch, tokens)
    rows = range(batch.size)
    return torch.cat([generate.forward_logits(model, batch.row(i), tokens[i : i + 1]) for i in rows])


def release(device: torch.device) -> None:
    """Returns the memory that nothing uses any more: in pieces, it has no room for the weights of a module."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def judge_logits(patched: Deviation, unpatched: Deviation, rounding: float) -> str | None:
    """Why the logits are too far off, or None."""
    if not patched.largest <= 2 * unpatched.largest + rounding:
        return f"the patched logits are off by up to {patched.largest:.3g}, the unpatched by {unpatched.largest:.3g}"
    # A rounding moves a logit by up to half of its last place; in the mean square by a quarter of the largest's.
    if not patched.rms <= 2 * unpatched.rms + rounding / 4:
        return f"the patched logits are off by {patched.rms:.3g} rms, the unpatched by {unpatched.rms:.3g}"
    return None


def judge_tokens(
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
