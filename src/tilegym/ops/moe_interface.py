"""A mixture of experts behind one function, and the function that transformers calls for a model's experts.

``experts_forward`` has the signature of the functions in ``transformers.integrations.moe``. With it registered there
(``ALL_EXPERTS_FUNCTIONS["tilegym"] = experts_forward``) and a model's ``config._experts_implementation`` set to
``"tilegym"``, every class of experts that transformers decorates with ``use_experts_implementation`` runs on
:func:`tilegym.ops.fused_moe`: what such a class computes between its two products is found out, not looked up by name.
"""

from typing import Any
from typing import NamedTuple

import torch

from tilegym.errors import UnsupportedError
from tilegym.ops.moe_ops import fused_moe
from tilegym.ops.moe_ops import moe_topk_routing
from tilegym.ops.ops import linear
from tilegym.ops.ops import silu_and_mul
from tilegym.ops.pytorch.moe_experts import ACTIVATIONS
from tilegym.ops.pytorch.moe_experts import activate


def moe_interface(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    *,
    routing: dict[str, Any] | None = None,
    experts: dict[str, Any] | None = None,
    shared_w1: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """A whole layer of experts: routing, experts, the weighted sum, and shared experts with silu, if there are any.

    Args:
        hidden_states: [..., H].
        router_logits: [T, E] for the T tokens of hidden_states.
        w1, w2: as in :func:`tilegym.ops.fused_moe`.
        top_k: experts a token.
        routing: options of :func:`tilegym.ops.moe_topk_routing`.
        experts: options of :func:`tilegym.ops.fused_moe`.
        shared_w1: [2S, H], gate above up, of the experts that every token goes through; shared_w2: [H, S].
        backend: for this call.

    Returns:
        [..., H]. Differentiable in hidden_states, router_logits and all weights.

    Raises:
        ValueError: shapes or options do not fit, or only one of the shared matrices is given.
        TypeError: dtypes do not fit.
    """
    if (shared_w1 is None) != (shared_w2 is None):
        raise ValueError("moe_interface: give both shared_w1 and shared_w2, or neither")
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    weights, ids = moe_topk_routing(router_logits, top_k, **(routing or {}), backend=backend)
    shared = None
    if shared_w1 is not None:
        shared = linear(
            silu_and_mul(linear(x, shared_w1, backend=backend), backend=backend), shared_w2, backend=backend
        )
    out = fused_moe(x, w1, w2, weights, ids, **(experts or {}), shared_output=shared, backend=backend)
    return out.view(hidden_states.shape)


class ExpertsFormula(NamedTuple):
    """What a module of experts computes between its products, as options of ``fused_moe``."""

    activation: str
    interleaved: bool
    alpha: float
    limit: float | None


FORMULA = "_tilegym_formula"  # the attribute in which a module keeps its own
PROBE_WIDTH = 32


def _attribute(module: torch.nn.Module, *names: str) -> float | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int | float):
            return float(value)
    return None


@torch.no_grad()
def find_formula(module: torch.nn.Module) -> ExpertsFormula:
    """The formula whose values are those of the module's own gate, on numbers far beyond any clamp.

    Args:
        module: experts as transformers makes them, decorated with ``use_experts_implementation``.

    Raises:
        UnsupportedError: no formula has these values, or the module has parts that ``fused_moe`` does not compute.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError("the experts have a norm behind them")
    gated = getattr(module, "has_gate", True)
    names = ("gate_up_proj" if gated else "up_proj", "down_proj")
    for name in names:
        weight = getattr(module, name, None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 3 or not weight.is_floating_point():
            raise UnsupportedError("the experts' weights are not floating-point tensors with three dimensions")
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(64, 2 * PROBE_WIDTH if gated else PROBE_WIDTH, generator=generator) * 6
    try:
        expected = module._apply_gate(probe) if gated else module.act_fn(probe)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise UnsupportedError("the experts' activation cannot be tried on a CPU") from error
    alpha = _attribute(module, "alpha", "swiglu_alpha")
    for limit in dict.fromkeys((_attribute(module, "limit", "swiglu_limit"), None)):
        for activation in ACTIVATIONS if gated else ACTIVATIONS[:-1]:
            for interleaved in (False, True) if gated else (False,):
                formula = ExpertsFormula(activation, interleaved, 1.702 if alpha is None else alpha, limit)
                gate, up = probe, None
                if gated:
                    gate, up = (probe[:, ::2], probe[:, 1::2]) if interleaved else probe.chunk(2, dim=-1)
                got = activate(gate, up, activation, formula.alpha, limit)
                if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-5):
                    return formula
    raise UnsupportedError("the experts' activation is none that fused_moe computes")


def prepare_experts(module: torch.nn.Module) -> ExpertsFormula:
    """:func:`find_formula`, kept in the module. Call it before ``torch.compile`` traces the module."""
    formula = find_formula(module)
    setattr(module, FORMULA, formula)
    return formula


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What ``forward`` of a transformers module of experts returns.

    Args:
        self: the module; its flags ``has_gate``, ``has_bias`` and ``is_transposed`` say how its weights are stored.
        hidden_states: [T, H].
        top_k_index: [T, k]; ``num_experts`` where another process has the expert.
        top_k_weights: [T, k].

    Returns:
        [T, H] in hidden_states' dtype. Differentiable in hidden_states, top_k_weights, weights and biases.

    Raises:
        UnsupportedError: the module computes something else; see :func:`find_formula`.
    """
    formula = getattr(self, FORMULA, None) or prepare_experts(self)
    gated, biased = getattr(self, "has_gate", True), getattr(self, "has_bias", False)
    w1, w2, b1, b2 = (self.gate_up_proj if gated else self.up_proj), self.down_proj, None, None
    if biased:
        b1, b2 = (self.gate_up_proj_bias if gated else self.up_proj_bias), self.down_proj_bias
    out = fused_moe(
        hidden_states.to(w1.dtype),  # autocast leaves norms in fp32
        w1,
        w2,
        top_k_weights,
        top_k_index,
        formula.activation,
        None,
        b1,
        b2,
        formula.interleaved,
        getattr(self, "is_transposed", False),
        formula.alpha,
        formula.limit,
    )
    return out.to(hidden_states.dtype)
