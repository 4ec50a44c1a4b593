"""transformers' continuous batching (``generate_batch``, ``init_continuous_batching``) of a model with our attention.

Its keys and values lie in pages, which are written within the attention function, and it takes transformers' own
attention functions only: for as long as its manager runs, the model has one of these. All else of a patch stays.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from tilegym.errors import FallbackWarning
from tilegym.transformers.attention import NAMES
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet


def use_attention(patches: PatchSet, backend: str | None, model: nn.Module, where: Entry) -> None:
    """Lets ``model`` use TileGym's attention, but where transformers batches continuously."""
    if patches.use_attention(model, NAMES[backend], where):
        support(patches, model, backend)


def support(patches: PatchSet, owner: nn.Module | type, backend: str | None) -> None:
    """Gives a model or a class :func:`batching` in the place of transformers' method."""
    patches.support(owner, "init_continuous_batching", batching(backend))


@reproducible
def batching(backend: str | None) -> Callable:
    """An ``init_continuous_batching`` for which the model's attention is transformers' default one until the manager
    that it returns is stopped, with a FallbackWarning. One for each backend: patches that lie one over the other are
    told apart by their functions."""

    def init_continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import GenerationMixin

        ours = model.config._attn_implementation
        if ours not in NAMES.values():
            return GenerationMixin.init_continuous_batching(model, *args, **kwargs)
        model.set_attn_implementation(model.get_correct_attn_implementation(None))
        try:
            manager = GenerationMixin.init_continuous_batching(model, *args, **kwargs)
        except BaseException:
            model.set_attn_implementation(ours)
            raise
        theirs = model.config._attn_implementation
        warnings.warn(
            f"continuous batching of {type(model).__name__}: attention is transformers' {theirs!r} instead of "
            "TileGym's, which knows no pages of keys and values",
            FallbackWarning,
            stacklevel=2,
        )
        if "stop" not in vars(manager):  # a manager that is kept for the next session comes back here
            manager.stop = functools.partial(_stop, manager, model, ours)
        return manager

    return init_continuous_batching


def _stop(manager: Any, model: Any, ours: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return type(manager).stop(manager, *args, **kwargs)
    finally:
        # Unless the patch was reverted meanwhile.
        function = getattr(model.init_continuous_batching, "__func__", None)
        if getattr(function, "recipe", (None,))[0] is batching:
            model.set_attn_implementation(ours)
