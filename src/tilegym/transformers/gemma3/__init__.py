"""Gemma 3's language model (``model_type`` "gemma3_text"): norms with an offset around everything, GELU, windows."""

from tilegym.transformers.computes import ATTN
from tilegym.transformers.computes import GEGLU
from tilegym.transformers.computes import GRAPH
from tilegym.transformers.computes import LINEAR
from tilegym.transformers.computes import LOSS
from tilegym.transformers.computes import RMS_NORM
from tilegym.transformers.computes import ROPE
from tilegym.transformers.family import Family

FAMILY = Family(
    "gemma3_text",
    "Gemma3",
    (ROPE, RMS_NORM, GEGLU, LINEAR, ATTN, GRAPH, LOSS),
    decode_step=True,
    package="gemma3",
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        "norm",
        "q_norm",
        "k_norm",
    ),
)
