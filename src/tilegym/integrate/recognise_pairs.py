"""Recognises what spans several modules, on the graph of one run: residual and norm, q and k norms, gates, the loss."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tilegym.integrate import formulas_sequence as formulas
from tilegym.integrate.formulas import Formula
from tilegym.integrate.probe import Match
from tilegym.integrate.probe import best
from tilegym.integrate.trace import Call
from tilegym.integrate.trace import Step
from tilegym.integrate.trace import Trace
from tilegym.integrate.trace import tensors

_ADD = ("add", "__add__", "__radd__", "__iadd__", "add_")
_MUL = ("mul", "__mul__", "__rmul__", "__imul__", "mul_")
_MOVES = ("view", "reshape", "transpose", "to", "type_as", "float", "contiguous", "unsqueeze", "permute", "flatten")


def residual_of(call: Call, producers: dict[int, Step]) -> dict[str, Any] | None:
    """The addition whose sum a norm is called with: where it runs, and the factor on what is added; None if none."""
    given = next(tensors(call.arguments), None)
    step = producers.get(id(given))
    if step is None or step.name not in _ADD:
        return None
    operands = [t for t in step.inputs if isinstance(t, torch.Tensor)]
    if len(operands) != 2 or operands[0].shape != operands[1].shape:
        return None
    scales = []
    for operand in operands:
        before = producers.get(id(operand))
        # A product made elsewhere, such as that of scaled embeddings, is the residual itself.
        if before is not None and before.name in _MUL and before.path == step.path:
            scales += [float(f) for f in before.inputs if isinstance(f, (int, float))]
    return {"residual_in": step.path, "residual_scale": scales[0] if len(scales) == 1 else 1.0}


def _reaches(start: Any, targets: set[int], consumers: dict[int, list[Step]], limit: int = 64) -> bool:
    """Whether a tensor flows into one of ``targets``, within the next steps."""
    seen, pending = set(), [id(t) for t in tensors(start)]
    while pending and len(seen) < limit:
        current = pending.pop(0)
        if current in targets:
            return True
        if current not in seen:
            seen.add(current)
            pending += [id(t) for step in consumers.get(current, ()) for t in tensors(step.output)]
    return False


def query_key_norms(attention: Call, norms: list[Call], consumers: dict[int, list[Step]]) -> tuple[Call, Call] | None:
    """Of the norms called inside an attention module, the one of its queries and the one of its keys."""
    _, q, k, *_ = attention.arguments.values()
    pair = []
    for tensor, other in ((q, k), (k, q)):
        into = [
            c
            for c in norms
            if _reaches(c.output, {id(tensor)}, consumers) and not _reaches(c.output, {id(other)}, consumers)
        ]
        if len(into) != 1:
            return None
        pair += into
    return (pair[0], pair[1]) if pair[0].path != pair[1].path else None


def gates(trace: Trace, paths: set[str], producers: dict[int, Step]) -> Iterator[tuple[str, str]]:
    """(path, activation) of the products with an activated tensor of the same shape in the modules at ``paths``."""
    for step in trace.steps:
        if step.path not in paths or step.name not in _MUL:
            continue
        operands = [t for t in step.inputs if isinstance(t, torch.Tensor)]
        if len(operands) != 2 or operands[0].shape != operands[1].shape or operands[0].ndim < 3:
            continue
        for operand in operands:
            before = producers.get(id(operand))
            while before is not None and before.name in _MOVES:
                before = producers.get(id(before.inputs[0]))
            if before is not None and before.name in ("sigmoid", "silu"):
                yield step.path, before.name
                break


def recognise_loss(
    call: Call, head: nn.Module | None, head_calls: list[Call], settings: dict[str, float]
) -> tuple[Match, Match | None] | None:
    """The loss by itself, and together with the output layer; the second is None where something else is between.

    Args:
        call: of the loss function.
        head: the output layer, whose calls are ``head_calls``.
        settings: numbers of the config, any of which may be a soft cap or a factor on the logits.
    """
    given = [t for t in call.values.values() if isinstance(t, torch.Tensor)]
    logits = next((t for t in given if t.is_floating_point() and t.ndim == 3), None)
    target = next((t for t in given if t.dtype is torch.int64 and t.ndim == 2), None)
    if logits is None or target is None or not isinstance(call.output, torch.Tensor):
        return None
    ignore = call.values.get("ignore_index", -100)

    def candidates(caps: list, scales: list, weight: bool) -> Iterator[tuple[Formula, dict[str, Any]]]:
        bias = weight and getattr(head, "bias", None) is not None
        for shift in (True, False):
            for cap in caps:
                for scale in scales:
                    said = {"shift": shift, "ignore_index": ignore, "softcap": cap, "scale": scale}
                    yield formulas.loss(shift, ignore, cap, scale, weight, bias), said

    outputs = {torch.float32: call.output}
    alone = best(outputs, candidates([None], [1.0], False), lambda f, w, d: {"x": logits, "target": target})
    hidden = next((t for c in head_calls for t in tensors(c.arguments)), None)
    if alone is None or head is None or hidden is None or hidden.ndim != 3 or getattr(head, "weight", None) is None:
        return alone and (alone, None)
    values = {"x": hidden, "weight": head.weight.detach(), "target": target, "bias": getattr(head, "bias", None)}
    numbers = [v for v in dict.fromkeys(settings.values()) if v not in (0.0, 1.0)]
    scales = [1.0, *numbers, *(1.0 / v for v in numbers)]
    # One at a time: no family has a soft cap and a factor.
    both = [*candidates([None], [1.0], True), *candidates(numbers, [1.0], True), *candidates([None], scales[1:], True)]
    return alone, best(outputs, both, lambda f, w, d: {n: values[n] for n in f.inputs})
