"""transformers' continuous batching (``generate_batch``, ``init_continuous_batching``) of a model with our attention.

Its manager takes transformers' own attention functions only, by their names, and is made with one of these; then the
model gets ours, before the manager looks at what masks there have to be. A transformers that does it in another way
than those known to :mod:`tilegym.transformers.paged_attention` keeps its own until the manager is stopped.
"""

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from tilegym.errors import FallbackWarning
from tilegym.transformers import traced_masks
from tilegym.transformers.attention import NAMES
from tilegym.transformers.attention import name_for
from tilegym.transformers.attention import name_in_batching
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

SHORTEST_PAGE = 16  # keys of a page that the kernels read
# The last manager of each model: by reference, since it holds the model.
_managers: "weakref.WeakKeyDictionary[nn.Module, weakref.ref]" = weakref.WeakKeyDictionary()


def use_attention(patches: PatchSet, backend: str | None, model: nn.Module, where: Entry) -> None:
    """Lets ``model`` use TileGym's attention, in continuous batching and under torch.compile too."""
    if patches.use_attention(model, name_for(model, backend), where):
        support(patches, model, backend)
        traced_masks.put(patches, model)


def support(patches: PatchSet, owner: nn.Module | type, backend: str | None) -> None:
    """Gives a model or a class :func:`batching` in the place of transformers' method."""
    patches.support(owner, "init_continuous_batching", batching(backend))
    patches.on_revert(functools.partial(_end, owner))


@reproducible
def batching(backend: str | None) -> Callable:
    """An ``init_continuous_batching`` that batches with the model's own attention. Where transformers does not let it,
    the attention is its default one until the manager that is returned is stopped, with a FallbackWarning. One for each
    backend: patches that lie one over the other are told apart by their functions."""

    def init_continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
        return _begin(model, args, kwargs)

    return init_continuous_batching


def _begin(model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    from transformers import GenerationMixin

    ours = model.config._attn_implementation
    if ours not in NAMES.values():
        return GenerationMixin.init_continuous_batching(model, *args, **kwargs)
    name, config, hints = name_in_batching(ours), None, None
    try:
        if name is None:
            model.set_attn_implementation(model.get_correct_attn_implementation(None))
        else:
            bound = inspect.signature(GenerationMixin.init_continuous_batching).bind(model, *args, **kwargs)
            config, hints = _without_flash(model, bound.arguments), bound.arguments.get("workload_hints")
            args, kwargs = bound.args[1:], bound.kwargs
            # Older ones ask for a prefix, and take any name that has it.
            prefixed = name != ours
            model.set_attn_implementation(name if prefixed else model.get_correct_attn_implementation(None))
        manager = GenerationMixin.init_continuous_batching(model, *args, **kwargs)
        if name is not None:
            model.set_attn_implementation(name)
            _use_block_tables(manager, model.config.get_text_config(), config, hints)
    except BaseException:
        model.set_attn_implementation(ours)
        raise
    if name is None:
        warnings.warn(
            f"continuous batching of {type(model).__name__}: attention is transformers' "
            f"{model.config._attn_implementation!r} instead of TileGym's, which this transformers does not take",
            FallbackWarning,
            stacklevel=3,
        )
    else:
        _managers[model] = weakref.ref(manager)
    if "stop" not in vars(manager):  # a manager that is kept for the next session comes back here
        manager.stop = functools.partial(_stop, manager, model, ours)
    return manager


def _without_flash(model: Any, arguments: dict[str, Any]) -> Any:
    """Changes the arguments of ``init_continuous_batching`` so that it looks for no flash attention to switch to, which
    it might have to download. Returns the options that are meant."""
    from transformers import ContinuousBatchingConfig

    config = arguments.get("continuous_batching_config")
    if config is None:
        generation_config = arguments.get("generation_config") or model.generation_config
        config = getattr(generation_config, "continuous_batching_config", None)
        if isinstance(config, ContinuousBatchingConfig):  # transformers has a word to say about where it is
            return config
        config = ContinuousBatchingConfig()
    if hasattr(config, "auto_switch_to_flash"):
        arguments["continuous_batching_config"] = copied = copy.copy(config)
        copied.auto_switch_to_flash = False
    return config


def _use_block_tables(manager: Any, model_config: Any, config: Any, hints: Any) -> None:
    """Lets batches of single tokens read their pages by block tables, of the size that the options ``config`` say or
    leave to transformers, which turns them off for all but flash attention. It has none for layers with windows."""
    layer_types = getattr(model_config, "layer_types", None)
    if layer_types is None:
        layer_types = [getattr(model_config, "sliding_window", None) or "full_attention"]
    if any(kind != "full_attention" for kind in layer_types):
        return
    try:
        from transformers.generation.continuous_batching.initialization import resolve_using_hints
        from transformers.generation.continuous_batching.initialization import resolve_without_hints
    except ImportError:
        return
    resolved = manager.continuous_batching_config
    size = getattr(resolved, "page_size", None) or getattr(resolved, "block_size", 0)
    if size % SHORTEST_PAGE == 0 and resolved.max_blocks_per_request == 0:
        wanted = copy.deepcopy(config)
        resolve_using_hints(wanted, hints)
        resolve_without_hints(wanted)
        resolved.max_blocks_per_request = wanted.max_blocks_per_request


def _stop(manager: Any, model: Any, ours: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return type(manager).stop(manager, *args, **kwargs)
    finally:
        # Unless the patch was reverted meanwhile.
        function = getattr(model.init_continuous_batching, "__func__", None)
        if getattr(function, "recipe", (None,))[0] is batching:
            model.set_attn_implementation(ours)


def _end(owner: nn.Module | type) -> None:
    """Stops the managers of a model, or of models of a class, that batch with our attention: they make no masks, which
    any other attention would need."""
    for model, reference in list(_managers.items()):
        manager = reference()
        if manager is None or not (model is owner or (isinstance(owner, type) and isinstance(model, owner))):
            continue
        if manager.is_running():
            manager.stop(block=True)
        if getattr(model, "_cached_continuous_batching_manager", None) is manager:
            model.destroy_cached_continuous_batching_manager()
        del _managers[model]
