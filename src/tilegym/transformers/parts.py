"""Forwards in which several computes have a part, each behind a flag of its own.

The forward of DeepSeek's attention rotates, and attends to latents; that of Qwen3.5's linear attention convolves, and
applies the delta rule. What one compute puts in must not take out what another has put in before, in whatever order and
however often they come: a forward here is made anew from the class's own and all parts by then.
"""

from collections.abc import Callable

from torch import nn

from tilegym.backend import name_of
from tilegym.transformers.forwards import describe
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

# Makes a forward of the class's own forward and the backends of the parts in it, by name.
Factory = Callable[[Callable, dict[str, str | None]], Callable]


@reproducible
def assembled(factory: Factory, original: Callable, parts: tuple[tuple[str, str | None], ...]) -> Callable:
    return factory(original, dict(parts))


def original_of(forward: Callable) -> Callable:
    """The forward that ``forward`` was assembled from, or itself."""
    make, arguments = getattr(forward, "recipe", (None, ()))
    return arguments[1] if make is assembled else forward


def with_part(forward: Callable, factory: Factory, part: str, backend: str | None) -> Callable:
    """``forward`` with one part more. The same parts give the same function."""
    make, arguments = getattr(forward, "recipe", (None, ()))
    parts = dict(arguments[2]) if make is assembled else {}
    return assembled(factory, original_of(forward), tuple(sorted({**parts, part: backend}.items())))


def put_in_model(
    patches: PatchSet,
    model: nn.Module,
    cls: type[nn.Module],
    factory: Factory,
    part: str,
    backend: str | None,
    refuse: Callable[[nn.Module], str],
) -> None:
    """Adds a part, whose name is the compute's, to the forwards of the modules that run ``cls.forward``.

    Left alone, and reported as skipped, are those that ``refuse`` has a reason against.
    """
    found = False
    for path, module in model.named_modules():
        if not isinstance(module, cls):
            continue
        found = True
        entry = Entry(path, part, name_of(backend))
        why = refuse(module)
        if type(module).forward is not cls.forward:
            why = f"it is a {describe(type(module))}, not a {cls.__name__}"
        if why:
            patches.skip(entry, why)
            continue
        patches.replace_forward(module, with_part(function_of_forward(module), factory, part, backend), entry)
    if not found:
        entry = Entry(type(model).__name__, part, name_of(backend))
        patches.skip(entry, f"there is no {cls.__name__} in it")


def put_in_class(
    patches: PatchSet, cls: type[nn.Module], factory: Factory, part: str, backend: str | None, why: str
) -> None:
    """Adds a part to the forward of ``cls``; skipped if there is a reason ``why`` not to."""
    entry = Entry(describe(cls), part, name_of(backend))
    if why:
        patches.skip(entry, why)
    else:
        patches.replace_method(cls, "forward", with_part(cls.forward, factory, part, backend), entry)
