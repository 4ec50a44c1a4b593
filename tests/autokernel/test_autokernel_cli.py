"""The command line: what it refuses, and that a run of it works and goes on."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilegym import autokernel_cli
from tilegym.autokernel.loop import Loop
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.repository import Repository
from tilegym.errors import AutokernelError
from tilegym.errors import ModelError
from tilegym.integrate import source_regions
from tilegym_command import build_app

MODEL = f"{Path(__file__).with_name('autokernel_models.py')}::gated_norm"


def call(*arguments):
    return CliRunner().invoke(build_app("autokernel"), ["autokernel", *map(str, arguments)])


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    for command in (["init"], ["commit", "--allow-empty", "-m", "Begin"]):
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command]
        subprocess.run(git, cwd=root, check=True, capture_output=True)
    return root


def test_help_says_what_the_sandbox_does_not_stop():
    text = " ".join(call("--help").output.replace("│", " ").split())
    assert "no boundary against hostile code" in text and "--ray" in text


@pytest.mark.parametrize("between", ["-", "_"])
def test_options_have_hyphens_or_underscores(repository, tmp_path, monkeypatch, between):
    seen = []
    monkeypatch.setattr(Loop, "run", lambda self: seen.append(self.settings.model) or "done")
    monkeypatch.setattr(Loop, "coverage", lambda self: 0.0)
    options = [f"--random{between}weights"]
    options += [f"--{name}{between}{what}={value}" for name, what, value in
                (("num", "layers", 3), ("input", "length", 5), ("output", "length", 7))]  # fmt: skip
    command = ["llama-3.1-8b", "--repository", repository, "--out", tmp_path / "out", "--device", "cpu"]
    result = call(*command, *options)
    assert result.exit_code == 0, result.exception
    (model,) = seen
    assert (model.spec.random_weights, model.spec.num_layers, model.input_length, model.output_length) == (
        True,
        3,
        5,
        7,
    )


def test_what_is_other_than_in_the_run_that_goes_on(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(Loop, "coverage", lambda self: 0.0)
    command = [MODEL, "--repository", repository, "--out", tmp_path / "out", "--device", "cpu"]

    def run(self):
        self._check_same_settings()
        self.ledger.note("settings", dataclasses.asdict(self.settings))
        return "done"

    monkeypatch.setattr(Loop, "run", run)
    assert call(*command).exit_code == 0
    assert call(*command, "--minutes", "500").exit_code == 0  # the budget may grow
    result = call(*command, "--precision", "float32", "--input-length", "2")
    message = "was started with precision 'bfloat16', not 'float32'; input_length 64, not 2: give the run another name"
    assert message in str(result.exception)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "GPU-none"], "is not here"),
        (["--precision", "int3"], "int3"),
        (["--device", "cpu", "--proposers", "nobody"], "nobody"),
        (["--device", "cpu", "--proposers", "agent"], "--agent"),
        (["--device", "cpu", "--minutes", "0"], "more than 0"),
        (["--device", "cpu", "--memory", "0"], "more than 0"),
        (["--device", "cpu", "--arch", "sm_90", "--num-layers", "1"], "have the function make fewer layers"),
        (["--device", "cpu", "--arch", "sm_90", "--arch", "sm_1"], "--arch takes sm_80, "),
        (["--device", "cpu", "--agent", "nowhere.json"], "--agent does nothing without agent in --proposers"),
        *(
            (["--device", "cpu", "--arch", "sm_90", "--run", name], "a name has letters")
            for name in ("../../evil", "a/b", "-x", "a..b", ".hidden", "x.lock", "a b", "end.")
        ),
        *(
            (["--device", "cpu", "--arch", "sm_90", "--folder", name], "within the repository")
            for name in ("/etc", "../x", "a/../../x", ".")
        ),
    ],
)
def test_wrong_arguments(repository, tmp_path, arguments, message):
    result = call(MODEL, "--repository", repository, "--out", tmp_path / "out", *arguments)
    assert result.exit_code and message in str(result.exception)
    assert not (tmp_path / "out").exists()


_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
}
_REMOTE = """from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.mark.parametrize(
    "config, arguments, message",
    [
        ({"model_type": "bert"} | _SIZES, [], "is an encoder (bert)"),
        ({"model_type": "t5", "d_model": 32, "num_layers": 1}, [], "this takes decoder-only language models"),
        ({"model_type": "llama"} | _SIZES, ["--num-layers", "2"], "the model has 1 layers"),
        (None, [], "is no file, no folder and no Hub id"),
    ],
)
def test_a_model_that_cannot_be_used_leaves_no_run(repository, tmp_path, config, arguments, message):
    file = tmp_path / "config.json"
    if config is not None:
        file.write_text(json.dumps(config))
    command = [file, "--random-weights", "--repository", repository, "--out", tmp_path / "out", "--device", "cpu"]
    result = call(*command, "--arch", "sm_90", *arguments)
    assert result.exit_code and message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_code_that_comes_with_the_model(repository, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Loop, "run", lambda self: seen.append(self.settings.model.spec) or "done")
    monkeypatch.setattr(Loop, "coverage", lambda self: 0.0)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "modeling_mine.py").write_text(_REMOTE)
    names = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": names} | _SIZES))
    command = [folder, "--random-weights", "--repository", repository, "--out", tmp_path / "out", "--device", "cpu"]
    result = call(*command, "--arch", "sm_90")
    assert "read that code, then add --trust-remote-code" in str(result.exception)
    result = call(*command, "--arch", "sm_90", "--trust-remote-code")
    assert result.exit_code == 0, result.exception
    model, _ = seen[0].load(torch.device("cpu"))
    assert type(model).__name__ == "MineForCausalLM"


@pytest.mark.parametrize(
    "function, message",
    [("gated", "has no function"), ("words", "returned a str"), ("encoder", "is an encoder (bert)")],
)
def test_functions_that_make_no_language_model(tmp_path, function, message):
    file = tmp_path / "models.py"
    file.write_text(
        "from transformers import BertConfig, BertLMHeadModel\n\n\n"
        "def words():\n    return 'a model'\n\n\n"
        f"def encoder():\n    return BertLMHeadModel(BertConfig(**{_SIZES}))\n"
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        ModelSpec(f"{file}::{function}").load(torch.device("cpu"))


FOUR = [f"GPU-{letter * 8}-0000" for letter in "abcd"]


@pytest.fixture
def four_gpus(monkeypatch):
    listed = "".join(f"{i}, {uuid}\n" for i, uuid in enumerate(FOUR))
    which, run = shutil.which, subprocess.run

    def answer(command, **options):
        listing = subprocess.CompletedProcess([], 0, listed, "")
        return listing if command[0] == "nvidia-smi" else run(command, **options)

    monkeypatch.setattr(shutil, "which", lambda name, **o: name if name == "nvidia-smi" else which(name, **o))
    monkeypatch.setattr(subprocess, "run", answer)


@pytest.mark.parametrize(
    "visible, left",
    [
        (None, [0, 1, 2, 3]),
        ("2", [2]),
        ("3, 1", [3, 1]),
        (f"{FOUR[2]},{FOUR[0]}", [2, 0]),
        ("GPU-bb", [1]),
        ("1,-1,2", [1]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("-1", []),
        ("", []),
    ],
)
def test_all_gpus_are_those_that_are_visible(four_gpus, monkeypatch, visible, left):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    left = tuple(FOUR[i] for i in left)
    assert autokernel_cli._devices(["auto"]) == (left or ("cpu",))
    for index, uuid in enumerate(left):
        assert autokernel_cli._devices([str(index)]) == autokernel_cli._devices([uuid]) == (uuid,)
    hidden = next(uuid for uuid in [*FOUR, "GPU-e"] if uuid not in left)
    for name in (hidden, str(len(left))):
        with pytest.raises(AutokernelError, match="is not here"):
            autokernel_cli._devices([name])


def test_a_part_of_a_gpu_is_taken_as_it_is_called(four_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    assert autokernel_cli._devices(["auto"]) == ("MIG-1234",)


def test_the_run_itself_uses_no_other_gpu(four_gpus, repository, tmp_path, monkeypatch):
    seen = []

    def stop(architectures):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise AutokernelError("seen")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(autokernel_cli, "_check_compiler", stop)
    call(MODEL, "--repository", repository, "--out", tmp_path / "out", "--device", "1")
    assert seen == [FOUR[1]]


@pytest.mark.parametrize("minutes, seconds", [(240, 60), (8, 24)])
def test_a_comparison_takes_a_twentieth_of_the_budget(four_gpus, repository, tmp_path, monkeypatch, minutes, seconds):
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(autokernel_cli, "_check_compiler", lambda architectures: None)
    monkeypatch.setattr(Loop, "run", lambda self: seen.append(self.model_judge.rules.seconds) or "done")
    monkeypatch.setattr(Loop, "coverage", lambda self: 0.0)
    result = call(MODEL, "--repository", repository, "--out", tmp_path / "out", "--minutes", minutes)
    assert result.exit_code == 0 and seen == [seconds], result.output


def test_a_dirty_repository_is_refused(repository, tmp_path):
    (repository / "new.py").write_text("x = 1\n")
    result = call(MODEL, "--repository", repository, "--out", tmp_path / "out", "--device", "cpu")
    assert "uncommitted changes" in str(result.exception)
    assert (repository / "new.py").read_text() == "x = 1\n"


def test_a_model_that_is_not_there_leaves_the_name_free(repository, tmp_path, monkeypatch):
    options = ["--run", "one", "--repository", repository, "--out", repository / "out", "--device", "cpu"]
    for model in ("no_such.py::model", "neither.py::model"):
        assert "no Python file" in str(call(model, *options).exception)
        assert not (repository / "out").exists()
    file = tmp_path / "models.py"
    file.write_text("def wants(a):\n    return a\n")
    assert "it is called without arguments" in str(call(f"{file}::wants", *options).exception)
    assert f"takes {file}::FUNCTION" in str(call(file, *options).exception)
    repo = Repository(repository, "one", tmp_path / "worktrees")
    repo.check_clean()  # nor does its folder make the tree dirty for the next run
    with pytest.raises(AutokernelError):
        repo.head()


def test_what_a_run_leaves_is_not_dirty(repository):
    repo = Repository(repository, "run", repository / "out" / "run" / "worktrees")
    (repository / "out" / "run").mkdir(parents=True)
    (repository / "out" / "run" / "ledger.sqlite").write_text("")
    repo.check_clean()
    (repository / "out" / "mine").write_text("")
    with pytest.raises(AutokernelError, match="uncommitted"):
        repo.check_clean()


def test_commits_are_looked_up_if_that_is_asked_for(repository, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Loop, "run", lambda self: "done")
    monkeypatch.setattr(source_regions, "look_up_commit", lambda: asked.append(1) or "")
    options = [MODEL, "--repository", repository, "--out", tmp_path / "out", "--device", "cpu"]
    assert "does not say" not in call(*options).output and not asked
    assert "does not say which commit" in call(*options, "--resolve-commits").output and asked


def test_ctrl_c_has_a_status_of_its_own(repository, tmp_path, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "_prepare", interrupted)
    result = call(MODEL, "--repository", repository, "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 130 and "stopped by hand; the same command goes on: 0 kernels" in result.output


def test_a_folder_is_found_from_where_the_command_runs(repository, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Loop, "run", lambda self: seen.append(self.settings.model.spec.model_id) or "done")
    monkeypatch.setattr(Loop, "coverage", lambda self: 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"} | _SIZES))
    result = call("model", "--random-weights", "--repository", repository, "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 0 and seen == [str(tmp_path / "model")], result.output


@pytest.mark.slow
def test_a_run(repository, tmp_path):
    options = ["--precision", "float32", "--device", "cpu", "--arch", "sm_90", "--input-length", 4]
    options += ["--output-length", 2, "--repository", repository, "--out", tmp_path / "out"]
    options += ["--run", "one", "--width", 1]
    for budget in (1, 2):
        result = call(MODEL, *options, "--proposers", "generate", "--experiments", budget)
        assert result.exit_code == 0, result.output + str(result.exception)
        assert f"budget of {budget} experiments is spent" in result.output
    assert (tmp_path / "out/results.md").read_text().count("| keep |") >= 1
    assert not list((tmp_path / "out").glob("worktrees/*"))
