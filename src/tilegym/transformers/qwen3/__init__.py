"""Qwen3 (``model_type`` "qwen3"): Llama's layout, with RMS norms over the head dimension of queries and keys."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family(
    "qwen3",
    "Qwen3",
    DENSE,
    norms=("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"),
    decode_step=True,
)
