"""Candidate formulas, as source text: what is run against a model's part is what its draft Definition then holds.

A formula is written once, with its constants filled in, and nothing in it is more general than the part it describes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

# Elementwise functions that a part's activation is compared with; {x} is the operand.
ACTIVATIONS = {
    "silu": "F.silu({x})",
    "gelu": "F.gelu({x})",
    "gelu_tanh": 'F.gelu({x}, approximate="tanh")',
    "relu": "F.relu({x})",
    "relu2": "F.relu({x}).square()",
    "quick_gelu": "{x} * torch.sigmoid(1.702 * {x})",
    "sigmoid": "torch.sigmoid({x})",
    "tanh": "torch.tanh({x})",
    "identity": "{x}",
}


@dataclass(frozen=True)
class Formula:
    """One computation: ``run`` over named inputs.

    Attributes:
        op_type: as in a Definition.
        inputs, outputs: name to the names of its axes; None for a Python number.
        body: the statements of ``run``, without indentation, ending in a return.
        dtypes: of the inputs and outputs that are not in the model's dtype.
        constraints: of the Definition.
    """

    op_type: str
    inputs: dict[str, tuple[str, ...] | None]
    outputs: dict[str, tuple[str, ...]]
    body: str
    dtypes: dict[str, str] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """A Python file that defines ``run``, which returns its outputs by name."""
        *lines, last = self.body.strip("\n").splitlines()
        names, result = ", ".join(self.outputs), last.removeprefix("return ")
        lines += [f"return {names}"] if result == names else [f"{names} = {result}", f"return {names}"]
        text = "\n".join(f"    {line}" if line else "" for line in lines)
        return f"import torch\nimport torch.nn.functional as F\n\n\ndef run({', '.join(self.inputs)}):\n{text}\n"

    @property
    def run(self) -> Callable:
        """The function that :attr:`code` defines."""
        return _compiled(self.code)


@functools.lru_cache(maxsize=4096)
def _compiled(code: str) -> Callable:
    names: dict[str, Any] = {}
    exec(compile(code, "<formula>", "exec"), names)
    return names["run"]


def activation(name: str, operand: str = "x") -> str:
    """The expression for an activation of ``operand``."""
    return ACTIVATIONS[name].format(x=operand)


def norm(
    kind: str,
    eps: float,
    casting: str,
    offset: float = 0.0,
    weight: bool = True,
    bias: bool = False,
    groups: int = 1,
    gate: str = "",
    act: str = "silu",
) -> Formula:
    """An RMS or layer norm.

    Args:
        kind: "rms_norm" or "layer_norm".
        casting: "llama": rounded to the input's dtype before the weight is applied; "gemma": after it, once.
        offset: added to the weight.
        groups: into how many groups of equal size the last dimension is split, with statistics of their own.
        gate: "before" or "after": where a second input's activation is multiplied in, in fp32; "" for no gate.
        act: the gate's activation.
    """
    lines = ["y = x.float()"]
    if gate == "before":
        lines.append(f"y = y * {activation(act, 'gate.float()')}")
    if groups > 1:
        lines.append(f"y = y.unflatten(-1, ({groups}, -1))")
    if kind == "layer_norm":
        lines.append("y = y - y.mean(-1, keepdim=True)")
    lines.append(f"y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + {eps!r})")
    if groups > 1:
        lines.append("y = y.flatten(-2)")
    scale = f"({offset!r} + weight{'.float()' if casting == 'gemma' else ''})" if offset else "weight"
    if casting == "llama":
        lines.append("y = y.to(x.dtype)")
    elif not offset:
        scale = "weight.float()"
    if weight:
        lines.append(f"y = {scale} * y")
    if bias:
        lines.append(f"y = y + bias{'.float()' if casting == 'gemma' else ''}")
    if gate == "after":
        lines.append(f"y = y * {activation(act, 'gate.float()')}")
    lines.append("return y.to(x.dtype)")
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("M", "N")}
    if gate:
        inputs["gate"] = ("M", "N")
    inputs |= {name: ("N",) for name, there in (("weight", weight), ("bias", bias)) if there}
    return Formula("rmsnorm" if kind != "layer_norm" else "layernorm", inputs, {"y": ("M", "N")}, "\n".join(lines))


def linear(bias: bool, transposed: bool) -> Formula:
    """``x @ weight.T + bias``; ``transposed``: the weight is [inputs, outputs] (GPT-2's Conv1D)."""
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("M", "K"), "weight": ("K", "N") if transposed else ("N", "K")}
    if bias:
        inputs["bias"] = ("N",)
    weight, last = "weight.T" if transposed else "weight", ", bias" if bias else ""
    return Formula("gemm", inputs, {"y": ("M", "N")}, f"return F.linear(x, {weight}{last})")


@dataclass(frozen=True)
class Gate:
    """How a gated MLP or an expert joins its two halves.

    Attributes:
        act: the activation.
        packed: "" for two weights; else "concatenated" or "interleaved".
        up_first: in a packed weight the gate comes second.
        limit: clamps the gate from above and the other half on both sides; 0: no clamp.
        alpha: the activation is ``g * sigmoid(alpha * g)``; 0: ``act``.
        shift: added to the half that is not the gate (gpt-oss: 1).
    """

    act: str
    packed: str = ""
    up_first: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    shift: float = 0.0

    def lines(self) -> list[str]:
        """From ``h`` (packed) or ``g`` and ``u`` to ``h``, the product."""
        lines = []
        names = "u, g" if self.up_first else "g, u"
        if self.packed == "concatenated":
            lines.append(f"{names} = h.chunk(2, -1)")
        elif self.packed == "interleaved":
            lines.append(f"{names} = h[..., ::2], h[..., 1::2]")
        if self.limit:
            lines.append(f"g, u = g.clamp(max={self.limit!r}), u.clamp({-self.limit!r}, {self.limit!r})")
        act = f"g * torch.sigmoid({self.alpha!r} * g)" if self.alpha else activation(self.act, "g")
        lines.append(f"h = {act} * {f'(u + {self.shift!r})' if self.shift else 'u'}")
        return lines


def gated_mlp(gate: Gate, biases: tuple[str, ...], gate_scale: float = 1.0, down_scale: float = 1.0) -> Formula:
    """``down(act(gate(x)) * up(x))``; ``biases``: the roles that have one."""
    roles = ("gate_up", "down") if gate.packed else ("gate", "up", "down")
    shapes = {"gate_up": ("J", "H"), "gate": ("I", "H"), "up": ("I", "H"), "down": ("H", "I")}
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("M", "H")}
    for role in roles:
        inputs[f"{role}_weight"] = shapes[role]
        if role in biases:
            inputs[f"{role}_bias"] = shapes[role][:1]

    def call(role: str, operand: str) -> str:
        return f"F.linear({operand}, {role}_weight{f', {role}_bias' if role in biases else ''})"

    lines = [f"h = {call('gate_up', 'x')}"] if gate.packed else [f"g, u = {call('gate', 'x')}, {call('up', 'x')}"]
    if gate_scale != 1.0:
        lines.append(f"g = g * {gate_scale!r}")
    lines += gate.lines()
    lines.append(f"return {call('down', 'h')}{f' * {down_scale!r}' if down_scale != 1.0 else ''}")
    constraints = ("J == 2 * I",) if gate.packed else ()
    return Formula("mlp", inputs, {"y": ("M", "H")}, "\n".join(lines), constraints=constraints)


def mlp(act: str, biases: tuple[str, ...], transposed: bool = False) -> Formula:
    """``down(act(up(x)))``; ``transposed``: weights are [inputs, outputs]."""
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("M", "H")}
    for role, shape in (("up", ("I", "H")), ("down", ("H", "I"))):
        inputs[f"{role}_weight"] = shape[::-1] if transposed else shape
        if role in biases:
            inputs[f"{role}_bias"] = shape[:1]

    def call(role: str, operand: str) -> str:
        weight = f"{role}_weight.T" if transposed else f"{role}_weight"
        return f"F.linear({operand}, {weight}{f', {role}_bias' if role in biases else ''})"

    return Formula(
        "mlp",
        inputs,
        {"y": ("M", "H")},
        f"h = {call('up', 'x')}\nh = {activation(act, 'h')}\nreturn {call('down', 'h')}",
    )


def elementwise(act: str) -> Formula:
    """An activation by itself."""
    return Formula("activation", {"x": ("M", "N")}, {"y": ("M", "N")}, f"return {activation(act)}")


def elementwise_gate(act: str) -> Formula:
    """A product with an activated gate."""
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("M", "N"), "gate": ("M", "N")}
    return Formula("activation", inputs, {"y": ("M", "N")}, f"return x * {activation(act, 'gate')}")


def add_norm(
    kind: str, eps: float, casting: str, offset: float, weight: bool, bias: bool, residual_scale: float
) -> Formula:
    """A residual addition and the norm behind it: (norm(total), total)."""
    inner = norm(kind, eps, casting, offset, weight, bias)
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("M", "N"), "residual": ("M", "N")}
    inputs |= {name: axes for name, axes in inner.inputs.items() if name != "x"}
    added = f"x * {residual_scale!r}" if residual_scale != 1.0 else "x"
    body = f"x = residual + {added}\n{inner.body.replace('return ', 'y = ')}\nreturn y, x"
    return Formula(inner.op_type, inputs, {"y": ("M", "N"), "total": ("M", "N")}, body)


def qk_norm(kind: str, eps: float, casting: str, offset: float) -> Formula:
    """The same norm of queries and keys, with weights of their own."""
    inner = norm(kind, eps, casting, offset)
    body = "\n".join(f"    {line}" for line in inner.body.splitlines())
    body = f"def norm(x, weight):\n{body}\n\nreturn norm(q, q_weight), norm(k, k_weight)"
    inputs: dict[str, tuple[str, ...] | None] = {
        "q": ("Mq", "N"), "k": ("Mk", "N"), "q_weight": ("N",), "k_weight": ("N",)
    }  # fmt: skip
    outputs = {"q_normed": ("Mq", "N"), "k_normed": ("Mk", "N")}
    return Formula(inner.op_type, inputs, outputs, body)
