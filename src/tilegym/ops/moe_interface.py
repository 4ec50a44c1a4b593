"""A mixture of experts behind one function, and the function that transformers calls for a model's experts.

``experts_forward`` has the signature of the functions in ``transformers.integrations.moe``. With it registered there
(``ALL_EXPERTS_FUNCTIONS["tilegym"] = experts_forward``) and a model's ``config._experts_implementation`` set to
``"tilegym"``, every class of experts that transformers decorates with ``use_experts_implementation`` runs on
:func:`tilegym.ops.fused_moe`: what such a class computes between its two products is found out, not looked up by name.
``router_forward`` does the same for the routers, the modules that choose the experts.
"""

import copy
import functools
import itertools
from typing import Any
from typing import NamedTuple

import torch

from tilegym.errors import UnsupportedError
from tilegym.ops.autocast import as_autocast_wants
from tilegym.ops.autocast import is_autocast
from tilegym.ops.moe_ops import fused_moe
from tilegym.ops.moe_ops import moe_topk_routing
from tilegym.ops.ops import linear
from tilegym.ops.ops import silu_and_mul
from tilegym.ops.pytorch.moe_experts import ACTIVATIONS
from tilegym.ops.pytorch.moe_experts import activate
from tilegym.ops.pytorch.moe_routing import SCORINGS
from tilegym.ops.pytorch.moe_routing import moe_topk_routing as routing_formula


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

    Under ``torch.autocast`` it computes in autocast's dtype, but for the routing.

    Args:
        hidden_states: [..., H].
        router_logits: [T, E] for the T tokens of hidden_states.
        w1, w2: as in :func:`tilegym.ops.fused_moe`.
        top_k: experts a token.
        routing: options of :func:`tilegym.ops.moe_topk_routing`.
        experts: options of :func:`tilegym.ops.fused_moe`. A ``shared_output`` is added to that of the shared experts.
        shared_w1: [2S, H], gate above up, of the experts that every token goes through; shared_w2: [H, S].
        backend: for this call.

    Returns:
        [..., H] in hidden_states' dtype (autocast's, where it is on). Differentiable in hidden_states, router_logits
        and all weights.

    Raises:
        ValueError: shapes or options do not fit, or only one of the shared matrices is given.
        TypeError: dtypes do not fit.
    """
    if (shared_w1 is None) != (shared_w2 is None):
        raise ValueError("moe_interface: give both shared_w1 and shared_w2, or neither")
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if router_logits.shape != (x.shape[0], w1.shape[0]):
        raise ValueError(
            f"moe_interface: router_logits must be {[x.shape[0], w1.shape[0]]} for hidden_states "
            f"{list(hidden_states.shape)} and {w1.shape[0]} experts, they are {list(router_logits.shape)}"
        )
    options = dict(experts or {})
    x, w1, w2, shared_w1, shared_w2 = _operands(options, x, w1, w2, shared_w1, shared_w2)
    weights, ids = moe_topk_routing(router_logits, top_k, **(routing or {}), backend=backend)
    if shared_w1 is not None:
        hidden = silu_and_mul(linear(x, shared_w1, backend=backend), backend=backend)
        shared, others = linear(hidden, shared_w2, backend=backend), options.get("shared_output")
        options["shared_output"] = shared if others is None else shared + others
    out = fused_moe(x, w1, w2, weights, ids, **options, backend=backend)
    return out.view(hidden_states.shape)


def _operands(options: dict[str, Any], *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """``tensors``, and in place those among the options of the experts, in the dtype that autocast wants."""
    names = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
    given = [t for t in tensors if t is not None]
    cast = iter(as_autocast_wants(*given, *(options[name] for name in names)))
    results = [None if t is None else next(cast) for t in tensors]
    options.update(zip(names, cast, strict=True))
    return results


class ExpertsFormula(NamedTuple):
    """What a module of experts computes between its products, as options of ``fused_moe``."""

    activation: str
    interleaved: bool
    alpha: float
    limit: float | None


FORMULA = "_tilegym_formula"  # the attribute in which a module of experts or a router keeps its own
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
    *,
    shared_output: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """What ``forward`` of a transformers module of experts returns.

    Args:
        self: the module; its flags ``has_gate``, ``has_bias`` and ``is_transposed`` say how its weights are stored.
        hidden_states: [T, H].
        top_k_index: [T, k]; ``num_experts`` where another process has the expert.
        top_k_weights: [T, k].
        shared_output: [T, H], added to it, or None.
        backend: for this call.

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
        shared_output,
        backend=backend,
    )
    return out.to(hidden_states.dtype)


class RouterFormula(NamedTuple):
    """How a router computes: its logits in fp32 or in its weight's dtype, and the options of ``moe_topk_routing``.

    An ``out_dtype`` of None is that of the hidden states.
    """

    wide: bool
    top_k: int
    scoring: str
    renormalize: bool
    corrected: bool
    num_groups: int
    topk_groups: int
    scaling_factor: float
    out_dtype: torch.dtype | None


def _router_logits(
    module: torch.nn.Module, hidden_states: torch.Tensor, wide: bool, backend: str | None
) -> torch.Tensor:
    x, weight, bias = hidden_states, module.weight, getattr(module, "bias", None)
    x = x.reshape(-1, weight.shape[1])
    if wide and len(x) == 1 and bias is None and x.dtype is weight.dtype:
        return linear(x, weight, None, torch.float32, backend=backend)
    if wide:
        return linear(x.float(), weight.float(), bias, backend=backend)
    if is_autocast(x):  # which casts for PyTorch's function only
        return torch.nn.functional.linear(x, weight, bias)
    return linear(x, weight, bias, backend=backend)


def _correction(module: torch.nn.Module) -> torch.Tensor | None:
    return getattr(module, "e_score_correction_bias", None)


@torch.no_grad()
def find_routing(module: torch.nn.Module) -> RouterFormula:
    """The routing whose choice and weights are those of the router itself, on random hidden states.

    Args:
        module: a router of transformers: ``weight`` [E, H], perhaps ``bias`` and ``e_score_correction_bias``, and a
            ``forward`` that gives logits, weights and indices.

    Raises:
        UnsupportedError: it is no such module, or no routing gives what it gives.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise UnsupportedError("the router has no floating-point weight with two dimensions")
    hidden = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        # By their forwards: hooks, as those by which transformers keeps the logits of routers, are not to see this.
        with torch.autocast(weight.device.type, enabled=False):
            own_logits, own_weights, _ = module.forward(hidden)
            # Choices are compared in fp32, where no two experts' scores are equal.
            module, hidden = copy.deepcopy(module).float(), hidden.float()
            logits, weights, ids = module.forward(hidden)
            expected = torch.nn.functional.linear(hidden, module.weight, getattr(module, "bias", None))
        fits = weights.shape == ids.shape and torch.allclose(logits, expected, rtol=1e-2, atol=1e-2)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        raise UnsupportedError("the router does not give logits, weights and indices") from error
    wide, out_dtype = own_logits.dtype != weight.dtype, own_weights.dtype
    if weight.dtype == torch.float32:
        wide, out_dtype = _of_16_bits(module, hidden, wide, out_dtype)
    if not fits or (wide and own_logits.dtype != torch.float32):
        raise UnsupportedError("the router's logits are not those of a linear layer")
    groups = int(_attribute(module, "num_group", "n_group") or 1), int(_attribute(module, "topk_group") or 1)
    scales = dict.fromkeys((_attribute(module, "routed_scaling_factor", "router_scaling_factor") or 1.0, 1.0))
    corrections = (True, False) if _correction(module) is not None else (False,)
    choices = itertools.product(SCORINGS, (False, True), corrections, dict.fromkeys((groups, (1, 1))), scales)
    order = ids.argsort(-1)
    for scoring, renormalize, corrected, (num_groups, topk_groups), scale in choices:
        formula = RouterFormula(
            wide, ids.shape[1], scoring, renormalize, corrected, num_groups, topk_groups, scale, out_dtype
        )
        try:
            got, got_ids = _routed(module, logits, formula, routing_formula)
        except ValueError:
            continue  # options that do not go together
        got_order = got_ids.argsort(-1)
        if torch.equal(ids.gather(1, order), got_ids.gather(1, got_order)) and torch.allclose(
            weights.gather(1, order).to(got), got.gather(1, got_order), rtol=1e-2, atol=1e-6
        ):
            return formula
    raise UnsupportedError("the router's choice is none that moe_topk_routing makes")


def _of_16_bits(
    module: torch.nn.Module, hidden: torch.Tensor, wide: bool, out_dtype: torch.dtype
) -> tuple[bool, torch.dtype | None]:
    """``wide`` and ``out_dtype`` of a router whose weight is in fp32, as transformers keeps some in models of 16 bits.

    Raises:
        UnsupportedError: it takes hidden states of 16 bits and computes in these.
    """
    try:
        with torch.autocast(hidden.device.type, enabled=False):
            logits, weights, _ = module.forward(hidden.bfloat16())
    except (RuntimeError, TypeError, ValueError):  # dtypes that differ
        return wide, out_dtype
    if logits.dtype != torch.float32:
        raise UnsupportedError("the router rounds its weight")
    return True, out_dtype if weights.dtype == out_dtype else None


def _routed(module: torch.nn.Module, logits: torch.Tensor, formula: RouterFormula, function: Any = moe_topk_routing):
    _, top_k, scoring, renormalize, corrected, *others = formula
    return function(logits, top_k, scoring, renormalize, _correction(module) if corrected else None, *others)


def prepare_router(module: torch.nn.Module) -> RouterFormula:
    """:func:`find_routing`, kept in the module. Call it before ``torch.compile`` traces the module."""
    formula = find_routing(module)
    setattr(module, FORMULA, formula)
    return formula


def router_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    *,
    formula: RouterFormula | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``forward`` of a transformers router returns; its chosen experts come by descending score.

    Args:
        self: the router, see :func:`find_routing`.
        hidden_states: [..., H].
        formula: how it computes; None: as :func:`prepare_router` has found out.
        backend: for this call.

    Returns:
        The logits [T, E], the weights [T, k] and the indices [T, k] of the experts.

    Raises:
        UnsupportedError: the router computes something else.
    """
    formula = formula or getattr(self, FORMULA, None)
    if formula is None:
        # Its own forward may be this function by now.
        raise UnsupportedError("the router is not prepared: call prepare_router before its forward is replaced")
    if formula.out_dtype is None:
        formula = formula._replace(out_dtype=hidden_states.dtype)
    logits = _router_logits(self, hidden_states, formula.wide, backend)
    return logits, *_routed(self, logits, formula, functools.partial(moe_topk_routing, backend=backend))
