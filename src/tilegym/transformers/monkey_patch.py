"""Puts TileGym's kernels into models of transformers, and takes them out again.

``apply(model)`` patches one loaded model; ``apply_tilegym_kernel_to_llama()`` and its sisters, without a model, patch
transformers itself, for the models made afterwards. Both return a :class:`~tilegym.transformers.patching.PatchSet`: a
report of what runs on which backend and what was left alone and why, which can be reverted.
"""

import functools
from collections.abc import Callable

from torch import nn

from tilegym.backend import assert_backend_available
from tilegym.backend import get_current_backend
from tilegym.errors import ModelError
from tilegym.errors import PatchError
from tilegym.transformers import layers
from tilegym.transformers.family import Family
from tilegym.transformers.forwards import describe
from tilegym.transformers.forwards import with_globals
from tilegym.transformers.llama import FAMILY as LLAMA
from tilegym.transformers.mistral import FAMILY as MISTRAL
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet
from tilegym.transformers.qwen2 import FAMILY as QWEN2
from tilegym.transformers.qwen3 import FAMILY as QWEN3

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def apply(
    model: nn.Module,
    use_cutile: bool = True,
    use_attn: bool = True,
    rope: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    linear: bool = True,
    graph: bool = True,
) -> PatchSet:
    """Puts TileGym's kernels into ``model``, whatever its family, and into nothing else in the process.

    Args:
        model: a model of transformers whose ``config.model_type`` is one of the supported families.
        use_cutile: run what is patched on the ``cutile`` backend; else on the one that is chosen when it runs.
        use_attn, rope, rms_norm, swiglu, linear: which computations to patch.
        graph: let ``generate`` replay its decoding steps as a CUDA graph; needs the attention, does nothing on a CPU.
            The graph's cache stays allocated for the next call until the patch is reverted.

    Returns:
        The report; ``revert()`` on it, or using it as a context manager, restores the model.

    Raises:
        ModelError: the model is of no supported family.
        PatchError: nothing in the model could be patched.
        BackendError: cuTile is asked for and not installed.
    """
    family = FAMILIES[_model_type(model, tuple(FAMILIES))]
    wanted = {"rope": rope, "rms_norm": rms_norm, "swiglu": swiglu, "linear": linear, "attn": use_attn, "graph": graph}
    return _patch(family, model, use_cutile, **wanted)


def revert(model: nn.Module | None = None) -> None:
    """Undoes what this module has patched in ``model``, or, without one, in transformers itself; if anything."""
    for patches in reversed(PatchSet.active(model)):
        if patches.maker == __name__:
            patches.revert()


def _for_family(family: Family) -> Callable[..., PatchSet]:
    def apply_to_family(
        rope: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        attn: bool = True,
        model: nn.Module | None = None,
        use_cutile: bool = False,
        linear: bool = True,
        graph: bool = True,
    ) -> PatchSet:
        if model is not None:
            _model_type(model, (family.model_type,))
        wanted = {"rope": rope, "rms_norm": rms_norm, "swiglu": swiglu, "linear": linear, "attn": attn, "graph": graph}
        return _patch(family, model, use_cutile, **wanted)

    apply_to_family.__name__ = apply_to_family.__qualname__ = f"apply_tilegym_kernel_to_{family.model_type}"
    apply_to_family.__doc__ = f"""Puts TileGym's kernels into ``model``, or into all {family.prefix} models to come.

    Without ``model`` transformers' own classes and functions are patched: norms, MLPs and the rotation of all
    {family.prefix} models in the process change, attention only of those made afterwards, unless they ask for another
    implementation than transformers' default; linear and graph need a model. Reverting reaches them all. Arguments,
    result and errors otherwise as for :func:`apply`.
    """
    return apply_to_family


apply_tilegym_kernel_to_llama = _for_family(LLAMA)
apply_tilegym_kernel_to_mistral = _for_family(MISTRAL)
apply_tilegym_kernel_to_qwen2 = _for_family(QWEN2)
apply_tilegym_kernel_to_qwen3 = _for_family(QWEN3)


def _model_type(model: nn.Module, supported: tuple[str, ...]) -> str:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in supported:
        what = f"model type {model_type!r}" if model_type else "no config.model_type"
        raise ModelError(f"{type(model).__name__} has {what}; supported here: {', '.join(supported)}")
    return model_type


def _patch(family: Family, model: nn.Module | None, use_cutile: bool, **wanted: bool) -> PatchSet:
    if use_cutile:
        assert_backend_available("cutile")
    backend = "cutile" if use_cutile else None
    patches = PatchSet(model, maker=__name__)
    patchers = _CLASS_PATCHERS if model is None else _MODEL_PATCHERS
    with patches.all_or_nothing():
        for compute in patchers:
            if wanted[compute]:
                patchers[compute](patches, family, backend, model)
        patches.require_match(family.modeling.__name__ if model is None else type(model).__name__)
    return patches


def _entry(where: str, compute: str, backend: str | None) -> Entry:
    return Entry(where, compute, backend or get_current_backend())


_CHANGED = "in this transformers it computes something else"


# One model.


def _replace_forwards(
    patches: PatchSet,
    model: nn.Module,
    cls: type,
    names: tuple[str, ...],
    forward: Callable | None,
    entry_at: Callable[[str], Entry],
    refuse: Callable[[nn.Module], str],
) -> None:
    """Gives ``forward`` to the modules that run ``cls.forward``.

    Skipped are those that ``refuse`` has a reason against, and others that stand under one of ``names``.
    """
    found = False
    for path, module in model.named_modules():
        fits = isinstance(module, cls) and type(module).forward is cls.forward
        if not fits and path.rpartition(".")[2] not in names:
            continue
        found = True
        why = refuse(module) if fits else f"it is a {describe(type(module))}, not a {cls.__name__}"
        if why:
            patches.skip(entry_at(path), why)
        else:
            patches.replace_forward(module, forward, entry_at(path))
    if not found:
        patches.skip(entry_at(type(model).__name__), f"there is no {cls.__name__} in it")


def _rms_norm_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    cls = family.class_of("RMSNorm")
    changed = "" if _is_ours(cls.forward) or layers.computes_rms_norm(cls.forward) else _CHANGED
    _replace_forwards(
        patches,
        model,
        cls,
        family.norms,
        layers.rms_norm_forward(backend),
        lambda path: _entry(path, "rms_norm", backend),
        lambda norm: changed,
    )


def _swiglu_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    cls = family.class_of("MLP")
    changed = "" if _is_ours(cls.forward) or layers.computes_gated_mlp(cls.forward) else _CHANGED

    def refuse(mlp: nn.Module) -> str:
        if changed or layers.is_silu(mlp.act_fn):
            return changed
        return f"its activation is {type(mlp.act_fn).__name__}, not SiLU"

    _replace_forwards(
        patches,
        model,
        cls,
        (family.mlp,),
        layers.swiglu_forward(backend),
        lambda path: _entry(path, "swiglu", backend),
        refuse,
    )


def _rope_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    cls, rotate = family.class_of("Attention"), getattr(family.modeling, family.rope)
    forward, why = None, _CHANGED
    if _is_ours(rotate) or layers.computes_rope(rotate):
        try:
            forward, why = with_globals(cls.forward, ((family.rope, layers.rope_function(backend)),)), ""
        except PatchError as error:
            why = str(error)
    _replace_forwards(
        patches,
        model,
        cls,
        (family.attention,),
        forward,
        lambda path: _entry(path, "rope", backend),
        lambda attention: why,
    )


def _linear_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    _replace_forwards(
        patches,
        model,
        nn.Linear,
        (),
        layers.linear_forward(backend),
        lambda path: _entry(path, "linear", backend),
        lambda module: "" if type(module) is nn.Linear else f"it is a {describe(type(module))}",
    )


def _graph_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.transformers import decode_graph

    entry = _entry(type(model).__name__, "graph", backend)
    why = "it does not generate" if not hasattr(model, "generate") else decode_graph.suits(model)
    if not why and model.config._attn_implementation not in decode_graph.ATTENTION.values():
        why = "its attention is not TileGym's"
    if why:
        patches.skip(entry, why)
        return
    patches.replace_instance_method(model, "generate", decode_graph.generate, entry)
    patches.on_revert(functools.partial(decode_graph.forget, model))
    _decode_steps_in_model(patches, family, backend, model)


def _decode_steps_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.transformers import decode_layer

    forward, cls = decode_layer.decode_forward(backend), family.class_of("DecoderLayer")
    rotary = getattr(model.base_model, "rotary_emb", None)
    tried: dict[type, str] = {}

    def refuse(layer: nn.Module) -> str:
        why = decode_layer.misfit(layer)
        if not why and type(layer) not in tried:
            same = decode_layer.computes_the_same(layer, rotary, forward)
            tried[type(layer)] = "" if same else "its step is not what the layer computes"
        return why or tried[type(layer)]

    _replace_forwards(patches, model, cls, (), forward, lambda path: _entry(path, "decode_step", backend), refuse)


def _attn_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.transformers.attention import NAMES

    entry = _entry(type(model).__name__, "attn", backend)
    if getattr(model.config, "output_attentions", False):
        patches.skip(entry, "its config asks for attention weights (output_attentions)")
    else:
        patches.use_attention(model, NAMES[backend], entry)


# Transformers itself, for models made afterwards.


def _rms_norm_in_class(patches: PatchSet, family: Family, backend: str | None, _: None) -> None:
    cls = family.class_of("RMSNorm")
    entry = _entry(describe(cls), "rms_norm", backend)
    if not _is_ours(cls.forward) and not layers.computes_rms_norm(cls.forward):
        patches.skip(entry, _CHANGED)
    else:
        patches.replace_method(cls, "forward", layers.rms_norm_forward(backend), entry)


def _swiglu_in_class(patches: PatchSet, family: Family, backend: str | None, _: None) -> None:
    cls = family.class_of("MLP")
    entry = _entry(describe(cls), "swiglu", backend)
    original = cls.forward.recipe[1][0] if _is_ours(cls.forward) else cls.forward
    if not layers.computes_gated_mlp(original):
        patches.skip(entry, _CHANGED)
    else:
        patches.replace_method(cls, "forward", layers.swiglu_forward_if_silu(original, backend), entry)


def _rope_in_class(patches: PatchSet, family: Family, backend: str | None, _: None) -> None:
    rotate = getattr(family.modeling, family.rope)
    entry = _entry(f"{family.modeling.__name__}.{family.rope}", "rope", backend)
    if not _is_ours(rotate) and not layers.computes_rope(rotate):
        patches.skip(entry, _CHANGED)
    else:
        patches.replace_function(family.modeling, family.rope, layers.rope_function(backend), entry)


def _attn_in_class(patches: PatchSet, family: Family, backend: str | None, _: None) -> None:
    from tilegym.transformers.attention import NAMES

    cls, method = family.class_of("PreTrainedModel"), "get_correct_attn_implementation"
    original = getattr(cls, method)
    original = original.recipe[1][0] if _is_ours(original) else original
    entry = _entry(describe(cls), "attn", backend)
    choice = layers.attention_choice(original, NAMES[backend])
    if patches.replace_method(cls, method, choice, entry):
        patches.on_revert(functools.partial(layers.restore_attention, choice, NAMES[backend]))


def _is_ours(function: Callable) -> bool:
    """Whether a patch of this module stands there already."""
    return hasattr(function, "recipe")


_MODEL_PATCHERS = {
    "rope": _rope_in_model,
    "rms_norm": _rms_norm_in_model,
    "swiglu": _swiglu_in_model,
    "linear": _linear_in_model,
    "attn": _attn_in_model,
    "graph": _graph_in_model,
}
_CLASS_PATCHERS = {
    "rope": _rope_in_class,
    "rms_norm": _rms_norm_in_class,
    "swiglu": _swiglu_in_class,
    "attn": _attn_in_class,
}
