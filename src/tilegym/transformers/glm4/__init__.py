"""GLM-4 (``model_type`` "glm4"): norms before and behind attention and MLP, rotation of neighbouring dimensions."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family(
    "glm4",
    "Glm4",
    DENSE,
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "post_self_attn_layernorm",
        "post_mlp_layernorm",
        "norm",
    ),
    decode_step=True,
)
