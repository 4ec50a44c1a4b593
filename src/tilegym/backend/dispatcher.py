"""One declaration an op, one implementation a backend, and the choice between them for every call.

``@dispatch(name)`` turns a declaration (signature, defaults, docstring, no body) into the public function.
``@register_impl(name, backend)`` adds an implementation, whose signature must be the declaration's. Calls that PyTorch
is known to serve faster go there (:mod:`tilegym.backend.slower`). Calls of cuTile's implementations that look like
earlier ones repeat what those launched (:mod:`tilegym.backend.recording`).
"""

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tilegym import env
from tilegym.backend import selector
from tilegym.backend import slower
from tilegym.backend.arguments import plain_arguments
from tilegym.backend.recording import Recordings
from tilegym.backend.selector import PREFER_CUTILE
from tilegym.backend.selector import eager_backend
from tilegym.backend.wrapped import unreadable
from tilegym.backend.wrapped import untraceable
from tilegym.errors import BackendError
from tilegym.errors import FallbackWarning
from tilegym.errors import RegistrationError
from tilegym.errors import UnsupportedError

FALLBACK_BACKEND = "pytorch"
RECORDED_BACKEND = "cutile"
Observer = Callable[[str, str], contextlib.AbstractContextManager]


class Op:
    """A declared op: its name, its declaration, and its implementations by backend."""

    def __init__(self, name: str, declaration: Callable) -> None:
        self.name = name
        self.declaration = declaration
        self.signature = inspect.signature(declaration)
        self.impls: dict[str, Callable] = {}
        self.is_slower = slower.lookup_of(name)
        # By implementation. Calls that name their backend do not go to PyTorch for being slower there, others may.
        self.chosen_recordings: dict[Callable, Recordings] = {}
        self.preferred_recordings: dict[Callable, Recordings] = {}
        self.named_recordings: dict[Callable, Recordings] = {}

    def register(self, backend: str, impl: Callable) -> None:
        expected, got = _shape_of(self.signature), _shape_of(inspect.signature(impl))
        if expected != got:
            raise RegistrationError(
                f"{impl.__module__}.{impl.__qualname__} cannot implement op {self.name!r} for backend {backend!r}: "
                f"its signature is {inspect.signature(impl)}, the declaration's is {self.signature}; "
                "names, order, kinds and defaults must be the same"
            )
        self.impls[backend] = _without_autocast(impl) if backend == FALLBACK_BACKEND else impl
        if backend == RECORDED_BACKEND:
            for kept, how in (
                (self.chosen_recordings, None),
                (self.preferred_recordings, selector.PREFER_CUTILE),
                (self.named_recordings, backend),
            ):
                known = self.is_slower is not None and how != backend
                elsewhere = functools.partial(self._settled, impl, how) if known else None
                kept[impl] = Recordings(self.signature, functools.partial(self.serve, how), self.name, elsewhere)

    def _faster(self, args: tuple, kwargs: dict[str, Any]) -> Callable | None:
        """The implementation that serves a call faster than cuTile's does, if one is known to."""
        if self.is_slower is None or not self.is_slower(args, kwargs):
            return None
        return self.impls.get(FALLBACK_BACKEND)

    def _settled(
        self, impl: Callable, how: str | None, args: tuple, kwargs: dict[str, Any], gradients: bool
    ) -> Callable | None:
        """What serves calls like this one, if that need not be found out each time: PyTorch, where it is faster, or
        ``impl``, where gradients are wanted. Kernels alone are recorded."""
        faster = self._faster(args, kwargs)
        if faster is not None or not gradients or unreadable((*args, *kwargs.values())) is not None:
            return faster
        return functools.partial(self._call, impl, RECORDED_BACKEND, how)

    def serve(self, backend: str | None, /, *args, **kwargs) -> Any:
        """Calls the implementation of ``backend``, None for the one that is chosen now."""
        chosen = selector.name_of(backend)
        named = backend is not None and backend != selector.PREFER_CUTILE
        if not named and chosen == "cutile" and self._faster(args, kwargs) is not None:
            chosen = FALLBACK_BACKEND
        impl = self.impls.get(chosen)
        # Those who chose for longer than this call were told already whether the backend can run.
        if impl is None or named and not _can_run(chosen):
            return self.call_without(chosen, args, kwargs)
        if chosen != FALLBACK_BACKEND:
            if is_compiling():
                why = untraceable(forward_ad._current_level)
            else:
                why = unreadable((*args, *kwargs.values()))
            if why is not None:
                return self.call_without(chosen, args, kwargs, why)
        return self._call(impl, chosen, backend, *args, **kwargs)

    def _call(self, impl: Callable, chosen: str, backend: str | None, /, *args, **kwargs) -> Any:
        """Calls ``impl``, that of ``chosen``, for a call that asked for ``backend``; others serve what it refuses."""
        try:
            if _observer is None:
                return impl(*args, **kwargs)
            with _observer(self.name, chosen):
                return impl(*args, **kwargs)
        except UnsupportedError as reason:
            return self.call_without(chosen, args, kwargs, reason)
        except Exception as error:
            named = str(error).startswith(f"{self.name}: ")
            plain = None if named or is_compiling() else plain_arguments(self.name, self.signature, args, kwargs)
            if plain is None:
                raise
        return self.serve(backend, *plain.args, **plain.kwargs)

    def call_without(self, backend: str, args: tuple, kwargs: dict, reason: UnsupportedError | None = None) -> Any:
        """Serves a call that ``backend`` has no implementation for, or refused with ``reason``."""
        why = reason.args[0] if reason is not None and reason.args else None
        _check_fallback(self.name, backend, why)
        return self.impls[FALLBACK_BACKEND](*args, **kwargs)


_ops: dict[str, Op] = {}
_warned: set[tuple[str, str, str]] = set()
_observer: Observer | None = None


def _without_autocast(impl: Callable) -> Callable:
    """``impl`` in the dtypes that it is given, as kernels are: ``torch.autocast`` casts for PyTorch's functions."""

    @functools.wraps(impl)
    def call(*args, **kwargs):
        if not torch._C._is_any_autocast_enabled():
            return impl(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return impl(*args, **kwargs)

    return call


def _shape_of(signature: inspect.Signature) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def _callers_inside() -> int:
    """How many of the caller's frames, its own among them, are this package's: the next one called the op."""
    frame, count = sys._getframe(1), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tilegym.backend"):
        frame, count = frame.f_back, count + 1
    return count


@selector.constant_while_compiling
def _can_run(backend: str) -> bool:
    return selector.unavailable_reason(backend) is None


@selector.constant_while_compiling
def _check_fallback(name: str, backend: str, why: str | None) -> None:
    """Warns once that ``backend`` does not serve op ``name``, or raises if nothing else may or can."""
    implemented = sorted(_ops[name].impls)
    if backend not in selector.known_backends():
        raise BackendError(f"op {name!r}: {selector.unavailable_reason(backend)}")
    why = why or selector.unavailable_reason(backend)
    if why is None:
        why = "it does not support this call" if backend in implemented else "it has no implementation of this op"
    if backend == FALLBACK_BACKEND or FALLBACK_BACKEND not in implemented:
        others = ", ".join(b for b in implemented if b != backend) or "no other backend"
        raise UnsupportedError(f"op {name!r} on backend {backend!r}: {why}; it is implemented for {others}")
    if env.disable_fallback():
        raise UnsupportedError(
            f"op {name!r} on backend {backend!r}: {why}; unset DISABLE_FALLBACK to let the pytorch backend serve it"
        )
    if (name, backend, why) not in _warned:
        _warned.add((name, backend, why))
        text = f"op {name!r}: {FALLBACK_BACKEND} instead of {backend}: {why}"
        warnings.warn(text, FallbackWarning, stacklevel=_callers_inside() + 1)


def dispatch(name: str) -> Callable[[Callable], Callable]:
    """Declares op ``name``: the decorated function gives signature, defaults and docstring, and is never run.

    The public function takes ``backend=`` besides, for one call.

    Raises:
        RegistrationError: an op of this name is declared already.
    """

    def decorate(declaration: Callable) -> Callable:
        if name in _ops:
            raise RegistrationError(f"op {name!r} is declared already, by {_ops[name].declaration.__module__}")
        op = _ops[name] = Op(name, declaration)
        impls, chosen_recordings, named_recordings = op.impls, op.chosen_recordings, op.named_recordings
        preferred_recordings = op.preferred_recordings

        @functools.wraps(declaration)
        def call(*args, backend: str | None = None, **kwargs):
            # What runs from here on costs every call, on the host. Compiled code sees no recordings.
            if is_compiling() or _observer is not None or forward_ad._current_level >= 0:
                return op.serve(backend, *args, **kwargs)
            if backend is None:
                recordings = chosen_recordings.get(impls.get(eager_backend()))
            elif backend == PREFER_CUTILE:
                recordings = preferred_recordings.get(impls.get(RECORDED_BACKEND))
            else:
                recordings = named_recordings.get(impls.get(backend))
            if recordings is None:
                return op.serve(backend, *args, **kwargs)
            return recordings.call(*args, **kwargs) if kwargs else recordings.call(*args)

        backend_parameter = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None)
        call.__signature__ = op.signature.replace(parameters=[*op.signature.parameters.values(), backend_parameter])
        call.op = op
        return call

    return decorate


def register_impl(name: str, backend: str) -> Callable[[Callable], Callable]:
    """Registers the decorated function as op ``name``'s implementation for ``backend``.

    A ``backend`` that is not known yet becomes one that is always available; to give it a probe, call
    :func:`tilegym.backend.register_backend` first.

    Raises:
        RegistrationError: no such op is declared, or the signature is not the declaration's.
    """

    def decorate(impl: Callable) -> Callable:
        _op(name, RegistrationError).register(backend, impl)
        if backend not in selector.known_backends():
            selector.register_backend(backend)
        return impl

    return decorate


@contextlib.contextmanager
def observe_calls(observer: Observer) -> Iterator[None]:
    """Within the block, runs every dispatched call inside ``observer(op, backend)``, a context manager.

    One observer at a time, for all threads; ops called by other ops are seen too.
    """
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def _op(name: str, error: type[Exception] = BackendError) -> Op:
    if name not in _ops:
        raise error(f"no op is called {name!r}; there are {', '.join(sorted(_ops))}")
    return _ops[name]


def get_available_backends_for_op(name: str) -> list[str]:
    """The backends that implement op ``name`` and can run on this machine."""
    return [b for b in sorted(_op(name).impls) if selector.is_backend_available(b)]


def has_backend_impl(name: str, backend: str) -> bool:
    """Whether ``backend`` implements op ``name``."""
    return backend in _op(name).impls


def get_registry_info() -> dict[str, dict[str, str]]:
    """For every op, by name, its implementations: backend to the function's qualified name."""
    return {
        name: {b: f"{f.__module__}.{f.__qualname__}" for b, f in sorted(op.impls.items())}
        for name, op in sorted(_ops.items())
    }


def print_registry_info() -> None:
    """Prints every op with the backends that implement it."""
    for name, impls in get_registry_info().items():
        print(f"{name:32} {', '.join(impls) or 'no implementation'}")
