"""Does a kernel give what a model's part gives? On captured calls, with gradients; and does it compile?

The measure is that of :mod:`tilegym.kernel.verify`: a kernel may be at most twice as far from float64 as the part is in
the model's own dtype, and four roundings of the largest value in any case.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import nn

from tilegym.backend import dispatcher
from tilegym.backend import slower
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError
from tilegym.integrate.capture import MODULE
from tilegym.integrate.capture import Recorded
from tilegym.kernel.verify import deviations
from tilegym.transformers.general import Place
from tilegym.transformers.general import resolve

# In fp32 sums in another order are further apart than four roundings; a wrong constant is off by thousands.
_FP32_ROUNDINGS = 32
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Error:
    """The largest error of one result of one call, and what is allowed."""

    call: str
    result: str
    error: float
    allowed: float


@dataclass
class Check:
    """What verification of one candidate gave: ``why`` is "" if it passed; kernels that were launched, by name."""

    why: str = ""
    errors: list[Error] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.why

    @property
    def worst(self) -> Error | None:
        """The result that comes nearest to what is allowed."""
        return max(self.errors, key=lambda e: e.error / e.allowed if e.allowed else 0.0, default=None)


class _Alone(nn.Module):
    """A function as a module without weights."""


def verify(
    model: nn.Module,
    place: Place,
    path: str,
    calls: list[Recorded],
    backend: str,
    gradients: bool = True,
    launches: list | None = None,
) -> Check:
    """Runs the kernel in place of the part on each captured call.

    Args:
        model: holds the part at ``path``; it is not changed.
        calls: of :func:`tilegym.integrate.capture.capture`.
        backend: to run the kernel on.
        gradients: compare those of the first prefill, with respect to tensors and weights, as well.
        launches: gets (kernel, arguments) of each kernel's first launch.
    """
    check = Check()
    if not calls:
        check.why = "it did not run while the model generated"
        return check
    owner = model.get_submodule(path)
    kernel = place.replacement(backend)
    if place.put == "forward":
        layer, original, replaced = _twin(owner, True), type(owner).forward, kernel
    else:
        layer = _twin(owner, False) if any(isinstance(a, str) and a == MODULE for a in calls[0].args) else _Alone()
        original, replaced = (
            _as_forward(function, place.kernel == "attention") for function in (resolve(place.of), kernel)
        )
    for index, call in enumerate(calls):
        trains = gradients and (index == 0 or call.label == "training")
        given = _with_constants(place, call)

        def run(trains: bool, given: tuple = given) -> dict | str:
            with recorded(launches), untuned(), _no_fallback(), use_backend(backend), slower.ignored():
                return deviations(layer, original, replaced, given, trains, _FP32_ROUNDINGS)

        try:
            try:
                found = run(trains)
            except FallbackWarning as warning:
                if not trains:
                    raise
                found = run(False)
                check.notes.append(f"in training PyTorch serves it: {warning}")
        except FallbackWarning as warning:
            check.why = f"{call.label}: {warning}"
            return check
        except Exception as error:  # whatever a kernel does with arguments that it was not written for
            line = (str(error).strip().splitlines() or [""])[0]
            check.why = f"{call.label}: {type(error).__name__}: {line}"
            return check
        if isinstance(found, str):
            check.why = f"{call.label}: {found}"
            return check
        for name, deviation in found.items():
            if not name.startswith("input ") and (deviation.allowed or deviation.problem):
                check.errors.append(Error(call.label, name, deviation.error, deviation.allowed))
            if deviation.problem:
                check.why = f"{call.label}: {name}: {deviation.problem}"
                return check
    return check


class _Constant:
    """A tensor that needs no gradient: angles and masks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _with_constants(place: Place, call: Recorded) -> tuple[tuple, dict]:
    """A call in which the tensors that training does not reach are marked."""
    if place.kernel not in ("rope", "attention"):
        return tuple(call.args), call.kwargs
    if place.kernel == "rope":
        rotated = [name for role, name in place.options["roles"] if role in ("q", "k", "x")]
        reached = {place.options["parameters"].index(name) for name in rotated} | set(rotated)
    else:
        reached = {1, 2, 3, "query", "key", "value"}

    def marked(key: Any, value: Any) -> Any:
        return _Constant(value) if isinstance(value, torch.Tensor) and key not in reached else value

    args = tuple(marked(i, value) for i, value in enumerate(call.args))
    return args, {name: marked(name, value) for name, value in call.kwargs.items()}


def _as_forward(function: Callable, attention: bool) -> Callable:
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # The module among the arguments: whichever copy of it runs.
        args = tuple(layer if isinstance(a, str) and a == MODULE else a for a in args)
        args = tuple(a.tensor if isinstance(a, _Constant) else a for a in args)
        kwargs = {name: a.tensor if isinstance(a, _Constant) else a for name, a in kwargs.items()}
        output = function(*args, **kwargs)
        if not attention:
            return output
        return _seen(output[0], kwargs.get("attention_mask", args[4] if len(args) > 4 else None))

    return forward


def _seen(output: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention's output [B, Sq, H, D] without the queries that see no key: those of padding, which nobody reads."""
    if not isinstance(mask, torch.Tensor):
        return output
    visible = mask if mask.dtype is torch.bool else mask > -1e4
    return output * visible.any(-1).transpose(1, 2)[..., None]


def _twin(module: nn.Module, weights: bool) -> nn.Module:
    """A copy of a module without hooks and patches."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        vars(part).pop("forward", None)
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            hooks.clear()
    # A function's gradients are those of its arguments.
    twin.requires_grad_(weights)
    config = vars(twin).get("config")
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # others do not compute in float64
    return twin.eval()


@contextlib.contextmanager
def _no_fallback() -> Iterator[None]:
    """A call that the backend cannot serve is an error here, also one that has been warned of before."""
    known = set(dispatcher._warned)
    dispatcher._warned.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            yield
    finally:
        dispatcher._warned.update(known)


@contextlib.contextmanager
def recorded(launches: list | None) -> Iterator[None]:
    """Collects (kernel, arguments) of each kernel's first launch within the block, on a GPU or in the interpreter."""
    if launches is None:
        yield
        return
    import cuda.tile as ct

    from tilegym import interpreter

    known = {kernel_name(kernel) for kernel, _ in launches}
    interpreted, native = interpreter.launch, ct.launch

    def keep(kernel: Any, args: tuple) -> None:
        if kernel_name(kernel) not in known:
            known.add(kernel_name(kernel))
            launches.append((kernel, args))

    def launch_on_cpu(grid: tuple, kernel: Any, args: tuple) -> None:
        keep(kernel, args)
        interpreted(grid, kernel, args)

    def launch_on_gpu(stream: int, grid: tuple, kernel: Any, args: tuple, **options: Any) -> None:
        keep(kernel, args)
        native(stream, grid, kernel, args, **options)

    interpreter.launch, ct.launch = launch_on_cpu, launch_on_gpu
    try:
        yield
    finally:
        interpreter.launch, ct.launch = interpreted, native


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Nothing is tuned within the block: kernels run with what is known, else their first configuration.

    For calls that are not timed: tuning each of their sizes would take minutes on a GPU. What a kernel is launched with
    here is not remembered.
    """
    from tilegym.backend.cutile.tuning_bench import GpuBench

    ready = GpuBench.ready
    GpuBench.ready = lambda bench: False
    try:
        yield
    finally:
        GpuBench.ready = ready


def compile_ahead(
    launches: list, done: dict[str, str], architectures: tuple[str, ...] = ARCHITECTURES
) -> dict[str, str]:
    """Compiles each kernel of ``launches`` for each architecture, as launched; "" or the compiler's complaint.

    Args:
        done: what was compiled before, which is not compiled again; by "kernel architecture".

    Raises:
        UnsupportedError: cuTile's compiler is not installed.
    """
    if not compiler_is_there():
        raise UnsupportedError("cuTile's compiler is not installed: pip install 'tilegym[tileiras]'")
    from tilegym import interpreter
    from tilegym.backend.cutile.tuning_bench import compiler_threads
    from tilegym.backend.cutile.tuning_bench import parallel_compilation

    first = {kernel_name(kernel): (kernel, args) for kernel, args in reversed(launches)}
    jobs = [(n, k, a, arch) for n, (k, a) in first.items() for arch in architectures if f"{n} {arch}" not in done]

    def run(job: tuple) -> tuple[str, str]:
        name, kernel, args, arch = job
        try:
            interpreter.compile_kernel(kernel, args, arch)
        except Exception as error:  # the compiler's own, of many kinds
            return f"{name} {arch}", (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{name} {arch}", ""

    with parallel_compilation(), ThreadPoolExecutor(compiler_threads()) as pool:
        return done | dict(pool.map(run, jobs))


def compiler_is_there() -> bool:
    """Whether kernels can be compiled ahead here."""
    from tilegym.doctor import find_tileiras

    return find_tileiras() is not None


def kernel_name(kernel: Any) -> str:
    """The name of a kernel's function."""
    return kernel._pyfunc.__name__
