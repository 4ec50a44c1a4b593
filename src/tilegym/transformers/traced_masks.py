"""Masks of a model whose whole forward torch.compile traces: as compact as those of the model that runs as it comes.

transformers' mask functions look at values where they can, and while they are traced they cannot. Positions that a
model counts by itself, since its caller gave none, might then be those of packed texts, and a mask of all pairs of
tokens is written out for it; of a window they make a closure, into which the trace does not see
(:func:`tilegym.transformers.attention.causal_mask`). A body's forward knows better than both.
"""

import functools
import inspect
import types
from collections.abc import Callable

import torch
from torch import nn
from transformers import masking_utils

from tilegym.transformers.attention import WindowedCausal
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import held
from tilegym.transformers.forwards import is_made_by
from tilegym.transformers.forwards import names_of
from tilegym.transformers.forwards import place_of_forward
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.forwards import unwrapped
from tilegym.transformers.forwards import with_globals
from tilegym.transformers.patching import PatchSet
from tilegym.transformers.patching import is_foreign

_CAUSAL = masking_utils.create_causal_mask
_SLIDING = masking_utils.create_sliding_window_causal_mask
_POSITIONS = "position_ids"


@functools.cache
def _sliding_with_its_window() -> Callable:
    return with_globals(_SLIDING, (("sliding_window_causal_mask_function", WindowedCausal),))


@reproducible
def _unpacked(create: Callable) -> Callable:
    """A mask function of transformers' for positions that count one text's tokens, which it need not look at."""
    at = list(inspect.signature(create).parameters).index(_POSITIONS)

    def create_unpacked(*args, **kwargs):
        kwargs.pop(_POSITIONS, None)
        return create(*args[:at], None, *args[at + 1 :], **kwargs) if len(args) > at else create(*args, **kwargs)

    return create_unpacked


def _calls(forward: Callable) -> dict[str, Callable]:
    """The mask functions that a forward calls, and what stands for them in a trace, by name."""
    known = getattr(unwrapped(forward), "__globals__", {})
    found = {name: known.get(name) for name in names_of(forward)}
    traced = {_CAUSAL: _CAUSAL, _SLIDING: _sliding_with_its_window()}
    return {name: traced[f] for name, f in found.items() if inspect.isfunction(f) and f in traced}


@reproducible
def with_compact_masks(forward: Callable) -> Callable:
    """``forward`` of a body, as a function of the module and its arguments, whose masks are compact when traced."""
    calls = _calls(forward)
    windows = {name: f for name, f in calls.items() if f is not _CAUSAL}
    # Held, so that they are pickled by how they are made also where the function below is pickled by value.
    given = held(with_globals(forward, tuple(windows.items())) if windows else forward)
    counted = held(with_globals(forward, tuple((name, _unpacked(f)) for name, f in calls.items())))
    parameters = list(inspect.signature(forward).parameters)
    at = parameters.index(_POSITIONS) - 1 if _POSITIONS in parameters else None

    @functools.wraps(forward)
    def forward_with_compact_masks(self, *args, **kwargs):
        if not torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        positions = args[at] if at is not None and len(args) > at else kwargs.get(_POSITIONS)
        return (counted if positions is None else given).function(self, *args, **kwargs)

    forward_with_compact_masks.may_stay = True  # with any other attention it is the original
    return forward_with_compact_masks


def put(patches: PatchSet, model: nn.Module) -> None:
    """Gives the parts of ``model`` that make masks :func:`with_compact_masks`, as a part of its attention's patch."""
    for module in model.modules():
        current = vars(module).get(place_of_forward(module))
        forward = function_of_forward(module)
        if _calls(forward) and not is_foreign(module) and not is_made_by(with_compact_masks, current):
            patches.support(module, place_of_forward(module), with_compact_masks(forward))


def put_in_classes(patches: PatchSet, modeling: types.ModuleType) -> None:
    """As :func:`put`, in the classes of one of transformers' modules."""
    for cls in vars(modeling).values():
        if inspect.isclass(cls) and cls.__module__ == modeling.__name__ and "forward" in vars(cls):
            if _calls(cls.forward) and not is_made_by(with_compact_masks, cls.forward):
                patches.support(cls, "forward", with_compact_masks(cls.forward))
