"""Hidden states that come out of a convolution: laid out by tokens, once, instead of in every layer.

A convolution over an image or a sound gives its channels one behind the other; transposed, that is what the layers of
SigLIP or Whisper get, and each sum with a residual keeps it so. Every norm and every sum then reads with strides: of
SigLIP-So400m at 384 pixels, 16 images on an H100, that is 10 of 34 ms.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import is_made_by
from tilegym.transformers.forwards import place_of_forward
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.patching import ALREADY_PATCHED
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet


@torch.no_grad()
def first_strided(model: nn.Module, inputs: dict[str, Any]) -> str | None:
    """The path of the first module with modules in it that is given hidden states [B, S, C] with strided channels, when
    ``model`` is run on ``inputs``; None if there is none."""
    paths = {module: path for path, module in model.named_modules() if path}
    found: list[str] = []

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if any(map(_is_strided, (*args, *kwargs.values()))):
            found.append(paths[module])

    hooks = [
        module.register_forward_pre_hook(before, with_kwargs=True) for module in paths if next(module.children(), None)
    ]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point() and value.stride(2) != 1


def put(patches: PatchSet, model: nn.Module, path: str, where: Entry) -> None:
    """Gives the module at ``path`` of ``model`` its hidden states by tokens."""
    module = model.get_submodule(path)
    current = vars(module).get(place_of_forward(module))
    if is_made_by(by_tokens, current):
        patches.skip(where, ALREADY_PATCHED)
        return
    patches.replace_forward(module, by_tokens(function_of_forward(module)), where)


@reproducible
def by_tokens(forward: Callable) -> Callable:
    """``forward``, as a function of the module and its arguments, that is given all hidden states contiguous."""

    @functools.wraps(forward)
    def forward_by_tokens(self, *args, **kwargs):
        args = [x.contiguous() if _is_strided(x) else x for x in args]
        return forward(self, *args, **{n: x.contiguous() if _is_strided(x) else x for n, x in kwargs.items()})

    return forward_by_tokens
