"""What a run has found so far, on disk after every step, so that a run that was stopped anywhere continues."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tilegym
from tilegym.errors import ModelError

FOLDER = ".state"
_PARTS = ("backend", "bench", "integrate", "interpreter", "inventory", "kernel", "ops")


@functools.cache
def code_digest() -> str:
    """Of the code that results depend on; not of the families' folders, into which a run writes."""
    package, digest = Path(tilegym.__file__).parent, hashlib.sha256()
    for pattern in ("*.py", "transformers/*.py", *(f"{part}/**/*.py" for part in _PARTS)):
        for file in sorted(package.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes ``folder``, and keeps other runs out of it for the block; a run that is killed frees it.

    Raises:
        ModelError: another run is in it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(
                f"another run is writing to {folder}: wait for it, or name another folder with --output"
            ) from None
        except OSError:  # a file system that locks nothing
            pass
        yield
    finally:
        os.close(descriptor)


def _not_writable(folder: Path, error: OSError) -> ModelError:
    return ModelError(f"{folder} cannot be written ({error.strerror}): name another folder with --output")


class State:
    """Results by step and key, in ``<folder>/.state/state.json``; captured tensors lie beside it until the end.

    Attributes:
        continues: whether an earlier run's results were found.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any], restart: bool = False) -> None:
        """Opens the state in ``folder``; one of another model, version or option is begun anew, as with ``restart``.

        Raises:
            ModelError: the folder cannot be written.
        """
        self.folder = folder / FOLDER
        self.file = self.folder / "state.json"
        self._fingerprint = json.loads(json.dumps(fingerprint))
        try:
            if restart:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            former = self._read()
            self.continues = bool(former)
            if former is None or not self.continues:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(parents=True, exist_ok=True)
            self._steps: dict[str, dict[str, Any]] = former or {}
            self._write()
        except OSError as error:
            raise _not_writable(folder, error) from error

    def _read(self) -> dict[str, dict[str, Any]] | None:
        try:
            data = json.loads(self.file.read_text(encoding="utf-8"))
            return data["steps"] if data["fingerprint"] == self._fingerprint else None
        except (FileNotFoundError, ValueError, LookupError, TypeError):  # nothing, or nothing that was written here
            return None

    def _write(self) -> None:
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({"fingerprint": self._fingerprint, "steps": self._steps}), encoding="utf-8")
        os.replace(partial, self.file)

    def get(self, step: str, key: str = "") -> Any:
        """The result of a step, None if it was not reached."""
        return self._steps.get(step, {}).get(key)

    def put(self, step: str, value: Any, key: str = "") -> Any:
        """Keeps the result of a step, plain data, and returns it."""
        self._steps.setdefault(step, {})[key] = value
        self._write()
        return value

    def tensors(self, key: str) -> Path:
        """Where captured tensors of one integration point are kept."""
        return self.folder / "captured" / f"{key}.safetensors"

    def forget_tensors(self) -> None:
        """Removes all captured tensors."""
        shutil.rmtree(self.folder / "captured", ignore_errors=True)
