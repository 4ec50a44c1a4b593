"""Families whose language models exist as parts of models that read images alone, such as Qwen2-VL's.

:func:`tilegym.apply` patches such a part, and those that are as a family of :mod:`.monkey_patch`, like Llama's in
LLaVA, with the family's computes; what is of the whole (attention, graph, loss) it finds out itself.
"""

from tilegym.transformers.computes import LINEAR
from tilegym.transformers.computes import RMS_NORM
from tilegym.transformers.computes import ROPE
from tilegym.transformers.computes import SWIGLU
from tilegym.transformers.family import Family
from tilegym.transformers.qwen3 import FAMILY as QWEN3

_COMPUTES = (ROPE, RMS_NORM, SWIGLU, LINEAR)


class _WithQwen2MLP(Family):
    def class_of(self, kind: str) -> type:
        return self.modeling.Qwen2MLP if kind == "MLP" else super().class_of(kind)


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _WithQwen2MLP("qwen2_vl_text", "Qwen2VL", _COMPUTES, package="qwen2_vl", decode_step=True),
        _WithQwen2MLP("qwen2_5_vl_text", "Qwen2_5_VL", _COMPUTES, package="qwen2_5_vl", decode_step=True),
        Family("qwen3_vl_text", "Qwen3VLText", _COMPUTES, package="qwen3_vl", norms=QWEN3.norms, decode_step=True),
    )
}
