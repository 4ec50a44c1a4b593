"""Every environment variable that TileGym reads, one typed getter each, read when it is called."""

import os
import tempfile
from pathlib import Path

_TRUE = frozenset({"1", "true", "yes", "on"})
_LONGEST_TIMEOUT = 1e9  # seconds; waiting for a process takes no longer ones, and no infinity


def _flag(name: str, default: bool = False) -> bool:
    value = os.environ.get(name, "").strip().lower()
    return value in _TRUE if value else default


def backend() -> str | None:
    """``TILEGYM_BACKEND``: the backend of this process, unless ``set_backend`` says otherwise."""
    return os.environ.get("TILEGYM_BACKEND", "").strip() or None


def disable_fallback() -> bool:
    """``DISABLE_FALLBACK=1``: a call that the chosen backend cannot serve is an error, not a fallback."""
    return _flag("DISABLE_FALLBACK")


def disable_autotune() -> bool:
    """``TILEGYM_DISABLE_AUTOTUNE=1``: take the first configuration of a search space, measure nothing."""
    return _flag("TILEGYM_DISABLE_AUTOTUNE")


def interpret() -> bool:
    """``TILEGYM_INTERPRET=1``: ``cuda.tile.launch`` itself runs kernels in the interpreter."""
    return _flag("TILEGYM_INTERPRET")


def use_kernels() -> bool:
    """``TILEGYM_USE_KERNELS=0``: applying kernels to a model does nothing, and says so."""
    return _flag("TILEGYM_USE_KERNELS", default=True)


def cache_dir() -> Path:
    """``TILEGYM_CACHE_DIR``: where tuning results are kept; else ``~/.cache/tilegym`` or under XDG_CACHE_HOME."""
    chosen = os.environ.get("TILEGYM_CACHE_DIR", "").strip()
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tilegym"
    except RuntimeError:  # the user has no home, as some that containers run as
        return Path(tempfile.gettempdir()) / "tilegym"


def tune_timeout() -> float:
    """``TILEGYM_TUNE_TIMEOUT``: seconds that one candidate may compile for while tuning (default 60)."""
    value = os.environ.get("TILEGYM_TUNE_TIMEOUT", "").strip() or "60"
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < _LONGEST_TIMEOUT:
        raise ValueError(f"TILEGYM_TUNE_TIMEOUT is {value!r}; it has to be a number of seconds, more than 0")
    return seconds
