"""``tilegym integrate`` as a user meets it: tables, exit status, and one sentence for whatever cannot be used."""

import json
from pathlib import Path

import pytest
import torch
from integration import remote
from integration import stablelm
from typer.testing import CliRunner

from tilegym import integrate_cli
from tilegym.integrate import emit
from tilegym.integrate import pipeline
from tilegym_command import build_app


def run(*arguments):
    return CliRunner().invoke(build_app("integrate"), ["integrate", *map(str, arguments)])


def refused(*arguments):
    """The sentence that a run ends with; the exit status is 2."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if not line.startswith("...")]
    assert lines[-1].startswith("error: ") and "Traceback" not in result.output
    return lines[-1]


def config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


def test_plan_only_shows_a_table_and_writes_nothing(tmp_path):
    result = run(stablelm(tmp_path), "--random_weights", "--plan-only", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for word in ("layer_norm", "layer_norm_cutile", "swiglu", "compatible", "StableLmForCausalLM"):
        assert word in result.stdout
    assert not (tmp_path / "out").exists()


def test_json_is_all_that_stdout_gets(tmp_path):
    result = run(stablelm(tmp_path), "--random_weights", "--plan-only", "--json")
    data = json.loads(result.stdout)
    assert data["plan"]["architecture"] == "StableLmForCausalLM"
    assert {"rope", "attn"} <= {item["compute"] for item in data["plan"]["items"]}


def test_a_family_by_hand(tmp_path):
    path = config(tmp_path, model_type="llama", vocab_size=100, hidden_size=32, intermediate_size=32,
                  num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
    result = run(path, "--random_weights")
    assert result.exit_code == 0 and "patched by hand already" in result.stdout and "--force" in result.stdout


def test_a_model_that_cannot_be_reached(monkeypatch):
    import huggingface_hub

    class Offline:
        def model_info(self, *args, **kwargs):
            raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    assert "cannot be reached (no route to host)" in refused("somebody/some-model-that-is-not-there")


def test_names_that_are_nothing(tmp_path):
    assert "no file, no folder and no Hub id" in refused("no-such-model")
    assert "holds no config.json" in refused(tmp_path)


def test_an_encoder_decoder(tmp_path):
    assert "an encoder-decoder model (t5)" in refused(config(tmp_path, model_type="t5"), "--random_weights")


def test_a_vision_model(tmp_path):
    assert "a vision model (vit)" in refused(config(tmp_path, model_type="vit"), "--random_weights")


def test_a_model_that_sees_the_tokens_to_come(tmp_path):
    """The families that can be either; of GPT-NeoX, a decoder all the same, the config says the same."""
    sizes = dict(vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    sentence = refused(config(tmp_path, model_type="bert", **sizes), "--random_weights", "--plan-only")
    assert "is an encoder (bert)" in sentence and '"is_decoder": true' in sentence
    for decoder in ({"model_type": "bert", "is_decoder": True}, {"model_type": "gpt_neox", "is_decoder": False}):
        result = run(config(tmp_path, **decoder, **sizes), "--random_weights", "--plan-only")
        assert result.exit_code == 0, result.output


def test_a_config_that_contradicts_itself(tmp_path):
    path = config(tmp_path, model_type="stablelm", hidden_size=64, num_attention_heads=7)
    assert "config" in refused(path, "--random_weights")


def test_a_model_that_cannot_be_built_small(tmp_path, monkeypatch):
    from tilegym.integrate import small_model

    monkeypatch.setattr(small_model, "RECIPES", ())
    sentence = refused(stablelm(tmp_path), "--random_weights")
    assert "no small model of type 'stablelm'" in sentence and "docs/how-to-add-a-model.md" in sentence


def test_code_of_its_own_needs_trust(tmp_path):
    assert "--trust-remote-code" in refused(remote(tmp_path / "model"), "--random_weights")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    sentence = refused(stablelm(tmp_path), "--random_weights", "--output", tmp_path / "file" / "out")
    assert "cannot be written" in sentence and "--output" in sentence


def test_a_folder_with_files_of_something_else(tmp_path):
    """Such as the model's own: they stay as they are."""
    path = Path(stablelm(tmp_path)).rename(tmp_path / "config.json")
    before = path.read_text()
    assert "holds a config.json of something else" in refused(tmp_path, "--random_weights", "--output", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"] and path.read_text() == before


def test_a_precision_that_is_none(tmp_path):
    assert "--precision 'int3'" in refused(stablelm(tmp_path), "--random_weights", "--precision", "int3")


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(integrate_cli, "run", full)
    assert "No space left on device" in refused(stablelm(tmp_path), "--random_weights")


def test_a_disk_that_is_full_of_captured_tensors_is_a_sentence(tmp_path, monkeypatch):
    import safetensors

    def full(tensors, file, metadata):
        file.write_bytes(b"the first of it")
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    sentence = refused(stablelm(tmp_path), "--random_weights", "--output", tmp_path / "out")
    assert "No space left" in sentence and "the same command continues" in sentence
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_a_package_that_cannot_be_written_is_said_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(emit.os, "access", lambda path, mode: False)
    monkeypatch.setattr(pipeline.models, "load", lambda *a, **k: pytest.fail("it went on"))
    sentence = refused(stablelm(tmp_path), "--random_weights", "--output", tmp_path / "out")
    assert "out cannot be written (Permission denied)" in sentence


def test_interrupted(tmp_path, monkeypatch):
    async def dispatcher():
        pass

    def stop(*args, **kwargs):
        dispatcher()  # cuTile's front end leaves such where it is interrupted
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.capture, "capture", stop)
    result = run(stablelm(tmp_path), "--random_weights", "--output", tmp_path / "out")
    assert result.exit_code == 130 and "the same command continues" in result.stderr
    assert "warning" not in result.stderr
    assert (tmp_path / "out" / ".state" / "state.json").exists()
    result = run(stablelm(tmp_path), "--random_weights", "--output", tmp_path / "out", "--restart")
    assert result.exit_code == 130 and "the same command without --restart continues" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_nothing_is_left_of_the_process(tmp_path):
    run(stablelm(tmp_path), "--random_weights", "--plan-only")
    assert torch.get_default_device() == torch.device("cpu")
