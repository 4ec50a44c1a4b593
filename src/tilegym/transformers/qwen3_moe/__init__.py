"""Qwen3-MoE (``model_type`` "qwen3_moe"): Qwen3 with experts, and gated MLPs in layers that have none."""

from tilegym.transformers.computes import ATTN
from tilegym.transformers.computes import GRAPH
from tilegym.transformers.computes import LINEAR
from tilegym.transformers.computes import LOSS
from tilegym.transformers.computes import MOE
from tilegym.transformers.computes import RMS_NORM
from tilegym.transformers.computes import ROPE
from tilegym.transformers.computes import SWIGLU
from tilegym.transformers.family import Family

FAMILY = Family(
    "qwen3_moe",
    "Qwen3Moe",
    (ROPE, RMS_NORM, SWIGLU, MOE, LINEAR, ATTN, GRAPH, LOSS),
    norms=("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"),
    mlp=None,
    decode_step=True,
)
