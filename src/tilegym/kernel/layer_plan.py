"""Finding, for every layer of a model, the kernel that shall replace its forward; nothing is changed here."""

import difflib
import pickle
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tilegym.errors import KernelError
from tilegym.errors import KernelWarning
from tilegym.kernel import checks
from tilegym.kernel import registry
from tilegym.kernel import verify as verification
from tilegym.kernel.modes import Mode
from tilegym.kernel.reports import Replacement
from tilegym.kernel.sources import Source
from tilegym.transformers.forwards import is_bound


@dataclass(frozen=True)
class LayerPlan:
    """``layer`` shall run ``forward(layer, ...)``; ``entry`` is its line in the report."""

    layer: nn.Module
    forward: Callable
    entry: Replacement


def plan_layers(
    model: nn.Module, mode: Mode, device: str, verify: bool, sample_inputs: Any
) -> tuple[list[LayerPlan], list[Replacement]]:
    """What to replace in ``model``, and the bound layers that cannot be, with the reason.

    Raises:
        KernelError: ``verify`` without inputs to run the model with.
    """
    plans: list[LayerPlan] = []
    skipped: list[Replacement] = []
    found: dict[tuple[str, type], tuple[registry.LayerKernel | None, Callable | str]] = {}
    for path, layer in model.named_modules():
        name, why = _bound_kernel(layer)
        if name is None:
            continue
        record, forward = None, why
        if not why:
            key = (name, type(layer))
            if key not in found:
                found[key] = _find(name, type(layer), mode, device)
            record, forward = found[key]
        source = str(record.source) if record else ""
        entry = Replacement(path or "(the model)", type(layer).__name__, name, source)
        problem = forward if isinstance(forward, str) else _unsuitable(layer, record)
        if problem:
            skipped.append(Replacement(entry.name, entry.original, name, source, why=problem))
        else:
            plans.append(LayerPlan(layer, forward, entry))
    if verify and plans:
        plans, differing = _verified(model, plans, mode, sample_inputs)
        skipped += differing
    return plans, skipped


def _bound_kernel(layer: nn.Module) -> tuple[str | None, str]:
    """The name of the kernel that ``layer`` is bound to, or None; and why it shall not have it after all, or ""."""
    cls = type(layer)
    binding = registry.find_external_layer(cls)
    if binding is not None:
        return binding.kernel_name, ""
    # Classes that kernels' own decorator has prepared, transformers' RMSNorm classes for one.
    name = getattr(cls, "kernel_layer_name", None)
    if isinstance(name, str) and registry.list_layer_kernels(name):
        owner = next(base for base in cls.__mro__ if "kernel_layer_name" in vars(base))
        if cls.forward is not owner.forward:
            return (
                name,
                f"a subclass of {owner.__name__} with its own forward; bind it with register_external_layer",
            )
        condition = getattr(cls, "kernel_condition", None)
        if condition is not None and not condition(layer):
            return name, "its kernel_condition says no"
        return name, ""
    for base in cls.__mro__[1:]:
        binding = registry.find_external_layer(base)
        if binding is not None:
            return binding.kernel_name, (
                f"a subclass of {base.__name__}, which alone is bound; bind it too, or pass subclasses=True"
            )
    return None, ""


def _find(
    name: str, layer_class: type[nn.Module], mode: Mode, device: str
) -> tuple[registry.LayerKernel | None, Callable | str]:
    """The registered kernel that serves the layer class, and its forward or why there is none."""
    record = registry.find_layer_kernel(name, device, mode)
    if record is None:
        others = [f"{k.device or 'any device'}/{k.mode}" for k in registry.list_layer_kernels(name)]
        known = {kernel.name for kernel in registry.list_layer_kernels()}
        if others:
            there = f"it is registered for {', '.join(others)}"
        elif near := difflib.get_close_matches(name, known, n=3):
            there = f"is it one of {', '.join(near)}?"
        else:
            there = "register one with register_layer_kernel"
        return None, f"no kernel {name!r} for device {device} and mode {mode}; {there}"
    try:
        return record, kernel_forward(record, layer_class, mode)
    except KernelError as error:
        return record, str(error)
    except Exception as error:  # code of others: whatever it raises belongs in the report
        return record, f"kernel {name!r} could not be loaded from {record.source}: {type(error).__name__}: {error}"


def kernel_forward(record: registry.LayerKernel, layer_class: type[nn.Module], mode: Mode) -> Callable:
    """Loads a kernel and returns its forward, callable as ``layer_class.forward`` is, and picklable.

    Raises:
        KernelError: the kernel is unfit for the layer or the mode.
    """
    who = f"kernel {record.name!r} from {record.source}"
    kernel = checks.check_layer_class(record.source.load(), who)
    problem = checks.mode_problem(kernel, mode if record.mode == Mode.FALLBACK else mode | record.mode)
    if problem:
        raise KernelError(f"{who} for layer {layer_class.__name__} in mode {mode}: {problem}")
    forward = _own_copy(checks.fitted_forward(kernel, layer_class, record.name))
    forward.recipe = (_unpickled_forward, (record.name, _Portable(record.source), layer_class))
    return forward


def _own_copy(function: Callable) -> Callable:
    """A function object of our own for the same code, to hold our attributes."""
    if not isinstance(function, types.FunctionType):
        return lambda *args, **kwargs: function(*args, **kwargs)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__module__,
    )
    copy.__dict__.update(function.__dict__)
    return copy


class _Portable:
    """A source as it is pickled: itself, or, if it cannot be pickled, one that cannot be loaded."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __reduce__(self):
        try:
            pickle.dumps(self.source)
        except Exception as error:  # whatever a repository object of others raises
            return _Lost, (f"{self.source} cannot be pickled: {type(error).__name__}: {error}",)
        return _itself, (self.source,)


def _itself(source: Source) -> Source:
    return source


@dataclass(frozen=True)
class _Lost:
    """A source that was not pickled, and why."""

    why: str

    def load(self) -> None:
        raise KernelError(self.why)

    def __str__(self) -> str:
        return self.why


def _unpickled_forward(name: str, source: Source, layer_class: type[nn.Module]) -> Callable:
    """The forward of a pickled kernelized layer: the kernel's, or, where that cannot be loaded, the layer's own."""
    try:
        forward = checks.fitted_forward(checks.check_layer_class(source.load(), name), layer_class, name)
    except Exception as error:
        warnings.warn(
            f"kernel {name!r} of a pickled {layer_class.__name__} could not be loaded, the layer computes as its "
            f"class does: {error}",
            KernelWarning,
            stacklevel=2,
        )
        forward = layer_class.forward
    forward = _own_copy(forward)
    forward.recipe = (_unpickled_forward, (name, _Portable(source), layer_class))
    return forward


def _unsuitable(layer: nn.Module, record: registry.LayerKernel) -> str:
    """Why this instance cannot have the kernel, or ""."""
    current = vars(layer).get("forward")
    if current is not None and "_hf_hook" not in vars(layer) and not is_bound(current):
        own = type(layer).forward
        if getattr(current, "__func__", None) is not own:
            return f"its forward has been replaced already, by {getattr(current, '__qualname__', repr(current))}"
    return (record.suits(layer) or "") if record.suits else ""


def _verified(
    model: nn.Module, plans: list[LayerPlan], mode: Mode, sample_inputs: Any
) -> tuple[list[LayerPlan], list[Replacement]]:
    """Splits ``plans`` into those whose kernel computes what the layer does, and the others, with the difference."""
    calls = verification.capture_inputs(model, [plan.layer for plan in plans], sample_inputs)
    equal, differing = [], []
    for plan in plans:
        e = plan.entry
        if plan.layer not in calls:
            why = "not verified: the forward of the sample inputs did not reach it"
        else:
            try:
                why = verification.difference(
                    plan.layer, type(plan.layer).forward, plan.forward, calls[plan.layer], Mode.TRAINING in mode
                )
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            why = why and f"differs from the original: {why}"
        if why:
            differing.append(Replacement(e.name, e.original, e.kernel, e.source, why=why))
        else:
            verified = Replacement(e.name, e.original, e.kernel, e.source, verified=True)
            equal.append(LayerPlan(plan.layer, plan.forward, verified))
    return equal, differing
