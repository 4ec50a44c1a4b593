"""Functions for one instance: bound to it, remade when it is pickled, or with other globals than the original."""

import contextlib
import copyreg
import functools
import inspect
import types
from collections.abc import Callable
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import nn

from tilegym.errors import PatchError


def describe(thing: Any) -> str:
    """The qualified name of a class or function, of what a partial calls, of an object's class."""
    thing = getattr(thing, "func", thing)
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def reproducible(factory: Callable) -> Callable:
    """Decorates a module-level function that makes functions, so that what it makes can be pickled.

    Closures cannot be pickled; the factory's name and its arguments can. The same arguments give the same function.
    """

    @functools.cache
    @functools.wraps(factory)
    def make(*args):
        function = factory(*args)
        function.recipe = (make, args)
        return function

    return make


_MARK = "_tilegym_binds"


def bound(function: Callable, module: nn.Module) -> types.MethodType:
    """``function(module, ...)`` as a method of one instance.

    A method and nothing of our own, because torch.compile shares what it has compiled for one of several like modules
    with the others only if their forwards are methods: any other callable it tells by its identity. A deepcopy's method
    is the copy's; for pickling see :func:`_reduce`.
    """
    setattr(function, _MARK, function)  # what wraps it may copy its attributes
    return types.MethodType(function, module)


def is_bound(value: Any) -> bool:
    """Whether ``value`` is what :func:`bound` returned, or a copy of that."""
    return type(value) is types.MethodType and getattr(value.__func__, _MARK, None) is value.__func__


def _reduce(method: types.MethodType) -> Any:
    """How a method is pickled: by name, and ours by their function, since a class has another one of that name.

    The module of one in a module's state exists already where that is unpickled, without its state.
    """
    if is_bound(method):
        return bound, (_portable(method.__func__), method.__self__)
    return method.__reduce__()


copyreg.pickle(types.MethodType, _reduce)
ForkingPickler.register(types.MethodType, _reduce)  # which has one of its own for methods


def replica(module: nn.Module) -> nn.Module:
    """PyTorch's replica of a module (``nn.DataParallel``), to which each :func:`bound` method is bound anew."""
    made = type(module)._replicate_for_data_parallel(module)
    for name, value in vars(made).items():
        if is_bound(value) and value.__self__ is module:
            vars(made)[name] = bound(value.__func__, made)
    return made


def place_of_forward(module: nn.Module) -> str:
    """The attribute of an instance where its forward stands: under a hook of accelerate's what that calls."""
    own = vars(module)
    return "_old_forward" if "_hf_hook" in own and "_old_forward" in own else "forward"


def only_moves_inputs(module: nn.Module) -> bool:
    """Whether accelerate's hook on a module, if it has one, only takes what comes to the device of the module."""
    hook = vars(module).get("_hf_hook")
    return hook is None or getattr(hook, "offload", None) is False  # its AlignDevicesHook, of weights that stay


def unwrapped(function: Callable) -> Callable:
    """What ``inspect.unwrap`` gives, also through transformers 5.15's decorator of forwards, which does not say what it
    wraps."""
    function = inspect.unwrap(function)
    free = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "forward_func" not in free:
        return function
    return unwrapped(function.__closure__[free.index("forward_func")].cell_contents)


def has_its_class_forward(module: nn.Module) -> bool:
    """Whether nobody has put another forward on the instance, but for a hook of accelerate's around it."""
    own = vars(module).get(place_of_forward(module))
    return getattr(own, "__func__", own) in (None, type(module).forward)


def function_of_forward(module: nn.Module) -> Callable:
    """The function that is a module's forward: the one that a patch has put on the instance, or its class's."""
    own = vars(module).get(place_of_forward(module))
    return own.__func__ if is_bound(own) else type(module).forward


def chain_of(forward: Any) -> Iterator[Any]:
    """The function behind a bound method, what it wraps, and so on."""
    function = getattr(forward, "__func__", forward)
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def is_made_by(factory: Callable, forward: Any) -> bool:
    """Whether ``forward``, or anything that it wraps, was made by a :func:`reproducible` factory."""
    return any(getattr(function, "recipe", (None,))[0] is factory for function in chain_of(forward))


def is_bound_to(forward: Any, function: Callable) -> bool:
    """Whether ``forward`` is ``function`` of an instance, or the innermost that it wraps.

    That is what ``unwrap_model`` of accelerate leaves of a forward that it had put its mixed precision around.
    """
    return getattr(forward, "__func__", None) in (function, inspect.unwrap(function))


class _Recipe:
    """Stands for a function while it is pickled; what is unpickled is the function."""

    def __init__(self, make: Callable, args: tuple) -> None:
        self.make, self.args = make, args

    def __reduce__(self):
        return self.make, self.args


def _portable(value: Any) -> Any:
    if isinstance(value, tuple):
        items = [_portable(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if hasattr(value, "recipe"):
        make, args = value.recipe
        return _Recipe(make, _portable(args))
    return value


class HeldFunction:
    """A reproducible function that an instance holds as an attribute; copied and pickled along with the instance."""

    def __init__(self, function: Callable) -> None:
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "HeldFunction":
        return self

    def __reduce__(self):
        return held, (_portable(self.function),)


@functools.cache
def held(function: Callable) -> HeldFunction:
    """A reproducible ``function`` as something that an instance can hold; the same for the same function."""
    return HeldFunction(function)


def names_of(function: Callable) -> set[str]:
    """The global names that a function uses, or the innermost that it wraps."""
    pending, names = [unwrapped(function).__code__], set()
    while pending:
        code = pending.pop()
        names |= set(code.co_names)
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return names


def _mentions(code: types.CodeType, name: str) -> bool:
    return name in code.co_names or any(_mentions(c, name) for c in code.co_consts if isinstance(c, types.CodeType))


def _overlay(function: types.FunctionType, replacements: dict[str, Any]) -> types.FunctionType | None:
    """A copy of ``function`` (and of what it wraps) in which global names mean something else; None if it uses none."""
    cells, used = [], any(_mentions(function.__code__, name) for name in replacements)
    for cell in function.__closure__ or ():
        inner = None
        with contextlib.suppress(ValueError):  # an empty cell
            if isinstance(cell.cell_contents, types.FunctionType):
                inner = _overlay(cell.cell_contents, replacements)
        cells.append(cell if inner is None else types.CellType(inner))
        used = used or inner is not None
    if not used:
        return None
    # For torch.compile: a code object of its own, by which it caches, and no module name, by which its guards would
    # look the globals up in the module instead of here.
    overlaid = {**function.__globals__, **replacements}
    overlaid.pop("__name__", None)
    new = types.FunctionType(
        function.__code__.replace(),
        overlaid,
        function.__name__,
        function.__defaults__,
        tuple(cells) if function.__closure__ else None,
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    new.__qualname__, new.__module__, new.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return new


@reproducible
def with_globals(function: types.FunctionType, replacements: tuple[tuple[str, Any], ...]) -> types.FunctionType:
    """A copy of ``function`` that sees other values under the given global names; the original is not touched.

    Works through decorators (functions held in closures), ``super()`` and nested functions.

    Raises:
        PatchError: the function uses none of the names.
    """
    new = _overlay(function, dict(replacements))
    if new is None:
        names = ", ".join(name for name, _ in replacements)
        raise PatchError(f"{describe(function)} does not use the global {names}; nothing to replace in it")
    return new
