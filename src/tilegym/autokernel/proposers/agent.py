"""Asks an agent, any program that edits files: it gets a worktree and a task, and its changes are the proposal."""

import contextlib
import json
import os
import signal
import string
import subprocess
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
            config = cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in data.items()})
        except (OSError, ValueError, TypeError) as error:
            raise AutokernelError(f"the agent's config {path} cannot be used: {error}") from error
        if not isinstance(config.command, tuple) or not all(isinstance(w, str) for w in config.command):
            raise AutokernelError(f"{path}: command is {config.command!r}, it has to be a list of words")
        for word in config.command:
            names = {name for _, name, _, _ in string.Formatter().parse(word) if name is not None}
            if names - set(PLACEHOLDERS):
                raise AutokernelError(f"{path}: {word!r} has an unknown placeholder; known are {PLACEHOLDERS}")
        return config


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
        """What the agent changed in its worktree; None if that is no proposal, or its attempts are used up."""
        if sum(a.proposer == self.name for a in task.history) >= self.config.attempts:
            return None
        with self.worktree() as tree, tempfile.TemporaryDirectory(prefix="tilegym-agent-") as folder:
            said = self._run(task, tree, Path(folder))
            return collect(task, tree, said)

    def _run(self, task: Task, tree: Path, folder: Path) -> str:
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
        output = folder / "output"
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
            pass  # what it has written until now is its proposal
        except OSError as error:
            raise AutokernelError(f"the agent {command[0]!r} cannot be started: {error}") from error
        return output.read_text(errors="replace")[-1000:].strip()


def _end(process: subprocess.Popen) -> None:
    """Ends the agent and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def collect(task: Task, tree: Path, said: str) -> Proposal | None:
    """The changes in a worktree as a proposal: one new Solution, and every file that was written.

    Files outside of the task's folder are taken along, so that gate 0 sees and rejects them.
    """
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames"],
        cwd=tree, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    files, solutions, definition = {}, [], task.definition
    for entry in changed.split("\0"):
        path = tree / entry[3:]
        if not entry or path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_FILE:
            continue
        name, text = entry[3:], path.read_text(errors="replace")
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
        path = repository.worktree("agent", repository.head())
        try:
            yield path
        finally:
            repository.remove("agent")

    return worktree
