"""``tilegym infer`` as a user meets it: what it prints, what it writes, and with which status it exits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench.tiny import CONFIG
from typer.testing import CliRunner

from tilegym import ops
from tilegym.bench import job
from tilegym.errors import UnsupportedError
from tilegym.integrate import emit
from tilegym.transformers import generated
from tilegym.transformers.general import Place
from tilegym_command import build_app

ROOT = Path(__file__).parents[2]
TINY_LLAMA = str(ROOT / "examples/models/tiny-llama")
TILEGYM = ["--use_tilegym", "--use_cutile", "--use_attn"]
COMPUTES = {"rms_norm", "rope", "swiglu", "linear", "attn", "graph", "decode_step", "loss"}
SHORT = ["--output_length", "6", "--num_runs", "1", "--warmup_runs", "0"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch):
    """These tests ask whether results are right; on a GPU tuning would take most of their time."""
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")


def infer(*args):
    return CliRunner().invoke(build_app("infer"), ["infer", *args])


def infer_json(*args):
    result = infer(*args, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result, json.loads(result.stdout)


def gpt2(folder):
    """The path of a config of a family that nobody has patched by hand."""
    path = folder / "config.json"
    path.write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 256}')
    return str(path)


def write_config(path, **changes):
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


class Test_Unpatched:
    def test_prints_what_was_measured(self):
        result = infer("--model_id", TINY_LLAMA, "--output_length", "6", "--num_runs", "2", "--show_outputs")
        assert result.exit_code == 0
        assert re.search(r"^Average throughput: \d+\.\d+ ± \d+\.\d+ tokens/sec$", result.stdout, re.MULTILINE)
        for words in ("time to first token", "time per output token", "peak memory", "kernels  unpatched"):
            assert words in result.stdout
        assert "The capital of France is Paris." in result.stdout
        assert "run 2/2" in result.stderr

    def test_json_alone_on_stdout(self):
        _, summary = infer_json("--model_id", TINY_LLAMA, *SHORT, "--batch_size", "3")
        assert summary["outputs"] == 3 * [{"prompt": "The capital of France is", "text": " Paris.\nP"}]
        assert summary["batch_sizes"] == [3]
        assert summary["patched"] is None
        measured = summary["unpatched"]
        assert len(measured["throughput_of_runs"]) == 1
        assert measured["time_to_first_token_ms"] > 0
        assert measured["time_per_output_token_ms"] > 0
        assert measured["peak_memory_bytes"] > 2**20

    def test_summary_file(self, tmp_path):
        path = tmp_path / "results" / "summary.json"
        result = infer("--model_id", TINY_LLAMA, *SHORT, "--summary_file", str(path))
        assert result.exit_code == 0
        assert str(path) in result.stdout
        assert json.loads(path.read_text())["model"]["parameters"] == 541_824

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file on a full disk")
    def test_summary_file_on_a_full_disk(self):
        result = infer("--model_id", TINY_LLAMA, *SHORT, "--summary_file", "/dev/full")
        assert result.exit_code == 2 and "Average throughput" in result.stdout
        last = result.stderr.splitlines()[-1]
        assert last == "error: --summary_file /dev/full cannot be written: No space left on device; name another file"

    def test_prompts_of_a_file_in_padded_batches(self, tmp_path):
        path = tmp_path / "prompts.txt"
        path.write_text("The capital of Peru is\nQuestion: What is the capital of Japan? Answer:\nTwo and two\n")
        _, summary = infer_json("--model_id", TINY_LLAMA, *SHORT, "--sentence_file", str(path), "--batch_size", "2")
        assert summary["batch_sizes"] == [2, 1]
        assert [output["text"].split("\n")[0] for output in summary["outputs"]] == [" Lima.", " Tokyo.", " make four."]

    @pytest.mark.parametrize("precision, name", [("fp16", "float16"), ("float32", "float32")])
    def test_precision(self, precision, name):
        _, summary = infer_json("--model_id", TINY_LLAMA, *SHORT, "--precision", precision)
        assert summary["precision"] == name
        assert summary["outputs"][0]["text"].startswith(" Paris.")

    def test_random_weights_and_input_length(self, tmp_path):
        config = write_config(tmp_path / "config.json")
        _, summary = infer_json("--model_id", config, "--random_weights", *SHORT, "--input_length", "40")
        assert summary["prompt_lengths"] == [40]
        assert summary["model"]["random_weights"]
        assert len(summary["outputs"][0]["text"].split()) == 6

    def test_profile(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = infer("--model_id", TINY_LLAMA, *SHORT, "--profile")
        assert result.exit_code == 0
        assert "aten::mm" in result.stdout
        assert json.loads((tmp_path / "out/profile-tiny-llama.json").read_text())["traceEvents"]


class Test_Patched:
    def test_compare(self):
        result = infer("--model_id", TINY_LLAMA, *TILEGYM, "--compare", "--show_outputs", "--output_length", "24")
        assert result.exit_code == 0, result.output
        assert "Paris" in result.stdout
        assert re.search(r"^token agreement +100\.0%$", result.stdout, re.MULTILINE)
        assert re.search(r"^largest logit difference +\d", result.stdout, re.MULTILINE)
        assert re.search(
            r"^unpatched: Average throughput: \d+\.\d+ ± \d+\.\d+ tokens/sec$", result.stdout, re.MULTILINE
        )
        assert re.search(r"^TileGym: +Average throughput: \d+\.\d+ ± \d+\.\d+ tokens/sec$", result.stdout, re.MULTILINE)
        assert "PASS" in result.stdout and "criterion:" in result.stdout

    @pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_every_family_agrees_with_itself_unpatched(self, model_type, precision, tmp_path):
        config = write_config(tmp_path / "config.json", model_type=model_type)
        path = tmp_path / "prompts.txt"
        path.write_text("a short one\nand another that is a good deal longer\n")
        result, summary = infer_json(
            *("--model_id", config, "--random_weights", *TILEGYM, "--compare", *SHORT),
            *("--sentence_file", str(path), "--precision", precision),
        )
        assert result.exit_code == 0, summary["comparison"]
        assert summary["comparison"]["passed"]
        computes = {entry["compute"] for entry in summary["patched_modules"]}
        assert computes == COMPUTES

    def test_a_family_without_a_patch_is_found_out(self, tmp_path):
        result, summary = infer_json("--model_id", gpt2(tmp_path), "--random_weights", *TILEGYM, "--compare", *SHORT)
        assert result.exit_code == 0 and summary["comparison"]["passed"]
        computes = {entry["compute"] for entry in summary["patched_modules"]}
        assert {"layer_norm", "linear", "attn"} <= computes
        assert "no patch for gpt2" in result.stderr
        result, summary = infer_json("--model_id", gpt2(tmp_path), "--random_weights", "--use_tilegym", *SHORT)
        # Graphs of decoding steps need TileGym's attention.
        assert computes - {entry["compute"] for entry in summary["patched_modules"]} == {"attn", "graph"}

    def test_a_patch_that_was_written_is_found_in_its_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / "tilegym_gpt2"
        place = Place("torch.nn.modules.normalization.LayerNorm", "layer_norm",
                      {"weight": "weight", "eps": "eps", "bias": "bias"})  # fmt: skip
        texts = {
            "__init__.py": emit.aggregate_text("gpt2", "gpt2", "GPT2LMHeadModel", ["layer_norm"]),
            "monkey_patch_layer_norm.py": emit.patch_text("layer_norm", "GPT2LMHeadModel", (place,)),
        }
        emit.write(folder, texts)
        try:
            result, summary = infer_json("--model_id", gpt2(tmp_path), "--random_weights", *TILEGYM, *SHORT)
        finally:
            generated._folders.clear()
        assert result.exit_code == 0 and {e["compute"] for e in summary["patched_modules"]} == {"layer_norm"}
        assert str(folder) in "".join(result.stderr.split())

    def test_every_patched_compute_is_covered(self):
        result, summary = infer_json("--model_id", TINY_LLAMA, *TILEGYM, *SHORT, "--report_kernel_coverage")
        assert result.exit_code == 0
        coverage = summary["kernel_coverage"]
        assert 0 < coverage["percent"] < 100
        assert sum(entry["own"] for entry in coverage["entries"]) >= 4

    @needs_no_gpu
    def test_coverage_line_on_a_cpu(self):
        result = infer("--model_id", TINY_LLAMA, *TILEGYM, *SHORT, "--report_kernel_coverage")
        assert re.search(r"^>>> Dispatched Op Coverage \(CPU Time\): \d+\.\d% <<<$", result.stdout, re.MULTILINE)
        assert "no GPU" in result.stdout

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_coverage_on_a_gpu_is_of_all_four_computes(self):
        result = infer("--model_id", TINY_LLAMA, *TILEGYM, *SHORT, "--report_kernel_coverage", "--json")
        assert result.exit_code == 0, result.stderr
        assert re.search(r"^>>> cuTile Kernel Coverage \(GPU Time\): \d+\.\d% <<<$", result.stderr, re.MULTILINE)
        coverage = json.loads(result.stdout)["kernel_coverage"]
        assert coverage["measure"] == "gpu_time_in_own_kernels"
        own = {entry["name"]: entry["calls"] for entry in coverage["entries"] if entry["own"]}
        assert len(own) >= 4, own
        # 2 norms in each of 4 layers and a last one, in 6 forward passes; in one kernel with what follows them, or not.
        assert sum(calls for name, calls in own.items() if "norm" in name) >= 54, own

    def test_without_attention(self):
        _, summary = infer_json("--model_id", TINY_LLAMA, "--use_tilegym", *SHORT)
        computes = {entry["compute"] for entry in summary["patched_modules"]}
        assert computes == {"rms_norm", "rope", "swiglu", "linear", "loss"}

    def test_compare_alone_patches_everything(self):
        result, summary = infer_json("--model_id", TINY_LLAMA, "--compare", *SHORT)
        assert result.exit_code == 0, summary["comparison"]
        assert {entry["compute"] for entry in summary["patched_modules"]} == COMPUTES

    @needs_no_gpu
    def test_cutile_without_a_gpu_says_what_runs_instead(self):
        result, summary = infer_json("--model_id", TINY_LLAMA, *TILEGYM, *SHORT)
        assert result.exit_code == 0
        assert summary["backend"] == "pytorch"
        [notice] = summary["notices"]
        assert "pytorch backend runs instead" in notice and "--interpret" in notice

    def test_interpreted_kernels_make_the_same_tokens(self):
        result, summary = infer_json(
            *("--model_id", TINY_LLAMA, *TILEGYM, "--interpret", "--compare", "--report_kernel_coverage"),
            *("--output_length", "4", "--num_runs", "1", "--warmup_runs", "0"),
        )
        assert result.exit_code == 0, summary["comparison"]
        assert summary["backend"] == "cutile" and summary["interpreted"]
        assert summary["comparison"]["token_agreement"] == 1.0
        assert summary["outputs"][0]["text"].startswith(" Paris.")
        assert all("(cutile)" in entry["name"] for entry in summary["kernel_coverage"]["entries"] if entry["own"])

    @pytest.mark.filterwarnings("ignore")
    def test_fallbacks_are_noted(self, monkeypatch):
        """Whatever warnings the user hides."""

        def refuse(*args, **kwargs):
            raise UnsupportedError("a reason of its own")

        monkeypatch.setitem(ops.fmha.op.impls, "cutile", refuse)
        result, summary = infer_json(
            *("--model_id", TINY_LLAMA, *TILEGYM, "--interpret"),
            *("--output_length", "1", "--num_runs", "1", "--warmup_runs", "0"),
        )
        assert result.exit_code == 0
        assert any("pytorch instead of cutile: a reason of its own" in notice for notice in summary["notices"])

    @pytest.mark.parametrize("op", ["rms_norm", "apply_rope_base", "swiglu", "fmha"])
    def test_a_wrong_kernel_exits_1(self, op, monkeypatch):
        def wrong(impl):
            def call(*args, **kwargs):
                result = impl(*args, **kwargs)
                return tuple(1.1 * x for x in result) if isinstance(result, tuple) else 1.1 * result

            return call

        for backend, impl in getattr(ops, op).op.impls.items():
            monkeypatch.setitem(getattr(ops, op).op.impls, backend, wrong(impl))
        result = infer("--model_id", TINY_LLAMA, *TILEGYM, "--compare", *SHORT)
        assert result.exit_code == 1
        assert "FAIL: the patched logits are off by" in result.stdout


class Test_Coverage:
    """``tilegym coverage MODEL``: nothing but which kernels took which share."""

    def run(self, *args: str):
        return CliRunner().invoke(build_app("coverage"), ["coverage", *args])

    def test_table(self):
        result = self.run(TINY_LLAMA, "--output-length", "2")
        assert result.exit_code == 0, result.stderr
        assert "Coverage (" in result.stdout and "Average throughput" not in result.stdout
        ops = ("fmha", "linear", "rms_norm", "swiglu") if not torch.cuda.is_available() else ()
        assert all(f"{op} (pytorch)" in result.stdout for op in ops)

    def test_json(self):
        result = self.run(TINY_LLAMA, "--output_length", "2", "--json")
        found = json.loads(result.stdout)["kernel_coverage"]
        assert 0 < found["percent"] <= 100 and any(entry["own"] for entry in found["entries"])

    def test_bad_input(self):
        result = self.run("./nowhere")
        assert result.exit_code == 2 and result.stderr.startswith("error: './nowhere' is no file, no folder")


class Test_Bad_Input:
    """One sentence on stderr, with the remedy, status 2, no traceback."""

    @pytest.mark.parametrize(
        "args, message",
        [
            (["--model_id", "./nowhere"], "no file, no folder and no Hub id"),
            (["--model_id", "llama-3.1-8b"], "add --random_weights"),
            (["--model_id", TINY_LLAMA, "--use_attn", "--compare"], "add --use_tilegym"),
            (["--model_id", TINY_LLAMA, "--use_cutile"], "add --use_tilegym"),
            (["--model_id", TINY_LLAMA, "--use_tilegym", "--interpret"], "add --use_cutile"),
            (["--model_id", TINY_LLAMA, "--precision", "int3"], "is none of bfloat16"),
            (["--model_id", TINY_LLAMA, "--input_text", " "], "--input_text is empty"),
            (["--model_id", TINY_LLAMA, "--sentence_file", "/no/such/file"], "cannot be read: No such file"),
            (["--model_id", TINY_LLAMA, "--output_length", "5000"], "exceed the model's 512 positions"),
            (["--model_id", TINY_LLAMA, "--batch_size", str(10**9)], "keys and values of 1000000000 x 65 tokens take"),
            (["--model_id", TINY_LLAMA, "--summary_file", "/dev/null/x.json"], "cannot be written"),
        ],
    )
    def test_message(self, args, message):
        self.check(infer(*args), message)

    def test_no_place_for_the_profile(self, monkeypatch):
        monkeypatch.setattr(job, "PROFILE_DIR", Path("/dev/null/out"))
        self.check(infer("--model_id", TINY_LLAMA, "--profile"), "/dev/null/out, which cannot be written")

    def test_a_run_that_fails_leaves_no_summary(self, tmp_path):
        file = tmp_path / "folder" / "summary.json"
        command = ["--model_id", TINY_LLAMA, "--output_length", "5000", "--summary_file", str(file)]
        self.check(infer(*command), "exceed")
        assert not file.exists()
        file.write_text("an earlier one")
        self.check(infer(*command), "exceed")
        assert file.read_text() == "an earlier one"

    def test_nothing_to_patch(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text('{"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 256}')
        result = infer("--model_id", str(path), "--random_weights", "--use_tilegym", *SHORT)
        assert result.exit_code == 0 and "its parts are found out" in result.stderr

    @pytest.mark.parametrize("command", ["infer", "coverage", "train"])
    def test_an_encoder(self, tmp_path, command):
        sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        config = write_config(tmp_path / "config.json", model_type="bert", **sizes)
        model = [config] if command == "coverage" else ["--model_id", config]
        app = build_app(command)
        # Any command takes options with hyphens or underscores.
        for option in ("--random_weights", "--random-weights"):
            result = CliRunner().invoke(app, [command, *model, option])
            self.check(result, "is an encoder (bert), which sees the tokens to come")

    @pytest.mark.parametrize("command", ["infer", "coverage", "train"])
    def test_an_encoder_with_its_decoder(self, tmp_path, command):
        config = write_config(tmp_path / "config.json", model_type="t5", d_model=32, num_layers=1, vocab_size=99)
        model = [config] if command == "coverage" else ["--model_id", config]
        result = CliRunner().invoke(build_app(command), [command, *model, "--random_weights"])
        self.check(result, "is an encoder-decoder model (t5): this takes decoder-only language models")

    def test_what_fails_in_transformers_itself(self, tmp_path):
        config = write_config(tmp_path / "config.json", model_type="jamba", num_hidden_layers=2)  # none of attention
        command = ["--model_id", config, "--random_weights", "--compare", *SHORT]
        self.check(infer(*command), "does not generate in transformers itself, unpatched (`get_seq_length` can only")

    def test_out_of_memory(self, tmp_path):
        config = write_config(tmp_path / "config.json", vocab_size=2**40)
        self.check(infer("--model_id", config, "--random_weights", *SHORT), "out of memory: the weights take")

    def test_code_of_the_models_own_runs_if_that_is_allowed(self, tmp_path, monkeypatch):
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.setattr(sys, "path", [*sys.path])
        folder = tmp_path / "model"
        folder.mkdir()
        classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        write_config(folder / "config.json", model_type="own_llama", architectures=["OwnModel"], auto_map=classes)
        (folder / "own.py").write_text(
            "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
            "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n\n\n"
            "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        )
        command = ["--model_id", str(folder), "--random_weights", *SHORT]
        self.check(infer(*command), "brings code of its own: read that code, then add --trust-remote-code")
        for spelling in ("--trust-remote-code", "--trust_remote_code"):
            result, summary = infer_json(*command, spelling)
            assert result.exit_code == 0 and summary["model"]["type"] == "own_llama"

    def test_option_out_of_range(self):
        result = infer("--model_id", TINY_LLAMA, "--output_length", "0")
        assert result.exit_code == 2
        assert "--output_length" in result.stderr

    def check(self, result, message):
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)
        *progress, error = result.stderr.strip().splitlines()
        assert error.startswith("error: ") and message in error
        assert all(line.startswith("...") for line in progress)


@pytest.mark.parametrize(
    "program",
    [["-m", "tilegym", "infer"], pytest.param(["modeling/transformers/infer.py"], marks=pytest.mark.slow)],
)
def test_as_a_program(program):
    command = [sys.executable, *program, "--model_id", TINY_LLAMA, *SHORT, "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["outputs"][0]["text"] == " Paris.\nP"
