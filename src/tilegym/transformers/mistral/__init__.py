"""Mistral (``model_type`` "mistral")."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family("mistral", "Mistral", DENSE, decode_step=True)
