"""The judge: every bad proposal of the corpus is rejected at its gate, the good one passes."""

import dataclasses
import json
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from autokernel_corpus import CORPUS
from autokernel_corpus import GOOD
from autokernel_corpus import proposal

from tilegym.autokernel import Task
from tilegym.autokernel import harness
from tilegym.autokernel import judging_inputs
from tilegym.autokernel import profile
from tilegym.autokernel import sandbox
from tilegym.autokernel import tensors
from tilegym.autokernel import timing
from tilegym.autokernel import worker
from tilegym.autokernel.judge import KernelJudge
from tilegym.autokernel.judge import Verdict
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.model_worker import batches_of
from tilegym.autokernel.regions import find_regions
from tilegym.autokernel.repository import write_proposal
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.static_checks import check_source
from tilegym.autokernel.workers import WorkerFailed
from tilegym.autokernel.workers import WorkerHost
from tilegym.bench import generate
from tilegym.errors import InventoryError
from tilegym.inventory import AxisVar
from tilegym.inventory import Definition
from tilegym.inventory import TensorSpec

MODELS = Path(__file__).with_name("autokernel_models.py")


@pytest.fixture(scope="module")
def region(tmp_path_factory):
    """(the gated norm's task, the file of its recorded calls)."""
    model, _ = ModelSpec(f"{MODELS}::gated_norm", "float32").load(torch.device("cpu"))
    batches = batches_of(model, None, 4)
    found = profile.record(model, [lambda: generate.run_once(model, batches, 3)])
    chosen = next(r for r in find_regions(model) if "norm_gate" in r.inputs)
    definition = profile.draft(chosen, found[chosen.key], "llama")
    profile.check_draft(definition, found[chosen.key], torch.device("cpu"))
    path = tmp_path_factory.mktemp("recording") / "norm.safetensors"
    judging_inputs.save_recording(path, definition, found[chosen.key])
    samples = profile.samples(definition, found[chosen.key])
    modules = tuple(chosen.modules)
    return Task(definition, chosen.key, modules, samples, ("sm_90",), "kernels_of/llama"), path


@pytest.fixture(scope="module")
def host():
    with WorkerHost("cpu", Limits(memory=1 << 30, seconds=10.0)) as host:
        yield host


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_corpus(name, region, host, tmp_path):
    task, recording = region
    canned = CORPUS[name]
    proposed = proposal(task, canned.source, name)
    write_proposal(tmp_path, task, proposed)
    limits = Limits(memory=1 << 30, seconds=3.0) if name == "hanging" else host.limits
    host.limits, former = limits, host.limits
    try:
        verdict = KernelJudge(host, timing.Rules(slowdown=120.0)).judge(task, proposed, tmp_path, recording, seed=7)
    finally:
        host.limits = former
    assert verdict.status == canned.status, verdict.log
    assert verdict.gate in canned.gate.split() or (not canned.gate and not verdict.gate), verdict.log
    reached = [g.gate for g in verdict.gates]
    assert reached == [f"G{i}" for i in range(len(reached))]
    assert all(g.passed for g in verdict.gates[:-1]) and verdict.gates[-1].passed == (not canned.gate)
    assert Verdict.from_json(verdict.to_json()) == verdict
    if not canned.gate:
        assert reached[-1] == "G7" and verdict.timing["kernel"] > 0 and verdict.confined["memory"]


def test_a_proposal_may_not_change_what_is_asked_for(region, host, tmp_path):
    task, recording = region
    proposed = proposal(task, GOOD)
    easier = dataclasses.replace(proposed, definition=task.definition.model_copy(update={"constraints": ["D0 == 1"]}))
    elsewhere = dataclasses.replace(proposed, files={"src/tilegym/__init__.py": GOOD})
    outside = dataclasses.replace(proposed, files={f"{task.folder}/../../x.py": GOOD})
    for wrong in (easier, elsewhere, outside):
        write_proposal(tmp_path, task, wrong)
        verdict = KernelJudge(host, timing.Rules()).judge(task, wrong, tmp_path, recording)
        assert (verdict.status, verdict.gate) == ("discard", "G0")
    assert not (tmp_path / "src").exists() and not (tmp_path / "x.py").exists()


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from torch import load",
        "import torch as t",
        "import torch.nn.functional as F",
        "from torch.nn import functional",
        "t = [torch]",
        "torch.ops.aten.add",
        "torch._C",
        "from tilegym.ops import pytorch",
        "from tilegym.ops.pytorch import rms_norm",
        "import tilegym.inventory",
        "from . import other",
        "x = eval",
        "().__class__",
        "getattr(1, 'real')",
        "__builtins__",
        "def f():\n    global state",
        "torch.autograd.grad",
        "def (",
        "from tilegym.ops.cutile.row_norms import torch as t",
        "import tilegym.ops.cutile.row_norms as m\nm.torch.sigmoid",
        "import tilegym.ops\ntilegym.ops.cutile.row_norms.torch.sigmoid",
        "from tilegym.ops import cutile\ncutile.row_norms.torch.sigmoid",
        "from tilegym.backend.cutile.launch import recording",
        "from tilegym.backend.cutile.tuning_cache import Path",
        "from tilegym.ops.cutile.row_norms import *",
        "import tilegym\ntilegym.inventory.catalog",
        "import tilegym.ops.cutile as c\nc.row_norms.launch = None",
        "torch.Tensor.clone = None",
        "x.data = y",
        "del x.shape",
        "x.tolist()",
        "x.numpy()",
        "g = (g.gi_frame.f_back for i in (1,))",
        "type('Grid', (tuple,), {'__iter__': 1})",
        "class Grid(tuple):\n    def __iter__(self):\n        return 1",
        "match torch.Tensor:\n    case object(__dict__=d):\n        pass",
    ],
)
def test_static_checks_refuse(line):
    assert check_source(f"import torch\n{line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "from tilegym.ops import rms_norm as rms_norm_op",
        "from tilegym.ops.cutile.tiling import functools",
        "from tilegym.ops.cutile import row_norms\nrow_norms.load",
        "import tilegym.ops.cutile.row_norms as m\nm.load, m.ct.sum",
        "import tilegym.ops.cutile.tiling\ntilegym.ops.cutile.tiling.span",
        "import cuda.tile as ct\nct.bid(0).item()",
        "def forward(ctx, x):\n    ctx.scale = 1",
    ],
)
def test_static_checks_allow_what_kernels_need(line):
    assert not check_source(GOOD) and not check_source(line)


def test_what_is_done_past_operators_is_seen():
    before = dict(vars(torch.Tensor))
    seen, x = {}, torch.ones(3)
    with harness._past_operators(seen):
        assert x.tolist() == x.numpy().tolist() == [1.0] * 3 and str(x)
    assert seen.keys() == {"tolist", "numpy", "__repr__"} and dict(vars(torch.Tensor)) == before


def test_a_launch_takes_nothing_that_runs_code():
    class Grid(tuple):
        pass

    class Lazy(torch.Tensor):
        pass

    @harness.ct.kernel
    def kernel(x):
        pass

    x = torch.ones(3)
    harness._check_plain((1, 2), kernel, (x, [x, x], (1, 2), 0.5, True, "a", None, harness.ct.float32))
    for grid, taken, args in [
        (Grid((1,)), kernel, (x,)),
        ((1,), len, (x,)),
        ((1,), kernel, Grid((x,))),
        ((1,), kernel, (x.as_subclass(Lazy),)),
        ((1,), kernel, ([x.as_subclass(Lazy)],)),
        ((torch.ones(()),), kernel, (lambda: x,)),
    ]:
        with pytest.raises(TypeError, match="a launch takes"):
            harness._check_plain(grid, taken, args)


def test_other_contents_have_the_same_layout(region):
    task, recording = region
    for call, _ in judging_inputs.recorded(recording, torch.Generator()):
        other = judging_inputs.other_contents(task.definition, call)
        for (one, two), name in zip([(call.inputs[n], other.inputs[n]) for n in call.inputs], call.inputs, strict=True):
            assert one.shape == two.shape and one.stride() == two.stride(), name
            assert torch.equal(one.flatten().sort()[0], two.flatten().sort()[0]) and not torch.equal(one, two)
    x = torch.arange(6.0).reshape(1, 6).expand(4, 6)
    call = judging_inputs.Call("repeated", {list(call.inputs)[0]: x})
    (other,) = judging_inputs.other_contents(task.definition, call).inputs.values()
    assert tensors.pack({"x": other})[1] == tensors.pack({"x": x})[1] and other[0, 0] == 5.0


def test_workers_are_confined(host, monkeypatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "secret")
    assert "MY_SECRET_TOKEN" not in sandbox.environment(Path("folder"), "cpu")
    with host.working() as worker:
        environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
        assert b"MY_SECRET_TOKEN" not in environment
        assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)
        limits = Path(f"/proc/{worker.pid}/limits").read_text()
        assert "unlimited" not in next(row for row in limits.splitlines() if row.startswith("Max address space"))
        if worker.confined["network"]:
            devices = Path(f"/proc/{worker.pid}/net/dev").read_text()
            assert [row.split(":")[0].strip() for row in devices.splitlines()[2:]] == ["lo"]
    assert worker.ended == "exit status 0" and not worker.folder.exists()


def test_a_worker_that_dies_is_a_crash(host):
    with host.working() as worker:
        os.kill(worker.pid, signal.SIGSEGV)
        with pytest.raises(WorkerFailed, match="SIGSEGV") as failed:
            worker.ask("candidate", root="", solution="")
    assert failed.value.status == "crash"


def test_answers_that_are_no_answers(host):
    with host.working() as worker:
        assert "error" in worker.ask("candidate", root="nowhere", solution="{}")
        assert "error" in worker.ask("no such command")


def measured(kernel=1e-3, reference=2e-3, clock=None, claimed=None):
    clock = kernel if clock is None else clock
    return timing.Measured(kernel, reference, clock, reference, clock if claimed is None else claimed)


@pytest.mark.parametrize(
    "given, bound, status",
    [
        (measured(), 5e-4, None),
        (measured(kernel=3e-3), 5e-4, "discard"),
        (measured(kernel=4e-4), 5e-4, "suspect"),
        (measured(kernel=1e-5), 0.0, "suspect"),
        (measured(claimed=1e-4), 5e-4, "suspect"),
    ],
)
def test_speed(given, bound, status):
    found = timing.judge(given, bound, ops=4, rules=timing.Rules())
    assert (found and found[0]) == status


@pytest.mark.parametrize("url", ["https://github.com/o/r/blob/v5.1/a.py#L1-L2",
                                 f"https://github.com/o/r/blob/{'0' * 40}/a.py#L1-L2"])  # fmt: skip
def test_drafts_say_where_they_are_from(url):
    model = torch.nn.Sequential(torch.nn.Linear(8, 2, bias=False))
    found = profile.record(model, [lambda: [model(torch.randn(n, 8)) for n in (2, 3)]])
    (region,) = find_regions(model)
    region.url = url
    definition = profile.draft(region, found[region.key], "llama")
    assert definition.reference.startswith(f"# Source: {url}\n")
    assert ("source:not-a-commit" in definition.tags) == ("v5.1" in url)


def test_drafts_say_why_there_is_none():
    model, _ = ModelSpec(f"{MODELS}::gated_norm", "float32").load(torch.device("cpu"))
    chosen = find_regions(model)[0]
    with pytest.raises(InventoryError, match="never called"):
        profile.draft(chosen, profile.Recording(), "llama")


def test_large_inputs_are_written_once(tmp_path):
    weight, outbox = torch.randn(1024, 512), tensors.Outbox(tmp_path)
    calls = [{"x": torch.full((2,), float(i)), "weight": weight, "eps": 1e-5} for i in range(3)]
    written = [outbox.write(call) for call in calls]
    assert len({files[0] for files, _ in written}) == 1 and len({f for files, _ in written for f in files}) == 4
    files = harness.Files(torch.device("cpu"))
    for call, (names, described) in zip(calls, written, strict=True):
        got = tensors.unpack(files.load(names), json.loads(described))
        assert list(got) == ["x", "weight", "eps"] and got["eps"] == 1e-5
        assert torch.equal(got["x"], call["x"]) and torch.equal(got["weight"], weight)
        outbox.remove(names)
    assert [p.name for p in tmp_path.iterdir()] == [Path(written[0][0][0]).name]


def test_models_share_what_was_compiled_and_kernels_do_not():
    shared = {"XDG_CACHE_HOME", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR"}
    kernel, model = (set(worker.own_folders(kind, "own", "cuda")) for kind in ("kernel", "model"))
    assert kernel - model == shared and model >= {"HOME", "TMPDIR", "TILEGYM_CACHE_DIR"}
    assert set(worker.own_folders("model", "own", "cpu")) == kernel
    worker._import_for_models()
    assert shared < {name for name, value in sandbox.environment(Path("all"), "0").items() if value == "all"}


def test_a_worker_mistakes_no_outbox_for_another(tmp_path):
    """The gates before the seventh have an outbox, and that has one of its own, for the same worker."""
    files, weight = harness.Files(torch.device("cpu")), torch.randn(1024, 512)
    for x in (torch.zeros(2), torch.ones(2), torch.full((1024, 512), 2.0)):
        names, described = tensors.Outbox(tmp_path).write({"x": x, "weight": weight})
        assert torch.equal(tensors.unpack(files.load(names), json.loads(described))["x"], x)


def test_recorded_weights_are_kept_once(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False))
    found = profile.record(model, [lambda: [model(torch.randn(n, 8)) for n in (2, 3)]])
    (region,) = find_regions(model)
    definition = profile.draft(region, found[region.key], "llama")
    judging_inputs.save_recording(tmp_path / "calls", definition, found[region.key])
    assert sorted(tensors.read(tmp_path / "calls")) == ["0.weight", "0.x", "1.x"]
    (first, _), (second, _) = judging_inputs.recorded(tmp_path / "calls", torch.Generator())
    assert first.inputs["weight"] is second.inputs["weight"] and second.inputs["x"].shape == (3, 8)
    assert torch.equal(first.inputs["weight"], model[0].weight)


def test_huge_values_do_not_overflow_in_sums():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 2, bias=False).bfloat16())
    found = profile.record(model, [lambda: [model(torch.randn(n, 1024).bfloat16()) for n in (2, 3)]])
    (region,) = find_regions(model)
    definition = profile.draft(region, found[region.key], "llama")
    call = judging_inputs.small(definition, {}, torch.Generator(), 3)
    assert judging_inputs.adds_up(definition, call)
    (huge,) = [c for c in judging_inputs.extreme(definition, call, torch.Generator()) if c.name == "huge values"]
    assert 1e30 < huge.inputs["x"].abs().max() and (huge.inputs["x"].float().abs().sum(-1).isfinite()).all()
    source = "# Source: x\nimport torch\n\n\ndef run(x):\n    y = x * 2\n    return y\n"
    pointwise = definition.model_copy(update={"inputs": {"x": definition.inputs["x"]}, "reference": source})
    call = judging_inputs.small(pointwise, {}, torch.Generator(), 3)
    assert not judging_inputs.adds_up(pointwise, call)


def test_huge_values_do_not_overflow_in_products_that_are_added():
    spec = TensorSpec(shape=["M"], dtype="float32")
    source = "# Source: x\nimport torch\n\n\ndef run(x):\n    y = {}\n    return y\n"
    highest = {}
    for text in ("x * x - x * (2 * x)", "x * x + 1.0", "x - 2 * x"):
        definition = Definition(
            name="sums",
            op_type="region",
            axes={"M": AxisVar()},
            inputs={"x": spec},
            outputs={"y": spec},
            reference=source.format(text),
        )
        call = judging_inputs.small(definition, {}, torch.Generator(), 3)
        calls = {c.name: c for c in judging_inputs.extreme(definition, call, torch.Generator())}
        highest[text] = calls["huge values"].inputs["x"].abs().max().item()
    fused, *others = highest.values()
    assert 1e18 < fused < 1e19 and all(value > 1e37 for value in others), highest


def test_on_a_gpu_the_next_process_begins_before_it_is_asked_for(monkeypatch):
    host, begun = WorkerHost("0"), []

    def begin(kind, limits):
        ours, theirs = socket.socketpair()
        theirs.sendall(b'{"confined": {"network": true}}\n')
        begun.append((kind, theirs, ours))
        return ours, 1 << 30, host.folder  # no such process

    monkeypatch.setattr(host, "_begin", begin)
    assert host.worker().confined == {"network": True}
    assert [kind for kind, *_ in begun] == ["kernel"] * 2
    second = host.worker()
    second.channel.sendall(b"x")
    assert begun[1][1].recv(1) == b"x" and len(begun) == 3  # it is the one that waited
    host.worker("model", Limits(memory=1 << 40))
    assert [kind for kind, *_ in begun[3:]] == ["model"] * 2
    host.close()
    # Those that nobody asked for are told to end.
    assert [ours.fileno() == -1 for *_, ours in begun] == [False, False, True, False, True]
