"""Phi-3 and Phi-4 (``model_type`` "phi3"): q, k, v in one linear, gate and up in another, partial rotation."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family("phi3", "Phi3", DENSE, decode_step=True)
