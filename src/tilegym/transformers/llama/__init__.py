"""Llama (``model_type`` "llama")."""

from tilegym.transformers.family import Family

FAMILY = Family("llama", "Llama")
