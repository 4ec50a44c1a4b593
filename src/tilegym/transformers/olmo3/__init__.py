"""OLMo 3 (``model_type`` "olmo3"): OLMo 2 with layers that see a window."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family(
    "olmo3",
    "Olmo3",
    DENSE,
    norms=("post_attention_layernorm", "post_feedforward_layernorm", "norm", "q_norm", "k_norm"),
    decode_step=True,
)
