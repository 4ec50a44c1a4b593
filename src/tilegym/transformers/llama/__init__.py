"""Llama (``model_type`` "llama")."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family("llama", "Llama", DENSE, decode_step=True)
