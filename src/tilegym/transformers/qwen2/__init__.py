"""Qwen2 (``model_type`` "qwen2")."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family("qwen2", "Qwen2", DENSE, decode_step=True)
