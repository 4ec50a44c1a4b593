"""Tensors that stand for others, which no kernel can read: DTensors, of which each process has a part, and the like."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.Size})


def is_wrapped(value: Any) -> bool:
    """Whether ``value`` is such a tensor: of a subclass that keeps its numbers in other tensors."""
    return type(value) not in _PLAIN and isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def any_wrapped(values: Iterable[Any]) -> bool:
    """Whether such a tensor is among ``values``, or in a list or tuple among them."""
    for value in values:
        if type(value) in _PLAIN:
            continue
        if any_wrapped(value) if isinstance(value, list | tuple) else is_wrapped(value):
            return True
    return False
