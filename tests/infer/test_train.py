"""``tilegym train`` as a user meets it: what it prints, what it writes, and with which status it exits."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from bench.tiny import CONFIG
from common import HAS_GPU
from common import some
from typer.testing import CliRunner

from tilegym import ops
from tilegym.backend import in_place
from tilegym.bench import train_job
from tilegym.bench import train_peer
from tilegym.bench import training
from tilegym_command import build_app

ROOT = Path(__file__).parents[2]
TINY_LLAMA = str(ROOT / "examples/models/tiny-llama")
SMALL = ["--batch_size", "2", "--sequence_length", "24", "--steps", "2", "--warmup_steps", "1"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch):
    """These tests ask whether results are right; on a GPU tuning would take most of their time."""
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")


@pytest.fixture
def model(tmp_path):
    """The arguments for a tiny model with random weights."""
    return ["--model_id", write_config(tmp_path), "--random_weights", *SMALL]


def write_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def train(*args):
    return CliRunner().invoke(build_app("train"), ["train", *args])


def train_json(*args):
    result = train(*args, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result, json.loads(result.stdout)


def with_backward(impl, change):
    """``impl``, whose gradients are what ``change`` makes of the right ones."""

    def call(*args, **kwargs):
        result = impl(*args, **kwargs)
        return tuple(map(changed, result)) if isinstance(result, tuple) else changed(result)

    def changed(tensor):
        wrong = tensor.clone()
        if wrong.requires_grad:
            wrong.register_hook(change)
        return wrong

    return call


class Test_Variants:
    def test_unpatched(self, model):
        result = train(*model)
        assert result.exit_code == 0, result.stderr
        assert "kernels  unpatched" in result.stdout and "TileGym" not in result.stdout
        assert re.search(r"a step +\d+\.\d+ ms", result.stdout) and re.search(r"tokens/sec", result.stdout)

    def test_compare_alone_patches_everything(self, model):
        result = train(*model, "--compare", "--report_kernel_coverage")
        assert result.exit_code == 0, result.output
        for words in ("PASS: the patched gradients are as exact", "criterion:", "loss of step", "forward", "backward"):
            assert words in result.stdout
        assert "gradients compared for: 2 x 24 tokens\n" in result.stdout
        assert re.search(r"Coverage \(.PU.*\): \d+\.\d%", result.stdout)

    def test_summary(self, model, tmp_path):
        path = tmp_path / "out" / "train-tiny.json"
        result, summary = train_json(
            *model, "--compare", "--report_kernel_coverage", "--num_layers", "1", "--summary_file", str(path)
        )
        assert result.exit_code == 0, result.stderr
        assert json.loads(path.read_text()) == summary
        assert summary["passed"] and summary["gradient_check"]["passed"] and summary["peer"] is None
        assert summary["model"]["layers"] == 1 and summary["model"]["random_weights"]
        assert {e["compute"] for e in summary["patched_modules"]} >= {"attn", "rms_norm", "rope", "swiglu", "linear"}
        assert summary["kernel_coverage"]["percent"] > 0
        for name in ("unpatched", "patched"):
            side = summary[name]
            assert len(side["losses"]) == 3 and len(side["step_ms_of_steps"]) == 2
            parts = [side[f"{part}_ms"] for part in ("forward", "backward", "optimizer")]
            assert min(parts) > 0 and side["step_ms_low"] <= side["step_ms"] <= side["step_ms_high"]
            assert side["tokens_per_second"] == pytest.approx(48e3 / side["step_ms"])
            assert (side["memory_bytes"] is None) == (not torch.cuda.is_available())
            assert side["losses"] == sorted(side["losses"], reverse=True)  # it learns the batch
        assert 0 <= summary["largest_loss_difference"] < 0.1

    @pytest.mark.parametrize(
        "flags", some([["--gradients_in_place"], ["--precision", "fp32"]], ["--gradients_in_place"])
    )
    def test_interpreted_kernels(self, model, flags):
        result, summary = train_json(*model, "--compare", "--interpret", *flags)
        assert result.exit_code == 0, summary["reason"]
        assert summary["backend"] == "cutile" and summary["interpreted"]
        assert summary["gradient_check"]["overall"]["patched_error"] > 0

    def test_every_variant_begins_with_the_same_weights(self, model):
        _, summary = train_json(*model, "--compare", "--precision", "float32", "--learning_rate", "0.01")
        ours, theirs = summary["patched"]["losses"], summary["unpatched"]["losses"]
        assert ours == pytest.approx(theirs, abs=1e-3) and theirs[2] < theirs[0] - 0.1

    def test_no_optimizer(self, model):
        _, summary = train_json(*model, "--optimizer", "none")
        losses = summary["unpatched"]["losses"]
        assert losses == losses[:1] * 3

    def test_text(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("The capital of Peru is Lima.\nThe capital of Japan is Tokyo.\nanother one\n")
        args = ("--model_id", TINY_LLAMA, "--sentence_file", str(path), "--optimizer", "none", *SMALL)
        result, summary = train_json(*args)
        losses = summary["unpatched"]["losses"]
        assert result.exit_code == 0 and losses == losses[:1] * 3  # the third line fills no batch
        _, random = train_json("--model_id", TINY_LLAMA, *SMALL)
        assert losses[0] < random["unpatched"]["losses"][0]
        result, summary = train_json("--model_id", TINY_LLAMA, "--input_text", "The capital of Peru is Lima.", *SMALL)
        assert result.exit_code == 0 and summary["unpatched"]["losses"][0] < random["unpatched"]["losses"][0]

    def test_checkpointing_and_gradients_in_place(self, model, monkeypatch):
        wanted = []
        right = ops.swiglu.op.impls["pytorch"]
        monkeypatch.setitem(
            ops.swiglu.op.impls, "pytorch", lambda *args: wanted.append(in_place.wanted()) or right(*args)
        )
        flags = ["--gradient_checkpointing", "--gradients_in_place"]
        result, summary = train_json(*model, "--compare", *(flags if not torch.cuda.is_available() else flags[:1]))
        assert result.exit_code == 0, summary
        assert in_place._mode is None
        if not torch.cuda.is_available():
            # Twice a layer in the check and in each step; where layers are checkpointed, hooks save.
            assert wanted.count(in_place.ALONE) == 2 * 2 * 4 and 0 not in wanted

    def test_graph(self, model):
        result, summary = train_json(*model, "--compare", "--graph", "--precision", "float32")
        assert result.exit_code == 0 and summary["graph"], summary["reason"]
        assert summary["patched"]["losses"] == pytest.approx(summary["unpatched"]["losses"], abs=1e-3)
        assert any("on a GPU only" in notice for notice in summary["notices"]) == (not HAS_GPU)
        assert not any("without a CUDA graph" in notice for notice in summary["notices"])

    def test_compiled_layers(self, model, monkeypatch):
        monkeypatch.setenv("CXX", sys.executable)  # none is needed here: any program there will do
        compiled, graphs, real = [], [], torch.nn.Module.compile

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        monkeypatch.setattr(
            torch.nn.Module, "compile", lambda layer: compiled.append(layer) or real(layer, backend=backend)
        )
        result, summary = train_json(*model, "--compare", "--compile", "--precision", "float32")
        assert result.exit_code == 0 and summary["compile"], summary["reason"]
        assert summary["patched"]["losses"] == pytest.approx(summary["unpatched"]["losses"], abs=1e-3)
        layers = set(compiled)
        assert len(layers) > 1 and len(compiled) == 2 * len(layers), "unpatched, and patched"
        assert len(graphs) > 1, "each variant's"
        assert not any(layer._compiled_call_impl for layer in layers)

    @needs_no_gpu
    def test_compiling_needs_a_compiler(self, model, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        result = train(*model, "--compile")
        assert result.exit_code == 2 and "install g++, set CXX, or leave out --compile" in result.stderr

    def test_dropout_is_off(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text('{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}')
        result, summary = train_json(
            *("--model_id", str(path), "--random_weights", "--num_layers", "1", "--compare", *SMALL)
        )
        assert result.exit_code == 0, summary["reason"]
        assert any("resid_pdrop" in notice and "is off" in notice for notice in summary["notices"])

    @needs_no_gpu
    def test_cutile_without_a_gpu_says_what_runs_instead(self, model):
        _, summary = train_json(*model, "--compare")
        assert summary["backend"] == "pytorch" and "pytorch backend runs instead" in summary["notices"][0]


# What is made of an op's gradients, and the precision in which that shows.
SCALED = (lambda gradient: 1.001 * gradient, "float32")
FLIPPED = (lambda gradient: -gradient, "bfloat16")
DROPPED = (torch.zeros_like, "bfloat16")


class Test_Wrong_Gradients:
    @pytest.mark.parametrize(
        ("op", "wrong"),
        [
            *((op, SCALED) for op in ("rms_norm", "apply_rope_base", "swiglu", "fmha", "linear")),
            *(("rms_norm", wrong) for wrong in (FLIPPED, DROPPED)),
        ],
    )
    def test_exit_status_1(self, model, op, wrong, monkeypatch):
        change, precision = wrong
        for backend, impl in getattr(ops, op).op.impls.items():
            monkeypatch.setitem(getattr(ops, op).op.impls, backend, with_backward(impl, change))
        result = train(*model, "--compare", "--precision", precision, "--steps", "1")
        assert result.exit_code == 1, result.output
        assert "FAIL: the patched gradient of " in result.stdout

    def test_losses_that_are_not_finite(self, model, monkeypatch):
        # Three timed steps of each model, and on a GPU one more of each that shows the memory.
        real, calls, last, of_all = training.Trainer.step, [], 7 if HAS_GPU else 6, 8 if HAS_GPU else 6

        def step(self, *args):
            calls.append(self)
            return real(self, *args) * (1.0 if len(calls) < last else torch.nan)

        monkeypatch.setattr(training.Trainer, "step", step)
        result, summary = train_json(*model, "--compare")
        assert len(calls) == of_all and result.exit_code == 1 and not summary["passed"]
        assert summary["patched"]["losses"][-1] == "nan" and summary["largest_loss_difference"] == "inf"
        assert "not finite" in summary["reason"] and summary["gradient_check"]["passed"]


class Test_Bad_Input:
    """One sentence on stderr, with the remedy, status 2, no traceback."""

    @pytest.mark.parametrize(
        "args, message",
        [
            (["--use_attn"], "add --use_tilegym"),
            (["--gradients_in_place"], "add --use_tilegym"),
            (["--graph", "--use_tilegym"], "--use_attn: add both"),
            (["--graph", "--compare", "--gradient_checkpointing"], "leave one of them out"),
            (["--precision", "float16"], "take --precision bfloat16 or float32"),
            (["--precision", "int3"], "is none of bfloat16"),
            (["--optimizer", "sgd"], "is none of adamw, none"),
            (["--learning_rate", "0"], "give a number above 0"),
            (["--learning_rate", "nan"], "give a number above 0"),
            (["--sequence_length", "129"], "exceeds the model's 128 positions"),
            (["--num_layers", "3"], "the model has 2 layers"),
            (["--peer", "other"], "is none of liger"),
            (["--input_text", " "], "--input_text is empty"),
            (["--sentence_file", "/no/such/file"], "cannot be read: No such file"),
            (["--summary_file", "/dev/null/x"], "cannot be written"),
        ],
    )
    def test_message(self, model, args, message):
        self.check(train(*model, *args), message)

    def test_peer_that_is_not_installed(self, model, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        self.check(train(*model, "--peer", "liger"), "pip install liger-kernel, or leave out --peer")

    def test_the_model(self):
        self.check(train("--model_id", "./nowhere"), "no file, no folder and no Hub id")

    def test_a_model_that_cannot_be_checkpointed(self, model, monkeypatch):
        monkeypatch.setattr("transformers.LlamaForCausalLM.supports_gradient_checkpointing", False)
        self.check(train(*model, "--gradient_checkpointing"), "leave out --gradient_checkpointing")

    def test_too_large(self, tmp_path):
        config = write_config(tmp_path, vocab_size=2**32)
        self.check(
            train("--model_id", config, "--random_weights", *SMALL),
            "out of memory: weights, gradients and the moments of AdamW take",
        )

    def test_out_of_memory_in_a_step(self, model, monkeypatch):
        def fails(*args):
            raise torch.OutOfMemoryError

        monkeypatch.setattr(training.Trainer, "step", fails)
        self.check(train(*model, "--compare"), "take a smaller --batch_size, --sequence_length or --num_layers")

    def test_a_model_that_does_not_train(self, model, monkeypatch):
        def fails(*args):
            raise ValueError("a reason of its own")

        monkeypatch.setattr(training.Trainer, "step", fails)
        self.check(train(*model), "does not train in transformers itself, unpatched (a reason of its own)")

    def check(self, result, message):
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)
        *progress, error = result.stderr.strip().splitlines()
        assert error.startswith("error: ") and message in error
        assert all(line.startswith("...") for line in progress)


class Test_Peer:
    """Another library in a process of its own: a package that is called as Liger-Kernel is."""

    @pytest.fixture
    def liger(self, tmp_path, monkeypatch):
        folder = tmp_path / "packages/liger_kernel/transformers"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").touch()
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{ROOT / 'src'}")
        monkeypatch.syspath_prepend(tmp_path / "packages")

        def write(body, families="llama"):
            known = f"MODEL_TYPE_TO_APPLY_LIGER_FN = {{'{families}': None}}\n"
            text = f"import os\n{known}\ndef _apply_liger_kernel_to_instance(model):\n    {body}\n"
            (folder / "monkey_patch.py").write_text(text)

        yield write
        for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
            del sys.modules[name]

    def test_measured_and_checked(self, model, liger):
        liger("print('something')")
        result, summary = train_json(*model, "--compare", "--peer", "liger")
        peer = summary["peer"]
        assert result.exit_code == 0 and peer["error"] is None and peer["version"]
        assert peer["gradient_check"]["passed"]
        assert peer["measurement"]["losses"] == summary["unpatched"]["losses"]  # the same weights and batches
        assert "liger" not in sys.modules

    def test_the_device_is_empty_when_it_begins(self, model, liger, monkeypatch):
        sessions = []

        def run(options, tell):
            [session] = sessions
            held = [*session.model.parameters(), *(p.grad for p in session.model.parameters() if p.grad is not None)]
            assert sum(tensor.numel() for tensor in held) == 0
            return train_peer.failed("liger", "a reason")

        start = train_job.Session.__init__
        monkeypatch.setattr(
            train_job.Session, "__init__", lambda self, *args: sessions.append(self) or start(self, *args)
        )
        monkeypatch.setattr(train_peer, "run", run)
        liger("pass")
        result = train(*model, "--compare", "--peer", "liger")
        assert result.exit_code == 0 and "liger could not be measured: a reason" in result.stdout

    def test_wrong_gradients_are_its_own(self, model, liger):
        liger("model.lm_head.weight.register_hook(lambda gradient: -gradient)")
        result = train(*model, "--compare", "--peer", "liger")
        assert result.exit_code == 0 and "PASS" in result.stdout
        assert "does not pass the same check: the patched gradient of lm_head.weight" in result.stdout

    def test_a_process_that_ends(self, model, liger):
        liger("os._exit(3)")
        result = train(*model, "--peer", "liger")
        assert result.exit_code == 0, result.output
        assert "liger could not be measured: its process ended with status 3" in result.stdout

    @pytest.mark.parametrize(
        "body, families, reason",
        [("raise ValueError('no such thing')", "llama", "no such thing"), ("pass", "gpt2", "has no kernels for llama")],
    )
    def test_failures_are_told(self, model, liger, body, families, reason, monkeypatch, tmp_path):
        liger(body, families)
        options = train_job.Options(model_id=model[1], random_weights=True, sequence_length=16, peer="liger")
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(options))))
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "answer.json")])
        train_peer.main()
        answer = json.loads((tmp_path / "answer.json").read_text())
        assert reason in answer["error"] and answer["measurement"] is None


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted(model):
    command = [sys.executable, "-m", "tilegym", "train", *model, "--steps", "1000000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    told = []
    try:
        for line in process.stderr:
            told.append(line)
            if "timed steps" in line:
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    # Where it came in a callback, Python has printed it first.
    assert (process.returncode, stdout) == (130, "") and stderr.endswith("interrupted\n"), (told, stderr)
