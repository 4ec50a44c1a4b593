"""What families share: norms, rotations, gated MLPs, experts, linears, attention, decoding as a graph, and the loss.

Each is a :class:`~tilegym.transformers.family.Compute`, with a function that patches one model and, where that can be,
one that patches transformers itself for the models made afterwards. A family whose parts need another treatment makes a
Compute of its own in its folder, from the same pieces.
"""

import functools
from collections.abc import Callable
from collections.abc import Collection
from typing import Any

from torch import nn

from tilegym.backend import name_of
from tilegym.errors import PatchError
from tilegym.errors import UnsupportedError
from tilegym.transformers import choices
from tilegym.transformers import layers
from tilegym.transformers import quantised_weights
from tilegym.transformers.family import Compute
from tilegym.transformers.family import Family
from tilegym.transformers.forwards import describe
from tilegym.transformers.forwards import with_globals
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

CHANGED = "in this transformers it computes something else"


def entry(where: str, compute: str, backend: str | None) -> Entry:
    return Entry(where, compute, name_of(backend))


def replace_forwards(
    patches: PatchSet,
    model: nn.Module,
    cls: type,
    names: tuple[str, ...],
    compute: str,
    backend: str | None,
    choose: Callable[[nn.Module], Callable | str],
    without: Collection[nn.Module] = (),
) -> None:
    """Gives the forward that ``choose`` returns to the modules that run ``cls.forward``.

    Skipped are those for which it returns a reason instead, and others that stand under one of ``names``; those of
    ``without``, and all that is in them, are not looked at.
    """
    found = False
    for path, module in model.named_modules(memo=set(without)):
        fits = isinstance(module, cls) and type(module).forward is cls.forward
        if not fits and path.rpartition(".")[2] not in names:
            continue
        found = True
        forward = choose(module) if fits else f"it is a {describe(type(module))}, not a {cls.__name__}"
        if isinstance(forward, str):
            patches.skip(entry(path, compute, backend), forward)
        else:
            patches.replace_forward(module, forward, entry(path, compute, backend))
    if not found and not without:
        patches.skip(entry(type(model).__name__, compute, backend), f"there is no {cls.__name__} in it")


def _formula_of(function: Callable, position: int, find: Callable[[], Any]) -> Any:
    """What ``find`` finds out about ``function``, or, if a patch stands there already, what that was made with."""
    return function.recipe[1][position] if hasattr(function, "recipe") else find()


# RMS norms.


def _norm_formula(cls: type[nn.Module]) -> layers.NormFormula | None:
    return _formula_of(cls.forward, 1, lambda: layers.find_rms_norm(cls))


def _rms_norm_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    cls = family.class_of("RMSNorm")
    formula = _norm_formula(cls)
    forward = layers.rms_norm_forward(backend, formula) if formula else CHANGED
    replace_forwards(patches, model, cls, family.norms, "rms_norm", backend, lambda norm: forward)


def _rms_norm_in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
    cls = family.class_of("RMSNorm")
    formula = _norm_formula(cls)
    if formula is None:
        patches.skip(entry(describe(cls), "rms_norm", backend), CHANGED)
    else:
        forward = layers.rms_norm_forward(backend, formula)
        patches.replace_method(cls, "forward", forward, entry(describe(cls), "rms_norm", backend))


RMS_NORM = Compute("rms_norm", _rms_norm_in_model, _rms_norm_in_class)


# Gated MLPs.


def _mlp_formula(cls: type[nn.Module]) -> layers.MLPFormula | None:
    return _formula_of(cls.forward, 2, lambda: layers.find_gated_mlp(cls.forward))


def gated_mlp(name: str, activations: tuple[str, ...]) -> Compute:
    """The gated MLPs of a family, if their activation is one of ``activations`` (see ``layers.find_activation``)."""

    def in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
        cls = family.class_of("MLP")
        formula = _mlp_formula(cls)

        def choose(mlp: nn.Module) -> Callable | str:
            if formula is None:
                return CHANGED
            function = getattr(mlp, formula.activation)
            activation = layers.find_activation(function)
            if activation in activations:
                return layers.gated_mlp_forward(backend, formula, activation)
            return f"its activation is {type(function).__name__}, not {' or '.join(activations)}"

        names = () if family.mlp is None else (family.mlp,)
        replace_forwards(patches, model, cls, names, name, backend, choose)

    def in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
        cls = family.class_of("MLP")
        formula = _mlp_formula(cls)
        if formula is None:
            patches.skip(entry(describe(cls), name, backend), CHANGED)
            return
        original = _formula_of(cls.forward, 0, lambda: cls.forward)
        forward = layers.gated_mlp_forward_if(original, backend, formula, activations)
        patches.replace_method(cls, "forward", forward, entry(describe(cls), name, backend))

    return Compute(name, in_model, in_class)


SWIGLU = gated_mlp("swiglu", ("silu",))
GEGLU = gated_mlp("geglu", ("gelu_tanh", "gelu"))


# Rotations.


def _rope_form(family: Family) -> str | None:
    """How the family's function rotates; None where that is unknown, or this transformers has no such function."""
    rotate = getattr(family.modeling, family.rope, None)
    return None if rotate is None else _formula_of(rotate, 1, lambda: layers.find_rope(rotate))


def _rope_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    cls, form = family.class_of("Attention"), _rope_form(family)
    forward: Callable | str = CHANGED
    if form is not None:
        try:
            forward = with_globals(cls.forward, ((family.rope, layers.rope_function(backend, form)),))
        except PatchError as error:
            forward = str(error)
    replace_forwards(patches, model, cls, (family.attention,), "rope", backend, lambda attention: forward)


def _rope_in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
    where, form = entry(f"{family.modeling.__name__}.{family.rope}", "rope", backend), _rope_form(family)
    if form is None:
        patches.skip(where, CHANGED)
    else:
        patches.replace_function(family.modeling, family.rope, layers.rope_function(backend, form), where)


ROPE = Compute("rope", _rope_in_model, _rope_in_class)


# Experts and the routers that choose them.


def _moe_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.ops import moe_interface
    from tilegym.transformers import experts

    def choose(router: nn.Module) -> Callable | str:
        try:
            return experts.routing_forward(backend, moe_interface.find_routing(router))
        except UnsupportedError as error:
            return str(error)

    replace_forwards(patches, model, family.class_of("TopKRouter"), (), "moe", backend, choose)
    where = entry(type(model).__name__, "moe", backend)
    found = [module for module in model.modules() if isinstance(module, family.class_of("Experts"))]
    try:
        for module in found:
            moe_interface.prepare_experts(module)
    except UnsupportedError as error:
        patches.skip(where, str(error))
        return
    if not found:
        patches.skip(where, f"there is no {family.class_of('Experts').__name__} in it")
    elif patches.use_experts(model, experts.NAMES[backend], where):
        patches.on_revert(functools.partial(experts.forget, model))


def _moe_in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
    from tilegym.transformers import experts

    router = family.class_of("TopKRouter")
    original = _formula_of(router.forward, 0, lambda: router.forward)
    forward = experts.routing_forward_of_class(original, backend)
    patches.replace_method(router, "forward", forward, entry(describe(router), "moe", backend))
    _choose_in_class(
        patches,
        family,
        "get_correct_experts_implementation",
        choices.experts_choice,
        choices.restore_experts,
        experts.NAMES[backend],
        entry(describe(family.class_of("PreTrainedModel")), "moe", backend),
    )


def _choose_in_class(
    patches: PatchSet, family: Family, method: str, choice: Callable, restore: Callable, name: str, where: Entry
) -> bool:
    cls = family.class_of("PreTrainedModel")
    original = getattr(cls, method)
    chosen = choice(_formula_of(original, 0, lambda: original), name)
    changed = patches.replace_method(cls, method, chosen, where)
    if changed:
        patches.on_revert(functools.partial(restore, chosen, name, cls))
    return changed


MOE = Compute("moe", _moe_in_model, _moe_in_class)


# Linears, attention, decoding.


def _linear_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    forward, served, tried = layers.linear_forward(backend), set(), {}
    for path, module in model.named_modules():
        if quantised_weights.put(patches, module, backend, entry(path, "linear", backend), tried):
            served.add(module)

    def choose(module: nn.Module) -> Callable | str:
        return forward if type(module) is nn.Linear else f"it is a {describe(type(module))}"

    replace_forwards(patches, model, nn.Linear, (), "linear", backend, choose, served)


LINEAR = Compute("linear", _linear_in_model)


def _attn_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.transformers import continuous_batching

    where = entry(type(model).__name__, "attn", backend)
    if getattr(model.config, "output_attentions", False):
        patches.skip(where, "its config asks for attention weights (output_attentions)")
    else:
        continuous_batching.use_attention(patches, backend, model, where)


def _attn_in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
    from tilegym.transformers import continuous_batching
    from tilegym.transformers import traced_masks
    from tilegym.transformers.attention import NAMES

    where = entry(describe(family.class_of("PreTrainedModel")), "attn", backend)
    method, name = "get_correct_attn_implementation", NAMES[backend]
    if _choose_in_class(patches, family, method, choices.attention_choice, choices.restore_attention, name, where):
        continuous_batching.support(patches, family.class_of("ForCausalLM"), backend)
        traced_masks.put_in_classes(patches, family.modeling)


ATTN = Compute("attn", _attn_in_model, _attn_in_class)


def _graph_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.transformers import decode_graph
    from tilegym.transformers import forward_graph
    from tilegym.transformers import graph_capture

    where = entry(type(model).__name__, "graph", backend)
    if not hasattr(model, "generate"):  # it embeds or classifies
        forward_graph.put(patches, model, where)
        return
    # torch.compile's wrapper has what the model in it has, but not as a method.
    wraps = not hasattr(type(model), "generate")
    why = "the model that it wraps generates: patch that one" if wraps else decode_graph.suits(model)
    if not why and model.config._attn_implementation not in decode_graph.ATTENTION.values():
        why = "its attention is not TileGym's"
    if not why and graph_capture.rotates_by_length(model):
        why = graph_capture.BY_LENGTH
    if why:
        patches.skip(where, why)
        return
    patches.replace_instance_method(model, "generate", decode_graph.generate, where)
    patches.on_revert(functools.partial(decode_graph.forget, model))
    if family.decode_step:
        decode_steps_in_model(patches, family, backend, model)


def decode_steps_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    """Lets layers of ``model``, whose parts are patched, run their decoding step in few launches (decode_layer.py)."""
    from tilegym.transformers import decode_layer
    from tilegym.transformers import decode_trial

    pairs = "kept" if ROPE in family.computes and _rope_form(family) == "pairs" else ""
    forward, cls = decode_layer.decode_forward(backend, pairs), family.class_of("DecoderLayer")
    rotary = getattr(model.base_model, "rotary_emb", None)
    tried: dict[tuple, str] = {}

    def choose(layer: nn.Module) -> Callable | str:
        why = decode_layer.misfit(layer)
        if why:
            return why
        kind = decode_trial.kind_of(layer)
        if kind not in tried:
            same = decode_trial.computes_the_same(layer, rotary, forward)
            tried[kind] = "" if same else "its step is not what the layer computes"
        return tried[kind] or forward

    replace_forwards(patches, model, cls, (), "decode_step", backend, choose)


GRAPH = Compute("graph", _graph_in_model)


# The loss.


def _loss_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    from tilegym.transformers import loss

    cls, where = family.class_of("ForCausalLM"), entry(type(model).__name__, "loss", backend)
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, cls)]
    if not found:
        patches.skip(where, f"there is no {cls.__name__} in it")
    elif not loss.computes_causal_lm_loss(ForCausalLMLoss):
        patches.skip(where, CHANGED)
    else:
        for path, module in found:
            where = entry(path or type(module).__name__, "loss", backend)
            if not loss.put_loss_function(patches, module, loss.loss_function(backend), ForCausalLMLoss, where):
                continue
            if type(module).forward is cls.forward:
                loss.put_late_logits(patches, module, where)
            else:
                patches.skip(where, f"its logits are computed: it is a {describe(type(module))}, not a {cls.__name__}")


def _loss_in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    from tilegym.transformers import loss

    cls = family.class_of("ForCausalLM")
    where = entry(describe(cls), "loss", backend)
    if loss.computes_causal_lm_loss(ForCausalLMLoss):
        loss.put_in_class(patches, cls, backend, ForCausalLMLoss, where)
    else:
        patches.skip(where, CHANGED)


LOSS = Compute("loss", _loss_in_model, _loss_in_class)


DENSE = (ROPE, RMS_NORM, SWIGLU, LINEAR, ATTN, GRAPH, LOSS)  # as Llama
WITH_EXPERTS = (ROPE, RMS_NORM, MOE, LINEAR, ATTN, GRAPH, LOSS)  # as Mixtral
