"""What transformers calls the cache, among the arguments of a model's forward and in its output: 5.24 renamed it."""

import inspect
from typing import Any

from transformers import GenerationMixin

_OLD, _NEW = "past_key_values", "cache"
CACHE = _OLD if _OLD in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else _NEW


def cache_argument(model_class: type) -> str:
    """The name in the forward of a class, whose code may be older than this transformers."""
    known = inspect.signature(model_class.forward).parameters
    return next((name for name in (CACHE, _OLD) if name in known), CACHE)


def cache_of(output: Any) -> Any | None:
    """The cache in a model's output; None if it has kept none."""
    return next((kept for name in (CACHE, _OLD) if (kept := getattr(output, name, None)) is not None), None)
