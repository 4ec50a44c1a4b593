"""Where the files of the inventory lie: paths in the repository, found in a checkout and in an installed package."""

from pathlib import Path

from tilegym.errors import InventoryError

PACKAGE = Path(__file__).parents[1]


def source_path(path: str, root: Path | None = None) -> Path | None:
    """Where the repository path ``path`` lies on this machine, or None if it leads out of the repository.

    Args:
        path: as in a Solution, with ``/`` between its parts.
        root: the repository; None for this one, whose ``src/tilegym`` may also be an installed package.
    """
    parts = path.split("/")
    if path.startswith("/") or "\\" in path or ".." in parts:
        return None
    if root is not None:
        return root / path
    return PACKAGE.joinpath(*parts[2:]) if parts[:2] == ["src", "tilegym"] else PACKAGE.parents[1] / path


def read_source(path: str, root: Path | None = None) -> str:
    """The text of the file at the repository path ``path``.

    Raises:
        InventoryError: the path leads out of the repository, or there is no such file.
    """
    file = source_path(path, root)
    if file is None:
        raise InventoryError(f"source {path!r} is not a path relative to the repository; write it without '..' and '/'")
    try:
        return file.read_text()
    except OSError as error:
        raise InventoryError(f"source {path!r} cannot be read: {error}") from error


def repository_path(file: Path, root: Path | None = None) -> str:
    """The inverse of :func:`source_path`; a file that is in no repository keeps its own path."""
    bases = ((root, ""),) if root is not None else ((PACKAGE, "src/tilegym/"), (PACKAGE.parents[1], ""))
    for base, prefix in bases:
        if file.is_relative_to(base):
            return prefix + file.relative_to(base).as_posix()
    return str(file)
