"""The proposers: reuse, generate, tune and agent."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tilegym.autokernel import Attempt
from tilegym.autokernel import Proposal
from tilegym.autokernel import Sample
from tilegym.autokernel import Task
from tilegym.autokernel import TensorInfo
from tilegym.autokernel.harness import Observer
from tilegym.autokernel.harness import _launches
from tilegym.autokernel.proposers import Agent
from tilegym.autokernel.proposers import AgentConfig
from tilegym.autokernel.proposers import Generate
from tilegym.autokernel.proposers import Reuse
from tilegym.autokernel.proposers import Tune
from tilegym.autokernel.proposers import reuse
from tilegym.autokernel.proposers.agent import NoProposal
from tilegym.autokernel.proposers.agent import worktrees
from tilegym.autokernel.proposers.tune import numbers
from tilegym.autokernel.repository import Repository
from tilegym.autokernel.repository import write_proposal
from tilegym.autokernel.static_checks import check
from tilegym.bench.deadline import Late
from tilegym.bench.deadline import at_most
from tilegym.errors import AutokernelError
from tilegym.inventory import AxisConst
from tilegym.inventory import AxisVar
from tilegym.inventory import Definition
from tilegym.inventory import TensorSpec
from tilegym.inventory import load
from tilegym.inventory import load_solution
from tilegym.inventory.inputs import cases
from tilegym.inventory.schema import CUDA_TILE

NORM = """# Source: https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/models/x.py#L1-L9
import torch


def run(x, weight):
    dtype = x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-06)
    y = weight * x.to(dtype)
    return y
"""


@pytest.fixture
def task():
    tensors = {"x": TensorSpec(shape=["M", "N"], dtype="float32"), "weight": TensorSpec(shape=["N"], dtype="float32")}
    definition = Definition(
        name="a_norm",
        op_type="region",
        axes={"M": AxisVar(), "N": AxisConst(value=32)},
        inputs=tensors,
        outputs={"y": tensors["x"]},
        reference=NORM,
    )
    sample = Sample({"M": 4, "N": 32}, {"x": TensorInfo((4, 32), (32, 1), "float32"),
                                        "weight": TensorInfo((32,), (1,), "float32")})  # fmt: skip
    return Task(definition, "norm", ("norm",), (sample,), ("sm_90",), "kernels_of/llama", trains=False)


def failed(proposal: Proposal, proposer: str, gate="G7", status="discard") -> Attempt:
    return Attempt(proposer, gate, status, "too slow", proposal.files, proposal.solution.to_json())


def computes(task: Task, proposal: Proposal, root: Path) -> None:
    write_proposal(root, task, proposal)
    assert check(task, proposal, root) == []
    x, weight = torch.randn(5, 32), torch.rand(32)
    got = load_solution(proposal.solution, root)(x, weight)
    torch.testing.assert_close(got, task.run()(x, weight))


def test_protocol_survives_json(task):
    proposal = Reuse().propose(task)
    history = (failed(proposal, "reuse"),)
    assert Proposal.from_json(proposal.to_json()) == proposal
    other = dataclasses.replace(task, history=history)
    assert Task.from_json(other.to_json()) == other


def test_reuse(task, tmp_path):
    proposal = Reuse().propose(task)
    assert "rms_norm" in proposal.rationale
    computes(task, proposal, tmp_path)
    tried, texts = task, set()
    while proposal is not None:
        texts.add(*proposal.files.values())
        tried = dataclasses.replace(tried, history=(*tried.history, failed(proposal, "reuse")))
        proposal = Reuse().propose(tried)
    assert len(texts) == len(tried.history) >= 1


def test_reuse_finds_nothing_for_what_nobody_has(task):
    definition = task.definition.model_copy(update={"reference": NORM.replace("weight *", "weight.sin() *")})
    assert Reuse().propose(dataclasses.replace(task, definition=definition)) is None


def test_generate(task, tmp_path):
    first = Generate().propose(task)
    computes(task, first, tmp_path / "first")
    slow = dataclasses.replace(task, history=(failed(first, "generate"),))
    second = Generate().propose(slow)
    assert second is None or second.files != first.files
    wrong = dataclasses.replace(task, history=(failed(first, "generate", "G3", "incorrect"),))
    assert Generate().propose(wrong) is None


def test_tune(task):
    first = Generate().propose(task)
    (path,) = first.files
    text = "TILE = 64\nkernel = hinted(f, num_worker_warps=4, occupancy=2)  # ä\n"
    proposal = dataclasses.replace(first, files={path: text})
    assert [name for name, _ in numbers(text)] == ["TILE", "num_worker_warps", "occupancy"]
    assert Tune().propose(task) is None
    tried, seen = dataclasses.replace(task, history=(failed(proposal, "generate"),)), []
    for _ in range(6):
        variant = Tune().propose(tried)
        seen.append(variant.files[path])
        tried = dataclasses.replace(tried, history=(*tried.history, failed(variant, "tune", "G3", "incorrect")))
    assert seen[0] == text.replace("64", "32") and seen[1] == text.replace("64", "128")
    assert seen[2] == text.replace("warps=4", "warps=8") and len(set(seen)) == 6
    assert seen[3:] == [text.replace("occupancy=2", f"occupancy={n}") for n in (1, 4, 8)]  # the farthest last
    assert Tune().propose(tried) is None
    wrong = dataclasses.replace(task, history=(failed(proposal, "generate", "G3", "incorrect"),))
    assert Tune().propose(wrong) is None


AGENT = """
import json, os, pathlib, subprocess, sys, time

task = json.loads(pathlib.Path(sys.argv[1]).read_text())
tree, mode = pathlib.Path(sys.argv[2]), sys.argv[3]
assert pathlib.Path.cwd() == tree and "SECRET" not in os.environ and os.environ["AGENT_KEY"] == "key"
assert sorted(p.name for p in pathlib.Path(sys.argv[4]).iterdir()) == ["1-tune-G3.log"]
assert task["history"][0]["log"] == "was wrong"
if mode == "nothing":
    sys.exit("I have no idea")
if mode == "asleep":
    time.sleep(600)
folder, name = tree / task["folder"], task["definition"]["name"]
for kind in ("kernels", "kernel_solutions"):
    (folder / kind).mkdir(parents=True)
path = f"{task['folder']}/kernels/mine.py"
(tree / path).write_text("def run(x, weight):\\n    return x\\n")
spec = {"language": "cuda-tile", "target_hardware": ["cpu"], "entry_point": f"{path}::run",
        "dependencies": ["cuda-tile"], "destination_passing_style": False}
solution = {"name": "mine", "definition": name, "author": "agent", "spec": spec, "sources": [{"path": path}]}
(folder / "kernel_solutions" / "mine.json").write_text(json.dumps(solution))
if mode == "elsewhere":
    (tree / "README").write_text("mine now")
if mode == "commits":
    me = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["checkout", "-q", "autokernel/run"], ["add", "-A"], [*me, "commit", "-qm", "Mine"]):
        subprocess.run(["git", *command], check=True)
    (tree / path).write_text("def run(x, weight):\\n    return x  # and then some more\\n")
print("this is why; " + "$HOME `date`")
sys.stdout.flush()
if mode == "forever":
    time.sleep(600)
"""


@pytest.fixture
def ask(task, tmp_path, monkeypatch):
    root = tmp_path / "repository"
    root.mkdir()
    for command in (["init"], ["commit", "--allow-empty", "-m", "Begin"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=root, check=True,
                       capture_output=True)  # fmt: skip
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    monkeypatch.setenv("SECRET", "secret")
    monkeypatch.setenv("AGENT_KEY", "key")
    repository = Repository(root, "run", tmp_path / "worktrees")
    repository.start_branch()
    before = Attempt("tune", "G3", "incorrect", "was wrong")

    def ask(mode, minutes=1.0):
        command = [sys.executable, str(script), "{task}", "{worktree}", mode, "{logs}"]
        path = tmp_path / "agent.json"
        path.write_text(json.dumps({"command": command, "minutes": minutes, "environment": ["AGENT_KEY"]}))
        agent = Agent(AgentConfig.from_file(path), worktrees(repository))
        proposal = agent.propose(dataclasses.replace(task, history=(before,)))
        assert not (tmp_path / "worktrees/agent").exists()
        assert subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True).stdout == b""
        return proposal

    return ask


def test_agent(ask, task, tmp_path):
    proposal = ask("good")
    assert proposal.solution.name == "mine" and proposal.definition == task.definition
    assert list(proposal.files) == [f"{task.folder}/kernels/mine.py"]
    assert "this is why; $HOME `date`" in proposal.rationale
    write_proposal(tmp_path / "tree", task, proposal)
    assert check(task, proposal, tmp_path / "tree") == []


def test_agent_that_commits(ask, task, tmp_path):
    """What it committed and what it did not are one proposal."""
    proposal = ask("commits")
    assert proposal.solution.name == "mine" and list(proposal.files) == [f"{task.folder}/kernels/mine.py"]
    assert "some more" in proposal.files[f"{task.folder}/kernels/mine.py"]
    root = tmp_path / "repository"  # and nothing that has not been judged is on the run's branch
    heads = subprocess.run(["git", "rev-parse", "HEAD", "autokernel/run"], cwd=root, capture_output=True, text=True)
    assert len(set(heads.stdout.split())) == 1


def test_agent_that_writes_elsewhere_is_rejected(ask, task, tmp_path):
    proposal = ask("elsewhere")
    assert any("README" in problem for problem in check(task, proposal, tmp_path))


def test_agent_without_a_proposal(ask):
    with pytest.raises(NoProposal, match="ended without a new Solution.* the last it said: I have no idea"):
        ask("nothing")
    with pytest.raises(NoProposal, match="was ended after 0.02 minutes"):
        ask("asleep", minutes=0.02)


def test_agent_is_ended_in_time(ask):
    assert ask("forever", minutes=0.05).solution.name == "mine"


def test_agent_is_asked_so_often(task):
    agent = Agent(AgentConfig(("no-such-agent",), attempts=1), worktree=None)
    assert agent.propose(dataclasses.replace(task, history=(Attempt("agent", "G3", "incorrect", ""),))) is None


@pytest.mark.parametrize("text, message", [
    ("[", "cannot be read"), ("[]", "a list"), ('{"minutes": 1}', "has to have command"),
    ('{"command": "a b"}', "'a b', it has to be a list"), ('{"command": []}', "a list of words"),
    ('{"command": ["a", "{home}"]}', "placeholder"), ('{"command": ["a", "{"]}', "brace"),
    ('{"command": ["a"], "shell": true}', "may have"), ('{"command": ["a"], "minutes": "2"}', "minutes is '2'"),
    ('{"command": ["a"], "attempts": 0}', "attempts is 0"), ('{"command": ["a"], "environment": "KEY"}', "'KEY'"),
])  # fmt: skip
def test_agent_config(tmp_path, text, message):
    path = tmp_path / "agent.json"
    path.write_text(text)
    with pytest.raises(AutokernelError, match=f"agent.json.*{message}"):
        AgentConfig.from_file(path)


def test_agent_is_looked_for_before_the_run(tmp_path):
    with pytest.raises(AutokernelError, match="'no-such-agent' is no program"):
        AgentConfig(("no-such-agent",)).check(tmp_path)
    with pytest.raises(AutokernelError, match="skill 'docs/how-to-add-an-op.md' is not in"):
        AgentConfig((sys.executable, "{skill}")).check(tmp_path)
    AgentConfig((sys.executable, "{task}")).check(tmp_path)


def test_a_search_ends_in_time(task, monkeypatch):
    def endless(definition):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(Late), at_most(0.05):
        endless(None)
    monkeypatch.setattr(reuse, "match", endless)
    monkeypatch.setattr(reuse, "_SECONDS", 0.05)
    reuse._matches.cache_clear()
    assert Reuse().propose(task) is None
    reuse._matches.cache_clear()


def test_candidates_may_copy_to_memory_of_their_own_alone():
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    for copies, forbidden in [
        (lambda: x.new_empty(3, 8)[:, :5].copy_(x), {}),
        (lambda: x.new_empty(3, 5, dtype=torch.bfloat16).copy_(x), {"copy_": 1}),  # converts
        (lambda: x.new_empty(2, 3, 5).copy_(x), {"copy_": 1}),  # repeats
        (lambda: y.copy_(x), {"copy_": 1}),  # is an input
    ]:
        observer = Observer("nan")
        with observer:
            copies()
        assert observer.forbidden == forbidden


# Solutions of the catalog whose ops compute with PyTorch, and what: proposed as they are, gate 6 rejects them.
PARTLY_PYTORCH = {
    "fused_linear_causal_lm_loss_cutile": {"mm"},
    "fused_linear_cross_entropy_cutile": {"mm"},
    "rope_neighbours_cutile": {"cat"},
}


def test_solutions_of_the_catalog_leave_nothing_to_pytorch():
    catalog, found = load(), {}
    for solution in catalog.solutions.values():
        if solution.spec.language != CUDA_TILE:
            continue
        function = load_solution(solution)
        for case in cases(catalog.definitions[solution.definition], count=1):
            observer, launched = Observer("nan"), []
            # Nothing is launched: what PyTorch is asked for does not depend on what kernels write.
            with (
                torch.no_grad(),
                _launches(lambda kernel, args, seen=launched: seen.append(kernel), run=False),
                observer,
            ):
                function(*case.inputs.values())
            assert launched, solution.name
            if observer.forbidden:
                found.setdefault(solution.name, set()).update(observer.forbidden)
    assert found == PARTLY_PYTORCH
