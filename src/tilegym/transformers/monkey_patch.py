"""Puts TileGym's kernels into models of transformers, and takes them out again.

``apply(model)`` patches one loaded model; ``apply_tilegym_kernel_to_llama()`` and its sisters, without a model, patch
transformers itself, for the models made afterwards. Both return a :class:`~tilegym.transformers.patching.PatchSet`: a
report of what runs on which backend and what was left alone and why, which can be reverted.
"""

import inspect
from collections.abc import Callable
from collections.abc import Iterable

from torch import nn

from tilegym.backend import PREFER_CUTILE
from tilegym.backend import assert_backend_available
from tilegym.errors import FlagError
from tilegym.errors import ModelError
from tilegym.transformers import generated
from tilegym.transformers.deepseek2 import DEEPSEEK_V2
from tilegym.transformers.deepseek2 import DEEPSEEK_V3
from tilegym.transformers.family import Family
from tilegym.transformers.family import model_in
from tilegym.transformers.gemma3 import FAMILY as GEMMA3
from tilegym.transformers.glm4 import FAMILY as GLM4
from tilegym.transformers.gpt_oss import FAMILY as GPT_OSS
from tilegym.transformers.granite import FAMILY as GRANITE
from tilegym.transformers.llama import FAMILY as LLAMA
from tilegym.transformers.mistral import FAMILY as MISTRAL
from tilegym.transformers.mixtral import FAMILY as MIXTRAL
from tilegym.transformers.olmo2 import FAMILY as OLMO2
from tilegym.transformers.olmo3 import FAMILY as OLMO3
from tilegym.transformers.olmoe import FAMILY as OLMOE
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet
from tilegym.transformers.patching import require_switches
from tilegym.transformers.phi3 import FAMILY as PHI3
from tilegym.transformers.qwen2 import FAMILY as QWEN2
from tilegym.transformers.qwen3 import FAMILY as QWEN3
from tilegym.transformers.qwen3_5 import QWEN3_5
from tilegym.transformers.qwen3_5 import QWEN3_5_MOE
from tilegym.transformers.qwen3_5 import QWEN3_NEXT
from tilegym.transformers.qwen3_moe import FAMILY as QWEN3_MOE

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GEMMA3,
        PHI3,
        OLMO2,
        OLMO3,
        OLMOE,
        GPT_OSS,
        MIXTRAL,
        GLM4,
        GRANITE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_NEXT,
    )
}


# What other families have, which are found out (tilegym.integrate), beside what those by hand do.
_OF_ANY_FAMILY = {
    "attn", "causal_conv1d", "gated_delta_rule", "geglu", "gelu", "graph", "layer_norm", "layout", "linear", "loss",
    "moe", "relu", "rms_norm", "rms_norm_gated", "rope", "swiglu",
}  # fmt: skip


def require_known(function: str, flags: Iterable[str], computes: Iterable[str] = ()) -> None:
    """Raises FlagError unless each of ``flags`` is a compute of some model's, or of ``computes``."""
    known = {compute.name for family in FAMILIES.values() for compute in family.computes}
    known |= {*_OF_ANY_FAMILY, *computes, "use_attn"}
    unknown = sorted(set(flags) - known)
    if unknown:
        raise FlagError(f"{function}: no family has {', '.join(unknown)}; flags are {', '.join(sorted(known))}")


def apply(model: nn.Module, use_cutile: bool = True, use_attn: bool = True, **flags: bool) -> PatchSet:
    """Puts TileGym's kernels into ``model``, whatever its family, and into nothing else in the process.

    Args:
        model: a model of transformers whose ``config.model_type`` is one of the supported families, or one that
            ``tilegym integrate`` has written a patch for; or one of peft's around such a model, which is patched then.
        use_cutile: run what is patched on the ``cutile`` backend, but for calls that were measured to be faster in
            PyTorch; else on the one that is chosen when it runs.
        use_attn: whether to patch attention; ``attn`` says the same.
        flags: whether to patch the other computes, by name; True for those that are not given. ``rope``, ``rms_norm``,
            ``swiglu`` or ``geglu``, ``moe`` (routers and experts) and ``linear`` say themselves what they are; flags
            for what a family does not have are ignored. ``graph`` lets ``generate`` replay its decoding steps as a CUDA
            graph; it needs the attention and does nothing on a CPU. The graph's cache stays allocated for the next call
            until the patch is reverted. ``loss`` takes the loss from hidden states: with labels, logits are computed
            only when somebody reads them (docs/training.md).

    Returns:
        The report; ``revert()`` on it, or using it as a context manager, restores the model.

    Raises:
        ModelError: the model is of no supported family.
        PatchError: nothing in the model could be patched.
        BackendError: cuTile is asked for and not installed.
        FlagError: no family has a compute of a flag's name; a TypeError, too.
        TypeError: a flag is neither True nor False.
    """
    require_switches("apply", use_cutile=use_cutile, use_attn=use_attn, **flags)
    model = model_in(model)
    model_type = getattr(getattr(model, "config", None), "model_type", None) or ""
    written = None if model_type in FAMILIES else generated.find(model_type)
    family = FAMILIES[_model_type(model, tuple(FAMILIES))] if written is None else None
    computes = set() if written is None else inspect.signature(written).parameters.keys() - {"model", "use_cutile"}
    require_known("apply", flags, computes)
    use_attn = use_attn and flags.get("attn", True)
    if written is not None:
        wanted = {name: value for name, value in {**flags, "attn": use_attn}.items() if name in computes}
        return written(model=model, use_cutile=use_cutile, **wanted)
    wanted = {compute.name: flags.get(compute.name, True) for compute in family.computes}
    return _patch(family, model, use_cutile, **{**wanted, "attn": use_attn})


def revert(model: nn.Module | None = None) -> None:
    """Undoes what this module has patched in ``model``, or, without one, in transformers itself; if anything."""
    for patches in reversed(PatchSet.active(None if model is None else model_in(model))):
        if patches.maker == __name__:
            patches.revert()


def _for_family(family: Family) -> Callable[..., PatchSet]:
    name = f"apply_tilegym_kernel_to_{family.name}"
    in_class = [compute.name for compute in family.computes if compute.in_class]
    in_model = [compute.name for compute in family.computes if not compute.in_class]
    defaults = {
        **dict.fromkeys(in_class, (bool, True)),
        "model": (nn.Module | None, None),
        "use_cutile": (bool, False),
        **dict.fromkeys(in_model, (bool, True)),
    }
    signature = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
            for name, (annotation, default) in defaults.items()
        ],
        return_annotation=PatchSet,
    )

    def apply_to_family(*args, **kwargs) -> PatchSet:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        asked = [compute for compute in in_model if bound.arguments.get(compute)]
        bound.apply_defaults()
        require_switches(name, **{flag: value for flag, value in bound.arguments.items() if flag != "model"})
        if bound.arguments["model"] is not None:
            bound.arguments["model"] = model_in(bound.arguments["model"])
            _model_type(bound.arguments["model"], (family.model_type,))
        patches = _patch(family, **bound.arguments)
        if bound.arguments["model"] is None:
            for compute in asked:
                patches.skip(Entry(family.modeling.__name__, compute), "it needs a model: pass model=")
        return patches

    apply_to_family.__name__ = apply_to_family.__qualname__ = name
    apply_to_family.__signature__ = signature
    apply_to_family.__doc__ = f"""Puts TileGym's kernels into ``model``, or into all {family.prefix} models to come.

    Without ``model`` transformers' own classes and functions are patched: {", ".join(in_class)}. Layers of all
    {family.prefix} models in the process change; attention and experts only in those made afterwards, unless they ask
    for another implementation than transformers' default. The others ({", ".join(in_model)}) need a model. Reverting
    reaches them all, but for copies, which keep their attention and experts. Each flag is a compute; arguments, result
    and errors otherwise as for :func:`apply`.
    """
    return apply_to_family


apply_tilegym_kernel_to_llama = _for_family(LLAMA)
apply_tilegym_kernel_to_mistral = _for_family(MISTRAL)
apply_tilegym_kernel_to_qwen2 = _for_family(QWEN2)
apply_tilegym_kernel_to_qwen3 = _for_family(QWEN3)
apply_tilegym_kernel_to_qwen3_moe = _for_family(QWEN3_MOE)
apply_tilegym_kernel_to_gemma3 = _for_family(GEMMA3)
apply_tilegym_kernel_to_phi3 = _for_family(PHI3)
apply_tilegym_kernel_to_olmo2 = _for_family(OLMO2)
apply_tilegym_kernel_to_olmo3 = _for_family(OLMO3)
apply_tilegym_kernel_to_olmoe = _for_family(OLMOE)
apply_tilegym_kernel_to_gpt_oss = _for_family(GPT_OSS)
apply_tilegym_kernel_to_mixtral = _for_family(MIXTRAL)
apply_tilegym_kernel_to_glm4 = _for_family(GLM4)
apply_tilegym_kernel_to_granite = _for_family(GRANITE)
apply_tilegym_kernel_to_deepseek_v2 = _for_family(DEEPSEEK_V2)
apply_tilegym_kernel_to_deepseek_v3 = _for_family(DEEPSEEK_V3)
apply_tilegym_kernel_to_qwen3_5 = _for_family(QWEN3_5)
apply_tilegym_kernel_to_qwen3_5_moe = _for_family(QWEN3_5_MOE)
apply_tilegym_kernel_to_qwen3_next = _for_family(QWEN3_NEXT)


def _model_type(model: nn.Module, supported: tuple[str, ...]) -> str:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in supported:
        what = f"model type {model_type!r}" if model_type else "no config.model_type"
        remedy = "monkey_patch.apply" if model_type in FAMILIES else "tilegym.apply"
        raise ModelError(
            f"{type(model).__name__} has {what}; supported here: {', '.join(supported)}"
            + (f". For others there is {remedy}(model)" if model_type else "")
        )
    return model_type


def _patch(family: Family, model: nn.Module | None, use_cutile: bool, **wanted: bool) -> PatchSet:
    if use_cutile:
        assert_backend_available("cutile")
    backend = PREFER_CUTILE if use_cutile else None
    patches = PatchSet(model, maker=__name__)
    with patches.all_or_nothing():
        for compute in family.computes:
            if not wanted.get(compute.name):
                continue
            if model is not None:
                compute.in_model(patches, family, backend, model)
            elif compute.in_class:
                compute.in_class(patches, family, backend)
        patches.require_match(family.modeling.__name__ if model is None else type(model).__name__)
        if model is not None:
            from tilegym.transformers import first_call

            first_call.put(patches, model)
    return patches
