"""``tilegym doctor``: whether this machine can run TileGym, and what to do where it cannot."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import typer

import tilegym
from tilegym import env
from tilegym.backend import same_chip
from tilegym.backend import selector
from tilegym.errors import BackendError

OK, INFO, WARN, FAIL = "ok", "info", "warn", "fail"
_MARKS = {OK: "[ok]  ", INFO: "[info]", WARN: "[warn]", FAIL: "[FAIL]"}
# CUDA 13, which cuTile's binaries need, starts at this driver.
_MIN_DRIVER = 580
_INSTALL_CUTILE = "pip install 'cuda-tile>=1.7,<1.8'"
# What launches make use of, such as hints and dependent launches, is new in this release of the compiler.
_MIN_TILEIRAS = (13, 4)
_TILEIRAS_PACKAGES = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
_INSTALL_TILEIRAS = "pip install " + " ".join(f"'{package}>=13.4,<13.5'" for package in _TILEIRAS_PACKAGES)


class Check(NamedTuple):
    """One line: what was looked at, whether it is as it should be, what was found, and the remedy if it is not."""

    name: str
    status: str  # OK, INFO (not there, and not needed on this machine), WARN (slower than it could be) or FAIL
    found: str
    remedy: str | None = None


def doctor(as_json: bool = typer.Option(False, "--json", help="Print the checks as JSON.")) -> None:
    """Checks GPU, driver, compiler, backend and caches; exits with 1 if the default backend or a setting is broken."""
    checks = run_checks()
    able = backend_can_run(checks)
    if as_json:
        print(json.dumps({"ok": able, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        for check in checks:
            print(f"{_MARKS[check.status]} {check.name:20} {check.found}")
            if check.remedy:
                print(f"{'':27} -> {check.remedy}")
        print("TileGym can run here." if able else "TileGym cannot run here as it is configured.")
    if not able:
        raise typer.Exit(1)


def run_checks() -> list[Check]:
    """All checks, in the order in which they are printed. None of them raises."""
    return [*_software(), *_gpu(), *_cutile(), *_backend(), *_caches(), *_settings()]


def backend_can_run(checks: list[Check]) -> bool:
    """Whether the backend that calls would take was found to run, and no setting stops it later."""
    return all(check.status != FAIL for check in checks if check.name in ("backend", "backend runs", "settings"))


def _software() -> Iterator[Check]:
    yield Check("TileGym", OK, f"{tilegym.__version__} in {Path(tilegym.__file__).parent}")
    supported = (3, 10) <= sys.version_info[:2] <= (3, 14)
    yield Check(
        "Python",
        OK if supported else FAIL,
        platform.python_version(),
        None if supported else "use Python 3.10 to 3.14",
    )
    fits = _release(torch.__version__) >= (2, 9)
    found = f"{torch.__version__} ({_torch_build()})"
    yield Check("PyTorch", OK if fits else FAIL, found, None if fits else "pip install 'torch>=2.9'")
    version, remedy = _version("transformers"), "pip install 'transformers>=5.10,<6'"
    if version is None:
        yield Check("transformers", INFO, "not installed: only the ops", remedy)
    elif not (5, 10) <= _release(version) < (6, 0):
        yield Check("transformers", FAIL, f"{version}; TileGym is made for 5.10 and later versions of 5", remedy)
    else:
        yield Check("transformers", OK, version)


def _release(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as "2.9.1+cpu" or "1.7rc1"; zeros where it has none."""
    numbers = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(numbers[1]), int(numbers[2] or 0)) if numbers else (0, 0)


def _torch_build() -> str:
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"


def _gpu() -> Iterator[Check]:
    driver = _driver_version()
    if driver is None:
        yield Check("driver", INFO, "no NVIDIA driver found; kernels run in the interpreter, on the CPU")
    elif _release(driver)[0] < _MIN_DRIVER:
        yield Check("driver", FAIL, driver, f"cuTile needs driver {_MIN_DRIVER} or later")
    else:
        yield Check("driver", OK, driver)
    if not torch.cuda.is_available():
        if driver is None:
            yield Check("GPU", INFO, "none")
        elif torch.version.cuda is None:
            yield Check("GPU", FAIL, "PyTorch is a CPU build", "install the CUDA build of torch")
        else:
            yield Check("GPU", FAIL, "PyTorch sees none", "look at CUDA_VISIBLE_DEVICES and at what nvidia-smi says")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        able = capability >= selector.MIN_COMPUTE_CAPABILITY
        yield Check(
            f"GPU {index}",
            OK if able else FAIL,
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs",
            None if able else "cuTile needs compute capability 8.0 (Ampere) or later; the pytorch backend runs",
        )
    names = (torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count()))
    for name in dict.fromkeys(names):
        yield Check("tuned for", INFO, _tuned_for(name))


def _tuned_for(gpu: str) -> str:
    """Whose tuning results and tables a GPU takes."""
    if gpu in same_chip.CHIPS:
        return gpu
    if others := same_chip.others_like(gpu):
        return f"{gpu}: what was measured on an {others[0]}, which has the same chip"
    return f"{gpu}: nothing was measured on it; first calls of attention and of matrix products tune"


def _driver_version() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def _cutile() -> Iterator[Check]:
    version = _version("cuda-tile")
    if version is None:
        yield Check("cuTile", _needed_for_gpu(), "the package cuda-tile is not installed", _INSTALL_CUTILE)
        return
    if _release(version) != (1, 7):
        yield Check("cuTile", FAIL, f"{version}; TileGym is made for 1.7", _INSTALL_CUTILE)
    else:
        yield Check("cuTile", OK, version)
    tileiras = find_tileiras()
    if tileiras is None:
        yield Check("tileiras", _needed_for_gpu(), "cuTile's compiler is not found", _INSTALL_TILEIRAS)
        return
    release = _tileiras_version(tileiras)
    if _release(release) < _MIN_TILEIRAS:
        found = f"{release} in {tileiras}; TileGym's kernels need {'.'.join(map(str, _MIN_TILEIRAS))}"
        yield Check("tileiras", _needed_for_gpu(), found, _INSTALL_TILEIRAS)
    else:
        yield Check("tileiras", OK, f"{release} in {tileiras}")


def _needed_for_gpu() -> str:
    return FAIL if torch.cuda.is_available() else INFO


def find_tileiras() -> str | None:
    """The compiler that cuTile would use: of the pip packages if they are of one release, on PATH, or in a toolkit."""
    releases = {_release(_version(package) or "") for package in _TILEIRAS_PACKAGES}
    package = importlib.util.find_spec("nvidia") if len(releases) == 1 else None
    folders = [f"{root}/cu13/bin" for root in (package.submodule_search_locations or [])] if package else []
    folders.append(os.environ.get("PATH", ""))
    folders += [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders.append("/usr/local/cuda/bin")
    return shutil.which("tileiras", path=os.pathsep.join(folders))


def _tileiras_version(path: str) -> str:
    """Such as "13.4.92"; what went wrong, where the compiler does not tell."""
    try:
        printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not start ({error})"
    named = re.search(r"\bV(\d+\.\d[\d.]*)", printed)
    return named[1] if named else "of an unknown version"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend() -> Iterator[Check]:
    default, why = selector.default_backend()
    try:
        chosen = selector.get_current_backend()
    except BackendError as error:
        yield Check("backend", FAIL, f"TILEGYM_BACKEND={env.backend()}: {error}", "unset TILEGYM_BACKEND")
        return
    if env.backend() is not None:
        why = f"TILEGYM_BACKEND; the default of this machine is {default}"
    yield Check("backend", OK, f"{chosen}: {why}")
    failure = _first_failure(chosen)
    if failure is None:
        where = "cuda" if _device() == "cuda" else "cpu" if chosen != "cutile" else "cpu, in the interpreter"
        yield Check("backend runs", OK, f"rms_norm agrees with PyTorch on {where}")
    else:
        yield Check("backend runs", FAIL, failure, "see the lines above; TILEGYM_BACKEND=pytorch does without cuTile")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _first_failure(backend: str) -> str | None:
    """Runs one small op on ``backend``, with no other to fall back to; what went wrong."""
    x = torch.linspace(-1, 1, 4 * 64, device=_device()).reshape(4, 64)
    weight = torch.linspace(0.5, 1.5, 64, device=_device())
    expected = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
    return _attempt(lambda: _compare(_rms_norm_of(backend)(x, (64,), weight, 1e-6), expected))


def _rms_norm_of(backend: str) -> Callable:
    op = tilegym.ops.rms_norm.op
    if backend not in op.impls:
        raise BackendError(f"backend {backend!r} has no implementation of rms_norm to try")
    return op.impls[backend]


def _compare(got: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (got - expected).abs().max().item()
    if not difference < 1e-5:  # both are fp32 with values around one
        raise BackendError(f"rms_norm is off by {difference:.2g}")


def _attempt(action: Callable[[], None]) -> str | None:
    try:
        action()
    except Exception as error:  # whatever it is, it is what the user needs to know
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


def _caches() -> Iterator[Check]:
    yield _writable("tuning results", env.cache_dir(), "set TILEGYM_CACHE_DIR to a folder that can be written to")
    if _version("cuda-tile") is None:
        return
    # As cuTile looks for it: variables that are empty count as set.
    base = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    folder = os.environ.get("CUDA_TILE_CACHE_DIR", os.path.join(base, "cutile-python"))
    if folder.strip().lower() in ("0", "off", "none", ""):
        yield Check("compiled kernels", INFO, "not kept", "unset CUDA_TILE_CACHE_DIR, or each process compiles anew")
    else:
        yield _writable("compiled kernels", Path(folder), "set CUDA_TILE_CACHE_DIR to a folder that can be written to")


def _writable(name: str, folder: Path, remedy: str) -> Check:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Check(name, OK, str(folder))
    except OSError as error:
        found = f"{folder} cannot be written to ({error.strerror}): each process begins anew"
        return Check(name, WARN, found, remedy)


def _settings() -> Iterator[Check]:
    """Variables whose value would only fail in the middle of a run."""
    try:
        env.tune_timeout()
    except ValueError as error:
        yield Check("settings", FAIL, str(error), "unset TILEGYM_TUNE_TIMEOUT, or give it a number")
