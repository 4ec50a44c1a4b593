"""Where a class or function is written: file and lines of the installed package, and a link to the same lines."""

import functools
import importlib.metadata
import inspect
import json
from pathlib import Path
from typing import Any

import torch

from tilegym.integrate.requirement import Source

REPOSITORY = "https://github.com/huggingface/transformers"

# The commit of a release's tag, where somebody has looked it up; other releases are linked by their tag.
RELEASE_COMMITS: dict[str, str] = {}


def transformers_revision() -> tuple[str, bool]:
    """The revision that the installed transformers comes from, and whether it is a commit: else it is a tag.

    A version installed from git knows its commit.
    """
    return _revision()


@functools.cache
def _revision() -> tuple[str, bool]:
    distribution = importlib.metadata.distribution("transformers")
    version = distribution.version
    commit = RELEASE_COMMITS.get(version, "")
    if not commit:
        commit = json.loads(distribution.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id", "")
    return (commit, True) if commit else (f"v{version}", False)


@functools.lru_cache(maxsize=4096)
def source_of(thing: Any) -> Source | None:
    """The region of a class, function or method; None if its text is not to be had."""
    thing = inspect.unwrap(thing) if not inspect.isclass(thing) else thing
    try:
        lines, first = inspect.getsourcelines(thing)
        path = Path(inspect.getsourcefile(thing))
    except (OSError, TypeError):
        return None
    last, package = first + len(lines) - 1, thing.__module__.partition(".")[0]
    parts = path.parts
    start = len(parts) - 1 - parts[::-1].index(package) if package in parts else len(parts) - 1
    file = "/".join(parts[start:])
    url, immutable = "", False
    if package == "transformers":
        revision, immutable = transformers_revision()
        url = f"{REPOSITORY}/blob/{revision}/src/{file}#L{first}-L{last}"
    elif package == "torch":
        commit = torch.version.git_version
        url, immutable = f"https://github.com/pytorch/pytorch/blob/{commit}/{file}#L{first}-L{last}", True
    return Source(file, first, last, thing.__qualname__, url, immutable)
