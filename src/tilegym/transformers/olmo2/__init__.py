"""OLMo 2 (``model_type`` "olmo2"): norms behind attention and MLP, and over all of a token's queries and keys."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family(
    "olmo2",
    "Olmo2",
    DENSE,
    norms=("post_attention_layernorm", "post_feedforward_layernorm", "norm", "q_norm", "k_norm"),
    decode_step=True,
)
