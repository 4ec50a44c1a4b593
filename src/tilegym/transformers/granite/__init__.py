"""Granite (``model_type`` "granite"): Llama's layout, with factors on embeddings, residuals, scores and logits."""

from tilegym.transformers.computes import DENSE
from tilegym.transformers.family import Family

FAMILY = Family("granite", "Granite", DENSE, decode_step=True)
