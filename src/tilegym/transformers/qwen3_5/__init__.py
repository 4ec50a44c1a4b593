"""Qwen3.5, its model with experts, and Qwen3-Next: three layers of linear attention to one of gated attention.

``model_type`` "qwen3_5_text", "qwen3_5_moe_text" and "qwen3_next"; of the first two the language models alone.
"""

from collections.abc import Callable

from torch import nn

from tilegym.transformers import computes
from tilegym.transformers import parts
from tilegym.transformers.family import Compute
from tilegym.transformers.family import Family
from tilegym.transformers.forwards import describe
from tilegym.transformers.patching import PatchSet


def _gated_norm_in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
    from tilegym.transformers.qwen3_5 import attention

    cls, forward = family.class_of("RMSNormGated"), attention.gated_norm_forward(backend)
    fits = hasattr(cls.forward, "recipe") or attention.computes_gated_norm(cls)

    def choose(norm: nn.Module) -> Callable | str:
        return forward if fits else computes.CHANGED

    computes.replace_forwards(patches, model, cls, (), "rms_norm_gated", backend, choose)


def _gated_norm_in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
    from tilegym.transformers.qwen3_5 import attention

    cls = family.class_of("RMSNormGated")
    entry = computes.entry(describe(cls), "rms_norm_gated", backend)
    if hasattr(cls.forward, "recipe") or attention.computes_gated_norm(cls):
        patches.replace_method(cls, "forward", attention.gated_norm_forward(backend), entry)
    else:
        patches.skip(entry, computes.CHANGED)


def _of_attention(part: str) -> Compute:
    """A part of the gated attention: "rope", or "sigmoid_mul" with its output."""

    def why_not(family: Family) -> str:
        from tilegym.transformers.qwen3_5 import attention

        if part == "rope":
            fits = attention.computes_partial_rotation(getattr(family.modeling, attention.ROPE))
        else:
            fits = attention.computes_gated_attention(parts.original_of(family.class_of("Attention").forward))
        return "" if fits else computes.CHANGED

    def in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
        from tilegym.transformers.qwen3_5.attention import attention_forward

        cls, why = family.class_of("Attention"), why_not(family)
        parts.put_in_model(patches, model, cls, attention_forward, part, backend, lambda module: why)

    def in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
        from tilegym.transformers.qwen3_5.attention import attention_forward

        parts.put_in_class(patches, family.class_of("Attention"), attention_forward, part, backend, why_not(family))

    return Compute(part, in_model, in_class)


def _of_linear_attention(part: str) -> Compute:
    """A part of the linear attention: "causal_conv1d" or "gated_delta_rule"."""

    def why_not(family: Family) -> str:
        from tilegym.transformers.qwen3_5 import linear_attention

        return linear_attention.misfit(family.modeling, part)

    def in_model(patches: PatchSet, family: Family, backend: str | None, model: nn.Module) -> None:
        from tilegym.transformers.qwen3_5 import linear_attention

        def refuse(module: nn.Module) -> str:
            if why or part != "causal_conv1d" or module.activation in linear_attention.ACTIVATIONS:
                return why
            return f"its activation is {module.activation}, not silu"

        cls, why = family.class_of("GatedDeltaNet"), why_not(family)
        if linear_attention.calls(parts.original_of(cls.forward), part):
            factory = linear_attention.linear_attention_forward
            parts.put_in_model(patches, model, cls, factory, part, backend, refuse)
            return
        for path, module in model.named_modules():  # its functions are its own attributes
            if not isinstance(module, cls):
                continue
            entry, reason = computes.entry(path, part, backend), refuse(module)
            for name, function in linear_attention.functions(part, backend).items():
                if reason:
                    patches.skip(entry, reason)
                else:
                    patches.replace_attribute(module, linear_attention.ATTRIBUTES[name], function, entry)

    def in_class(patches: PatchSet, family: Family, backend: str | None) -> None:
        from tilegym.transformers.qwen3_5 import linear_attention

        cls, why = family.class_of("GatedDeltaNet"), why_not(family)
        if not why and not linear_attention.calls(parts.original_of(cls.forward), part):
            why = "in this transformers its functions are attributes of each layer: patch a model"
        parts.put_in_class(patches, cls, linear_attention.linear_attention_forward, part, backend, why)

    return Compute(part, in_model, in_class)


_LAYERS = (
    _of_attention("rope"),
    computes.RMS_NORM,
    Compute("rms_norm_gated", _gated_norm_in_model, _gated_norm_in_class),
    _of_linear_attention("causal_conv1d"),
    _of_linear_attention("gated_delta_rule"),
    _of_attention("sigmoid_mul"),
    computes.SWIGLU,
)
_MODEL = (computes.LINEAR, computes.ATTN, computes.GRAPH, computes.LOSS)
_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
_WITH_EXPERTS = (*_LAYERS, computes.MOE, *_MODEL)

QWEN3_5 = Family("qwen3_5_text", "Qwen3_5", _LAYERS + _MODEL, package="qwen3_5", norms=_NORMS, decode_step=True)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", "Qwen3_5Moe", _WITH_EXPERTS, package="qwen3_5_moe", norms=_NORMS, mlp=None, decode_step=True
)
QWEN3_NEXT = Family("qwen3_next", "Qwen3Next", _WITH_EXPERTS, norms=_NORMS, mlp=None, decode_step=True)
