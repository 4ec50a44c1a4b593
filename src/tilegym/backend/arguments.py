"""What arguments of an op should have been, looked at once its implementation has failed: what succeeds pays nothing.

Numbers come as numpy's, as tensors of one element and as whole floats, too, and tensors in what a transform of
torch.func has left around them. Not every implementation takes those.
"""

import inspect
import types
import typing
from typing import Any

import torch
from torch import Tensor

_NAMES = {int: "a whole number", float: "a number", bool: "True or False", Tensor: "a tensor", types.NoneType: "None"}


def plain_arguments(op: str, signature: inspect.Signature, args: tuple, kwargs: dict) -> inspect.BoundArguments | None:
    """The arguments of a call with plain numbers where the declaration asks for numbers, and tensors that are no longer
    a transform's; None if they are that already.

    Raises:
        TypeError: one is no number, or no tensor, where it has to be; the message names ``op`` and the argument.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None  # the error that the call has raised says so
    changed = False
    for name, value in bound.arguments.items():
        allowed = _allowed(signature.parameters[name].annotation)
        kinds = allowed & _NAMES.keys()
        if isinstance(value, Tensor):
            alive = torch._C._functorch.unwrap_if_dead(value)
            changed |= alive is not value
            bound.arguments[name] = value = alive
        if type(value) in kinds or isinstance(value, Tensor) and Tensor in kinds:
            continue
        plain = _plain(value, kinds)
        if plain is None and kinds != allowed:
            continue
        if plain is None:
            what = " or ".join(text for kind, text in _NAMES.items() if kind in allowed)
            given = f"a {type(value).__name__}" if isinstance(value, Tensor | list | tuple) else repr(value)
            raise TypeError(f"{op}: {name} must be {what}, it is {given}")
        changed |= plain is not value
        bound.arguments[name] = plain
    return bound if changed else None


def _allowed(annotation: Any) -> set:
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return set(typing.get_args(annotation)) if union else {annotation}


def _plain(value: Any, allowed: set) -> int | float | None:
    """A number for what is one but in type, of those that are allowed; None if there is none."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, int) and allowed & {int, float}:
        return value
    if isinstance(value, bool) and bool in allowed:
        return value
    if isinstance(value, float):
        return value if float in allowed else int(value) if int in allowed and value.is_integer() else None
    return None
