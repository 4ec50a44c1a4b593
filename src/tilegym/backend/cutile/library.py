"""Makes launch functions known to ``torch.library``, so that compiled code can call them without a graph break."""

import functools
import hashlib
import inspect
from collections.abc import Callable

import torch
from torch._library.custom_ops import get_library_allowing_overwrite

from tilegym.backend.recording import Recordings


def compilable(fake: Callable, mutates: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Decorates a launch function that allocates and returns its outputs and changes no inputs but ``mutates``.

    Eager calls go straight to the function, or repeat what an earlier one did (:mod:`tilegym.backend.recording`): this
    serves forward and backward passes of training. While torch.compile traces, the call becomes the operator
    ``torch.ops.tilegym.<function name>``, with a hash of their file for functions outside of TileGym. The function's
    parameters are annotated with the types of ``torch.library.infer_schema`` and are passed by position.

    Args:
        fake: called like the function, returns empty tensors of the outputs' shapes, dtypes and strides.
        mutates: the parameters that the function changes in place.
    """

    def decorate(function: Callable) -> Callable:
        recordings = Recordings(inspect.signature(function), function, function.__name__)

        @functools.wraps(function)
        def recorded(*args):
            return recordings.call(*args)

        if mutates:
            operator = torch.library.custom_op(f"tilegym::{_name_of(function)}", recorded, mutates_args=mutates)
            operator.register_fake(fake)
        else:
            operator = _functional(_name_of(function), recorded, fake)

        @functools.wraps(function)
        def call(*args):
            return operator(*args) if torch.compiler.is_compiling() else recordings.call(*args)

        call.operator = operator
        return call

    return decorate


def _functional(name: str, function: Callable, fake: Callable) -> torch._ops.OpOverload:
    """An operator that changes none of its inputs, and that autograd never sees: an ``autograd.Function`` calls it.

    What ``torch.library.custom_op`` puts around one for autograd, and to look for aliases, takes the host longer than
    all else of a call in compiled code: 28 us of rms_norm, 8 without (two cores, a launch that does nothing).
    """
    library = get_library_allowing_overwrite("tilegym", name)  # a file may be loaded again
    schema = torch.library.infer_schema(function, mutates_args=())
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilegym::{name}", fake, lib=library)
    return getattr(torch.ops.tilegym, name).default


def _name_of(function: Callable) -> str:
    """The operator's name. A user's function, or a generated one, may have the name of one of TileGym's own, or of one
    in another file, and an operator replaces what had its name."""
    if function.__module__.split(".")[0] == "tilegym":
        return function.__name__
    file = hashlib.sha256(function.__code__.co_filename.encode()).hexdigest()[:12]
    return f"{function.__name__}_{file}"
