"""The forwards and functions that are put in place of transformers', and what finds out which of them fits.

A forward that replaces another must compute the same thing: each ``find_*`` and ``computes_*`` runs what is there on a
few numbers and compares it with the formulas that there are, so that a class whose math differs, now or in a later
version of transformers, is refused instead of silently changed. Submodules are called, their weights never read: hooks,
biases, quantised linears and LoRA keep working.
"""

import contextlib
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch import nn

from tilegym.backend.selector import constant_while_compiling
from tilegym.ops import apply_rope_base
from tilegym.ops import geglu
from tilegym.ops import linear
from tilegym.ops import rms_norm
from tilegym.ops import silu_and_mul
from tilegym.ops import swiglu
from tilegym.ops.autocast import is_autocast
from tilegym.ops.modules import apply_rotary_pos_emb as rotate_first_dimensions
from tilegym.ops.modules import apply_rotary_pos_emb_of_pairs as rotate_pairs
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import reproducible


class NormFormula(NamedTuple):
    """How a module normalises: where it keeps eps, and offset and casting as in :func:`tilegym.ops.rms_norm`."""

    eps: str
    offset: float
    casting: str


NORMS = tuple(
    NormFormula(eps, offset, casting)
    for eps in ("variance_epsilon", "eps")
    for offset, casting in ((0.0, "llama"), (0.0, "gemma"), (1.0, "gemma"))
)


@reproducible
def rms_norm_forward(backend: str | None, formula: NormFormula) -> Callable:
    """Forward for a module with ``weight`` and eps."""
    eps, offset, casting = formula

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype is weight.dtype:
            return rms_norm(hidden_states, weight.shape, weight, getattr(self, eps), backend=backend)
        # A norm kept in fp32 in a bf16 model: the product is in the wider dtype.
        return weight * rms_norm(hidden_states, weight.shape, None, getattr(self, eps), backend=backend)

    def forward_in_fp32(self, hidden_states: Tensor) -> Tensor:
        weight, none = self.weight, None
        return rms_norm(
            hidden_states, weight.shape, weight, getattr(self, eps), none, none, offset, casting, backend=backend
        )

    return forward if casting == "llama" else forward_in_fp32


def arguments_of_norm(norm: nn.Module) -> tuple[Tensor, float, float, str]:
    """Weight, eps, offset and casting of a norm that has a forward of :func:`rms_norm_forward`."""
    _, (eps, offset, casting) = function_of_forward(norm).recipe[1]
    return norm.weight, getattr(norm, eps), offset, casting


class MLPFormula(NamedTuple):
    """A gated MLP: its linears and its activation. ``linears`` are those that are multiplied, or the one for both."""

    linears: tuple[str, ...]
    activation: str  # the attribute


MLPS = MLPFormula(("gate_proj", "up_proj"), "act_fn"), MLPFormula(("gate_up_proj",), "activation_fn")


@reproducible
def gated_mlp_forward(backend: str | None, formula: MLPFormula, activation: str) -> Callable:
    """Forward for a module with ``down_proj`` behind ``activation(gate) * up``, one of :func:`find_activation`."""
    approximate = "tanh" if activation == "gelu_tanh" else "none"

    def swiglu_forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), backend=backend))

    def geglu_forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), approximate, backend=backend))

    def packed_swiglu_forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden_states), backend=backend))

    def packed_geglu_forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(geglu(gate, up, approximate, backend=backend))

    if activation == "silu":
        return swiglu_forward if len(formula.linears) == 2 else packed_swiglu_forward
    return geglu_forward if len(formula.linears) == 2 else packed_geglu_forward


@reproducible
def gated_mlp_forward_if(
    original: Callable, backend: str | None, formula: MLPFormula, activations: tuple[str, ...]
) -> Callable:
    """:func:`gated_mlp_forward` for a whole class; instances with other activations keep what they compute."""
    forwards = {name: gated_mlp_forward(backend, formula, name) for name in activations}

    def forward(self, x: Tensor) -> Tensor:
        function = getattr(self, formula.activation)
        name = _activation_of(type(function), getattr(function, "__dict__", {}).get("approximate"))
        return forwards[name](self, x) if name in forwards else original(self, x)

    return forward


@constant_while_compiling
def _activation_of(cls: type, approximate: str | None) -> str | None:
    """:func:`find_activation` of a class whose other arguments have defaults; ``approximate``: as of ``nn.GELU``."""
    key = cls, approximate
    if key not in _activations:
        activation = None
        with contextlib.suppress(Exception):
            activation = cls() if approximate is None else cls(approximate=approximate)
        _activations[key] = find_activation(activation)
    return _activations[key]


_activations: dict[tuple[type, str | None], str | None] = {}


QUANTISED = "its weight is quantised"


@reproducible
def linear_forward(backend: str | None) -> Callable:
    """Forward for an ``nn.Linear``. Autocast casts the arguments of PyTorch's function only."""

    def forward(self, input: Tensor) -> Tensor:
        if is_autocast(input):
            return nn.functional.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias, backend=backend)

    forward.is_linear = True  # and nothing else: another way to compute it may stand in for it
    return forward


ROPES = ("halves", "first dimensions", "pairs")


@reproducible
def rope_function(backend: str | None, form: str) -> Callable:
    """Stands in for ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``; ``form`` is one of ROPES."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1):
        return apply_rope_base(q, k, cos, sin, None, unsqueeze_dim, backend=backend)

    def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1):
        return rotate_first_dimensions(q, k, cos, sin, unsqueeze_dim, backend=backend)

    def of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1):
        return rotate_pairs(q, k, cos, sin, unsqueeze_dim, backend=backend)

    return dict(zip(ROPES, (apply_rotary_pos_emb, partial, of_pairs), strict=True))[form]


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unround numbers between -2 and 2, the same in every call, on the CPU whatever the default device is."""
    count = torch.Size(shape).numel()
    return (2 * torch.sin(torch.arange(1.0, count + 1, device="cpu", dtype=torch.float32))).to(dtype).view(shape)


def _agrees(run: Callable[[], object], *expected: Tensor) -> bool:
    """Whether ``run()`` returns what is expected, exactly; a callable that needs other arguments does not agree."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got = run()
    except Exception:  # whatever it does with the stand-in that it is called with, it is not the formula
        return False
    got = got if isinstance(got, tuple) else (got,)
    return len(got) == len(expected) and all(
        isinstance(g, Tensor) and g.dtype is e.dtype and torch.allclose(g, e, rtol=1e-6, atol=1e-6)
        for g, e in zip(got, expected, strict=True)
    )


def find_rms_norm(cls: type[nn.Module]) -> NormFormula | None:
    """Which of NORMS an instance of ``cls`` computes; in bf16, where rounding shows."""
    x, weight = _numbers(4, 64, dtype=torch.bfloat16), _numbers(64, dtype=torch.bfloat16)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 0.5)
    for formula in NORMS:
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.weight = nn.Parameter(weight)
        setattr(module, formula.eps, 0.5)
        if formula.casting == "llama":
            expected = weight * normed.to(x.dtype)
        else:
            expected = (normed * (formula.offset + weight.float())).to(x.dtype)
        if _agrees(lambda module=module: cls.forward(module, x), expected):
            return formula
    return None


def find_gated_mlp(forward: Callable) -> MLPFormula | None:
    """Which of MLPS ``forward`` computes: ``down_proj(activation(gate) * up)``."""
    x, silu = _numbers(4, 8), nn.functional.silu
    stand_ins = {
        "gate_proj": lambda x: 2 * x,
        "up_proj": lambda x: x - 1,
        "gate_up_proj": lambda x: torch.cat((2 * x, x - 1), -1),
        "down_proj": lambda x: 3 * x,
    }
    for formula in MLPS:
        parts = {name: stand_ins[name] for name in (*formula.linears, "down_proj")}
        module = types.SimpleNamespace(**parts, **{formula.activation: silu})
        if _agrees(lambda module=module: forward(module, x), 3 * (silu(2 * x) * (x - 1))):
            return formula
    return None


def find_activation(activation: Callable) -> str | None:
    """ "silu", "gelu_tanh", "gelu", or None for another function."""
    x = 4 * _numbers(64)
    functions = {
        "silu": x * torch.sigmoid(x),
        "gelu_tanh": nn.functional.gelu(x, approximate="tanh"),
        "gelu": nn.functional.gelu(x),
    }
    return next((name for name, expected in functions.items() if _agrees(lambda: activation(x), expected)), None)


def find_rope(function: Callable) -> str | None:
    """Which of ROPES ``function(q, k, cos, sin)`` computes, with q and k [B, H, S, D].

    "halves" rotates the whole head, split into halves, by tables as wide as the head or as its half; "first dimensions"
    does so with as many dimensions as the tables are wide, and passes the others on; "pairs" rotates as many, each with
    its neighbour.
    """
    q, k, angle = _numbers(1, 2, 3, 8), _numbers(1, 1, 3, 8), _numbers(1, 3, 4)

    def tables(columns: int, repeats: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat([f(angle[..., :columns])] * repeats, -1) for f in (torch.cos, torch.sin))

    def rotated(x: Tensor, columns: int, pairs: bool = False) -> Tensor:
        cos, sin = angle[..., :columns].cos(), angle[..., :columns].sin()
        x, rest = x[..., : 2 * columns], x[..., 2 * columns :]
        x1, x2 = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        return torch.cat((torch.stack((y1, y2), -1).flatten(-2) if pairs else torch.cat((y1, y2), -1), rest), -1)

    tries = (
        ("first dimensions", tables(2, 2), 2),
        ("pairs", tables(2, 2), 2),
        ("halves", tables(4, 2), 4),
        ("halves", tables(4, 1), 4),
    )
    for form, (cos, sin), columns in tries:
        expected = (rotated(x, columns, form == "pairs") for x in (q, k))
        if _agrees(lambda cos=cos, sin=sin: function(q, k, cos, sin), *expected):
            return form
    return None


def computes_rope(function: Callable) -> bool:
    """Whether ``function(q, k, cos, sin)`` rotates half-split pairs of q and k, [B, H, S, D]."""
    return find_rope(function) in ("halves", "first dimensions")
