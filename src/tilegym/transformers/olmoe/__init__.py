"""OLMoE (``model_type`` "olmoe"): experts, and norms over all of a token's queries and keys."""

from tilegym.transformers.computes import WITH_EXPERTS
from tilegym.transformers.family import Family

FAMILY = Family(
    "olmoe",
    "Olmoe",
    WITH_EXPERTS,
    norms=("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"),
)
