"""Mixtral (``model_type`` "mixtral"): Mistral with experts."""

from tilegym.transformers.computes import WITH_EXPERTS
from tilegym.transformers.family import Family

FAMILY = Family("mixtral", "Mixtral", WITH_EXPERTS, decode_step=True)
