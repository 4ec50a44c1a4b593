"""The Definitions and Solutions there are: those of the op library, and those of the model families."""

import contextlib
import functools
import json
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import TypeVar

import pydantic

from tilegym.errors import InventoryError
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import Solution
from tilegym.inventory.sources import PACKAGE
from tilegym.inventory.sources import repository_path

_Model = TypeVar("_Model", Definition, Solution)
LIBRARY = PACKAGE / "inventory" / "catalog"
FAMILIES = PACKAGE / "transformers"


@dataclass(frozen=True)
class Folder:
    """Where Definitions and Solutions lie; ``kernels`` is the code of a model family, whose every file needs both."""

    definitions: Path
    solutions: Path
    kernels: Path | None = None


def shipped_folders() -> list[Folder]:
    """The folders of this package: the library's, and one for each model family that has kernels of its own."""
    families = sorted(
        {
            path.parent
            for name in ("kernels", "kernel_definitions", "kernel_solutions")
            for path in FAMILIES.glob(f"*/{name}")
        }
    )
    return [Folder(LIBRARY / "definitions", LIBRARY / "solutions"), *map(family_folder, families)]


def family_folder(family: Path) -> Folder:
    """The folders of one model family (``src/tilegym/transformers/<family>``, or such a folder elsewhere)."""
    return Folder(family / "kernel_definitions", family / "kernel_solutions", family / "kernels")


def folders_in(path: Path) -> list[Folder]:
    """The folders below ``path``: a model family's, or ``definitions`` and ``solutions`` as FlashInfer-Bench has them.

    Raises:
        InventoryError: there are neither.
    """
    found = []
    if (path / "kernel_definitions").is_dir() or (path / "kernels").is_dir():
        found.append(family_folder(path))
    if (path / "definitions").is_dir():
        found.append(Folder(path / "definitions", path / "solutions"))
    if not found:
        raise InventoryError(
            f"{path} holds no inventory: expected a folder 'definitions' (and 'solutions'), or a model family's "
            "'kernel_definitions' (and 'kernel_solutions', 'kernels')"
        )
    return found


@dataclass
class Catalog:
    """Definitions and Solutions by name, and the files that they came from."""

    definitions: dict[str, Definition] = field(default_factory=dict)
    solutions: dict[str, Solution] = field(default_factory=dict)
    files: dict[tuple[type, str], Path] = field(default_factory=dict)

    def solutions_of(self, definition: str) -> list[Solution]:
        """The Solutions of the Definition of this name."""
        return [solution for solution in self.solutions.values() if solution.definition == definition]

    def definition(self, name: str) -> Definition:
        """The Definition of this name.

        Raises:
            InventoryError: there is none; the message lists names like it.
        """
        return _of(self.definitions, "Definition", name)

    def solution(self, name: str) -> Solution:
        """The Solution of this name; errors as of :meth:`definition`."""
        return _of(self.solutions, "Solution", name)

    def add(self, definition: Definition, *solutions: Solution) -> None:
        """Adds entries of its own, in memory, to what was read.

        Raises:
            InventoryError: an entry of such a name is there already.
        """
        for table, entry in ((self.definitions, definition), *((self.solutions, s) for s in solutions)):
            if entry.name in table:
                raise InventoryError(f"{entry.name!r} is in the catalog already; choose another name")
            table[entry.name] = entry


def _of(table: dict[str, _Model], what: str, name: str) -> _Model:
    if name not in table:
        import difflib

        near = difflib.get_close_matches(name, table, n=3, cutoff=0.4)
        hint = f"is it one of {', '.join(near)}?" if near else "`tilegym inventory list` shows all"
        raise InventoryError(f"there is no {what} {name!r}: {hint}")
    return table[name]


def read(model: type[_Model], file: Path) -> _Model:
    """The Definition or Solution in ``file``.

    Raises:
        InventoryError: it cannot be read, or is not one; the message names every field at fault.
    """
    try:
        return parse(model, file.read_bytes())
    except OSError as error:
        raise InventoryError(f"{file} cannot be read: {error.strerror}") from error
    except pydantic.ValidationError as error:
        faults = "; ".join(f"{path or 'file'}: {message}" for path, message in faults_of(error))
        raise InventoryError(
            f"{repository_path(file)} is no {model.__name__}: {faults}; correct it, "
            "`tilegym inventory validate FOLDER` says more"
        ) from error


def parse(model: type[_Model], text: bytes, root: Path | None = None) -> _Model:
    """The Definition or Solution in a file's bytes; a Solution also as FlashInfer-Bench has it, sources embedded.

    Args:
        root: where the paths of sources begin; None for this package's repository.

    Raises:
        pydantic.ValidationError: it is none.
    """
    if model is Solution:
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            data = json.loads(text)
            if data["spec"]["language"] == "python" and all(source.get("content") for source in data["sources"]):
                return model.from_flashinfer_bench(data, root)
    return model.from_json(text)


def faults_of(error: pydantic.ValidationError) -> list[tuple[str, str]]:
    """What pydantic found: pairs of a field's path and what is wrong with it."""
    return [
        (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors(include_url=False)
    ]


def json_files(folder: Path) -> Iterator[Path]:
    """The JSON files below ``folder``, in order; none if there is no such folder."""
    yield from sorted(folder.rglob("*.json"))


def load(folders: Iterable[Folder] | None = None) -> Catalog:
    """The catalog in ``folders``, by default the shipped one.

    Raises:
        InventoryError: a file is not what it should be, or two entries have one name.
    """
    if folders is not None:
        return _load(list(folders))
    shipped = _shipped()
    return Catalog(dict(shipped.definitions), dict(shipped.solutions), dict(shipped.files))


@functools.cache
def _shipped() -> Catalog:
    return _load(shipped_folders())


def _load(folders: list[Folder]) -> Catalog:
    catalog = Catalog()
    for model, table, files in (
        (Definition, catalog.definitions, [f for folder in folders for f in json_files(folder.definitions)]),
        (Solution, catalog.solutions, [f for folder in folders for f in json_files(folder.solutions)]),
    ):
        for file in files:
            entry = read(model, file)
            if entry.name in table:
                other = repository_path(catalog.files[model, entry.name])
                raise InventoryError(f"{repository_path(file)}: {entry.name!r} is defined in {other} too; rename one")
            table[entry.name] = entry
            catalog.files[model, entry.name] = file
    return catalog
