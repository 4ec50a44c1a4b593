"""Which attention and which experts a model gets when it is made: TileGym's, unless it asks for others."""

import weakref
from collections.abc import Callable

from torch import nn

from tilegym.transformers.forwards import reproducible


@reproducible
def attention_choice(original: Callable, name: str) -> Callable:
    """Stands in for ``get_correct_attn_implementation``: ``name`` becomes what a model gets unless it asks otherwise.

    A config that has been used once says "sdpa", as does one that was never asked about: while a model is being made,
    both mean transformers' default. Later calls, and any other name, are obeyed. The models that got ``name`` this way
    are in ``made`` of the function.
    """
    made: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def get_correct_attn_implementation(self, requested_attention=None, is_init_check=False, *args, **kwargs):
        if is_init_check and requested_attention in (None, "sdpa"):
            made.add(self)
            requested_attention = name
        return original(self, requested_attention, is_init_check, *args, **kwargs)

    get_correct_attn_implementation.made = made
    return get_correct_attn_implementation


def _made_of(choice: Callable, cls: type) -> list[nn.Module]:
    """Takes the models of class ``cls`` out of those that ``choice`` has made: families share the function."""
    models = [model for model in choice.made if isinstance(model, cls)]
    choice.made.difference_update(models)
    return models


def restore_attention(choice: Callable, name: str, cls: type) -> None:
    """Gives transformers' default back to the models of ``cls`` that got ``name`` by :func:`attention_choice`."""
    for model in _made_of(choice, cls):
        if model.config._attn_implementation == name:
            model.set_attn_implementation(choice.recipe[1][0](model, None))


@reproducible
def experts_choice(original: Callable, name: str) -> Callable:
    """Stands in for ``get_correct_experts_implementation`` as :func:`attention_choice` does for attention."""
    made: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def get_correct_experts_implementation(self, requested_experts=None, *args, **kwargs):
        # A model that is being made has no modules yet.
        if not self._modules and requested_experts in (None, "grouped_mm"):
            made.add(self)
            requested_experts = name
        return original(self, requested_experts, *args, **kwargs)

    get_correct_experts_implementation.made = made
    return get_correct_experts_implementation


def restore_experts(choice: Callable, name: str, cls: type) -> None:
    """Gives transformers' default back to the models of ``cls`` that got ``name`` by :func:`experts_choice`."""
    for model in _made_of(choice, cls):
        if model.config._experts_implementation == name:
            model.set_experts_implementation(choice.recipe[1][0](model, None))
