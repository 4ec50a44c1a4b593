"""From a kernel and its arguments to a program, compiled once per signature."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import torch

from . import _cutile
from . import control  # noqa: F401  (these modules register how operations are evaluated)
from . import ops_arithmetic  # noqa: F401
from . import ops_atomic  # noqa: F401
from . import ops_memory  # noqa: F401
from . import ops_mma  # noqa: F401
from . import ops_reduce  # noqa: F401
from . import ops_shape  # noqa: F401
from . import ops_views  # noqa: F401
from . import refused
from .program import Program
from .signature import kernel_signature

_MAX_KEYS = 4096  # of arguments, per kernel; they are cheap to find again

_caches = weakref.WeakKeyDictionary()  # kernel function -> _KernelCache
_lock = threading.RLock()


class _KernelCache:
    def __init__(self):
        self.by_arguments = {}
        self.by_signature = {}


class Compiled:
    """A program with the signature that it was compiled for."""

    __slots__ = ("program", "signature")

    def __init__(self, program, signature):
        self.program = program
        self.signature = signature


def compiled(kernel, args) -> Compiled:
    """The program for a launch of ``kernel`` with ``args``, from the cache where there is one.

    Raises what cuTile's compiler raises for the kernel, with its message and line.
    """
    function = _cutile.kernel_function(kernel)
    cache = _caches.get(function)
    if cache is None:
        with _lock:
            cache = _caches.setdefault(function, _KernelCache())
    key = tuple(map(_argument_key, args))
    try:
        found = cache.by_arguments.get(key)
    except TypeError:  # an argument that is not hashable is none that a kernel takes
        kernel_signature(kernel, args)
        raise
    if found is not None:
        return found
    with _lock:
        signature = kernel_signature(kernel, args)
        signature_key = repr(signature.parameters)
        found = cache.by_signature.get(signature_key)
        if found is None:
            ir = _cutile.typed_ir(kernel, signature)
            refused.check(ir)
            found = Compiled(Program(ir), signature)
            cache.by_signature[signature_key] = found
        if len(cache.by_arguments) >= _MAX_KEYS:
            cache.by_arguments.clear()
        cache.by_arguments[key] = found
    return found


def _argument_key(arg):
    """What of an argument the signature can depend on."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.shape, arg.stride(), arg.data_ptr() % 16
    if isinstance(arg, np.ndarray):
        return arg.dtype.str, arg.shape, arg.strides, arg.ctypes.data % 16, arg.flags.writeable
    if isinstance(arg, (tuple, list)):
        return type(arg), tuple(map(_argument_key, arg))
    return type(arg), repr(arg) if isinstance(arg, float) else arg
