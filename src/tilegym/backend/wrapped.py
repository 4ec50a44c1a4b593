"""Tensors that stand for others, which no kernel can read: DTensors, of which each process has a part, and the like.

They are of subclasses that say themselves what an operation on them does.
"""

from collections.abc import Iterable
from typing import Any

import torch

_SHAPES = "torch._subclasses.fake_tensor"
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.Size})


def is_wrapped(value: Any) -> bool:
    """Whether ``value`` is such a tensor."""
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return False
    kind = type(value)
    # Those of a mode that follows shapes stand for none.
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and kind.__module__ != _SHAPES


def any_wrapped(values: Iterable[Any]) -> bool:
    """Whether such a tensor is among ``values``, or in a list or tuple among them."""
    for value in values:
        if type(value) in _PLAIN:
            continue
        if any_wrapped(value) if isinstance(value, list | tuple) else is_wrapped(value):
            return True
    return False
