"""Layer kernels: registering them, binding layer classes to them, and applying them to a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tilegym.errors import KernelError
from tilegym.kernel import checks
from tilegym.kernel import kernelize
from tilegym.kernel import modes
from tilegym.kernel import registry
from tilegym.kernel import sources


def register_layer_kernel(
    kernel_name: str,
    repo_id: str | None = None,
    repo_path: str | Path | None = None,
    package_name: str | None = None,
    layer_name: str | None = None,
    version: int | str | None = None,
    revision: str | None = None,
    device: str | None = "cuda",
    mode: modes.ModeLike = None,
    *,
    layer_class: type[nn.Module] | None = None,
    repo: sources.Source | None = None,
    trust_remote_code: bool | list[str] = False,
) -> None:
    """Registers a kernel for layers under ``kernel_name``; nothing is loaded yet.

    It comes from exactly one of: a Hub repository (``repo_id`` with ``version`` or ``revision``; with neither, the
    branch ``main``), a package on disk (``repo_path`` and ``package_name``, with a ``layers.py``; without
    ``package_name`` a kernel as kernel-builder lays it out), ``layer_class``, or ``repo``, an object whose ``load()``
    gives the class, such as ``kernels.LockedLayerRepository``.

    A layer kernel is an ``nn.Module`` class that defines ``forward`` and nothing else, besides the flags
    ``has_backward`` (default True) and ``can_torch_compile`` (default False). Its forward runs with the replaced layer
    as ``self``.

    Args:
        kernel_name: what :func:`register_external_layer` refers to.
        layer_name: the class in the repository's ``layers``; default ``kernel_name``.
        device: the kind of device it is for ("cuda", "cpu", "npu", ...); None for every kind.
        mode: "inference", "train", "compile" or a combination such as "train+compile"; None for every mode that the
            kernel supports. One registration replaces only the one of the same name, device and mode.
        trust_remote_code: passed to ``kernels`` for ``repo_id``: whether code of untrusted publishers may run.

    Raises:
        KernelError: no source or several, an unknown device or mode, an unfit ``layer_class``.
    """
    registry.add(
        make_layer_kernel(
            kernel_name,
            repo_id=repo_id,
            repo_path=repo_path,
            package_name=package_name,
            layer_name=layer_name,
            version=version,
            revision=revision,
            device=device,
            mode=mode,
            layer_class=layer_class,
            repo=repo,
            trust_remote_code=trust_remote_code,
        )
    )


def make_layer_kernel(
    kernel_name: str,
    *,
    repo_id: str | None = None,
    repo_path: str | Path | None = None,
    package_name: str | None = None,
    layer_name: str | None = None,
    version: int | str | None = None,
    revision: str | None = None,
    device: str | None = "cuda",
    mode: modes.ModeLike = None,
    layer_class: type[nn.Module] | None = None,
    repo: sources.Source | None = None,
    trust_remote_code: bool | list[str] = False,
) -> registry.LayerKernel:
    """The record that :func:`register_layer_kernel` registers, checked."""
    who = f"layer kernel {kernel_name!r}"
    if not isinstance(kernel_name, str) or not kernel_name:
        raise KernelError(f"a layer kernel needs a name, got {kernel_name!r}")
    sources.exactly_one(who, repo_id=repo_id, repo_path=repo_path, layer_class=layer_class, repo=repo)
    if repo_id is None and (version is not None or revision is not None):
        raise KernelError(f"{who}: version and revision belong to repo_id")
    if repo_path is None and package_name is not None:
        raise KernelError(f"{who}: package_name belongs to repo_path")
    parsed_mode = modes.parse_mode(mode, who)
    layer_name = layer_name or kernel_name
    if repo_id is not None:
        source = sources.hub(
            repo_id, layer_name, version=version, revision=revision, trust_remote_code=trust_remote_code, where=who
        )
    elif repo_path is not None:
        source = sources.LocalPackage(Path(repo_path).expanduser(), package_name, layer_name)
    elif layer_class is not None:
        problem = checks.mode_problem(checks.check_layer_class(layer_class, who), parsed_mode)
        if problem:
            raise KernelError(f"{who}, registered for mode {parsed_mode}: {problem}")
        source = sources.InProcess(layer_class)
    else:
        source = sources.repository(repo, who)
    return registry.LayerKernel(kernel_name, source, modes.parse_device(device, who), parsed_mode)


def register_external_layer(layer_class: type[nn.Module], kernel_name: str, *, subclasses: bool = False) -> None:
    """Binds a layer class to the kernels registered as ``kernel_name``, now or later. The class is not changed.

    Args:
        subclasses: also replace instances of subclasses; by default only those of exactly this class, since a
            subclass with a forward of its own computes something else.

    Raises:
        KernelError: ``layer_class`` is no ``nn.Module`` class, or a kernel class that is known already does not fit.
    """
    registry.add(make_external_layer(layer_class, kernel_name, subclasses=subclasses))


def make_external_layer(
    layer_class: type[nn.Module], kernel_name: str, *, subclasses: bool = False
) -> registry.ExternalLayer:
    """The record that :func:`register_external_layer` registers, checked."""
    if not (isinstance(layer_class, type) and issubclass(layer_class, nn.Module)):
        raise KernelError(f"register_external_layer binds torch.nn.Module classes, this is {layer_class!r}")
    if not isinstance(kernel_name, str) or not kernel_name:
        raise KernelError(f"{layer_class.__name__} cannot be bound to kernel {kernel_name!r}: give its name")
    for kernel in registry.list_layer_kernels(kernel_name):
        if isinstance(kernel.source, sources.InProcess):
            checks.fitted_forward(kernel.source.kernel, layer_class, kernel_name)
    return registry.ExternalLayer(layer_class, kernel_name, subclasses)


def register_layer_batch(config: Mapping[str, Mapping[str, Any]]) -> None:
    """Registers layer kernels: name to the arguments of :func:`register_layer_kernel`; on error none of them."""
    from tilegym.kernel import config as batch

    registry.add(*batch.records({"layers": config}, "register_layer_batch"))


def apply_layer_kernel(
    model: nn.Module,
    mode: modes.ModeLike = "inference",
    device: str | None = None,
    use_fallback: bool = True,
    *,
    verify: bool = False,
    sample_inputs: Any = None,
) -> nn.Module:
    """The layer half of :func:`tilegym.kernel.kernelize_model`: no function is replaced for the model."""
    return kernelize.apply(
        model, mode, device, use_fallback, verify=verify, sample_inputs=sample_inputs, functions=False
    )
