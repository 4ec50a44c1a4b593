"""Runs a case of a model: what it gives patched is compared with what it gave, call by call."""

import copy
import random
import time
from collections.abc import Callable

import torch

import tilegym
from fuzz.comparing import Failure
from fuzz.comparing import Results
from fuzz.model_calls import CALLS
from fuzz.model_calls import Prompt
from fuzz.model_calls import drawn_call
from fuzz.model_calls import drawn_prompt
from fuzz.models import drawn_model
from fuzz.models import drawn_places
from fuzz.models import has_experts
from fuzz.models import spread
from fuzz.running import Outcome
from fuzz.running import attempt
from tilegym.backend import use_backend
from tilegym.errors import TileGymError

NUMBER = {"cpu": 3, "cuda": 12}  # calls of a case
TURNS = 2  # of each: the second repeats what the first has recorded
SECONDS = 70  # after which no other call begins
LARGER = 4.0  # so much larger than the unpatched model's may an error be
TOLERANCE = {"cpu": 3e-5, "cuda": 2e-4}  # and so much besides in fp32, relative to the largest number
BF16 = 0.02
OF_GRADIENTS = 4.0  # times that, of the largest of all gradients, and of what gradients have changed
BY_CHOICE = ("tokens", "logits of steps")  # differ in bf16 once rounding has decided


def run_model(
    family: str, seed: int, device: str = "cpu", show: Callable[[str], None] | None = None, over: int = 0
) -> Outcome:
    """Runs the case ``seed`` of a family; ``show`` gets its text before it runs.

    ``over``: so many GPUs that the model is spread over by accelerate, whose hooks a model on a CPU gets besides.
    """
    rng = random.Random(f"{family}/{seed}")
    model, text = drawn_model(rng, family, device)
    backend = "cutile" if device == "cuda" or rng.random() < 0.3 else "pytorch"
    half = rng.random() < 0.3 and not has_experts(model)
    exact = copy.deepcopy(model).to(torch.float32 if half else torch.float64)
    exact.config._experts_implementation = "eager"  # others have no fp64
    model = model.bfloat16() if half else model
    patched, late = copy.deepcopy(model), False
    text = f"{'bf16' if half else 'fp32'}, {backend}, {text}"
    if over:
        drawn = random.Random(f"{family}/{seed}/{over}")
        devices = [torch.device(device, i) if device == "cuda" else torch.device(device) for i in range(over)]
        places, late = drawn_places(drawn, model, devices), drawn.random() < 0.3
        text = f"{text}, over {[place.index for place in places.values()]}{' once patched' * late}"
        model, patched = (spread(m, places) if m is model or not late else m for m in (model, patched))
    if show is not None:
        show(text)
    begin, taken = time.monotonic(), 0
    with use_backend(backend):
        try:
            tilegym.apply(patched, use_cutile=backend == "cutile")
        except TileGymError as error:
            return Outcome("unsupported", f"{error} | {text}")
        patched = spread(patched, places) if late else patched
        for _ in range(NUMBER[device]):
            if time.monotonic() - begin > SECONDS:
                break
            name, prompt = drawn_call(rng), drawn_prompt(rng, model.config.vocab_size, device)
            trial = Trial(name, prompt, rng.getrandbits(40), device, half)
            try:
                taken += trial.run(model, patched, exact)
            except Failure as failure:
                return Outcome("FAIL", f"{name} of {prompt}: {failure} | {text}")
        tilegym.revert(patched)
    ids = torch.randint(2, model.config.vocab_size, (2, 17)).to(device)
    try:
        Trial("forward", Prompt(ids, None, None), seed, device, half).check_reverted(model, patched)
    except Failure as failure:
        return Outcome("FAIL", f"reverted: {failure} | {text}")
    return Outcome("ok" if taken else "raises", text)


class Trial:
    """A call, of the model as it was and patched."""

    def __init__(self, name: str, prompt: Prompt, seed: int, device: str, half: bool) -> None:
        self.name, self.prompt, self.seed, self.device, self.half = name, prompt, seed, device, half

    def call(self, model: torch.nn.Module) -> Results:
        with torch.no_grad():
            results = CALLS[self.name](model, self.prompt, random.Random(self.seed))
        return {name: t.detach().to(self.device, copy=True) for name, t in results.items()}

    def run(self, model: torch.nn.Module, patched: torch.nn.Module, exact: torch.nn.Module) -> bool:
        """Fails if the patched model gives something else; ``exact``: the model in the next wider dtype.

        Whether the model took the call unpatched.
        """
        expected, error = attempt(lambda: self.call(model))
        if error is not None:  # transformers does not take the call
            return False
        wide, error = attempt(lambda: self.call(exact))
        if error is not None or wide.keys() != expected.keys():  # where attention in fp64 has a row of NaN
            wide = expected
        for turn in range(TURNS):
            got, error = attempt(lambda: self.call(patched))
            if error is not None:
                raise Failure(f"only patched raises {type(error).__name__}: {str(error)[:300]}")
            try:
                self.compare(got, expected, wide)
            except Failure as failure:
                raise Failure(f"{failure}{' the second time' * turn}") from None
        return True

    def check_reverted(self, model: torch.nn.Module, reverted: torch.nn.Module) -> None:
        expected, error = attempt(lambda: self.call(model))
        if error is None:
            got = self.call(reverted)
            for name, t in expected.items():
                if not torch.equal(got[name], t):
                    raise Failure(f"{name} differs from the model's that was never patched")

    def compare(self, got: Results, expected: Results, wide: Results) -> None:
        if got.keys() != expected.keys():
            raise Failure(f"{sorted(got.keys() ^ expected.keys())} on one side only")
        largest = max((t.abs().max().item() for n, t in expected.items() if n.startswith("gradient")), default=0.0)
        for name, value in expected.items():
            (a, b), (c, d) = ((t.dtype, list(t.shape)) for t in (got[name], value))
            if (a, b) != (c, d):
                raise Failure(f"{name} is {a}{b}, not {c}{d}")
            if not (self.half and name in BY_CHOICE):
                self.compare_one(name, *(self.valid(t) for t in (got[name], value, wide[name])), largest)

    def compare_one(
        self, name: str, got: torch.Tensor, value: torch.Tensor, exact: torch.Tensor, largest: float
    ) -> None:
        """``largest``: of all gradients."""
        if not value.is_floating_point():
            if not torch.equal(got, value):
                raise Failure(f"{int((got != value).sum())} of {value.numel()} {name} differ")
            return
        if not value.numel():
            return
        if (got.isfinite() != value.isfinite()).any():
            raise Failure(f"{name} is not finite where it was, or was not where it is")
        size = exact.nan_to_num(0, 0, 0).abs().max().item()
        rounded = self.half or " in bf16" in name
        tolerance = BF16 if rounded else TOLERANCE[self.device]
        if name.startswith("gradient"):
            size = largest
        if name.startswith(("gradient", "trained")):
            tolerance *= OF_GRADIENTS
        error, own = _distance(got, exact), _distance(value, exact)
        if not own and rounded:  # ``exact`` is ``value``, whose own error counts besides
            tolerance *= 2
        if error > LARGER * own + tolerance * max(size, 1e-3) + 1e-7:
            raise Failure(f"{name} is off by {error:.3g} of {size:.3g}, unpatched by {own:.3g}")

    def valid(self, t: torch.Tensor) -> torch.Tensor:
        """Without what stands at padding."""
        mask = self.prompt.mask
        if mask is None or t.dim() < 3 or t.shape[:2] != mask.shape:
            return t
        return t[mask.bool()]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).nan_to_num(0, 0, 0).abs().max().item()
