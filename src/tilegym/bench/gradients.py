"""Are a patched model's gradients as right as the unpatched one's?

Both models' loss and gradients of one batch are compared with an oracle's: the unpatched model, computing in the next
wider precision. A parameter at a time, so that a wrong gradient of a small one does not vanish beside large ones.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch

from tilegym.bench import compare
from tilegym.bench.models import is_out_of_memory
from tilegym.bench.prompts import Batch
from tilegym.errors import ModelError

CRITERION = (
    "the patched gradient of every parameter, and all of them together, may be at most twice as far from the oracle as "
    "the unpatched one, give or take one rounding of each element; the distance is the root of the summed squares. The "
    "loss may be at most twice as far off, give or take four roundings of the loss; what is not finite is infinitely "
    "far off"
)
_LOSS_ROUNDINGS = 4  # it is a mean over all tokens: of sums, each of which rounds
_FEWEST_TOKENS = 16
_PIECE = 1 << 24  # elements whose differences are taken at a time


@dataclass(frozen=True)
class Errors:
    """How far a model's loss, and the gradient of each of its parameters by name, are from the oracle's."""

    loss: float
    loss_error: float
    parameters: dict[str, float]

    @property
    def overall(self) -> float:
        return math.hypot(*self.parameters.values())


@dataclass(frozen=True)
class Oracle:
    """What is right, to the precision ``dtype``: the loss and the gradients, on the CPU, of ``batch``.

    ``cut`` says whether that is but a part of the batch that was asked for.
    """

    batch: Batch
    cut: bool
    dtype: torch.dtype
    loss: float
    gradients: dict[str, torch.Tensor]
    norms: dict[str, float]

    @classmethod
    def of(cls, model: Any, batch: Batch) -> "Oracle":
        """Of ``model``, unpatched; of as much of ``batch`` as its device has memory for in the wider precision.

        Raises:
            ModelError: that is less than a few tokens; or the oracle's gradients are not finite, or all zero.
        """
        asked = batch
        while True:
            compare.release(model.device)
            try:
                with compare.experts_in_turn(model), compare.widened(model, at_once=True) as wide:
                    loss = backward(model, batch)
                    found = {name: p.grad.cpu() for name, p in _with_gradients(model)}
                    norms = {name: _distance(p.grad) for name, p in _with_gradients(model)}
                    model.zero_grad()
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                model.zero_grad()
                smaller = _half(batch)
                if smaller is None:
                    raise ModelError(
                        f"out of memory on {model.device} for the model in the precision that gradients are compared "
                        "with: take a smaller --num_layers, or leave out --compare"
                    ) from error
                batch = smaller
        if not 0 < math.hypot(*norms.values(), 0.0) < math.inf:
            what = "not finite" if any(norms.values()) else "all zero"
            raise ModelError(
                f"the unpatched model's gradients in {str(wide)[6:]} are {what}, so that nothing can be compared with "
                "them: take other weights, or leave out --compare"
            )
        return cls(batch, batch is not asked, wide, loss, found, norms)

    def errors(self, model: Any) -> Errors:
        """Those of ``model`` as it is now, patched or not; a parameter without a gradient has one of zeros."""
        loss = backward(model, self.batch)
        got = dict(_with_gradients(model))
        errors = {}
        for name in self.gradients.keys() | got.keys():
            errors[name] = _distance(got[name].grad if name in got else None, self.gradients.get(name))
        model.zero_grad()
        return Errors(loss, _finite(abs(loss - self.loss)), errors)

    def judge(self, unpatched: Errors, patched: Errors, narrow: torch.dtype) -> "Check":
        """Whether ``patched`` errors are small enough beside ``unpatched`` ones of a model in the precision ``narrow``.

        Raises:
            ModelError: the unpatched model's own gradients are not finite: no others could be further from the oracle.
        """
        if not math.isfinite(unpatched.overall + unpatched.loss_error):
            raise ModelError(
                f"the unpatched model's gradients are not finite in {str(narrow)[6:]}, so that nothing can be compared "
                "with them: take --precision float32, or leave out --compare"
            )
        eps = torch.finfo(narrow).eps

        def checked(name: str, norm: float, theirs: float, ours: float) -> ParameterCheck:
            return ParameterCheck(name, norm, theirs, ours, 2 * theirs + eps / 2 * norm)

        names = unpatched.parameters.keys() | patched.parameters.keys()
        parameters = [
            checked(
                name, self.norms.get(name, 0.0), unpatched.parameters.get(name, 0.0), patched.parameters.get(name, 0.0)
            )
            for name in names
        ]
        parameters.sort(key=lambda parameter: (-parameter.excess, parameter.name))
        overall = checked("all parameters", math.hypot(*self.norms.values()), unpatched.overall, patched.overall)
        loss_allowed = 2 * unpatched.loss_error + _LOSS_ROUNDINGS * eps * abs(self.loss)
        reason = None
        if not patched.loss_error <= loss_allowed:
            reason = f"the patched loss is off by {patched.loss_error:.3g}, the unpatched by {unpatched.loss_error:.3g}"
        wrong = [parameter for parameter in [*parameters, overall] if not parameter.passed]
        if wrong and reason is None:
            most = wrong[0]  # the worst parameter, if any by itself
            more = f" (and {len(wrong) - 1} others)" if len(wrong) > 1 else ""
            reason = (
                f"the patched gradient of {most.name}{more} is off by {most.patched_error:.3g}, the unpatched by "
                f"{most.unpatched_error:.3g}, of {most.norm:.3g}"
            )
        return Check(
            passed=reason is None,
            reason=reason or "the patched gradients are as exact as the unpatched ones",
            criterion=CRITERION,
            oracle=str(self.dtype).removeprefix("torch."),
            rows=self.batch.size,
            tokens=self.batch.prompt_length,
            cut=self.cut,
            oracle_loss=self.loss,
            unpatched_loss=unpatched.loss,
            patched_loss=patched.loss,
            overall=overall,
            parameters=parameters,
        )


@dataclass(frozen=True)
class ParameterCheck:
    """A parameter's errors, and how far off the patched gradient may be; ``norm`` is that of the oracle's gradient."""

    name: str
    norm: float
    unpatched_error: float
    patched_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.patched_error <= self.allowed

    @property
    def excess(self) -> float:
        """The error as a multiple of what is allowed."""
        if self.patched_error == 0:
            return 0.0
        return self.patched_error / self.allowed if self.allowed else math.inf


@dataclass(frozen=True)
class Check:
    """A patched model's loss and gradients against the unpatched one's, and whether they are good enough.

    Errors are against the oracle, whose precision is ``oracle``, of ``rows`` x ``tokens`` tokens, which are fewer than
    a step's if the oracle of these did not fit the memory (``cut``). ``overall`` stands for all parameters together;
    in ``parameters`` the one that is furthest beyond what is allowed, or nearest to it, comes first.
    """

    passed: bool
    reason: str
    criterion: str
    oracle: str
    rows: int
    tokens: int
    cut: bool
    oracle_loss: float
    unpatched_loss: float
    patched_loss: float
    overall: ParameterCheck
    parameters: list[ParameterCheck] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Plain data; an infinite error is the text ``"inf"``."""
        return compare.plain(asdict(self))


def backward(model: Any, batch: Batch) -> float:
    """Runs forward and backward passes of ``model`` over ``batch``, whose text is its own label; returns the loss."""
    model.zero_grad()
    loss = loss_of(model, batch.to(model.device))
    loss.backward()
    return loss.item()


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """The model's own loss for predicting every token of ``batch``, which is where the model is."""
    return model(input_ids=batch.input_ids, labels=batch.input_ids, use_cache=False).loss


def _with_gradients(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.grad is not None)


def _half(batch: Batch) -> Batch | None:
    """Half of the sequences, or of the only one's tokens; None where too little would be left."""
    rows, tokens = batch.size, batch.prompt_length
    if rows > 1:
        rows //= 2
    elif tokens >= 2 * _FEWEST_TOKENS:
        tokens //= 2
    else:
        return None
    return Batch(batch.input_ids[:rows, :tokens], batch.attention_mask[:rows, :tokens])


def _distance(ours: torch.Tensor | None, exact: torch.Tensor | None = None) -> float:
    """The root of the summed squares of ``ours - exact``; None is zeros; infinite where anything is not finite."""
    if ours is None:
        ours, exact = exact, None
    squares = 0.0
    pieces = ours.detach().flatten().split(_PIECE)
    others = exact.flatten().split(_PIECE) if exact is not None else [None] * len(pieces)
    for piece, other in zip(pieces, others, strict=True):
        difference = piece.double()
        if other is not None:
            difference = difference - other.to(piece.device).double()
        squares += difference.square().sum().item()
    return _finite(math.sqrt(squares)) if squares >= 0 else math.inf


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
