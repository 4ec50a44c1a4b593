"""The whole pipeline: what it writes, that it continues where it was stopped, that it tries the next candidate."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integration import remote
from integration import small
from integration import stablelm

from tilegym.errors import ModelError
from tilegym.errors import PatchError
from tilegym.integrate import pipeline
from tilegym.integrate import recipes
from tilegym.integrate import steps
from tilegym.integrate.check import check_patch
from tilegym.integrate.pipeline import Options
from tilegym.integrate.state import State
from tilegym.integrate.state import alone_in
from tilegym.integrate.verify import compile_ahead
from tilegym.transformers import generated
from tilegym.transformers import monkey_patch
from tilegym.transformers.general import Place

COMPUTES = {"loss", "rope", "attn", "linear", "swiglu", "layer_norm", "graph"}


@pytest.fixture(autouse=True, scope="module")
def one_architecture():
    """Compiling for all of them is tested where kernels are."""
    patch = pytest.MonkeyPatch()
    patch.setattr(steps, "compile_ahead", functools.partial(compile_ahead, architectures=("sm_90",)))
    yield
    patch.undo()
    generated._folders.clear()


def options(folder, **more):
    return Options(
        more.pop("model", None) or stablelm(folder),
        random_weights=True,
        output=folder / "out",
        output_length=4,
        num_runs=1,
        **more,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("integrate")
    return pipeline.integrate(options(folder))


def test_every_compute_has_a_patch_a_test_and_a_flag(done):
    assert set(done.accepted) == COMPUTES and not done.dropped
    names = {path.name for path in done.package.iterdir()}
    assert names - {"__pycache__"} == {
        *(f"monkey_patch_{c}.py" for c in COMPUTES),
        *(f"test_monkey_patch_{c}.py" for c in COMPUTES),
        *("__init__.py", "config.json", "report.md", "report.html", "report.json", "definitions", ".state"),
    }
    assert not (done.folder / ".state" / "captured").exists()
    for path in done.package.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) < 60 and str(done.folder) not in text
        assert max(map(len, text.splitlines())) <= 120


def test_the_written_tests_pass_and_would_find_a_wrong_patch(done):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_monkey_patch_layer_norm.py"]
    run = subprocess.run(command, cwd=done.package, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "1 passed" in run.stdout
    (place,) = done.accepted["layer_norm"]
    wrong = Place(place.of, place.kernel, {**place.options, "eps": 0.25}, place.put)
    with pytest.raises(AssertionError, match="off by"):
        check_patch((wrong,), done.package / "config.json", "pytorch")


def test_monkey_patch_finds_it(done):
    generated.register(done.package)
    model = small("stablelm")
    with monkey_patch.apply(model, use_cutile=False, rope=False) as report:
        assert {entry.compute for entry in report.patched} == COMPUTES - {"rope"}
    with pytest.raises(TypeError, match="no family has roppe; flags are .*layer_norm"):
        monkey_patch.apply(model, use_cutile=False, roppe=False)
    aggregate = generated.find("stablelm")
    assert aggregate.__name__ == "apply_tilegym_kernel_to_stablelm"
    with pytest.raises(PatchError, match="model="):
        aggregate()


def test_a_folder_without_patches_is_refused(tmp_path):
    with pytest.raises(PatchError, match="holds no patches"):
        generated.register(tmp_path)


def test_the_reports_say_what_was_found(done):
    data = json.loads((done.folder / "report.json").read_text())
    assert data["together"]["comparison"]["passed"] and data["together"]["backend"] == "cutile"
    assert data["measured"]["unpatched"]["tokens"] == data["measured"]["patched"]["tokens"]
    assert set(data["measured"]["alone"]) == COMPUTES - {"loss", "graph"} | {"attn and graph"}
    assert data["measured"]["patched"]["coverage_percent"] > 0
    assert any(errors for tried in data["verified"].values() for errors in [tried[-1]["errors"]])
    page = (done.folder / "report.html").read_text()
    assert page.count("<svg") >= 6 and not re.search(r"<(script|link|img)|src=|@import|url\(", page)
    markdown = (done.folder / "report.md").read_text()
    for compute in COMPUTES:
        assert compute in page and compute in markdown
    assert "| loss | - | - | not called while it generates |" in markdown and "| rope | - |" not in markdown


def test_of_two_measurements_the_faster_counts():
    slow = {"throughput_tokens_per_second": 2.0, "tokens": [1], "coverage_percent": 30.0}
    fast = {"throughput_tokens_per_second": 3.0, "tokens": [1]}
    assert steps.faster(slow, fast) == {**fast, "coverage_percent": 30.0}
    assert steps.faster(slow | fast, slow) == slow | fast


def test_a_run_that_was_stopped_anywhere_continues(tmp_path, monkeypatch, done):
    """Stopped at every line that is told; each candidate is verified once all the same."""
    verified = []
    real = steps.verify_candidate
    monkeypatch.setattr(steps, "verify_candidate", lambda *a: verified.append(a[1].kernel) or real(*a))
    seen, told, outcome = set(), 0, None
    stops = ("verify", "aggregate", "wrote", "measure: unpatched", "measure: rope")

    def tell(line):
        if line.startswith(stops) and line not in seen:
            seen.add(line)
            raise KeyboardInterrupt

    while outcome is None:
        told += 1
        try:
            outcome = pipeline.integrate(options(tmp_path), tell)
        except KeyboardInterrupt:
            assert (tmp_path / "out" / ".state" / "state.json").exists()
    assert told > 8 and outcome.continued
    assert sorted(verified) == sorted(dict.fromkeys(verified))
    assert set(outcome.accepted) == set(done.accepted)


def test_two_runs_at_once_do_not_share_a_folder(tmp_path):
    with alone_in(tmp_path / "out"), pytest.raises(ModelError, match="another run is writing to .*--output"):
        pipeline.integrate(options(tmp_path))
    with alone_in(tmp_path / "out"):
        pass  # nobody is in it any more


def test_another_model_or_code_or_restart_begins_anew(tmp_path, monkeypatch):
    State(tmp_path, {"model": "a"}).put("verified", 1, "x")
    assert State(tmp_path, {"model": "a"}).get("verified", "x") == 1
    assert State(tmp_path, {"model": "b"}).get("verified", "x") is None
    State(tmp_path, {"model": "b"}).put("verified", 1, "x")
    assert State(tmp_path, {"model": "b"}, restart=True).get("verified", "x") is None
    for text in ("{broken", "[]", "{}", '{"fingerprint": {"model": "b"}}'):
        (tmp_path / ".state" / "state.json").write_text(text)
        assert not State(tmp_path, {"model": "b"}).continues
    before = pipeline._fingerprint(Options("x"), small("stablelm").config, torch.device("cpu"))
    assert before == pipeline._fingerprint(Options("x"), small("stablelm").config, torch.device("cpu"))
    monkeypatch.setattr(pipeline, "code_digest", lambda: "of other kernels")
    assert before != pipeline._fingerprint(Options("x"), small("stablelm").config, torch.device("cpu"))


def test_the_next_candidate_is_tried_and_the_reason_is_kept(tmp_path, monkeypatch):
    good = recipes._WAYS["layer_norm"]

    def both(requirement, model):
        (op, place), *_ = good(requirement, model)
        wrong = Place(place.of, place.kernel, {**place.options, "eps": 0.3})
        return [(op, wrong), (op, place)]

    monkeypatch.setitem(recipes._WAYS, "layer_norm", both)
    monkeypatch.setitem(recipes._WAYS, "rope", lambda r, m: [(r.op, _reversed(recipes._rope(r, m)[0][1]))])
    monkeypatch.setattr(pipeline, "judge", _only(("swiglu", "layer_norm", "attn", "graph"), pipeline.judge))
    outcome = pipeline.integrate(options(tmp_path))
    first, second = outcome.checks["layer_norm"]
    assert not first["passed"] and "off by" in first["why"] and second["passed"]
    assert "rope" not in outcome.accepted and not (outcome.package / "monkey_patch_rope.py").exists()
    assert set(outcome.dropped) == {"loss", "linear"} and "linear" not in outcome.accepted
    assert "unsuitable" in (outcome.folder / "report.md").read_text()


def _reversed(place):
    return Place(place.of, place.kernel, {**place.options, "style": "half_reversed"}, place.put)


def _only(names, real):
    """Fails whatever has more than ``names`` in it."""

    def judge(model, batches, length, context):
        with context() as patches:
            more = {entry.compute for entry in patches.patched} - set(names)
        if more:
            raise RuntimeError(f"{', '.join(sorted(more))} is slow")
        return real(model, batches, length, context)

    return judge


@pytest.mark.slow
def test_code_that_comes_with_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Path(remote(tmp_path / "model")).name
    with pytest.raises(ModelError, match="--trust-remote-code"):
        pipeline.integrate(options(tmp_path, model=model))
    outcome = pipeline.integrate(options(tmp_path, model=model, trust_remote_code=True, precision="float32"))
    assert {"rms_norm", "rope", "attn", "linear"} <= set(outcome.accepted)
    before, after = (outcome.measured[side]["tokens"] for side in ("unpatched", "patched"))
    assert before == after
    written = (outcome.package / "test_monkey_patch_rope.py").read_text()
    assert f'"{tmp_path / model}"' in written, "found from any folder"


def test_a_family_by_hand_is_said_to_be_so(tmp_path):
    config = tmp_path / "llama.json"
    config.write_text(json.dumps({**json.loads(Path(stablelm(tmp_path)).read_text()), "model_type": "llama"}))
    outcome = pipeline.integrate(options(tmp_path, model=str(config)))
    assert outcome.plan.by_hand and outcome.folder is None and not (tmp_path / "out").exists()


def test_patches_of_a_new_family_go_into_a_checkout():
    plan = type("P", (), {"by_hand": False, "family": "stablelm"})
    inside = pipeline.package_folder(plan, Options("x"), Path("tilegym_stablelm"))
    if (Path(pipeline.tilegym.__file__).parents[2] / ".git").exists():
        assert inside == Path(pipeline.tilegym.__file__).parent / "transformers" / "stablelm"
    assert pipeline.package_folder(plan, Options("x", output=Path("o")), Path("o")) == Path("o")


def test_torch_is_left_as_it_was(done):
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
