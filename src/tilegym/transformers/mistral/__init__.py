"""Mistral (``model_type`` "mistral")."""

from tilegym.transformers.family import Family

FAMILY = Family("mistral", "Mistral")
