"""Function kernels: registering them and patching the functions they replace."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Protocol
from typing import runtime_checkable

from tilegym import env
from tilegym.errors import KernelError
from tilegym.kernel import checks
from tilegym.kernel import function_patches
from tilegym.kernel import modes
from tilegym.kernel import registry
from tilegym.kernel import reports
from tilegym.kernel import sources


@runtime_checkable
class FuncRepositoryProtocol(Protocol):
    """What ``repo`` must be: ``load()`` gives a function, or a stateless ``nn.Module`` class whose forward is one."""

    def load(self) -> Any: ...


def register_function_kernel(
    *,
    func_name: str,
    target_module: str,
    func_impl: Callable | str | None = None,
    repo: FuncRepositoryProtocol | None = None,
    repo_id: str | None = None,
    revision: str | None = None,
    version: int | str | None = None,
    device: str | None = None,
    mode: modes.ModeLike = None,
    trust_remote_code: bool | list[str] = False,
) -> None:
    """Registers a kernel for the function ``func_name`` of the Python module ``target_module``; nothing is loaded yet.

    It comes from exactly one of: ``func_impl``, a callable or the name of one of TileGym's own functions
    ("TileGymRoPE", ...); ``repo``, an object with ``load()``; ``repo_id``, a Hub repository that has a function of the
    same name, with ``version`` or ``revision`` (with neither, the branch ``main``).

    Args:
        device: the kind of device it is for; None for every kind.
        mode: as in :func:`tilegym.kernel.register_layer_kernel`. The flags ``has_backward`` and ``can_torch_compile``
            are read from the function or class.
        trust_remote_code: passed to ``kernels`` for ``repo_id``: whether code of untrusted publishers may run.

    Raises:
        KernelError: no source or several, an unknown device or mode, or a ``func_impl`` unfit for the mode.
    """
    registry.add(
        make_function_kernel(
            func_name=func_name,
            target_module=target_module,
            func_impl=func_impl,
            repo=repo,
            repo_id=repo_id,
            revision=revision,
            version=version,
            device=device,
            mode=mode,
            trust_remote_code=trust_remote_code,
        )
    )


def make_function_kernel(
    *,
    func_name: str,
    target_module: str,
    func_impl: Callable | str | None = None,
    repo: FuncRepositoryProtocol | None = None,
    repo_id: str | None = None,
    revision: str | None = None,
    version: int | str | None = None,
    device: str | None = None,
    mode: modes.ModeLike = None,
    trust_remote_code: bool | list[str] = False,
) -> registry.FunctionKernel:
    """The record that :func:`register_function_kernel` registers, checked."""
    who = f"function kernel for {target_module}.{func_name}"
    if not all(isinstance(name, str) and name for name in (func_name, target_module)) or not func_name.isidentifier():
        raise KernelError(f"{who}: func_name must be the name of a function and target_module the path of its module")
    sources.exactly_one(who, func_impl=func_impl, repo=repo, repo_id=repo_id)
    if repo_id is None and (version is not None or revision is not None):
        raise KernelError(f"{who}: version and revision belong to repo_id")
    parsed_mode = modes.parse_mode(mode, who)
    suits = None
    if func_impl is not None:
        implementation = func_impl
        if isinstance(func_impl, str):
            named = registry.find_named_function(func_impl)
            implementation, suits = named.function, named.suits
        if not callable(implementation):
            raise KernelError(f"{who}: func_impl must be a callable or the name of one, this is {func_impl!r}")
        problem = checks.mode_problem(implementation, parsed_mode)
        if problem:
            raise KernelError(f"{who}, registered for mode {parsed_mode}: {problem}")
        source = sources.InProcess(implementation)
    elif repo is not None:
        source = sources.repository(repo, who)
    else:
        source = sources.hub(
            repo_id,
            func_name,
            version=version,
            revision=revision,
            trust_remote_code=trust_remote_code,
            is_layer=False,
            where=who,
        )
    return registry.FunctionKernel(
        func_name, target_module, source, modes.parse_device(device, who), parsed_mode, suits
    )


def register_function_batch(config: Mapping[str, Mapping[str, Any]]) -> None:
    """Registers function kernels: function name to the other arguments of :func:`register_function_kernel`.

    All of them are registered or, on error, none. An entry's ``func_name`` overrides its key, for functions of one name
    in several modules.
    """
    from tilegym.kernel import config as batch

    registry.add(*batch.records({"functions": config}, "register_function_batch"))


def apply_function_kernel(
    *,
    target_module: str | None = None,
    device: str | None = None,
    mode: modes.ModeLike = None,
    strict: bool = False,
) -> list[str]:
    """Patches the registered functions in their modules, for the whole process.

    Functions that a model's modules imported by name are reached by :func:`tilegym.kernel.kernelize_model`, which knows
    the model. ``unkernelize_model(None)`` takes everything back.

    Args:
        target_module: only functions of this module.
        device, mode: only kernels that serve this device and this mode; of several the one that fits best.
        strict: raise, and patch nothing, if a module or function is missing, a kernel cannot be used, or nothing was
            left to patch; else each is a warning, given once.

    Returns:
        The patched functions as "package.module.function", each once.

    Raises:
        KernelError: as ``strict`` says; an unknown device or mode.
    """
    wanted_mode = None if mode is None else modes.parse_mode(mode, "apply_function_kernel")
    wanted_device = modes.parse_device(device, "apply_function_kernel")
    if not env.use_kernels():
        reports.log_disabled("apply_function_kernel")
        return []
    kernels = registry.select_function_kernels(wanted_device, wanted_mode, target_module)
    plans, skipped = function_patches.plan_functions(
        {target: record for target, record in kernels.items() if record}, wanted_mode, wanted_device
    )
    problems = [f"{entry.name} was not replaced: {entry.why}" for entry in skipped]
    if not any(kernels.values()):
        filters = f"target_module={target_module!r}, device={device!r}, mode={mode!r}"
        problems.append(f"no registered function kernel matches {filters}")
    if problems and strict:
        raise KernelError("nothing was patched: " + "; ".join(problems))
    for problem in problems:
        reports.warn_once(problem)
    function_patches.claim(function_patches.PROCESS, plans, None, None)
    return [plan.record.target for plan in plans]
