"""Where a class or function is written: file and lines of the installed package, and a link to the same lines."""

import contextlib
import functools
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from tilegym import env
from tilegym.integrate.requirement import Source

REPOSITORY = "https://github.com/huggingface/transformers"
_TIMEOUT = 10  # seconds
# Of releases whose tag is known to be this commit; `--resolve-commits` asks for the others.
_RELEASES = {"5.17.0": "856157a2f3e9594954310df18fdccc31ffddebe9"}


def transformers_revision() -> tuple[str, bool]:
    """The revision that the installed transformers comes from, and whether it is a commit: else it is a tag.

    A version installed from git knows its commit; that of a few releases is known here, that of the others once
    :func:`look_up_commit` has asked.
    """
    return _revision()


@functools.cache
def _revision() -> tuple[str, bool]:
    distribution = importlib.metadata.distribution("transformers")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id", "")
    if not commit and origin.get("dir_info", {}).get("editable"):
        commit = _git("-C", origin["url"].removeprefix("file://"), "rev-parse", "HEAD").strip()
    commit = commit or _known_commits().get(distribution.version, "")
    return (commit, True) if commit else (f"v{distribution.version}", False)


def look_up_commit() -> str:
    """Asks GitHub for the commit of the installed release's tag, and remembers it; "" if that did not work."""
    revision, known = transformers_revision()
    if known:
        return revision
    answer = _git("ls-remote", REPOSITORY, f"refs/tags/{revision}", f"refs/tags/{revision}^{{}}")
    # An annotated tag has a line of its own; the line behind it is the commit's.
    lines = [line.split() for line in answer.splitlines() if "refs/tags/" in line]
    if not lines:
        return ""
    commit = lines[-1][0]
    file = _file_of_commits()
    with contextlib.suppress(OSError):  # then it is asked for again
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_known_commits() | {revision.removeprefix("v"): commit}), encoding="utf-8")
    _revision.cache_clear()
    source_of.cache_clear()
    return commit


def _git(*arguments: str) -> str:
    """What git answers; "" if it does not."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=True, env=environment
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _file_of_commits() -> Path:
    return env.cache_dir() / "transformers_commits.json"


def _known_commits() -> dict[str, str]:
    try:
        return _RELEASES | json.loads(_file_of_commits().read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return _RELEASES


def _on_the_hub(file: str) -> str:
    """Where a model's own code lies on the Hub, by the folder that transformers has put it into; "" if not there."""
    match = re.fullmatch(r"transformers_modules/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", file)
    if match is None:
        return ""
    # A folder is a Python name: transformers writes these for what is none.
    names = (re.sub(r"^_(?=\d)", "", part) for part in match[1].split("/"))
    repository = "/".join(name.replace("_hyphen_", "-").replace("_dot_", ".") for name in names)
    return f"https://huggingface.co/{repository}/blob/{match[2]}/{match[3]}"


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
    elif hub := _on_the_hub(file):
        url, immutable = f"{hub}#L{first}-L{last}", True
    return Source(file, first, last, thing.__qualname__, url, immutable)
