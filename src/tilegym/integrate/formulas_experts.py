"""Candidate formulas of mixtures of experts: the experts themselves, and how a token's experts are chosen."""

from dataclasses import dataclass

from tilegym.integrate.formulas import Formula
from tilegym.integrate.formulas import Gate
from tilegym.integrate.formulas import activation


def experts(gate: Gate | None, act: str, transposed: bool, biases: tuple[str, ...]) -> Formula:
    """Every token's experts, weighted and summed.

    Args:
        gate: how the two halves of ``gate_up`` are joined; None: ``down(act(up(x)))``.
        transposed: weights are [experts, inputs, outputs], else [experts, outputs, inputs].
        biases: the roles, of "gate_up", "up" and "down", that have one.
    """
    first = "gate_up" if gate else "up"
    shapes = {first: ("E", "J", "H"), "down": ("E", "H", "I")}
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("T", "H"), "topk_ids": ("T", "K"), "topk_weights": ("T", "K")}
    for role, (e, rows, columns) in shapes.items():
        inputs[f"{role}_weight"] = (e, columns, rows) if transposed else (e, rows, columns)
        if role in biases:
            inputs[f"{role}_bias"] = (e, rows)

    def call(role: str, operand: str) -> str:
        weight = f"{role}_weight[e].T" if transposed else f"{role}_weight[e]"
        return f"F.linear({operand}, {weight}{f', {role}_bias[e]' if role in biases else ''})"

    lines = ["y = torch.zeros_like(x)", f"for e in range({first}_weight.shape[0]):"]
    inside = ["token, slot = torch.where(topk_ids == e)", f"h = {call(first, 'x[token]')}"]
    inside += gate.lines() if gate else [f"h = {activation(act, 'h')}"]
    inside += [f"h = {call('down', 'h')} * topk_weights[token, slot, None]", "y.index_add_(0, token, h.to(y.dtype))"]
    body = "\n".join([*lines, *(f"    {line}" for line in inside), "return y"])
    constraints = ("J == 2 * I",) if gate else ("J == I",)
    return Formula("moe", inputs, {"y": ("T", "H")}, body, {"topk_ids": "int64"}, constraints)


@dataclass(frozen=True)
class Routing:
    """How experts are chosen for a token.

    Attributes:
        scoring: "softmax" or "sigmoid" of the logits before the choice; "softmax_topk": the choice is by logits, and
            the softmax over the chosen ones.
        top_k: how many are chosen.
        normalised: the chosen weights are divided by their sum.
        scaling: factor on the weights.
        groups, top_groups: experts are chosen within the best ``top_groups`` of ``groups`` groups.
        group_score: "top2": a group counts the sum of its best two; "max": its best.
        correction: a bias that joins the scores for the choice alone.
        bias: the logits have a bias.
        eps: added to the sum that normalises.
    """

    scoring: str
    top_k: int
    normalised: bool = False
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    correction: bool = False
    bias: bool = False
    eps: float = 0.0


def routing(r: Routing) -> Formula:
    """From hidden states to (topk_weights, topk_ids), statistics in fp32."""
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("T", "H"), "weight": ("E", "H")}
    if r.bias:
        inputs["bias"] = ("E",)
    if r.correction:
        inputs["correction"] = ("E",)
    lines = [f"logits = F.linear(x.float(), weight.float(){', bias.float()' if r.bias else ''})"]
    if r.scoring == "softmax_topk":
        lines += [f"values, ids = logits.topk({r.top_k}, -1)", "weights = torch.softmax(values, -1)"]
    else:
        lines.append(f"scores = {'torch.softmax(logits, -1)' if r.scoring == 'softmax' else 'torch.sigmoid(logits)'}")
        lines.append(f"choice = scores{' + correction' if r.correction else ''}")
        if r.groups > 1:
            score = "topk(2, -1).values.sum(-1)" if r.group_score == "top2" else "amax(-1)"
            lines += [
                f"grouped = choice.unflatten(-1, ({r.groups}, -1))",
                f"best = grouped.{score}.topk({r.top_groups}, -1).indices",
                "allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)",
                "choice = grouped.masked_fill(~allowed[..., None], float('-inf')).flatten(1)",
            ]
        lines += [f"ids = choice.topk({r.top_k}, -1).indices", "weights = scores.gather(1, ids)"]
        if r.normalised:
            lines.append(f"weights = weights / (weights.sum(-1, keepdim=True){f' + {r.eps!r}' if r.eps else ''})")
    if r.scaling != 1.0:
        lines.append(f"weights = weights * {r.scaling!r}")
    lines.append("return weights, ids")
    dtypes = {"topk_ids": "int64", "topk_weights": "float32"}
    return Formula(
        "moe_routing", inputs, {"topk_weights": ("T", "K"), "topk_ids": ("T", "K")}, "\n".join(lines), dtypes
    )
