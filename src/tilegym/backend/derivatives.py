"""Backward passes that cannot be differentiated themselves."""

import functools
from collections.abc import Callable

import torch

from tilegym.errors import UnsupportedError


def once_differentiable(backward: Callable) -> Callable:
    """Decorates the backward pass of an ``autograd.Function``: where it is to be differentiated, it is an error.

    With ``torch.autograd.function.once_differentiable`` that is none where no upstream gradient requires grad, as that
    of a loss, or where ``torch.autograd.grad`` is asked for gradients of some tensors: what depends on the inputs of
    the forward pass would then be missing in second derivatives, silently.
    """
    name = backward.__qualname__.partition(".")[0]

    @functools.wraps(backward)
    def wrapper(ctx, *upstream):
        # torch.compile raises an error of its own.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError(
                f"the backward pass of {name} ran with create_graph=True, but has no derivative: call the op with "
                'backend="pytorch", or in use_backend("pytorch")'
            )
        with torch.no_grad():
            return backward(ctx, *upstream)

    return wrapper
