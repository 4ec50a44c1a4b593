"""The git side: a worktree and a ref for every experiment, a branch for what is kept; the user's tree is left alone."""

import subprocess
from pathlib import Path

from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task
from tilegym.errors import AutokernelError

_NOBODY = ("-c", "user.name=tilegym", "-c", "user.email=tilegym@localhost")


class Repository:
    """The repository in which kernels are kept.

    Args:
        root: a folder in it.
        run: the run's name, part of the names of branch and refs.
        worktrees: where worktrees are put.

    Raises:
        AutokernelError: ``root`` is in no git repository, or that has no commit.
    """

    def __init__(self, root: Path, run: str, worktrees: Path) -> None:
        self.run, self.worktrees = run, worktrees
        self.branch = f"autokernel/{run}"
        try:
            self.root = Path(_git(root, "rev-parse", "--show-toplevel"))
            self.base = _git(self.root, "rev-parse", "HEAD")
        except (OSError, AutokernelError) as error:
            reason = str(error).splitlines()[0]
            remedy = "run `git init` and commit there, or name a repository with --repository"
            raise AutokernelError(f"{root} is in no git repository with a commit: {remedy} ({reason})") from error

    def check_clean(self) -> None:
        """Raises AutokernelError unless everything in the user's tree is committed or ignored, or the run's own."""
        own = self.worktrees.resolve().parent
        other = [f":(top,exclude){own.relative_to(self.root)}"] if own.is_relative_to(self.root) else []
        dirty = _git(self.root, "status", "--porcelain", "--", ":(top)", *other).splitlines()
        if dirty:
            raise AutokernelError(
                f"{self.root} has uncommitted changes ({dirty[0].strip()}"
                f"{f' and {len(dirty) - 1} more' if len(dirty) > 1 else ''}): commit them first, they are never touched"
            )

    def start_branch(self) -> str:
        """Makes the run's branch at the commit that is checked out, if it is not there; its commit."""
        if self._resolve(f"refs/heads/{self.branch}") is None:
            _git(self.root, "update-ref", f"refs/heads/{self.branch}", self.base, "")
        return self.head()

    def head(self) -> str:
        """The commit of the run's branch."""
        return _git(self.root, "rev-parse", f"refs/heads/{self.branch}")

    def put_back(self, head: str) -> None:
        """Sets the run's branch to a commit that it had: what somebody else has put there was not judged."""
        if self.head() != head:
            _git(self.root, "update-ref", f"refs/heads/{self.branch}", head)

    def worktree(self, name: str, commit: str) -> Path:
        """A worktree of this name with ``commit`` checked out; what was there is replaced."""
        path = self.worktrees / name
        if path.exists():
            self.remove(name)
        _git(self.root, "worktree", "prune")
        _git(self.root, "worktree", "add", "--quiet", "--detach", str(path), commit)
        return path

    def remove(self, name: str) -> None:
        """Removes a worktree; none of that name is fine."""
        path = self.worktrees / name
        if path.exists():
            _git(self.root, "worktree", "remove", "--force", str(path))

    def ref(self, number: int) -> str:
        """The ref under which the attempt of an experiment is kept."""
        return f"refs/autokernel/{self.run}/{number}"

    def commit_attempt(self, number: int, base: str, task: Task, proposal: Proposal, message: str) -> str:
        """Commits a proposal in a worktree of its own, on ``base``, and keeps it under its ref; its commit.

        An attempt that is there already is not made again.
        """
        name = f"experiment-{number}"
        found = self._resolve(self.ref(number))
        if found is not None:
            self.worktree(name, found)
            return found
        path = self.worktree(name, base)
        written = write_proposal(path, task, proposal)
        if written:
            _git(path, "add", "--force", "--", *written)
        commit = self._commit(path, f"{message}\n\n{self._trailer(number)}")
        _git(self.root, "update-ref", self.ref(number), commit)
        return commit

    def keep(self, number: int, attempt: str) -> str:
        """Puts an attempt onto the run's branch; the commit there. One that is there already is not put there again."""
        head = self.head()
        pattern = f"^{self._trailer(number)}$"
        found = _git(self.root, "log", f"--grep={pattern}", "--format=%H", f"{self.base}..{head}")
        if found:
            return found.splitlines()[0]
        if _git(self.root, "rev-parse", f"{attempt}^") == head:
            new = attempt
        else:
            path = self.worktree(f"keep-{number}", head)
            _git(path, *self._identity(), "cherry-pick", attempt)
            new = _git(path, "rev-parse", "HEAD")
            self.remove(f"keep-{number}")
        _git(self.root, "update-ref", f"refs/heads/{self.branch}", new, head)
        return new

    def _trailer(self, number: int) -> str:
        return f"Autokernel-Experiment: {self.run}/{number}"

    def _commit(self, path: Path, message: str) -> str:
        _git(path, *self._identity(), "commit", "--quiet", "--no-verify", "--allow-empty", "-m", message)
        return _git(path, "rev-parse", "HEAD")

    def _identity(self) -> tuple[str, ...]:
        known = subprocess.run(["git", "config", "user.email"], cwd=self.root, capture_output=True, check=False)
        return () if known.returncode == 0 else _NOBODY

    def _resolve(self, ref: str) -> str | None:
        found = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", ref], cwd=self.root, capture_output=True, text=True, check=False
        )
        return found.stdout.strip() or None


def write_proposal(root: Path, task: Task, proposal: Proposal) -> list[str]:
    """Writes a proposal's files, Definition and Solution below ``root``; their paths in the repository.

    A path that leads out of the task's folder is left out: gate 0 rejects the proposal.
    """
    files = dict(proposal.files)
    files[f"{task.folder}/kernel_definitions/{proposal.definition.name}.json"] = proposal.definition.to_json()
    files[f"{task.folder}/kernel_solutions/{proposal.solution.name}.json"] = proposal.solution.to_json()
    base, written = (root / task.folder).resolve(), []
    if not base.is_relative_to(root.resolve()) or base == root.resolve():
        raise AutokernelError(f"the folder {task.folder!r} is not within {root}")
    for name, text in files.items():
        path = (root / name).resolve()
        if not path.is_relative_to(base) or path == base:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(name)
    return written


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AutokernelError(f"git {' '.join(arguments[:3])} failed: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()
