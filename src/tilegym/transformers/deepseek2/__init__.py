"""DeepSeek-V2 and V3 (``model_type`` "deepseek_v2", "deepseek_v3"): latent attention, experts beside shared ones."""

from torch import nn

from tilegym.transformers import computes
from tilegym.transformers import parts
from tilegym.transformers.family import Compute
from tilegym.transformers.family import Family
from tilegym.transformers.patching import PatchSet

# Names of classes that are not the usual, the older behind the newer. Old versions route in the MLP itself.
_NAMES = {"TopKRouter": ("TopkRouter", "Moe"), "Experts": ("Experts", "NaiveMoe")}


class _Deepseek(Family):
    def class_of(self, kind: str) -> type:
        names = [name for name in _NAMES.get(kind, ()) if hasattr(self.modeling, self.prefix + name)]
        return super().class_of(names[0] if names else kind)


def _why_not(family: Family, part: str) -> str:
    """Why the attention of this transformers cannot take a part; empty if it can."""
    from tilegym.transformers.deepseek2 import attention

    original = parts.original_of(family.class_of("Attention").forward)
    if part == "rope":
        known = {name: getattr(family.modeling, name, None) for name in attention.ROTATIONS}
        fits = all(attention.computes_rotation(function, name) for name, function in known.items() if function)
    else:
        fits = attention.computes_latent_attention(family.modeling, family.prefix, original)
    return "" if fits else computes.CHANGED


def _rope_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.transformers.deepseek2.attention import attention_forward

    cls, why = family.class_of("Attention"), _why_not(family, "rope")
    parts.put_in_model(patches, model, cls, attention_forward, "rope", backend, lambda module: why)


def _rope_in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
    from tilegym.transformers.deepseek2.attention import attention_forward

    cls, why = family.class_of("Attention"), _why_not(family, "rope")
    parts.put_in_class(patches, cls, attention_forward, "rope", backend, why)


def _attn_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.transformers.deepseek2 import attention

    def refuse(module: nn.Module) -> str:
        if why or attention.expands_by_its_weight(module.kv_b_proj):
            return why
        return "its kv_b_proj is more than a weight (a bias, hook, adapter or quantisation)"

    cls, why = family.class_of("Attention"), _why_not(family, "attn")
    # The layers that are refused, and models that are told to use another attention, call it by this name.
    computes.ATTN.in_model(patches, family, backend, model)
    if not getattr(model.config, "output_attentions", False):
        parts.put_in_model(patches, model, cls, attention.attention_forward, "attn", backend, refuse)


def _attn_in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
    from tilegym.transformers.deepseek2.attention import attention_forward

    computes.ATTN.in_class(patches, family, backend)
    cls, why = family.class_of("Attention"), _why_not(family, "attn")
    parts.put_in_class(patches, cls, attention_forward, "attn", backend, why)


_COMPUTES = (
    Compute("rope", _rope_in_model, _rope_in_class),
    computes.RMS_NORM,
    computes.SWIGLU,
    computes.MOE,
    computes.LINEAR,
    Compute("attn", _attn_in_model, _attn_in_class),
    computes.GRAPH,
    computes.LOSS,
)
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "q_a_layernorm", "kv_a_layernorm")

DEEPSEEK_V2 = _Deepseek("deepseek_v2", "DeepseekV2", _COMPUTES, norms=_NORMS, mlp=None, decode_step=True)
DEEPSEEK_V3 = _Deepseek("deepseek_v3", "DeepseekV3", _COMPUTES, norms=_NORMS, mlp=None, decode_step=True)
