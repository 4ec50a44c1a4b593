"""The loop's bookkeeping: order, decisions, resuming after a kill at every step; with judges that are made up."""

import json
import os
import sqlite3
import subprocess
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from autokernel_corpus import GOOD
from autokernel_corpus import proposal
from common import some

from tilegym.autokernel import Sample
from tilegym.autokernel import Task
from tilegym.autokernel import TensorInfo
from tilegym.autokernel.judge import Failed
from tilegym.autokernel.judge import GateRecord
from tilegym.autokernel.judge import Verdict
from tilegym.autokernel.ledger import RegionRow
from tilegym.autokernel.loop import Loop
from tilegym.autokernel.loop import Settings
from tilegym.autokernel.model_judge import ModelSettings
from tilegym.autokernel.model_judge import confident_ratio
from tilegym.autokernel.model_judge import decided
from tilegym.autokernel.model_judge import throughput_problem
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.preparation import recording_path
from tilegym.autokernel.proposers import Scripted
from tilegym.autokernel.repository import Repository
from tilegym.errors import AutokernelError
from tilegym.inventory import AxisVar
from tilegym.inventory import Definition
from tilegym.inventory import TensorSpec
from tilegym.inventory import Trace

# Regions: seconds, bound, and how the proposals for it end, in order: a gate that fails, "slow" or "good".
REGIONS = {
    "large": (5.0, 1.0, ["G3", "good"]),
    "middle": (3.0, 1.0, ["good"]),
    "hopeless": (1.0, 0.1, ["G6", "G3", "G1", "G2", "G8", "good"]),
    "finished": (0.5, 0.49, ["good"]),
    "unwanted": (0.4, 0.1, []),
}


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Runs are described as of a machine without a GPU: a child forked after CUDA was initialised cannot use it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet")
    (root / "README").write_text("kernels\n")
    git(root, "add", "README")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "Begin")
    return root


def task(key):
    spec = TensorSpec(shape=["M"], dtype="float32")
    definition = Definition(
        name=f"region_{key}",
        op_type="region",
        axes={"M": AxisVar()},
        inputs={"x": spec},
        outputs={"y": spec},
        reference="# Source: here\ndef run(x):\n    y = x + 1\n    return y\n",
    )
    sample = Sample({"M": 4}, {"x": TensorInfo((4,), (1,), "float32")})
    return Task(definition, key, ("model",), (sample,), ("sm_90",), "kernels_of/family")


def survey(settings, device, architectures, folder, recordings, tell, models):
    recordings.mkdir(parents=True, exist_ok=True)
    rows = []
    for key, (seconds, bound, _) in REGIONS.items():
        for suffix in (".safetensors", ".json"):
            recording_path(recordings, key).with_suffix(suffix).write_bytes(b"")
        rows.append(RegionRow(key, task(key).to_json(), seconds, bound, "at its bound" if key == "finished" else ""))
    return rows, {"profiled_seconds": 12.0, "in_regions": 0.8, "family": "family"}


def proposals(given):
    return [proposal(given, f"{GOOD}# {end} {i}\n", f"v{i}") for i, end in enumerate(REGIONS[given.region][2])]


class FakeDevices:
    """Verdicts by what stands in the last line of a proposal; in an order of its own."""

    def __init__(self, backwards=False):
        self.backwards = backwards
        self.judged = []

    def judge(self, jobs):
        for job in reversed(jobs) if self.backwards else jobs:
            self.judged.append(job.number)
            (text,) = json.loads(job.proposal)["files"].values()
            end = text.split("# ")[-1].split()[0]
            verdict = Verdict(timing={"kernel": 1e-3, "reference": 2e-3})
            if end.startswith("G") and end != "G8":
                verdict.status, verdict.gate, verdict.log = "incorrect", end, f"wrong at {end}"
            verdict.gates.append(GateRecord(end, verdict.status == "passed", verdict.log, 0.1))
            yield job.number, verdict

    def close(self):
        pass


class FakeModel:
    """Every kernel makes the model faster; one with G8 in its source is refused."""

    def __init__(self):
        self.judged = []

    def close(self, *_):
        pass

    expect = prepare = close

    def baseline(self):
        return {"seconds": 1.0, "throughput": 100.0, "peak": 1000, "noise": 0.01}

    def judge(self, kernels, best, baseline):
        assert set(best) < set(kernels)
        new = next(k for key, k in kernels.items() if best.get(key) != k)
        path = Path(new["root"]) / json.loads(new["solution"])["sources"][0]["path"]
        self.judged.append(path.name)
        if "G8" in path.read_text():
            raise Failed("discard", "too slow in the model")
        for kernel in kernels.values():
            assert (Path(kernel["root"]) / json.loads(kernel["solution"])["sources"][0]["path"]).is_file()
        ratio = 1 + len(kernels) / 10  # while the machine gets slower, and the unpatched model with it
        return {"throughput": 100.0 * 0.5 ** len(kernels) * ratio, "ratio_to_original": ratio, "peak": 1000}


def loop(repository, folder, checkpoint=lambda name: None, devices=None, **settings):
    model = ModelSettings(ModelSpec("model"))
    return Loop(
        settings=Settings(model, folder="kernels_of/{family}", **settings),
        folder=folder,
        repository=Repository(repository, "run", folder / "worktrees"),
        proposers=[Scripted(proposals)],
        devices=devices or FakeDevices(),
        model_judge=FakeModel(),
        survey=survey,
        checkpoint=checkpoint,
    )


def summary(made):
    columns = "region", "round", "status", "gate", "coverage", "throughput", "state"
    return [tuple(getattr(e, c) for c in columns) for e in made.ledger.experiments()]


def tree(repository):
    return git(repository, "ls-tree", "-r", "--name-only", "autokernel/run").splitlines()


def test_a_run(repository, tmp_path):
    before = git(repository, "rev-parse", "HEAD"), git(repository, "status", "--porcelain")
    made = loop(repository, tmp_path / "out")
    assert made.run() == "every region is covered or exhausted"
    assert [e.region for e in made.ledger.experiments()][:3] == ["large", "middle", "hopeless"]
    kept = {e.region: e for e in made.ledger.kept()}
    assert set(kept) == {"large", "middle"}
    assert made.coverage() == pytest.approx(8 / 12)
    closed = {r.key: r.closed for r in made.ledger.regions()}
    assert "5 attempts" in closed["hopeless"] and "no proposer" in closed["unwanted"]
    # Kept: Definition, Solution and kernel on the branch. Discarded: nothing in the tree, a ref with the attempt.
    assert tree(repository) == sorted(
        ["README"]
        + [f"kernels_of/family/kernel_definitions/region_{k}.json" for k in kept]
        + [f"kernels_of/family/kernel_solutions/region_{k}_{v}.json" for k, v in (("large", "v1"), ("middle", "v0"))]
        + [f"kernels_of/family/kernels/{v}.py" for v in ("v0", "v1")]
    )
    refs = git(repository, "for-each-ref", "--format=%(refname)", "refs/autokernel").splitlines()
    assert len(refs) == len(made.ledger.experiments()) == 8
    assert before == (git(repository, "rev-parse", "HEAD"), git(repository, "status", "--porcelain"))
    assert git(repository, "worktree", "list").count("\n") == 0
    assert sorted(p.name for p in repository.iterdir()) == [".git", "README"]
    # History reaches the proposers.
    last = [e for e in made.ledger.experiments() if e.region == "hopeless"][-1]
    assert (last.status, last.gate, last.description) == ("discard", "G8", "too slow in the model")


def test_reports_are_made_from_the_ledger(repository, tmp_path):
    made = loop(repository, tmp_path / "out")
    made.run()
    text = (tmp_path / "out/results.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and " | " in line]
    assert rows[2][0] == "| 0" and rows[2][5] == "baseline" and rows[2][3:5] == ["100.00", "1.00x"]
    statuses = [row[5] for row in rows[3:11]]
    assert statuses == [e.status for e in made.ledger.experiments()]
    assert "does not decide" in text  # without a GPU
    assert [row[4] for row in rows[3:11] if row[5] == "keep"] == ["1.10x", "1.20x"]
    page = (tmp_path / "out/results.html").read_text()
    for svg in [part.split("</svg>")[0] for part in page.split("<svg")[1:]]:
        xml.etree.ElementTree.fromstring(f"<svg{svg}</svg>")
    assert page.count("<svg") == 2 and ">1.32x<" in page  # a tenth above the largest gain
    for e in made.ledger.experiments():
        trace = Trace.from_json((tmp_path / f"out/traces/{e.number}.json").read_text())
        assert trace.definition == e.name and json.loads(trace.evaluation.log)["status"] == e.status


def test_decisions_do_not_depend_on_the_order_of_verdicts(repository, tmp_path):
    one = loop(repository, tmp_path / "one")
    one.run()
    git(repository, "update-ref", "-d", "refs/heads/autokernel/run")
    for ref in git(repository, "for-each-ref", "--format=%(refname)", "refs/autokernel").splitlines():
        git(repository, "update-ref", "-d", ref)
    other = loop(repository, tmp_path / "other", devices=FakeDevices(backwards=True))
    other.run()
    assert summary(one) == summary(other)


def steps(repository, folder):
    names = []
    made = loop(repository, folder, names.append)
    made.run()
    return names, summary(made), tree(repository)


def killed(make):
    """Runs ``make().run()`` in a process of its own, which may kill itself; how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            make().run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_at_every_step_it_goes_on(repository, tmp_path):
    subprocess.run(["cp", "-r", repository, tmp_path / "other"], check=True)
    names, expected, files = steps(tmp_path / "other", tmp_path / "expected")
    assert len(names) > 60
    folder, done = tmp_path / "out", []

    def kill_at(count):
        seen = []

        def checkpoint(name):
            seen.append(name)
            if len(seen) == count:
                os.kill(os.getpid(), 9)

        return checkpoint

    # Every run is killed one to three steps after the place that the one before it had reached.
    for run in range(3 * len(names)):
        ended = killed(lambda at=2 + run % 3: loop(repository, folder, kill_at(at)))
        assert ended in (0, -9)
        connection = sqlite3.connect(folder / "ledger.sqlite")
        done.append(connection.execute("select count(*) from experiments").fetchone()[0])
        connection.close()
        if ended == 0:
            break
    assert len(done) > len(names) / 3
    made = loop(repository, folder)
    assert summary(made) == expected and tree(repository) == files
    assert done == sorted(done)
    assert made.run() == "every region is covered or exhausted"  # nothing is left to do
    assert summary(made) == expected
    assert git(repository, "rev-list", "--count", "autokernel/run") == "3"


@pytest.mark.parametrize("step", some(["branch", "survey", "begin", "drawn", "committed", "judged", "measured",
    "decide", "keep", "traces", "finish"], "judged", "measured", "keep"))  # fmt: skip
def test_killed_once_nothing_is_done_twice(repository, tmp_path, step):
    folder = tmp_path / "out"

    def checkpoint(name):
        if name == step:
            os.kill(os.getpid(), 9)

    assert killed(lambda: loop(repository, folder, checkpoint)) == -9
    made = loop(repository, folder)
    before = {e.number: e for e in made.ledger.experiments()}
    judged = {n for n, e in before.items() if e.verdict is not None}
    measured = {n for n, e in before.items() if e.state in ("measured", "decided", "finished")}
    made.run()
    assert not judged & set(made.devices.judged)
    assert len(made.model_judge.judged) == sum(
        e.verdict.status == "passed" or e.gate == "G8" for e in made.ledger.experiments() if e.number not in measured
    )
    assert len(made.ledger.kept()) == 2


def test_what_a_killed_run_took_counts(repository, tmp_path):
    def checkpoint(name):
        if name == "survey":
            made.began -= 1e6
        if name == "begin":
            os.kill(os.getpid(), 9)

    made = loop(repository, tmp_path / "out", checkpoint)
    assert killed(lambda: made) == -9
    assert "minutes" in loop(repository, tmp_path / "out").run()


def test_by_hand_it_stops_before_there_is_a_baseline(repository, tmp_path):
    def checkpoint(name):
        if name == "baseline":
            raise KeyboardInterrupt

    made = loop(repository, tmp_path / "out", checkpoint)
    assert "by hand" in made.run() and made.coverage() == 0.0
    assert loop(repository, tmp_path / "out").run() == "every region is covered or exhausted"


def test_by_hand_it_stops_cleanly(repository, tmp_path):
    def checkpoint(name):
        if name == "measure":
            raise KeyboardInterrupt

    made = loop(repository, tmp_path / "out", checkpoint)
    assert "by hand" in made.run()
    assert git(repository, "worktree", "list").count("\n") == 0
    assert "by hand" in (tmp_path / "out/results.md").read_text()
    assert loop(repository, tmp_path / "out").run() == "every region is covered or exhausted"


def test_budgets(repository, tmp_path):
    made = loop(repository, tmp_path / "out", experiments=2)
    assert "2 experiments" in made.run() and len(made.ledger.experiments()) == 2
    assert "minutes" in loop(repository, tmp_path / "out", minutes=0.0).run()
    assert loop(repository, tmp_path / "out", experiments=3).run() and len(made.ledger.experiments()) == 3


def test_a_dirty_start_is_refused(repository, tmp_path):
    (repository / "README").write_text("changed\n")
    with pytest.raises(AutokernelError, match="uncommitted changes .*README"):
        loop(repository, tmp_path / "out").run()
    assert (repository / "README").read_text() == "changed\n"
    with pytest.raises(AutokernelError, match="no git repository"):
        loop(tmp_path, tmp_path / "out")


def test_another_run_of_the_same_name_is_refused(repository, tmp_path):
    loop(repository, tmp_path / "out", experiments=1).run()
    with pytest.raises(AutokernelError, match="was started with width [0-9]+, not 2: give the run another name"):
        loop(repository, tmp_path / "out", width=2).run()


def test_a_proposer_that_fails_does_not_end_the_run(repository, tmp_path):
    made = loop(repository, tmp_path / "out")

    class Broken:
        name = "broken"

        def propose(self, given):
            raise RuntimeError("no kernel today")

    made.proposers.append(Broken())
    made.run()
    assert "no kernel today" in {r.key: r.closed for r in made.ledger.regions()}["unwanted"]


def test_throughput_decides():
    baseline = {"noise": 0.01, "peak": 1000}
    good = {"least_ratio_to_original": 1.2, "least_ratio_to_best": 0.995, "peak": 1040}
    assert throughput_problem(good, baseline) is None
    assert "best" in throughput_problem(good | {"least_ratio_to_best": 0.98}, baseline)
    assert "original" in throughput_problem(good | {"least_ratio_to_original": float("nan")}, baseline)
    assert "memory" in throughput_problem(good | {"peak": 2000}, baseline)


def test_confidence():
    mean, least = confident_ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert mean == least == pytest.approx(2.0)
    mean, least = confident_ratio([1.0, 2.0, 1.5, 1.2], [1.0, 1.0, 1.0, 1.0])
    assert least < 1.0 < mean


def test_turns_end_when_it_is_decided():
    assert not decided([[1.0] * 3, [1.0] * 3], 0.99)  # too few
    assert decided([[1.0] * 4, [1.0] * 4], 0.99) and decided([[1.1] * 4, [1.0] * 4], 0.99)
    noisy = [1.0, 1.1, 0.9, 1.0]
    assert not decided([noisy, [1.0] * 4], 0.99)
    assert not decided([noisy, [1.0] * 4, [2.0] * 4], 0.99)
    assert decided([noisy, [1.0] * 4, [0.5] * 4], 0.99)  # slower than one of them


def test_minutes_end_a_round_between_two_experiments(repository, tmp_path):
    def checkpoint(step):
        if step == "finish":
            made.began -= 1e6

    made = loop(repository, tmp_path / "out", checkpoint, experiments=2, width=2)
    assert "minutes" in made.run()
    assert [e.state for e in made.ledger.experiments()] == ["finished", "judged"]
    assert not list(made.repository.worktrees.glob("*"))
    made.ledger.note("seconds", 0.0)
    again = loop(repository, tmp_path / "out", experiments=2, width=2)
    assert "experiments" in again.run()
    assert {e.state for e in again.ledger.experiments()} == {"finished"}


@pytest.mark.parametrize("middle, regions, coverage", [
    (4.0, {"large", "hopeless"}, 5.0 + 1.0),  # the larger region goes first, and what is inside it is closed
    (0.5, {"large", "middle", "hopeless"}, 5.0 + 3.0 + 1.0 - 0.5),  # most of this one is elsewhere
])  # fmt: skip
def test_time_inside_a_larger_region_counts_once(repository, tmp_path, monkeypatch, middle, regions, coverage):
    monkeypatch.setitem(REGIONS, "large", (5.0, 1.0, ["good"]))
    monkeypatch.setitem(REGIONS, "middle", (min(3.0, middle) if middle > 3 else 3.0, 1.0, ["good"]))
    monkeypatch.setitem(REGIONS, "hopeless", (1.0, 0.1, ["good"]))
    made = loop(repository, tmp_path / "out", experiments=9)

    def nested(*arguments):
        rows, whole = survey(*arguments)
        return rows, whole | {"inside": [["large", "middle", min(middle, 3.0)]]}

    made.survey = nested
    made.run()
    assert {e.region for e in made.ledger.kept()} == regions
    assert made.coverage() == pytest.approx(coverage / 12.0)
    assert {e.round for e in made.ledger.experiments() if e.region == "large"} == {1}
    assert all(e.round > 1 for e in made.ledger.experiments() if e.region == "middle")  # not beside the larger one
    closed = {row.key: row.closed for row in made.ledger.regions()}
    assert ("is covered" in closed["middle"]) == ("middle" not in regions)


def test_a_larger_region_is_closed_when_its_parts_are_covered(repository, tmp_path, monkeypatch):
    monkeypatch.setitem(REGIONS, "large", (5.0, 4.4, ["good"]))  # little to gain: the parts go first
    made = loop(repository, tmp_path / "out", experiments=9)

    def nested(*arguments):
        rows, whole = survey(*arguments)
        return rows, whole | {"inside": [["large", "middle", 3.0], ["large", "hopeless", 2.0]]}

    monkeypatch.setitem(REGIONS, "hopeless", (2.0, 0.1, ["good"]))
    made.survey = nested
    made.run()
    assert {e.region for e in made.ledger.kept()} == {"middle", "hopeless"}
    assert made.coverage() == pytest.approx(5.0 / 12.0)
    assert "is covered" in {row.key: row.closed for row in made.ledger.regions()}["large"]
