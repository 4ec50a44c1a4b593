"""What is registered: layer kernels by name, the classes bound to them, and function kernels by what they replace.

Everything here is thread-safe. A record is immutable; registering the same name, device and mode again replaces it.
"""

import threading
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tilegym.errors import KernelError
from tilegym.kernel import modes
from tilegym.kernel.modes import Mode
from tilegym.kernel.sources import Source


@dataclass(frozen=True)
class LayerKernel:
    """A kernel for a layer: ``device`` None means every device, mode ``Mode.FALLBACK`` every mode that it supports.

    ``suits(layer)``, if given, says why the kernel cannot serve that instance, or gives None.
    """

    name: str
    source: Source
    device: str | None
    mode: Mode
    suits: Callable[[nn.Module], str | None] | None = None


@dataclass(frozen=True)
class ExternalLayer:
    """A layer class whose instances take the kernel of this name; with ``subclasses`` those of its subclasses too."""

    layer_class: type[nn.Module]
    kernel_name: str
    subclasses: bool = False


@dataclass(frozen=True)
class FunctionKernel:
    """A kernel for the function ``func_name`` of the Python module ``target_module``.

    ``suits(original)``, if given, says why the kernel cannot replace that function, or gives None.
    """

    func_name: str
    target_module: str
    source: Source
    device: str | None
    mode: Mode
    suits: Callable[[Callable], str | None] | None = None

    @property
    def target(self) -> str:
        return f"{self.target_module}.{self.func_name}"


@dataclass(frozen=True)
class NamedFunction:
    """A function that ``func_impl`` can name, with the ``suits`` of its :class:`FunctionKernel`."""

    function: Callable
    suits: Callable[[Callable], str | None] | None = None


Record = LayerKernel | ExternalLayer | FunctionKernel

_lock = threading.RLock()
_layers: dict[str, dict[tuple[str | None, Mode], LayerKernel]] = {}
_external: dict[type[nn.Module], ExternalLayer] = {}
_functions: dict[str, dict[tuple[str | None, Mode], FunctionKernel]] = {}
_named_functions: dict[str, NamedFunction] = {}
_own: list[Record] = []


def add(*records: Record, own: bool = False) -> None:
    """Registers ``records``, all under one lock; ``own`` marks TileGym's, which outlive :func:`clear`."""
    with _lock:
        if own:
            _own.extend(records)
        for record in records:
            if isinstance(record, ExternalLayer):
                _external[record.layer_class] = record
            elif isinstance(record, LayerKernel):
                _layers.setdefault(record.name, {})[record.device, record.mode] = record
            else:
                _functions.setdefault(record.target, {})[record.device, record.mode] = record


def add_named_function(name: str, function: Callable, suits: Callable[[Callable], str | None] | None = None) -> None:
    """Makes ``function`` known under ``name``, so that ``func_impl="name"`` registers it for a target."""
    with _lock:
        _named_functions[name] = NamedFunction(function, suits)


def list_layer_kernels(name: str | None = None) -> list[LayerKernel]:
    """The registered layer kernels, of one name or of all."""
    with _lock:
        names = _layers if name is None else [name]
        return [kernel for n in names for kernel in _layers.get(n, {}).values()]


def list_external_layers() -> list[ExternalLayer]:
    """The layer classes that are bound to a kernel name."""
    with _lock:
        return list(_external.values())


def list_function_kernels(target_module: str | None = None) -> list[FunctionKernel]:
    """The registered function kernels, for one target module or for all."""
    with _lock:
        kernels = [kernel for by_use in _functions.values() for kernel in by_use.values()]
    return [kernel for kernel in kernels if target_module in (None, kernel.target_module)]


def list_named_functions() -> dict[str, NamedFunction]:
    """The functions that ``func_impl`` can name."""
    with _lock:
        return dict(_named_functions)


def find_layer_kernel(name: str, device: str | None = None, mode: modes.ModeLike = "inference") -> LayerKernel | None:
    """The kernel registered as ``name`` that serves ``device`` and ``mode``, by the fallback chain; else None."""
    with _lock:
        return _best(_layers.get(name, {}), modes.parse_device(device), modes.parse_mode(mode))


def find_external_layer(layer_class: type[nn.Module]) -> ExternalLayer | None:
    """The binding that instances of ``layer_class`` take: their own, else a superclass's that includes subclasses."""
    with _lock:
        for base in layer_class.__mro__:
            binding = _external.get(base)
            if binding is not None and (base is layer_class or binding.subclasses):
                return binding
    return None


def find_function_kernel(target: str, device: str | None = None, mode: modes.ModeLike = None) -> FunctionKernel | None:
    """The kernel for ``target`` ("package.module.function") serving ``device`` and ``mode``; None filters nothing."""
    with _lock:
        return _best(_functions.get(target, {}), modes.parse_device(device), modes.parse_mode(mode))


def select_function_kernels(
    device: str | None, mode: Mode | None, target_module: str | None = None
) -> dict[str, FunctionKernel | None]:
    """For every target (of one module or of all) the kernel that serves ``device`` and ``mode`` best, or None."""
    with _lock:
        targets = {kernel.target for kernel in list_function_kernels(target_module)}
        return {target: find_function_kernel(target, device, mode) for target in sorted(targets)}


def find_named_function(name: str) -> NamedFunction:
    """The function known as ``name``.

    Raises:
        KernelError: there is none.
    """
    with _lock:
        if name not in _named_functions:
            raise KernelError(f"no function kernel is named {name!r}; there are {', '.join(sorted(_named_functions))}")
        return _named_functions[name]


def clear() -> None:
    """Forgets everything registered, except for TileGym's own kernels. Models that were kernelized stay so."""
    with _lock:
        for table in (_layers, _external, _functions):
            table.clear()
        add(*_own)


def _best(kernels: Mapping, device: str | None, mode: Mode) -> Record | None:
    # Every registered mode is in inference's chain: without a mode to filter by, that chain only orders.
    chain = modes.fallback_chain(Mode.INFERENCE if mode == Mode.FALLBACK else mode)
    devices = [device, None]
    if device is None:
        devices = [modes.current_device(), None, *modes.DEVICES]
    return next((kernels[d, m] for d in devices for m in chain if (d, m) in kernels), None)
