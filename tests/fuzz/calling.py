"""Calls an op and takes gradients through it, in the ways in which programs do."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch

from fuzz.arguments import GRAPHS
from fuzz.arguments import asking
from fuzz.arguments import own_bytes
from fuzz.arguments import tensors_in
from fuzz.comparing import Failure
from fuzz.comparing import Results
from fuzz.drawing import Case
from fuzz.drawing import Draw

SINE_GRADIENT = 0.5


@dataclass
class Called:
    """What a call gave."""

    results: Results  # copies of the outputs and of the arguments it wrote to, and gradients
    outputs: list[torch.Tensor]
    through: set[int]  # outputs that require a gradient


class Backward:
    """How gradients are asked for: of which arguments, what they are to autograd, and what arrives at the outputs."""

    def __init__(self, draw: Draw, case: Case) -> None:
        self.wanted = [name for name in case.grad if draw.data.random() < 0.8] if draw.data.random() < 0.75 else []
        self.layout = draw.data.choice(["normal", "normal", "expanded", "transposed", "steps"])
        self.seed = draw.data.getrandbits(40)
        self.skipped = draw.data.choices([None, 0, 1], [81, 10, 9])[0]  # an output that nothing uses
        if draw.nan:
            self.skipped = None  # nothing times NaN is NaN where autograd would not have asked
        self.graph = draw.data.choice(GRAPHS)
        self.in_place = draw.data.random() < 0.25
        if self.in_place and draw.op == "apply_rope_base" and self.graph.startswith("sine"):
            self.graph = "computed"  # documented: q and k change in the forward pass

    def __str__(self) -> str:
        if not self.wanted:
            return "no gradients"
        text = f"gradients of {', '.join(self.wanted)}: {self.graph}, {self.layout}"
        text += ", in place" if self.in_place else ""
        return text + (f", without output {self.skipped}" if self.skipped is not None else "")

    def upstream(self, i: int, output: torch.Tensor) -> torch.Tensor:
        """The gradient that arrives at output ``i``."""
        if self.layout == "expanded":
            return torch.full((), 0.75, dtype=output.dtype, device=output.device).expand(output.shape)
        generator = torch.Generator().manual_seed(self.seed + i)
        x = torch.randn(tuple(output.shape), generator=generator).to(torch.bfloat16)  # exact in the other dtypes, too
        x = x.to(output.device, output.dtype)
        if self.layout == "transposed" and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if self.layout == "steps" and x.dim():
            wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype, device=x.device)
            return wide[..., ::2].copy_(x)
        return x


def call(op: Any, args: dict[str, Any], case: Case, backward: Backward, backend: str, grad_mode: bool = True) -> Called:
    """Calls ``op`` and, in ``grad_mode``, takes the gradients that are wanted."""
    if not grad_mode or not backward.wanted:
        with contextlib.nullcontext() if grad_mode else torch.no_grad():
            outputs = tensors_in([op(**args, backend=backend)])
        return Called(_results(outputs, args, case), outputs, {i for i, o in enumerate(outputs) if o.requires_grad})
    given, leaves = asking(args, backward.wanted, backward.graph)
    asked = [x for name in backward.wanted for x in tensors_in(given[name])]
    sines = [x.sin() for x in asked] if backward.graph == "sine before" else []
    kept = [(x.detach(), own_bytes(x.detach())) for x in asked] if backward.graph == "kept" else []
    outputs = tensors_in([op(**given, backend=backend)])
    results = _results(outputs, args, case)
    if backward.graph == "sine after":
        sines = [x.sin() for x in asked]
    del given, asked  # only the graph holds what was computed
    through = {i for i, o in enumerate(outputs) if o.requires_grad}
    ends = {i: outputs[i] for i in through if i != backward.skipped}
    gradients = [backward.upstream(i, o) for i, o in ends.items()] + [torch.full_like(x, SINE_GRADIENT) for x in sines]
    ends = [*ends.values(), *sines]
    for turn in ("", " again") if backward.graph == "twice" else ("",):
        results |= {f"gradient {i}{turn}": torch.zeros_like(t) for i, t in enumerate(leaves)}
        if not ends or not leaves:
            continue
        retain = backward.graph == "twice" and not turn
        found = torch.autograd.grad(ends, leaves, gradients, allow_unused=True, retain_graph=retain)
        results |= {f"gradient {i}{turn}": g for i, g in enumerate(found) if g is not None}
    if not backward.in_place:
        for now, was in kept:
            if not torch.equal(own_bytes(now), was):
                raise Failure("an activation that is still held was changed")
    return Called(results, outputs, through)


def _results(outputs: list[torch.Tensor], args: dict[str, Any], case: Case) -> Results:
    results = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    return results | {f"{name} afterwards": args[name].detach().clone() for name in case.mutated}
