"""From a requirement to the ways of serving it: which kernel goes where, with which names and numbers."""

import inspect
from typing import Any

from torch import nn

from tilegym.errors import PatchError
from tilegym.integrate.requirement import Requirement
from tilegym.transformers.forwards import HeldFunction
from tilegym.transformers.general import Place
from tilegym.transformers.general import callers
from tilegym.transformers.general import resolve
from tilegym.transformers.general_rope import STYLES
from tilegym.transformers.patching import ALREADY_PATCHED

# What computes are called, and with them flags and files, where the op's own name says less.
COMPUTES = {
    "apply_rope_base": "rope",
    "fmha": "attn",
    "mla": "attn",
    "attention_sink": "attn",
    "gemma_attention": "attn",
    "silu_and_mul": "swiglu",
    "fused_moe": "moe",
    "cross_entropy": "loss",
    "chunk_gated_delta_rule": "gated_delta_rule",
    "recurrent_gated_delta_rule": "gated_delta_rule",
    "causal_conv1d_update": "causal_conv1d",
    "causal_conv1d_fn": "causal_conv1d",
}
_SPANNING = {
    "qk_norm": "the two norms are served by themselves",
    "add_norm": "the addition stands in the layer's forward; the norm is served by itself",
    "gate_mul": "the product stands in the middle of a forward",
    "routing": "the choice of experts stands in the middle of a forward",
    "linear_cross_entropy": "the output layer and the loss are called apart; the compute loss serves both",
}


def compute_of(requirement: Requirement) -> str:
    """The name of a requirement's compute, which its flag and its file have."""
    op = requirement.op
    if requirement.kind == "rms_norm_gated":
        return "rms_norm_gated"
    if requirement.kind in _SPANNING or not op:
        return requirement.kind
    return COMPUTES.get(op, op)


def ways(requirement: Requirement, model: nn.Module) -> tuple[list[tuple[str, Place]], str]:
    """The ways to serve a requirement of ``model``, the plainest first, as (op, place); why there are none, if so."""
    if not requirement.op:
        return [], "no op of TileGym computes it"
    if requirement.kind in _SPANNING:
        return [], _SPANNING[requirement.kind]
    if requirement.implementation.startswith("tilegym."):  # by a patch of the whole process
        return [], ALREADY_PATCHED
    make = _WAYS.get(requirement.kind)
    if make is None:
        return [], f"there is no way to put a kernel in the place of a {requirement.kind}"
    found = make(requirement, model)
    if isinstance(found, str):
        return [], found
    return found, ""


def _eps(requirement: Requirement, model: nn.Module) -> str | float:
    """The name under which the module holds its eps, else the number."""
    eps, module = requirement.parameters["eps"], model.get_submodule(requirement.modules[0])
    return next((name for name, value in vars(module).items() if value == eps and name[0] != "_"), eps)


def _rms_norm(requirement: Requirement, model: nn.Module) -> Any:
    said, roles = requirement.parameters, requirement.roles
    options = {"weight": roles.get("weight", ""), "eps": _eps(requirement, model)}
    options |= {"offset": said["offset"]} if said["offset"] else {}
    options |= {"bias": roles["bias"]} if "bias" in roles else {}
    found = []
    for casting in (said["casting"], "gemma" if said["casting"] == "llama" else "llama"):
        more = {} if casting == "llama" else {"casting": casting}
        found.append(("rms_norm", Place(requirement.implementation, "rms_norm", options | more)))
    return found


def _layer_norm(requirement: Requirement, model: nn.Module) -> Any:
    said, roles = requirement.parameters, requirement.roles
    options = {"weight": roles.get("weight", ""), "eps": _eps(requirement, model)}
    options |= {"bias": roles["bias"]} if "bias" in roles else {}
    options |= {"offset": said["offset"]} if said["offset"] else {}
    options |= {"casting": "llama"} if said["casting"] == "llama" and "weight" in roles else {}
    return [("layer_norm", Place(requirement.implementation, "layer_norm", options))]


def _rms_norm_gated(requirement: Requirement, model: nn.Module) -> Any:
    said, roles = requirement.parameters, requirement.roles
    if "weight" not in roles or "bias" in roles or said["offset"]:
        return "rms_norm_gated takes a weight alone"
    options = {"weight": roles["weight"], "eps": _eps(requirement, model), "activation": said["activation"]}
    options |= {} if said["norm_before_gate"] else {"norm_before_gate": False}
    return [("rms_norm_gated", Place(requirement.implementation, "rms_norm_gated", options))]


def _gated_mlp(requirement: Requirement, model: nn.Module) -> Any:
    said, roles = requirement.parameters, requirement.roles
    if said.get("dropout"):
        return "its dropout in training stands between the parts"
    act = {"activation": said["activation"]}
    if "gate_up" not in roles:
        op = "swiglu" if said["activation"] == "silu" else "geglu"
        options = {"gate": roles["gate"], "up": roles["up"], "down": roles["down"]} | act
        return [(op, Place(requirement.implementation, "gated_mlp", options))]
    if said["packed"] != "concatenated":
        return "its gate alternates with the other half in one weight"
    options = {"gate_up": roles["gate_up"], "down": roles["down"]} | act
    options |= {} if said["order"] == "gate, up" else {"order": said["order"]}
    return [(requirement.op, Place(requirement.implementation, "packed_mlp", options))]


def _mlp(requirement: Requirement, model: nn.Module) -> Any:
    said, roles = requirement.parameters, requirement.roles
    if said.get("dropout"):
        return "its dropout in training stands between the parts"
    options = {"up": roles["up"], "down": roles["down"], "activation": said["activation"]}
    return [(requirement.op, Place(requirement.implementation, "mlp", options))]


def _activation(requirement: Requirement, model: nn.Module) -> Any:
    options = {"activation": requirement.parameters["activation"]}
    return [(requirement.op, Place(requirement.implementation, "activation", options))]


def _linear(requirement: Requirement, model: nn.Module) -> Any:
    if requirement.implementation != f"{nn.Linear.__module__}.{nn.Linear.__qualname__}":
        return "it is no torch.nn.Linear"
    return [("linear", Place(requirement.implementation, "linear"))]


def _rope(requirement: Requirement, model: nn.Module) -> Any:
    said = requirement.parameters
    if said["style"] not in STYLES:
        return f"no kernel rotates in the style {said['style']}"
    function = _function(requirement, model)
    if isinstance(function, str):
        return function
    code = function.__code__
    options = {
        "parameters": code.co_varnames[: code.co_argcount],
        "roles": tuple(requirement.roles.items()),
        "style": said["style"],
    }
    options |= {"angles": said["angles"]} if said["angles"] not in ("full", "complex") else {}
    # What calls leave out is the function's default, also where this one was called with another.
    named = inspect.signature(function).parameters.get("unsqueeze_dim")
    heads_dim = named.default if named and isinstance(named.default, int) else said["heads_dim"]
    options |= {"heads_dim": heads_dim} if heads_dim != 1 else {}
    return [("apply_rope_base", Place(requirement.implementation, "rope", options, "function"))]


def _function(requirement: Requirement, model: nn.Module) -> Any:
    """The function of a requirement, or why it cannot be replaced in ``model``."""
    try:
        function = resolve(requirement.implementation)
    except PatchError as error:
        return str(error)
    held = any(value is function for module in model.modules() for value in vars(module).values())
    if not held and not callers(model, function):
        return f"no forward calls {function.__name__} by its name"
    return function


def _attention(requirement: Requirement, model: nn.Module) -> Any:
    function = _function(requirement, model)
    if isinstance(function, str):
        return function
    if "ALL_ATTENTION_FUNCTIONS" in function.__globals__ and function.__name__ == "eager_attention_forward":
        return [(requirement.op, Place(requirement.implementation, "attention", put="attention"))]
    return [(requirement.op, Place(requirement.implementation, "attention", put="function"))]


def _experts(requirement: Requirement, model: nn.Module) -> Any:
    said, roles = requirement.parameters, requirement.roles
    if "gate_up_weight" not in roles:
        return "its experts have no gate"
    if said["order"] != "gate, up":
        return "its gate stands behind the other half"
    act, alpha = said["activation"], said.get("alpha")
    if act == "quick_gelu":
        act, alpha = "silu", 1.702
    if alpha or said.get("shift"):
        if not (alpha and said.get("shift") == 1.0):
            return "fused_moe has a factor in the gate's sigmoid only together with a shift by one"
        act = "gpt_oss"
    elif act not in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        return f"fused_moe has no activation {act}"
    options = {"gate_up": roles["gate_up_weight"], "down": roles["down_weight"], "activation": act}
    options |= {name: roles[name] for name in ("gate_up_bias", "down_bias") if name in roles}
    options |= {"interleaved": True} if said["packed"] == "interleaved" else {}
    options |= {name: said[name] for name in ("transposed", "limit") if said.get(name)}
    options |= {"alpha": alpha} if alpha else {}
    return [("fused_moe", Place(requirement.implementation, "experts", options))]


def _loss(requirement: Requirement, model: nn.Module) -> Any:
    if not requirement.implementation.startswith("transformers.loss."):
        held = isinstance(getattr(model, "loss_function", None), HeldFunction)  # by a patch of the whole process
        return ALREADY_PATCHED if held else "the loss is written in the model's forward"
    options = {} if requirement.parameters["shift"] else {"shift": False}
    return [("cross_entropy", Place(requirement.implementation, "cross_entropy", options, "loss"))]


def _held(requirement: Requirement, model: nn.Module) -> Any:
    function = _function(requirement, model)
    if isinstance(function, str):
        return function
    options = {"original": requirement.implementation}
    return [(requirement.op, Place(requirement.implementation, requirement.op, options, put="function"))]


_WAYS = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rms_norm_gated": _rms_norm_gated,
    "gated_mlp": _gated_mlp,
    "mlp": _mlp,
    "activation": _activation,
    "linear": _linear,
    "rope": _rope,
    "attention": _attention,
    "experts": _experts,
    "loss": _loss,
    "gated_delta_rule": _held,
    "causal_conv1d": _held,
}
