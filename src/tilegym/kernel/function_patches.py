"""Which function kernels are in force, and for whom.

A function of a Python module is one for the whole process, so each kernelized model has a claim on it, and so has the
process for what was applied without a model, or for models that are gone. The latest claim is in force; without any
the original is back.
"""

import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from types import ModuleType
from typing import Any

from torch import nn

from tilegym.errors import KernelError
from tilegym.kernel import checks
from tilegym.kernel import registry
from tilegym.kernel.modes import Mode
from tilegym.kernel.reports import FUNCTION
from tilegym.kernel.reports import Replacement
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

# Patching looks before it writes; whoever changes functions or layers holds this.
lock = threading.RLock()


class _Process:
    """Claims what was applied without a model."""


PROCESS = _Process()


@dataclass(frozen=True)
class FunctionPlan:
    """``target`` shall be ``function``; ``entry`` is its line in the report."""

    record: registry.FunctionKernel
    function: Callable
    entry: Replacement


@dataclass
class _Target:
    """A function that is replaced.

    Attributes:
        claims: the owners with what they want, oldest first.
        holders: the Python modules and names that hold the function.
        in_force: what the holders hold now, by ``patches``.
    """

    original: Callable
    claims: list[tuple[weakref.ref, FunctionPlan]] = field(default_factory=list)
    holders: dict[tuple[str, str], ModuleType] = field(default_factory=dict)
    in_force: Callable | None = None
    patches: PatchSet = field(default_factory=lambda: PatchSet(maker=__name__))


_targets: dict[str, _Target] = {}


def plan_functions(
    kernels: dict[str, registry.FunctionKernel | None], mode: Mode | None, device: str | None
) -> tuple[list[FunctionPlan], list[Replacement]]:
    """Loads and checks the kernels of the given targets: those that can be used, and the others with the reason."""
    plans, skipped = [], []
    for target, record in kernels.items():
        if record is None:
            others = [k for k in registry.list_function_kernels() if k.target == target]
            there = ", ".join(f"{k.device or 'any device'}/{k.mode}" for k in others)
            why = f"no kernel for device {device or 'any'} and mode {mode or 'any'}; it is registered for {there}"
            skipped.append(Replacement(target, FUNCTION, "", why=why))
            continue
        try:
            function = _load(record, mode)
        except KernelError as error:
            skipped.append(Replacement(target, FUNCTION, "", str(record.source), why=str(error)))
        except Exception as error:  # code of others: whatever it raises belongs in the report
            why = f"the kernel could not be loaded: {type(error).__name__}: {error}"
            skipped.append(Replacement(target, FUNCTION, "", str(record.source), why=why))
        else:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            plans.append(FunctionPlan(record, function, Replacement(target, FUNCTION, name, str(record.source))))
    return plans, skipped


def _load(record: registry.FunctionKernel, mode: Mode | None) -> Callable:
    original = original_of(record)
    loaded = record.source.load()
    who = f"its kernel from {record.source}"
    wanted = [m for m in (mode, record.mode) if m is not None and m != Mode.FALLBACK]
    problem = next(filter(None, (checks.mode_problem(loaded, m) for m in wanted)), None)
    if problem:
        raise KernelError(f"{who}: {problem}")
    if isinstance(loaded, type) and issubclass(loaded, nn.Module):
        loaded = checks.check_layer_class(loaded, who)().forward
    elif not callable(loaded):
        raise KernelError(f"{who}: load() gave {loaded!r}, which cannot be called")
    problem = record.suits(original) if record.suits else None
    if problem:
        raise KernelError(f"{record.target} cannot be replaced by {who}: {problem}")
    return checks.fitted(loaded, original, who, record.target)


def original_of(record: registry.FunctionKernel) -> Callable:
    """The function that a kernel replaces, as it was before anything was replaced.

    Raises:
        KernelError: there is no such module, or no such function in it.
    """
    try:
        module = importlib.import_module(record.target_module)
    except ModuleNotFoundError as error:
        if error.name and not (record.target_module + ".").startswith(error.name + "."):
            raise  # the module is there, but imports something that is not
        raise KernelError(f"there is no module {record.target_module!r} to patch") from error
    with lock:
        target = _target(record)
    original = target.original if target is not None else vars(module).get(record.func_name)
    if not callable(original):
        raise KernelError(f"{record.target_module!r} has no function {record.func_name!r}, and none is created")
    return original


def claim(owner: Any, plans: list[FunctionPlan], model: nn.Module | None, instance_patches: PatchSet | None) -> None:
    """Puts the planned functions in force for ``owner``, also where ``model``'s own modules hold them by name.

    If one of them cannot be put there, all claims are as they were before.
    """
    with lock:
        former = {name: list(target.claims) for name, target in _targets.items()}
        try:
            for plan in plans:
                _claim(owner, plan, model, instance_patches)
        except BaseException:
            for name, target in list(_targets.items()):
                target.claims = former.get(name, [])
                _enforce(name, target)
            raise


def _claim(owner: Any, plan: FunctionPlan, model: nn.Module | None, instance_patches: PatchSet | None) -> None:
    target = _target(plan.record)
    if target is None:
        target = _targets[plan.record.target] = _Target(original_of(plan.record))
        holder = sys.modules[plan.record.target_module]
        target.holders[plan.record.target_module, plan.record.func_name] = holder
    held_as = [target.original, *(p.function for _, p in target.claims)]
    # The same kernel for another model is the same function: callers see no change.
    plan = next((p for _, p in target.claims if p.record == plan.record), plan)
    _drop_claims(target, owner)
    target.claims.append((weakref.ref(owner), plan))
    for module, name in _holders(model, held_as):
        target.holders[module.__name__, name] = module
    _enforce(plan.record.target, target)
    if model is not None:
        for path, layer, name in _instance_holders(model, held_as):
            entry = Entry(f"{path}.{name}" if path else name, FUNCTION, plan.entry.kernel)
            instance_patches.replace_attribute(layer, name, plan.function, entry)


def release(owner: Any) -> None:
    """Gives up all claims of ``owner``."""
    with lock:
        for name, target in list(_targets.items()):
            if _drop_claims(target, owner):
                _enforce(name, target)


def _target(record: registry.FunctionKernel) -> _Target | None:
    """The state of the function that ``record`` is for, unless it is not replaced, or its module was imported anew."""
    target = _targets.get(record.target)
    if target is None:
        return None
    module = target.holders[record.target_module, record.func_name]
    if module is sys.modules.get(record.target_module):
        return target
    del _targets[record.target]
    target.patches.revert()
    return None


def _drop_claims(target: _Target, owner: Any) -> bool:
    """Removes the claims of ``owner``; says whether there were any."""
    owners = (owner, None) if owner is PROCESS else (owner,)  # None: of a model that is gone
    kept = [claim for claim in target.claims if not any(claim[0]() is one for one in owners)]
    had = len(kept) < len(target.claims)
    target.claims = kept
    return had


def _enforce(name: str, target: _Target) -> None:
    """Makes every holder hold the latest claim's function, or, without a claim, the original."""
    plan = target.claims[-1][1] if target.claims else None
    if plan is None:
        del _targets[name]
    if plan is None or target.in_force is not plan.function:
        former, target.patches, target.in_force = target.patches, PatchSet(maker=__name__), None
        former.revert()
    if plan is None:
        return
    for (module_name, attribute), module in target.holders.items():
        entry = Entry(f"{module_name}.{attribute}", FUNCTION, plan.entry.kernel)
        target.patches.replace_function(module, attribute, plan.function, entry)
    target.in_force = plan.function


def _holders(model: nn.Module | None, functions: list[Callable]) -> Iterator[tuple[ModuleType, str]]:
    """The globals that are one of ``functions`` in the Python modules that define the model's classes."""
    if model is None:
        return
    names = {c.__module__ for layer in model.modules() for c in type(layer).__mro__ if issubclass(c, nn.Module)}
    for module in filter(None, map(sys.modules.get, sorted(names))):
        for name, value in list(vars(module).items()):
            if any(value is function for function in functions):
                yield module, name


def _instance_holders(model: nn.Module, functions: list[Callable]) -> Iterator[tuple[str, nn.Module, str]]:
    """The attributes of the model's layers that are one of ``functions``."""
    for path, layer in model.named_modules():
        for name, value in list(vars(layer).items()):
            if any(value is function for function in functions):
                yield path, layer, name
