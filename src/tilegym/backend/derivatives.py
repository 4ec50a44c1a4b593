"""The ``autograd.Function`` of the ops: backward passes that cannot be differentiated themselves, and what is given to
forward ones."""

import functools
from collections.abc import Callable

import torch

from tilegym.backend.wrapped import unreadable
from tilegym.errors import UnsupportedError

_REMEDY = 'call the op with backend="pytorch", or in use_backend("pytorch")'


class Function(torch.autograd.Function):
    """An ``autograd.Function`` whose eager calls do not look for what no kernel is ever given: arguments that a
    transform of :mod:`torch.func` has left behind. That took the host 3 of 6 us."""

    @classmethod
    def apply(cls, *args):
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)


def once_differentiable(backward: Callable) -> Callable:
    """Decorates the backward pass of an ``autograd.Function``: where it is to be differentiated, it is an error.

    With ``torch.autograd.function.once_differentiable`` that is none where no upstream gradient requires grad, as that
    of a loss, or where ``torch.autograd.grad`` is asked for gradients of some tensors: what depends on the inputs of
    the forward pass would then be missing in second derivatives, silently. An error, too, are upstream gradients that
    no kernel can read, as those of several backward passes at a time (``is_grads_batched``); those whose sign is still
    to be turned, which complex numbers leave behind, are written out first.
    """
    name = backward.__qualname__.partition(".")[0]

    @functools.wraps(backward)
    def wrapper(ctx, *upstream):
        if torch.compiler.is_compiling():  # which raises an error of its own
            with torch.no_grad():
                return backward(ctx, *upstream)
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"the backward pass of {name} ran with create_graph=True, but has no derivative: {_REMEDY}"
            )
        upstream = [None if gradient is None else gradient.resolve_neg() for gradient in upstream]
        why = unreadable(upstream)
        if why is not None:
            raise UnsupportedError(f"the backward pass of {name}: {why}: {_REMEDY}")
        return backward(ctx, *upstream)

    return wrapper


def of_caller(number: float) -> float:
    """``number``, before it is given to an ``autograd.Function``.

    torch.compile with dynamic=True leaves numbers open, defaults of parameters too, and makes one a part of the graph
    where it is first looked at. If that is within such a function, the next one that is given the same fails.
    """
    return 0.0 if number == 0 else number  # a look that changes nothing
