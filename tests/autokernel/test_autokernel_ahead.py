"""Models that are made ready before their turn, kernels that are judged at once on a device: the same is found."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_autokernel_loop import REGIONS
from test_autokernel_loop import FakeModel
from test_autokernel_loop import loop
from test_autokernel_loop import no_gpu
from test_autokernel_loop import repository
from test_autokernel_model_judge import RULES
from test_autokernel_model_judge import SPEC
from test_autokernel_model_judge import HereWorker
from test_autokernel_model_judge import Host
from test_autokernel_model_judge import as_it_is
from test_autokernel_model_judge import kernels

from tilegym.autokernel import devices
from tilegym.autokernel import workers
from tilegym.autokernel.devices import Job
from tilegym.autokernel.devices import LocalDevices
from tilegym.autokernel.judge import Verdict
from tilegym.autokernel.model_judge import ModelJudge
from tilegym.autokernel.model_judge import ModelSettings
from tilegym.autokernel.model_worker import REPLAYED
from tilegym.autokernel.quiet import Quiet
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.timing import Rules
from tilegym.autokernel.workers import WorkerFailed
from tilegym.autokernel.workers import WorkerHost
from tilegym.errors import AutokernelError

__all__ = ["no_gpu", "repository"]
SETS = [kernels(name) for name in ("one", "two", "three")]


_LOADING, _COUNTING = threading.Lock(), threading.Lock()


class OneLoads(HereWorker):
    """Random weights come from a generator that all of a process share."""

    def ask(self, command, **arguments):
        with _LOADING if command == "model" else contextlib.nullcontext():
            return super().ask(command, **arguments)


def judge_with_room(tmp_path, room, worker=OneLoads):
    class There(Host):
        def worker(self, kind, limits):
            made = worker(self)
            with _COUNTING:  # several threads prepare models
                self.begun += 1
                self.workers = [*getattr(self, "workers", []), made]
            return made

    host = There(tmp_path / f"workers{room}", original=as_it_is, one=as_it_is, two=as_it_is, three=as_it_is)
    settings = ModelSettings(SPEC, 5, 6)
    return ModelJudge(host, settings, RULES, Limits(), tmp_path / f"baseline{room}", lambda size: room)


def test_one_measures_alone():
    quiet, seen, inside = Quiet(), [], []

    def user():
        for _ in range(30):
            with quiet.shared():
                inside.append(1)
                time.sleep(0.001)
                inside.pop()

    def timer():
        for _ in range(5):
            with quiet.alone():
                seen.append(len(inside))
                time.sleep(0.002)
                seen.append(len(inside))

    threads = [threading.Thread(target=f) for f in (user, user, timer, timer, user)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [0] * 20


def test_those_who_measure_are_not_kept_waiting():
    """Somebody else is always in a shared block; who wants to be alone still is, before the next one enters."""
    quiet, stop, alone = Quiet(), threading.Event(), threading.Event()

    def user():
        while not stop.is_set():
            with quiet.shared():
                time.sleep(0.005)

    users = [threading.Thread(target=user) for _ in range(3)]
    for thread in users:
        thread.start()

    def timer():
        with quiet.alone():
            alone.set()

    thread = threading.Thread(target=timer)
    thread.start()
    assert alone.wait(5)
    stop.set()
    for each in (*users, thread):
        each.join(5)


@pytest.mark.parametrize("room", [0, 3])
def test_what_is_made_ready_is_judged_as_ever(tmp_path, room):
    judge = judge_with_room(tmp_path, room)
    judge.load_ahead(1)
    judge.run_ahead(wait=True)
    assert judge.host.begun == (2 if room else 0)
    judge.run_ahead()
    baseline = judge.baseline() | {"noise": 0.99}
    assert judge.host.begun == 2 and baseline["way"] == REPLAYED
    judge.prepare(SETS, baseline)
    found, best = [], {}
    for kernel in SETS:
        before = len(judge.host.asked)
        found.append(judge.judge(kernel, best, baseline))
        asked = judge.host.asked[before:]
        judge.prepare(SETS[SETS.index(kernel) + 1 :], baseline)
        best = kernel
        if room and kernel is not SETS[0]:  # nothing but the turns was left to do
            assert {command for name, command, _ in asked if name == kernel["region"]["solution"]} == {"generate"}
            assert "waited" in found[-1]["steps"]
    assert judge.host.begun == 5
    for value in found:
        assert (value["token_agreement"], value["way"]) == (1.0, REPLAYED) and value["peak"] > 0
        assert value["max_logit_error"] == value["unpatched_max_logit_error"]
    assert {"load", "first run", "exactness", "graphs", "others", "turns"} <= found[2]["steps"].keys()
    judge.close()
    assert not list(judge.host.folder.iterdir()) and all(worker.ended for worker in judge.host.workers)


def test_what_fails_ahead_is_made_again_alone(tmp_path):
    class Crowded(OneLoads):
        """There is no memory for two at once."""

        def ask(self, command, **arguments):
            if command == "logits" and self.name == "one" and "one" not in tried:
                tried.append(self.name)
                self.close()
                raise WorkerFailed("crash", "no memory")
            return super().ask(command, **arguments)

    tried = []
    judge = judge_with_room(tmp_path, 3, Crowded)
    baseline = judge.baseline() | {"noise": 0.99}
    judge.prepare(SETS[:2], baseline)
    assert judge.judge(SETS[0], {}, baseline)["token_agreement"] == 1.0
    assert tried == ["one"] and judge.host.begun == 5  # two of the baseline, two ahead, one alone
    judge.prepare(SETS[2:], baseline)  # the first is refused, and another proposal is next: the second is not needed
    assert [worker.ended for worker in judge.host.workers if worker.name == "two"] == [True]
    judge.close()


def test_room_for_one_alone_begins_nothing(tmp_path):
    judge = judge_with_room(tmp_path, 1)
    judge.load_ahead(1)
    baseline = judge.baseline()
    begun = judge.host.begun
    judge.prepare(SETS, baseline)
    assert judge.host.begun == begun
    judge.close()


def test_the_next_models_have_what_comes_before_them(repository, tmp_path, monkeypatch):
    """Each of a round is made ready with all before it that have passed, and anew when one of these is not kept."""
    monkeypatch.setitem(REGIONS, "large", (5.0, 0.1, ["good"]))
    monkeypatch.setitem(REGIONS, "middle", (4.0, 0.1, ["G8", "good"]))
    monkeypatch.setitem(REGIONS, "hopeless", (2.0, 0.1, ["good"]))
    made, prepared = loop(repository, tmp_path / "out", width=3), []

    class Preparing(FakeModel):
        def prepare(self, sets, baseline):
            for kernel in (kernel for chosen in sets for kernel in chosen.values()):
                assert (Path(kernel["root"]) / json.loads(kernel["solution"])["sources"][0]["path"]).is_file()
            prepared.append([sorted(chosen) for chosen in sets])

        def judge(self, kernels, best, baseline):
            assert sorted(kernels) == prepared[-1][0]
            return super().judge(kernels, best, baseline)

    made.model_judge = Preparing()
    made.run()
    first = [["large"], ["large", "middle"], ["hopeless", "large", "middle"]]
    assert prepared[:3] == [first, first[1:], [["hopeless", "large"]]]
    for sets in prepared:
        assert all(
            set(one) < set(other) and len(other) == len(one) + 1 for one, other in zip(sets, sets[1:], strict=False)
        )


def test_a_run_that_is_under_way_is_not_begun_again(repository, tmp_path):
    """Not at any step; and behind it, it goes on."""
    refused = []

    def checkpoint(name):
        with pytest.raises(AutokernelError, match="under way in another process"):
            loop(repository, tmp_path / "out").run()
        refused.append(name)

    assert "covered" in loop(repository, tmp_path / "out", checkpoint).run()
    assert {"survey", "judge", "finish"} <= set(refused)
    assert "covered" in loop(repository, tmp_path / "out").run()


def test_kernels_are_judged_at_once_on_one_device(monkeypatch):
    at_once, most, room = [], [0], [9]
    hosts = LocalDevices(("0", "1"), Limits(), Rules(), each=3)
    assert [host.device for host in hosts.hosts] == ["0", "1"] * 3
    assert len({id(host.quiet) for host in hosts.hosts}) == 2 and hosts.hosts[0].quiet is hosts.hosts[2].quiet

    def judged(host, job, rules):
        at_once.append(host.device)
        most[0] = max(most[0], len(at_once))
        time.sleep(0.05)
        at_once.remove(host.device)
        return Verdict(seed=job.number)

    monkeypatch.setattr(devices, "judge_job", judged)
    monkeypatch.setattr(LocalDevices, "_room", lambda self, device, name: room[0])
    jobs = [Job(number, "", "", (b"", b"")) for number in range(12)]
    for room[0], expected in ((9, 6), (2, 4), (0, 2)):  # one a device in any case
        most[0] = 0
        assert {number: verdict.seed for number, verdict in hosts.judge(jobs)} == {n: n for n in range(12)}
        assert most[0] == expected
    hosts.close()


def test_by_hand_nobody_waits_for_kernels_that_are_judged(monkeypatch):
    """Their workers are ended; the others are not begun."""
    ended, began = threading.Event(), []
    hosts = LocalDevices(("cpu",), Limits(), Rules())
    monkeypatch.setattr(hosts.hosts[0], "end_workers", ended.set)

    def judged(host, job, rules):
        began.append(job.number)
        assert job.number == 0 or ended.wait(20)
        return Verdict()

    monkeypatch.setattr(devices, "judge_job", judged)
    judging = hosts.judge([Job(number, "", "", (b"", b"")) for number in range(9)])
    assert next(judging)[0] == 0
    with pytest.raises(KeyboardInterrupt):
        judging.throw(KeyboardInterrupt)
    assert ended.is_set() and len(began) <= 3
    hosts.close()


def test_a_worker_may_be_ended_by_two_at_once(monkeypatch):
    """By who waits for its answer, and by hand."""
    with WorkerHost("cpu", Limits()) as host:
        for _ in range(3):
            worker = host.worker()
            failed = []

            def ask(worker=worker, failed=failed):
                try:
                    worker.ask("compile")
                except WorkerFailed as error:
                    failed.append(error.status)

            threads = [threading.Thread(target=ask) for _ in range(2)]
            worker.channel.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.start()
            host.end_workers()
            for thread in threads:
                thread.join(20)
            assert failed == ["crash"] * 2 and worker.ended is not None and not host._live
        # A request whose answer nobody has read does not confuse the next one.
        with host._asking:
            host._control.sendall(json.dumps({"number": 0, "wait": 1 << 22}).encode())
            time.sleep(0.1)
        assert host.worker().confined["memory"]


def test_folders_of_killed_runs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_quick_folder", lambda: str(tmp_path))
    program = (
        "import os; from tilegym.autokernel import workers; "
        f"workers._quick_folder = lambda: {str(tmp_path)!r}; workers.WorkerHost(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    with WorkerHost() as one, WorkerHost() as other:
        assert not left.exists() and one.folder.is_dir() and other.folder.is_dir()
    assert not list(tmp_path.iterdir())
