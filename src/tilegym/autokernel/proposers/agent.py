"""Asks an agent, any program that edits files: it gets a worktree and a task, and its changes are the proposal."""

import contextlib
import json
import os
import shutil
import signal
import string
import subprocess
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task
from tilegym.autokernel.repository import Repository
from tilegym.autokernel.sandbox import ENVIRONMENT
from tilegym.errors import AutokernelError
from tilegym.inventory import Definition
from tilegym.inventory import Solution

PLACEHOLDERS = ("task", "worktree", "skill", "logs")
_MAX_FILE = 200_000


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


# What the fields of a config have to be.
_KINDS = {
    "command": ("a list of words", lambda v: _words(v) and v),
    "minutes": ("a number above 0", lambda v: type(v) in (int, float) and v > 0),
    "environment": ("a list of names", _words),
    "skill": ("a path", lambda v: isinstance(v, str)),
    "attempts": ("a whole number above 0", lambda v: type(v) is int and v > 0),
}


@dataclass(frozen=True)
class AgentConfig:
    """How the agent is called.

    Attributes:
        command: its words, in which ``{task}``, ``{worktree}``, ``{skill}`` and ``{logs}`` stand for paths. No shell
            reads them.
        minutes: how long it may take.
        environment: names of variables that it gets besides the usual ones, such as that of its key.
        skill: a file that tells it how kernels are written here; by default the repository's page on ops.
        attempts: how often it is asked for one region.
    """

    command: tuple[str, ...]
    minutes: float = 20.0
    environment: tuple[str, ...] = ()
    skill: str = "docs/how-to-add-an-op.md"
    attempts: int = 5

    @classmethod
    def from_file(cls, path: Path) -> "AgentConfig":
        """Reads a JSON file with these fields.

        Raises:
            AutokernelError: it cannot be read, or something in it is wrong.
        """
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise AutokernelError(f"the agent's config {path} cannot be read: {error}") from error
        if not isinstance(data, dict) or not {"command"} <= set(data) <= set(_KINDS):
            found = ", ".join(data) if isinstance(data, dict) else f"a {type(data).__name__}"
            raise AutokernelError(f"{path} has {found}; it has to have command, and may have {', '.join(_KINDS)}")
        wrong = [f"{n} is {v!r}, it has to be {_KINDS[n][0]}" for n, v in data.items() if not _KINDS[n][1](v)]
        if wrong:
            raise AutokernelError(f"{path}: {'; '.join(wrong)}")
        config = cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in data.items()})
        for word in config.command:
            try:
                names = {name for _, name, _, _ in string.Formatter().parse(word) if name is not None}
            except ValueError as error:
                raise AutokernelError(f"{path}: {word!r}: {error}; a brace is written twice") from error
            if names - set(PLACEHOLDERS):
                raise AutokernelError(f"{path}: {word!r} has an unknown placeholder; known are {PLACEHOLDERS}")
        return config

    def check(self, repository: Path) -> None:
        """Raises AutokernelError unless the program is there, and in ``repository`` the page that it is to read."""
        if shutil.which(self.command[0]) is None:
            raise AutokernelError(f"the agent {self.command[0]!r} is no program: --agent names how it is called")
        if any("{skill}" in word for word in self.command) and not (repository / self.skill).is_file():
            raise AutokernelError(f"the agent's skill {self.skill!r} is not in {repository}: the config names another")


class NoProposal(Exception):
    """The agent has changed nothing that is a proposal; says what it has said."""


class Agent:
    """Runs the agent's command in a worktree.

    Args:
        config: how it is called.
        worktree: makes a worktree of what the proposal will be built on, and removes it after the block.
    """

    name = "agent"

    def __init__(self, config: AgentConfig, worktree: Callable) -> None:
        self.config, self.worktree = config, worktree

    def propose(self, task: Task) -> Proposal | None:
        """What the agent changed in its worktree; None if its attempts are used up.

        Raises:
            NoProposal: what it changed is none.
            AutokernelError: it cannot be started.
        """
        if sum(a.proposer == self.name for a in task.history) >= self.config.attempts:
            return None
        with self.worktree() as tree, tempfile.TemporaryDirectory(prefix="tilegym-agent-") as folder:
            base = _git(tree, "rev-parse", "HEAD").strip()
            said, in_time = self._run(task, tree, Path(folder))
            proposal = collect(task, tree, said, base)
        if proposal is None:
            ended = "ended" if in_time else f"was ended after {self.config.minutes:g} minutes"
            last = said[-200:] or "nothing"
            raise NoProposal(f"it {ended} without a new Solution and its kernel; the last it said: {last}")
        return proposal

    def _run(self, task: Task, tree: Path, folder: Path) -> tuple[str, bool]:
        """Lets it run; what it said last, and whether it ended by itself."""
        (folder / "task.json").write_text(task.to_json())
        logs = folder / "logs"
        logs.mkdir()
        for number, attempt in enumerate(task.history, 1):
            (logs / f"{number}-{attempt.proposer}-{attempt.gate}.log").write_text(attempt.log)
        skill = Path(self.config.skill)
        paths = {"task": folder / "task.json", "worktree": tree, "skill": tree / skill, "logs": logs}
        command = [word.format(**paths) for word in self.config.command]
        allowed = (*ENVIRONMENT, "HOME", "TERM", *self.config.environment)
        environment = {name: os.environ[name] for name in allowed if name in os.environ}
        output, in_time = folder / "output", True
        try:
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=tree,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    process.wait(60 * self.config.minutes)
                finally:
                    _end(process)
        except subprocess.TimeoutExpired:
            in_time = False  # what it has written until now is its proposal
        except OSError as error:
            raise AutokernelError(f"the agent {command[0]!r} cannot be started: {error}") from error
        return output.read_text(errors="replace")[-1000:].strip(), in_time


def _end(process: subprocess.Popen) -> None:
    """Ends the agent and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True).stdout


def collect(task: Task, tree: Path, said: str, base: str = "HEAD") -> Proposal | None:
    """The changes in a worktree as a proposal: one new Solution, and every file that was written.

    Committed or not: what differs from ``base``. Files outside of the task's folder are taken along, so that gate 0
    sees and rejects them.
    """
    changed = _git(tree, "diff", "--name-only", "-z", "--no-renames", base)
    changed += _git(tree, "ls-files", "-z", "--others", "--exclude-standard")
    files, solutions, definition = {}, [], task.definition
    for name in dict.fromkeys(filter(None, changed.split("\0"))):
        path = tree / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_FILE:
            continue
        text = path.read_text(errors="replace")
        try:
            if name.startswith(f"{task.folder}/kernel_solutions/"):
                solutions.append(Solution.from_json(text))
            elif name.startswith(f"{task.folder}/kernel_definitions/"):
                definition = Definition.from_json(text)
            else:
                files[name] = text
        except pydantic.ValidationError:
            return None
    return Proposal(definition, solutions[0], files, said) if len(solutions) == 1 and files else None


def worktrees(repository: Repository) -> Callable:
    """What :class:`Agent` needs: a context manager that makes worktrees of what is kept so far."""

    @contextlib.contextmanager
    def worktree() -> Iterator[Path]:
        head = repository.head()
        path = repository.worktree("agent", head)
        try:
            yield path
        finally:
            repository.remove("agent")
            repository.put_back(head)

    return worktree
