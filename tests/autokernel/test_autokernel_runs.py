"""Whole runs on the CPU, through the interpreter: coverage grows, outputs stay equal, what is bad is not kept."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from autokernel_corpus import CORPUS
from autokernel_corpus import proposal

from tilegym.autokernel.devices import Job
from tilegym.autokernel.devices import LocalDevices
from tilegym.autokernel.devices import RayDevices
from tilegym.autokernel.judge import Failed
from tilegym.autokernel.loop import Loop
from tilegym.autokernel.loop import Settings
from tilegym.autokernel.model_judge import ModelJudge
from tilegym.autokernel.model_judge import ModelRules
from tilegym.autokernel.model_judge import ModelSettings
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.preparation import recording_path
from tilegym.autokernel.preparation import survey
from tilegym.autokernel.proposers import Generate
from tilegym.autokernel.proposers import Scripted
from tilegym.autokernel.regions import install
from tilegym.autokernel.repository import Repository
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.timing import Rules
from tilegym.autokernel.workers import WorkerHost
from tilegym.bench import generate
from tilegym.inventory import load_solution

MODELS = Path(__file__).with_name("autokernel_models.py")
TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
LIMITS = Limits(memory=2 << 30, seconds=60.0)
RULES = Rules(slowdown=5000.0)


@pytest.fixture(scope="module")
def host():
    with WorkerHost("cpu", LIMITS) as host:
        yield host


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    for command in (["init"], ["commit", "--allow-empty", "-m", "Begin"]):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command]
        subprocess.run(git, cwd=root, check=True, capture_output=True)
    return Repository(root, "run", tmp_path / "out/worktrees")


class OnHost(LocalDevices):
    """The one worker host that the tests of this file share."""

    def __init__(self, host):
        self.rules, self.hosts, self.devices = RULES, [host], 1


def make(repository, host, folder, model, proposers, regions, experiments):
    """A loop over those regions of a model whose source has one of ``regions`` in it."""
    settings = ModelSettings(ModelSpec(model, "float32"), 5, 3)

    def some(*arguments):
        rows, whole = survey(*arguments)
        return [r for r in rows if r.task and any(text in r.task for text in regions)], whole

    limits = dataclasses.replace(LIMITS, memory=8 << 30)
    return Loop(
        settings=Settings(settings, architectures=("sm_90",), folder="kernels_of/{family}", experiments=experiments,
                          least_share=0.0),
        folder=folder,
        repository=repository,
        proposers=proposers,
        devices=OnHost(host),
        model_judge=ModelJudge(host, settings, ModelRules(rounds=1, throughput=False), limits, folder / "baseline"),
        survey=some,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, regions",
    [
        (f"{MODELS}::gated_norm", ["norm_gate"]),
        (f"{MODELS}::scaled_residual", ["* 0.22"]),
        (f"{MODELS}::unusual_activation", [".square()"]),
        (f"{MODELS}::gated_norm", ["rotate_half"]),
        (str(next((p for p in sorted(TINY.parent.glob("*")) if p.is_dir()), TINY)), ["silu"]),
    ],
    ids=["gated_norm", "scaled_residual", "unusual_activation", "rotation", "tiny"],
)
def test_the_generator_covers_what_nobody_wrote(host, repository, tmp_path, model, regions):
    made = make(repository, host, tmp_path / "out", model, [Generate()], regions, experiments=1)
    made.run()
    (experiment,) = made.ledger.experiments()
    assert experiment.status == "keep", experiment.description
    assert experiment.model["token_agreement"] == 1.0
    assert experiment.model["way"] == "eager" and "without a GPU" in experiment.model["why"]
    assert made.coverage() > 0
    # What is on the branch is what computes, and the model gives the same tokens with it.
    tree = repository.worktree("look", repository.head())
    run = load_solution(experiment.proposal.solution, tree)
    loaded, tokenizer = made.settings.model.spec.load(torch.device("cpu"))
    batches = make_batches(loaded, tokenizer)
    expected = generate.run_once(loaded, batches, 3).tokens
    calls = []
    with install(loaded, {experiment.region: lambda *inputs: calls.append(1) or run(*inputs)}):
        got = generate.run_once(loaded, batches, 3).tokens
    assert calls and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def make_batches(model, tokenizer):
    from tilegym.autokernel.model_worker import batches_of

    return batches_of(model, tokenizer, 5)


def test_bad_proposals_leave_nothing_and_the_good_one_is_kept(host, repository, tmp_path):
    names = ["wrong", "mutates_inputs", "reads_files", "good"]

    def proposals(task):
        return [proposal(task, CORPUS[name].source, name) for name in names]

    model = f"{MODELS}::gated_norm"
    made = make(repository, host, tmp_path / "out", model, [Scripted(proposals)], ["norm_gate"], experiments=9)
    assert made.run() == "every region is covered or exhausted"
    assert [(e.status, e.gate) for e in made.ledger.experiments()] == [
        ("incorrect", "G2"), ("incorrect", "G6"), ("discard", "G0"), ("keep", "")
    ]  # fmt: skip
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", repository.branch], cwd=repository.root,
                            capture_output=True, text=True, check=True).stdout.split()  # fmt: skip
    assert [Path(p).name for p in listed if p.endswith(".py")] == ["good.py"] and len(listed) == 3
    # The judge of the model refuses what the judge of kernels has not seen.
    (kept,) = made.ledger.kept()
    wrong = proposal(made.task_of(kept), CORPUS["wrong"].source.replace("1e-2", "3.0"), "wrong")
    (tmp_path / "wrong" / "kernels_of/llama/kernels").mkdir(parents=True)
    (tmp_path / "wrong" / "kernels_of/llama/kernels/wrong.py").write_text(*wrong.files.values())
    kernels = {kept.region: {"root": str(tmp_path / "wrong"), "solution": wrong.solution.to_json()}}
    with pytest.raises(Failed, match="logits are off") as failed:
        made.model_judge.judge(kernels, {}, made.ledger.fact("baseline"))
    assert failed.value.status == "incorrect"


def jobs(tmp_path):
    settings = ModelSettings(ModelSpec(f"{MODELS}::gated_norm", "float32"), 5, 3)
    rows, whole = survey(settings, torch.device("cpu"), ("sm_90",), Path("kernels_of/{family}"), tmp_path)
    assert re.fullmatch(r"TileGym serves \d+ of its parts: .*\brms_norm\b.*", whole["integration"])
    row = next(r for r in rows if "norm_gate" in r.task)
    from tilegym.autokernel import Task

    task = Task.from_json(row.task)
    path = recording_path(tmp_path, row.key)
    recording = path.read_bytes(), path.with_suffix(".json").read_bytes()
    names = ("wrong", "reads_files", "mutates_inputs")
    return [
        Job(i, row.task, proposal(task, CORPUS[name].source, name).to_json(), recording) for i, name in enumerate(names)
    ]


EXPECTED = {0: ("incorrect", "G2"), 1: ("discard", "G0"), 2: ("incorrect", "G6")}


@pytest.mark.slow
def test_two_devices_decide_as_one(tmp_path):
    devices = LocalDevices(("cpu", "cpu"), LIMITS, RULES)
    try:
        assert {n: (v.status, v.gate) for n, v in devices.judge(jobs(tmp_path))} == EXPECTED
    finally:
        devices.close()


@pytest.mark.slow
def test_a_ray_cluster_decides_as_one(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    devices = RayDevices("auto", "cpu", LIMITS, RULES)
    try:
        assert {n: (v.status, v.gate) for n, v in devices.judge(jobs(tmp_path))} == EXPECTED
    finally:
        devices.close()
