"""Where kernels are judged: on the devices of this machine, or on those of a Ray cluster.

What is judged and in which order decisions are taken is settled before; more devices only make it faster.
"""

import functools
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import as_completed
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from typing import Protocol

import torch

from tilegym.autokernel import timing
from tilegym.autokernel.judge import KernelJudge
from tilegym.autokernel.judge import Verdict
from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task
from tilegym.autokernel.quiet import Quiet
from tilegym.autokernel.repository import write_proposal
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.workers import WorkerHost
from tilegym.errors import AutokernelError


@dataclass(frozen=True)
class Job:
    """A proposal to be judged, with all that this needs: it may be judged on another machine.

    Attributes:
        number: of the experiment.
        task, proposal: as JSON.
        recording: the two files of the region's recorded calls: tensors, and JSON.
    """

    number: int
    task: str
    proposal: str
    recording: tuple[bytes, bytes]


class Devices(Protocol):
    """Judges jobs, several at once if it can."""

    def judge(self, jobs: list[Job]) -> Iterator[tuple[int, Verdict]]:
        """(number, verdict) of each job, in the order in which they are done."""
        ...

    def close(self) -> None:
        """Ends all workers."""
        ...


def judge_job(host: WorkerHost, job: Job, rules: timing.Rules) -> Verdict:
    """Judges one job in a folder of its own."""
    task, proposal = Task.from_json(job.task), Proposal.from_json(job.proposal)
    with tempfile.TemporaryDirectory(prefix="tilegym-judge-") as folder:
        root, recording = Path(folder) / "tree", Path(folder) / "recording.safetensors"
        root.mkdir()
        write_proposal(root, task, proposal)
        recording.write_bytes(job.recording[0])
        recording.with_suffix(".json").write_bytes(job.recording[1])
        return KernelJudge(host, rules).judge(task, proposal, root, recording)


class LocalDevices:
    """Worker hosts on the devices of this machine. Of several on one device only one is there while it times.

    Args:
        names: "cpu", or GPUs by UUID or index; "cpu" may stand there several times.
        limits: of the workers.
        rules: of gate 7.
        each: how many kernels a device judges at once, at most; on a GPU those for whose limits there is memory.
    """

    def __init__(self, names: tuple[str, ...], limits: Limits, rules: timing.Rules, each: int = 1) -> None:
        self.rules, self.limits = rules, limits
        quiet = [Quiet() for _ in names]
        # By turns, so that all devices are used before one has two.
        self.hosts = [WorkerHost(n, limits, q) for _ in range(each) for n, q in zip(names, quiet, strict=True)]
        self.devices = len(names)

    def prepare(self) -> None:
        """Begins the first workers, in the background."""
        for host in self.hosts:
            host.prepare()

    def judge(self, jobs: list[Job]) -> Iterator[tuple[int, Verdict]]:
        """As of :class:`Devices`."""
        free: SimpleQueue[WorkerHost] = SimpleQueue()
        for index, host in enumerate(self.hosts):
            turn, device = divmod(index, self.devices)
            if turn == 0 or turn < self._room(device, host.device):
                free.put(host)

        def run(job: Job) -> Verdict:
            host = free.get()
            try:
                return judge_job(host, job, self.rules)
            finally:
                free.put(host)

        with ThreadPoolExecutor(len(self.hosts)) as pool:
            futures = {pool.submit(run, job): job.number for job in jobs}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:  # by hand: what is not judged is judged again, and nobody waits for it now
                pool.shutdown(wait=False, cancel_futures=True)
                for host in self.hosts:
                    host.end_workers()
                raise

    def _room(self, device: int, name: str) -> int:
        """How many workers a device's free memory is enough for."""
        if name == "cpu":
            return len(self.hosts)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0] // self.limits.memory

    def close(self) -> None:
        """As of :class:`Devices`."""
        for host in self.hosts:
            host.close()


class RayDevices:
    """The devices of a Ray cluster: a task asks for one GPU, or in CPU mode for one CPU.

    Args:
        address: of the cluster, as ``ray.init`` takes it.
        device: "cpu", or anything else for GPUs.
        limits: of the workers.
        rules: of gate 7.

    Raises:
        AutokernelError: ray is not installed, or the cluster does not answer.
    """

    def __init__(self, address: str, device: str, limits: Limits, rules: timing.Rules) -> None:
        try:
            import ray
        except ImportError as error:
            raise AutokernelError("--ray needs ray: pip install 'tilegym[ray]'") from error
        try:
            ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        except Exception as error:  # ray has many kinds
            raise AutokernelError(f"the Ray cluster at {address} does not answer: {error}") from error
        self._ray, self._device, self._limits, self._rules = ray, device, limits, rules
        wanted = {"num_cpus": 1} if device == "cpu" else {"num_gpus": 1}
        self._remote = ray.remote(max_calls=0, **wanted)(_judge_on_ray)

    def judge(self, jobs: list[Job]) -> Iterator[tuple[int, Verdict]]:
        """As of :class:`Devices`. What a machine that is lost was judging is judged again, by Ray."""
        arguments = self._device, asdict(self._limits), asdict(self._rules)
        waiting = {self._remote.remote(asdict(job), *arguments): job.number for job in jobs}
        while waiting:
            (done,), _ = self._ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), Verdict.from_json(self._ray.get(done))

    def close(self) -> None:
        """As of :class:`Devices`."""
        self._ray.shutdown()


_LOCK = threading.Lock()


@functools.cache
def _host(device: str, limits: tuple[tuple[str, Any], ...]) -> WorkerHost:
    """One worker host a process of Ray, for all the jobs that it is given."""
    return WorkerHost(device, Limits(**dict(limits)))


def _judge_on_ray(job: dict[str, Any], device: str, limits: dict[str, Any], rules: dict[str, Any]) -> str:
    """Runs on a machine of the cluster, which has given this process its GPU."""
    if device != "cpu":
        import ray

        device = str(ray.get_gpu_ids()[0])
    with _LOCK:
        host = _host(device, tuple(sorted(limits.items())))
        given = Job(**{**job, "recording": tuple(job["recording"])})
        return judge_job(host, given, timing.Rules(**rules)).to_json()
