"""The judge's side of the workers: starts them, asks them, and ends them when they take too long or too much."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from typing import TextIO

from tilegym.autokernel import sandbox
from tilegym.autokernel.quiet import Quiet
from tilegym.autokernel.sandbox import Limits
from tilegym.errors import AutokernelError

_PACKAGE = Path(__file__).parents[2]
_MAX_LINE = 16 << 20
_START = 180.0  # seconds in which a worker has to be there
_PREFIX, _LOCK = "tilegym-autokernel-", "lock"
_POLL = 0.05  # seconds between two looks at how much memory a worker has


class WorkerFailed(Exception):
    """A worker did not answer as it should. ``status``: "crash" or "timeout"."""

    def __init__(self, status: str, log: str) -> None:
        super().__init__(log)
        self.status, self.log = status, log


class Worker:
    """One confined process. Ask it with :meth:`ask`; it ends with :meth:`close`."""

    def __init__(self, host: "WorkerHost", channel: socket.socket, pid: int, folder: Path, limits: Limits) -> None:
        self.host, self.channel, self.pid, self.folder, self.limits = host, channel, pid, folder, limits
        self._buffer, self._closing = b"", threading.RLock()
        self.ended: str | None = None
        self.confined = self._receive(_START)["confined"]

    def ask(self, command: str, seconds: float | None = None, **arguments: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            WorkerFailed: it died, hung, or took too much memory; it is gone then.
        """
        request = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
        try:
            self.channel.settimeout(10.0)
            self.channel.sendall(request)
        except OSError:
            raise self._failed("crash", "the worker is gone") from None
        return self._receive(self.limits.seconds if seconds is None else seconds)

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if time.monotonic() > deadline:
                raise self._failed("timeout", f"no answer within {seconds:g} s")
            if self.host.device != "cpu" and sandbox.resident(self.pid) > self.limits.memory + self.host.resident:
                raise self._failed("crash", f"more than {self.limits.memory >> 20} MiB of memory")
            self.channel.settimeout(_POLL)
            try:
                data = self.channel.recv(1 << 20)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                raise self._failed("crash", "the worker died")
            self._buffer += data
            if len(self._buffer) > _MAX_LINE:
                raise self._failed("crash", "the worker answers without end")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._failed("crash", "the worker does not answer in JSON") from None
        if not isinstance(answer, dict):
            raise self._failed("crash", "the worker does not answer with an object")
        return answer

    def _failed(self, status: str, why: str) -> WorkerFailed:
        self.close()
        log = self.log()
        ended = f" ({self.ended})" if status == "crash" and self.ended else ""
        return WorkerFailed(status, f"{why}{ended}{': ' + log if log else ''}")

    def log(self) -> str:
        """The end of what the worker printed."""
        try:
            return (self.folder / "log").read_text(errors="replace")[-2000:].strip()
        except OSError:
            return ""

    def close(self) -> None:
        """Ends the worker and all that it has started; a second call does nothing."""
        with self._closing:  # by who waits for an answer, and by who does not want it any more
            if self.ended is not None:
                return
            self.channel.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # One that hung up has a moment to end by itself, so that its own exit status is seen.
                end = time.monotonic() + 0.5
                while time.monotonic() < end and _alive(self.pid):
                    time.sleep(0.005)
                os.killpg(self.pid, signal.SIGKILL)
            self.ended = self.host.ended(self.pid)
            self.host.forget(self)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _quick_folder() -> str | None:
    """Where tensors are handed over: in memory if there is room, else where temporary files go."""
    memory = "/dev/shm"
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 32 << 30
    return memory if roomy else None


def _own_folder(parent: Path) -> tuple[Path, TextIO]:
    """(a new folder, the file that is locked for as long as this process lives); removes those of killed ones."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    made = folder / f"{_LOCK}.new"
    file = made.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    made.rename(folder / _LOCK)  # nobody finds it before it is locked
    return folder, file


class WorkerHost:
    """Makes workers on one device. A context manager.

    Args:
        device: "cpu", or a GPU's UUID or index as ``CUDA_VISIBLE_DEVICES`` takes it.
        limits: of every worker.
        quiet: who is on the device, where there are other hosts on it.
    """

    def __init__(self, device: str = "cpu", limits: Limits | None = None, quiet: Quiet | None = None) -> None:
        self.device, self.limits, self.quiet = device, limits or Limits(), quiet or Quiet()
        self.folder, self._lock = _own_folder(Path(_quick_folder() or tempfile.gettempdir()))
        self._live: set[Worker] = set()
        self.resident = 0
        self._needs_network = self._closed = False
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._requests = 0
        self._asking, self._choosing = threading.Lock(), threading.Lock()
        self._spare: dict[tuple[str, Limits], list[tuple[socket.socket, int, Path]]] = defaultdict(list)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = sandbox.environment(self.folder, self.device)
        paths = [str(_PACKAGE), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in paths if p))
        environment["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked
        command = [sys.executable, "-m", "tilegym.autokernel.worker", str(theirs.fileno()), self.device]
        self._process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "host.log").open("wb"),
            start_new_session=True,
        )
        theirs.close()
        self._control = ours

    def _ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> dict[str, Any]:
        with self._asking:
            return self._ask_alone(request, descriptors)

    def _ask_alone(self, request: dict[str, Any], descriptors: list[int] | None) -> dict[str, Any]:
        if self._process is None:
            if self._closed:
                raise AutokernelError("the workers have been ended")
            self._start()
        self._control.settimeout(180.0)
        self._requests += 1
        number, answer, rest = self._requests, {}, b""
        try:
            socket.send_fds(self._control, [json.dumps(request | {"number": number}).encode()], descriptors or [])
            while answer.get("number") != number:  # what an interrupted request has not read comes first
                while b"\n" not in rest:
                    data = self._control.recv(4096)
                    if not data:
                        raise OSError("it hung up")
                    rest += data
                line, _, rest = rest.partition(b"\n")
                answer = json.loads(line) if line.startswith(b"{") else {}
        except OSError as error:
            log = (self.folder / "host.log").read_text(errors="replace")[-2000:]
            raise AutokernelError(f"workers cannot be started on {self.device} ({error}): {log}") from error
        return answer

    def worker(self, kind: str = "kernel", limits: Limits | None = None) -> Worker:
        """A new worker. ``kind``: "kernel", or "model", which may use the whole GPU.

        Where a GPU cannot be used without the network's namespace, workers keep it, and say so.
        """
        limits = limits or self.limits
        if self.device == "cpu" or limits.network:
            return self._worker(kind, limits)
        try:
            return self._worker(kind, dataclasses.replace(limits, network=self._needs_network))
        except WorkerFailed:
            if self._needs_network:
                raise
            found = self._worker(kind, dataclasses.replace(limits, network=True))
            self._needs_network = True
            return found

    def _worker(self, kind: str, limits: Limits) -> Worker:
        with self._choosing:
            spare = self._spare[kind, limits]
            begun = spare.pop(0) if spare else None
        worker = Worker(self, *(begun or self._begin(kind, limits)), limits)
        self._live.add(worker)
        if self.device != "cpu" and not spare:  # there a process takes seconds to begin: the next one does so meanwhile
            spare.append(self._begin(kind, limits))
        return worker

    def prepare(self, kind: str = "kernel", limits: Limits | None = None, count: int = 1) -> None:
        """Begins processes, in the background, so that ``count`` workers of that kind are there sooner."""
        limits = dataclasses.replace(limits or self.limits, network=self._needs_network)

        def begin() -> None:
            with contextlib.suppress(AutokernelError, OSError):  # whoever asks for a worker is told
                while not self._closed and len(self._spare[kind, limits]) < count:
                    self._spare[kind, limits].append(self._begin(kind, limits))

        threading.Thread(target=begin, daemon=True).start()

    def _begin(self, kind: str, limits: Limits) -> tuple[socket.socket, int, Path]:
        """(channel, process id, folder) of a process that will be a worker."""
        ours, theirs = socket.socketpair()
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=self.folder))
        request = {"folder": str(folder), "kind": kind, "limits": asdict(limits)}
        pid = self._ask(request, [theirs.fileno()])["pid"]
        theirs.close()
        self.resident = self.resident or sandbox.resident(pid) + (8 << 30)  # CUDA's own and the driver's, generously
        return ours, pid, folder

    @contextlib.contextmanager
    def working(self, kind: str = "kernel", limits: Limits | None = None) -> Iterator[Worker]:
        """A worker for the time of a block; its files are gone afterwards."""
        worker = self.worker(kind, limits)
        try:
            yield worker
        finally:
            worker.close()
            shutil.rmtree(worker.folder, ignore_errors=True)

    def forget(self, worker: Worker) -> None:
        """A worker has ended."""
        self._live.discard(worker)

    def end_workers(self) -> None:
        """Ends all workers that somebody waits for: they are told that these died."""
        for worker in list(self._live):
            worker.close()

    def ended(self, pid: int) -> str:
        """How the process ended, in words; waits for it."""
        status = self._ask({"wait": pid})["status"]
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """Ends all workers and removes their files."""
        self._closed = True
        for channel, _, _ in [begun for spare in self._spare.values() for begun in spare]:
            channel.close()
        self._spare.clear()
        if self._process is not None:
            self._control.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> "WorkerHost":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
