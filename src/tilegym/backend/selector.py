"""Which backend serves a call.

Strongest first: ``backend=`` of the call, :func:`use_backend` (per thread), :func:`set_backend` (per process),
``TILEGYM_BACKEND``, and the default: ``cutile`` on a machine whose GPU cuTile supports, else ``pytorch``.
"""

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable
from collections.abc import Iterator

import torch

from tilegym import env
from tilegym.errors import BackendError

# Compute capabilities that tileiras of CUDA 13.4 compiles for start at Ampere.
MIN_COMPUTE_CAPABILITY = (8, 0)
# As backend= of a call: as within use_backend("cutile"). A model is patched with it: its calls go to PyTorch where that
# was measured to be faster, as those do that name no backend.
PREFER_CUTILE = "cutile unless slower"

_probes: dict[str, Callable[[], str | None]] = {}
_process_choice: str | None = None
_latest_choice: str | None = None  # of use_backend, in whichever thread; only tells compiled code of a change


class _ThreadChoice(threading.local):
    value: str | None = None


_thread_choice = _ThreadChoice()


def register_backend(name: str, probe: Callable[[], str | None] | None = None) -> None:
    """Makes ``name`` a backend. ``probe`` returns why it cannot run on this machine, or None where it can."""
    _probes[name] = probe or (lambda: None)
    unavailable_reason.cache_clear()


@functools.cache
def unavailable_reason(name: str) -> str | None:
    """Why backend ``name`` cannot run on this machine, with the remedy; None if it can."""
    if name not in _probes:
        return f"no backend is called {name!r}; there are {', '.join(sorted(_probes))}"
    return _probes[name]()


@functools.cache
def _cutile_gpu_missing() -> str | None:
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is visible"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_COMPUTE_CAPABILITY:
        return "the GPU's compute capability is {}.{}, cuTile needs 8.0 or later".format(*capability)
    return None


def _probe_cutile() -> str | None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.tile") is None:
        return "the package cuda-tile is not installed: pip install 'cuda-tile>=1.7,<1.8'"
    return None


register_backend("pytorch")
register_backend("cutile", _probe_cutile)


@functools.cache
def default_backend() -> tuple[str, str]:
    """The default backend of this machine and why it is the default."""
    missing = unavailable_reason("cutile") or _cutile_gpu_missing()
    return ("pytorch", missing) if missing else ("cutile", "a GPU that cuTile supports is present")


def constant_while_compiling(function: Callable) -> Callable:
    """Marks a function of plain values that torch.compile shall run once, while tracing, and not trace into."""
    # What torch.compiler.assume_constant_result does, without importing torch._dynamo (a second) to do it.
    function._dynamo_marked_constant = True
    return function


@functools.cache
def _environment_or_default() -> str:
    # Read once: a look-up in os.environ would cost each op more than the rest of its dispatch.
    chosen = env.backend()
    if chosen is None:
        return default_backend()[0]
    assert_backend_available(chosen)
    return chosen


def get_current_backend() -> str:
    """The backend that a call without ``backend=`` takes in this thread now."""
    if torch.compiler.is_compiling():
        return _backend_while_tracing(_process_choice, _latest_choice)
    return eager_backend()


def name_of(backend: str | None) -> str:
    """The backend that ``backend=`` of a call stands for: itself, the one of the moment if None, or preferred."""
    return "cutile" if backend == PREFER_CUTILE else backend or get_current_backend()


def eager_backend() -> str:
    """:func:`get_current_backend` for code that torch.compile does not trace."""
    return _thread_choice.value or _process_choice or _environment_or_default()


@constant_while_compiling
def _backend_while_tracing(process_choice: str | None, latest_choice: str | None) -> str:
    # The arguments are module globals, on which the traced code is guarded: a changed choice traces again.
    return _thread_choice.value or process_choice or _environment_or_default()


def set_backend(name: str | None) -> None:
    """Chooses the backend of this process; None returns to ``TILEGYM_BACKEND`` and the default.

    Raises:
        BackendError: the backend is unknown or cannot run here.
    """
    global _process_choice
    if name is not None:
        assert_backend_available(name)
    _process_choice = name


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Chooses the backend of a ``with`` block, in this thread alone; blocks nest.

    Code under torch.compile is traced again when the choice changes; two threads that run the same compiled
    function under different choices at the same time are not told apart.

    Raises:
        BackendError: the backend is unknown or cannot run here.
    """
    global _latest_choice
    assert_backend_available(name)
    before = _thread_choice.value
    _thread_choice.value = _latest_choice = name
    try:
        yield
    finally:
        _thread_choice.value = _latest_choice = before


def get_available_backends() -> list[str]:
    """The names of the backends that can run on this machine."""
    return [name for name in sorted(_probes) if unavailable_reason(name) is None]


def is_backend_available(name: str) -> bool:
    """Whether ``name`` is a backend that can run on this machine."""
    return unavailable_reason(name) is None


def assert_backend_available(name: str) -> None:
    """Raises BackendError, with the remedy, unless ``name`` is a backend that can run on this machine."""
    reason = unavailable_reason(name)
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot be used: {reason}")


def known_backends() -> list[str]:
    """The names of all registered backends, also of those that cannot run on this machine."""
    return sorted(_probes)
