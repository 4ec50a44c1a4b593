"""Whether a kernel can stand in for a layer or function: stateless, of a fitting signature, and fit for the mode."""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from torch import nn

from tilegym.errors import KernelError
from tilegym.kernel.modes import Mode

_ALLOWED = frozenset({"forward", "can_torch_compile", "has_backward"})
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def check_layer_class(kernel: Any, who: str) -> type[nn.Module]:
    """Checks what ``kernels`` asks of a layer: an ``nn.Module`` class with a ``forward`` and nothing of its own beside.

    Its forward runs on the layer it replaces, so a constructor's attributes or further methods would not be there.

    Raises:
        KernelError: naming ``who``, what is wrong, and the remedy.
    """
    if not (isinstance(kernel, type) and issubclass(kernel, nn.Module)):
        raise KernelError(f"{who}: a layer kernel is a subclass of torch.nn.Module, this is {kernel!r}")
    if kernel.forward is nn.Module.forward:
        raise KernelError(f"{who}: {kernel.__name__} defines no forward")
    if kernel.__init__ is not nn.Module.__init__:
        raise KernelError(
            f"{who}: {kernel.__name__} is stateful: it has a constructor, but only its forward runs, on the layer "
            "that it replaces; remove __init__ and read parameters from that layer"
        )
    own = {name for base in kernel.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    extra = sorted(name for name in own - _ALLOWED if not (name.startswith("__") and name.endswith("__")))
    if extra:
        raise KernelError(
            f"{who}: {kernel.__name__} is stateful: it defines {', '.join(extra)}, which the layer it replaces "
            "does not have; make it a function of the Python module"
        )
    return kernel


def mode_problem(kernel: Any, mode: Mode) -> str | None:
    """Why ``kernel`` cannot be used in ``mode`` by its own word, or None.

    As in ``kernels``, a kernel has a backward unless it sets ``has_backward = False``, and cannot be compiled unless
    it sets ``can_torch_compile = True``.
    """
    name = getattr(kernel, "__qualname__", type(kernel).__qualname__)
    if Mode.TRAINING in mode and not getattr(kernel, "has_backward", True):
        return f"{name} has no backward (has_backward = False); use it for mode 'inference' or 'compile'"
    if Mode.TORCH_COMPILE in mode and not getattr(kernel, "can_torch_compile", False):
        return (
            f"{name} does not say that torch.compile can trace it; set can_torch_compile = True on it if it can, or "
            "use it without 'compile'"
        )
    return None


def signature_of(function: Callable) -> inspect.Signature | None:
    """The signature of a callable, an ``nn.Module``'s being its forward's; None for builtins that have none."""
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None


def fit(kernel: inspect.Signature, original: inspect.Signature) -> tuple[str | None, dict[str, str]]:
    """Whether every call that ``original`` accepts is accepted by ``kernel``, and means the same.

    Returns:
        (why not, or None; the parameters that have another name in the kernel, by their original name).
    """
    kernel_by_name, original_by_name = kernel.parameters, original.parameters
    kernel_positional, original_positional = _positional(kernel), _positional(original)
    kernel_kinds = {p.kind for p in kernel_by_name.values()}
    renamed: dict[str, str] = {}
    used = set()

    for i, parameter in enumerate(original_positional):
        if i >= len(kernel_positional):
            if Parameter.VAR_POSITIONAL not in kernel_kinds:
                return f"it takes no {parameter.name!r}", {}
            if parameter.kind is not Parameter.POSITIONAL_ONLY and Parameter.VAR_KEYWORD not in kernel_kinds:
                return f"it does not take {parameter.name!r} by keyword", {}
            continue
        counterpart = kernel_positional[i]
        used.add(counterpart.name)
        reason = _default_problem(counterpart, parameter)
        if reason:
            return reason, {}
        if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and counterpart.name != parameter.name:
            if counterpart.kind is Parameter.POSITIONAL_ONLY:
                return f"it does not take {parameter.name!r} by keyword", {}
            if counterpart.name in original_by_name or parameter.name in kernel_by_name:
                return f"its parameters are in another order ({counterpart.name!r} where {parameter.name!r} is)", {}
            renamed[parameter.name] = counterpart.name

    for parameter in original_by_name.values():
        if parameter.kind is Parameter.KEYWORD_ONLY:
            counterpart = kernel_by_name.get(parameter.name)
            if counterpart is None or counterpart.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
                if Parameter.VAR_KEYWORD not in kernel_kinds:
                    return f"it takes no {parameter.name!r}", {}
                continue
            used.add(counterpart.name)
            reason = _default_problem(counterpart, parameter)
            if reason:
                return reason, {}
        elif parameter.kind is Parameter.VAR_POSITIONAL and Parameter.VAR_POSITIONAL not in kernel_kinds:
            return f"it does not take *{parameter.name}", {}
        elif parameter.kind is Parameter.VAR_KEYWORD and Parameter.VAR_KEYWORD not in kernel_kinds:
            return f"it does not take **{parameter.name}", {}

    for parameter in kernel_by_name.values():
        variadic = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        if parameter.name not in used and not variadic and parameter.default is Parameter.empty:
            return f"it needs {parameter.name!r}, which the original does not take", {}
    return None, renamed


def _positional(signature: inspect.Signature) -> list[Parameter]:
    return [p for p in signature.parameters.values() if p.kind in _POSITIONAL]


def _default_problem(kernel: Parameter, original: Parameter) -> str | None:
    if original.default is Parameter.empty:
        return None
    if kernel.default is Parameter.empty:
        return f"it requires {kernel.name!r}, which is optional in the original"
    same = kernel.default is original.default
    if not same:
        try:
            same = bool(kernel.default == original.default)
        except Exception:
            same = False
    return (
        None if same else f"its {kernel.name!r} defaults to {kernel.default!r}, the original's to {original.default!r}"
    )


def fitted(kernel: Callable, original: Callable, who: str, what: str) -> Callable:
    """``kernel`` made callable as ``original`` is: itself, or, where parameters have other names, a wrapper.

    Raises:
        KernelError: a call that ``original`` accepts would fail or mean something else.
    """
    signature, expected = signature_of(kernel), signature_of(original)
    if signature is None or expected is None:
        return kernel
    reason, renamed = fit(signature, expected)
    if reason is not None:
        raise KernelError(
            f"{who}: its signature {signature} does not fit {what}{expected}: {reason}; give it the same signature"
        )
    if not renamed:
        return kernel

    def call(*args, **kwargs):
        if kwargs:
            kwargs = {renamed.get(name, name): value for name, value in kwargs.items()}
        return kernel(*args, **kwargs)

    call.__name__, call.__qualname__, call.__module__ = (
        getattr(kernel, name, "kernel") for name in ("__name__", "__qualname__", "__module__")
    )
    call.__signature__ = expected
    call.__wrapped__ = kernel
    return call


def fitted_forward(kernel: type[nn.Module], layer_class: type[nn.Module], kernel_name: str) -> Callable:
    """The forward of a kernel class, callable as ``layer_class.forward`` is.

    Raises:
        KernelError: it does not fit.
    """
    who = f"kernel {kernel_name!r} for layer {layer_class.__name__}"
    return fitted(kernel.forward, layer_class.forward, who, f"{layer_class.__name__}.forward")
