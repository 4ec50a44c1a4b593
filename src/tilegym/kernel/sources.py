"""Where a kernel comes from, and how it is loaded from there.

A source's ``load()`` gives the kernel: for a layer a stateless ``nn.Module`` class, for a function a callable. It is
cheap to make and loads when it is first needed. Its ``str`` says in a report where the kernel came from.
"""

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from typing import Protocol
from typing import runtime_checkable

from tilegym.errors import KernelError

# Loading imports code, and neither ``kernels`` nor a half-imported package is safe to enter twice at a time.
_load_lock = threading.RLock()


@runtime_checkable
class Source(Protocol):
    """Anything that ``load()`` gets a kernel from."""

    def load(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class InProcess:
    """A class or function of this process."""

    kernel: Any

    def load(self) -> Any:
        return self.kernel

    def __str__(self) -> str:
        return f"{self.kernel.__module__}.{getattr(self.kernel, '__qualname__', type(self.kernel).__qualname__)}"


@dataclass(frozen=True, eq=False)
class Repository:
    """A repository object: anything with ``load()``, such as those of ``kernels``."""

    repo: Source

    def load(self) -> Any:
        with _load_lock:
            return self.repo.load()

    def __str__(self) -> str:
        return f"repository {type(self.repo).__qualname__}"


@dataclass(frozen=True)
class LocalPackage:
    """A layer of a Python package on disk, or of a kernel built by kernel-builder (``package_name`` None).

    The package is the folder ``repo_path/package_name``, or ``repo_path`` itself, and has a ``layers.py``. It is
    imported under a name of its own, so that two packages of one name can be used and ``sys.path`` stays as it is;
    imports of its own modules must therefore be relative.
    """

    repo_path: Path
    package_name: str | None
    layer_name: str

    def load(self) -> Any:
        with _load_lock:
            if self.package_name is None and not (self.repo_path / "layers.py").is_file():
                layers = getattr(_load_built_kernel(self.repo_path), "layers", None)
            else:
                layers = _import_layers(self._folder())
        return _member(layers, self.layer_name, str(self))

    def _folder(self) -> Path:
        if not self.repo_path.is_dir():
            raise KernelError(f"repo_path {str(self.repo_path)!r} is not a folder; give the one that holds the package")
        tried = [self.repo_path] if self.package_name is None else [self.repo_path / self.package_name, self.repo_path]
        for folder in tried:
            if (folder / "layers.py").is_file():
                return folder
        raise KernelError(
            f"package {self.package_name!r} was not found in {str(self.repo_path)!r}: there is no "
            f"{' and no '.join(str(folder / 'layers.py') for folder in tried)}"
        )

    def __str__(self) -> str:
        return f"{self.repo_path / (self.package_name or '')}:{self.layer_name}"


@dataclass(frozen=True)
class Hub:
    """A layer or a function of a kernel repository on the Hugging Face Hub, loaded by ``kernels``.

    ``trust_remote_code`` is passed on: False takes trusted publishers only, True any, a list these repositories too.
    """

    repo_id: str
    name: str
    revision: str | None = None
    version: int | None = None
    trust_remote_code: bool | tuple[str, ...] = False
    is_layer: bool = True

    def load(self) -> Any:
        kernels = import_kernels(f"loading {self}")
        trust = list(self.trust_remote_code) if isinstance(self.trust_remote_code, tuple) else self.trust_remote_code
        where = dict(revision=self.revision, version=self.version, trust_remote_code=trust)
        with _load_lock, _one_sentence(self):
            if self.is_layer:
                return kernels.LayerRepository(self.repo_id, layer_name=self.name, **where).load()
            module = kernels.get_kernel(self.repo_id, **where)
        return _member(module, self.name, str(self))

    def __str__(self) -> str:
        ref = f"v{self.version}" if self.version is not None else self.revision
        return f"hub {self.repo_id}@{ref}:{self.name}"


def hub(
    repo_id: str,
    name: str,
    *,
    revision: str | None,
    version: int | str | None,
    trust_remote_code: bool | list[str] | tuple[str, ...] = False,
    is_layer: bool = True,
    where: str,
) -> Hub:
    """Checks the arguments of a Hub source.

    ``version`` is the number of a kernel's version, or the text of a release ("0.1.0", tagged ``v0.1.0``). Without
    ``version`` and ``revision`` the repository's ``main`` is taken, which can change from one day to the next.

    Raises:
        KernelError: both were given, or one of them is no such thing.
    """
    if not (isinstance(repo_id, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id)):
        raise KernelError(f"{where}: repo_id {repo_id!r} is not of the form 'owner/name'")
    if version is not None and revision is not None:
        raise KernelError(
            f"{where}: give version or revision, not both (got version={version!r}, revision={revision!r})"
        )
    if version is None and revision is None:
        revision = "main"
    elif version is None:
        if not (isinstance(revision, str) and revision.strip()):
            raise KernelError(f"{where}: revision {revision!r} is not the name of a branch, tag or commit")
    elif type(version) is not int or version < 0:
        text = version.strip() if isinstance(version, str) else ""
        if text.isdecimal():
            version = int(text)
        elif re.fullmatch(r"\d+(\.\d+)+", text):
            version, revision = None, f"v{text}"
        else:
            raise KernelError(f"{where}: version {version!r} is neither a number (1) nor a release ('0.1.0')")
    if isinstance(trust_remote_code, list):
        trust_remote_code = tuple(trust_remote_code)
    return Hub(repo_id, name, revision, version, trust_remote_code, is_layer)


def import_kernels(purpose: str) -> ModuleType:
    """The package ``kernels``.

    Raises:
        KernelError: it is not installed.
    """
    try:
        return importlib.import_module("kernels")
    except ImportError as error:
        raise KernelError(f"{purpose} needs the package kernels: pip install 'tilegym[hub]' ({error})") from error


@contextlib.contextmanager
def _one_sentence(source: Hub):
    """Turns what can go wrong between here and the Hub into one sentence with the remedy."""
    from huggingface_hub import constants
    from huggingface_hub import errors

    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise KernelError(f"{source}: the Hub has no such repository, or it is private: see `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise KernelError(f"{source}: the repository has no such revision or version") from error
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        if constants.HF_HUB_OFFLINE and isinstance(error, (OSError, ValueError, errors.HfHubHTTPError)):
            cache = os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE
            raise KernelError(
                f"{source}: Hub access is off (HF_HUB_OFFLINE) and the cache {cache} does not serve it: {first_line}"
            ) from error
        # By name: the library that huggingface_hub speaks HTTP with has changed twice.
        if not {"TransportError", "ConnectionError"}.isdisjoint(base.__name__ for base in type(error).__mro__):
            raise KernelError(f"{source}: the Hub ({constants.ENDPOINT}) cannot be reached: {first_line}") from error
        raise KernelError(f"{source}: {type(error).__name__}: {first_line}") from error


def _load_built_kernel(path: Path) -> ModuleType:
    if not path.is_dir():
        raise KernelError(f"repo_path {str(path)!r} is not a folder; give the one that holds the kernel")
    kernels = import_kernels(f"loading a built kernel from {path}")
    try:
        return kernels.get_local_kernel(path)
    except FileNotFoundError as error:
        raise KernelError(
            f"{path} holds neither a layers.py nor a kernel built for this system; for a Python package inside it give "
            "package_name"
        ) from error


def _import_layers(folder: Path) -> ModuleType:
    """Imports ``folder`` as a package, with or without an ``__init__.py``, and returns its module ``layers``."""
    folder = folder.resolve()
    name = f"_tilegym_local_{hashlib.sha1(str(folder).encode()).hexdigest()[:12]}_{folder.name}"
    if name not in sys.modules:
        init = folder / "__init__.py"
        if init.is_file():
            spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
        else:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = package = importlib.util.module_from_spec(spec)
        try:
            if spec.loader is not None:
                spec.loader.exec_module(package)
        except BaseException:
            for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[module]
            raise
    return importlib.import_module(f"{name}.layers")


def _member(module: ModuleType | None, name: str, source: str) -> Any:
    member = getattr(module, name, None)
    if member is None:
        there = sorted(
            key for key, value in vars(module or object).items() if not key.startswith("_") and callable(value)
        )
        raise KernelError(f"{source}: there is no {name!r}; the repository has {', '.join(there) or 'nothing public'}")
    return member


def repository(repo: Any, who: str) -> Repository:
    """Checks a repository object.

    Raises:
        KernelError: it has no ``load()``.
    """
    if isinstance(repo, type) or not callable(getattr(repo, "load", None)):
        raise KernelError(f"{who}: repo must be an object with a method load(), this is {repo!r}")
    return Repository(repo)


def exactly_one(who: str, **given: Any) -> None:
    """Raises KernelError unless exactly one of the keyword arguments is not None."""
    present = [name for name, value in given.items() if value is not None]
    if len(present) != 1:
        raise KernelError(f"{who}: give exactly one of {', '.join(given)} (got {', '.join(present) or 'none'})")
