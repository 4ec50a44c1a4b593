import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from bench.tiny import CONFIG
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file
from safetensors.torch import save_file

from tilegym.bench import models
from tilegym.bench import placement
from tilegym.errors import ModelError

CPU = torch.device("cpu")
TINY_LLAMA = Path(__file__).parents[2] / "examples/models/tiny-llama"
# Published parameter counts, in billions.
SIZES = {
    "deepseek-v2-lite": 15.7,
    "gemma-3-4b": 3.88,  # without the vision tower
    "gemma-3-4b-vision": 4.30,
    "glm-4-9b": 9.40,
    "gpt-oss-20b": 20.9,
    "granite-3.1-8b": 8.17,
    "internvl3-8b": 7.94,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llava-1.5-7b": 7.06,
    "mistral-7b": 7.24,
    "mistral-small-3.1-24b": 24.0,
    "olmo-2-7b": 7.30,
    "phi-4": 14.7,
    "qwen2.5-7b": 7.62,
    "qwen2.5-vl-3b": 3.75,
    "qwen3-0.6b": 0.596,
    "qwen3-30b-a3b": 30.5,
    "qwen3-8b": 8.19,
    "qwen3-vl-4b": 4.44,
    "qwen3.5-0.8b": 0.752,  # without the vision tower
}


def write_config(path, **changes):
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def copy_of_tiny_llama(folder, *, without=()):
    shutil.copytree(TINY_LLAMA, folder, ignore=shutil.ignore_patterns("*.py", "*.txt", *without))
    return folder


def test_presets_have_the_published_sizes():
    assert models.presets() == sorted(SIZES)
    for name, billions in SIZES.items():
        config = models.load_config(name, random_weights=True)
        assert models.count_parameters(config) == pytest.approx(billions * 1e9, rel=0.005), name


def test_the_language_model_of_one_that_also_sees(tmp_path):
    sizes = dict(hidden_size=32, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_5", "text_config": sizes}))
    config = models.load_config(str(path), random_weights=True)
    assert config.model_type == "qwen3_5_text" and config.hidden_size == 32
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": {"hidden_size": 32}}))  # made as a whole
    assert models.load_config(str(path), random_weights=True).model_type == "gemma3"


def test_loads_a_folder_with_its_tokenizer():
    loaded = models.load(str(TINY_LLAMA), torch.bfloat16, CPU, random_weights=False)
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer("Paris")["input_ids"], skip_special_tokens=True) == "Paris"
    assert loaded.tokenizer.padding_side == "left"
    assert loaded.model.generation_config.eos_token_id is None


def test_random_weights_depend_on_the_seed_alone(tmp_path):
    path = write_config(tmp_path / "config.json")
    first, second, third = (
        models.load(path, torch.float32, CPU, random_weights=True, seed=seed).model for seed in (3, 3, 4)
    )
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, third.lm_head.weight)


def test_random_weights_of_a_folder_keep_its_tokenizer(tmp_path):
    folder = copy_of_tiny_llama(tmp_path / "model", without=["*.safetensors"])
    assert models.load(str(folder), torch.float32, CPU, random_weights=True).tokenizer is not None


@pytest.mark.parametrize(
    "model_id, random_weights, message",
    [
        ("./nowhere", False, "no file, no folder and no Hub id"),
        ("a/b/c", False, "no file, no folder and no Hub id"),
        ("llama-3.1-8b", False, "add --random_weights"),
        ("gpt5-900b", True, "name a preset with --random_weights"),
        ("", True, "the model's name is empty"),
        ("llama-3.1-8b/", True, "the Hub has no model 'llama-3.1-8b/'"),
        ("a" * 300 + "/b", False, "the Hub has no model"),
    ],
)
def test_unknown_names(model_id, random_weights, message):
    with pytest.raises(ModelError, match=message):
        models.load_config(model_id, random_weights)


# The constructor of the second wants a response of the HTTP client, and which client that is depends on the version.
NO_NETWORK = ConnectionError("Name or service not known")
NOT_FOUND = RepositoryNotFoundError.__new__(RepositoryNotFoundError)


@pytest.mark.parametrize(
    "error, message",
    [
        (NO_NETWORK, "the Hub cannot be reached .Name or service not known.: connect to the network"),
        (NOT_FOUND, "the Hub has no model 'nobody/nothing' that you may see: check the spelling"),
    ],
)
def test_hub_ids_that_cannot_be_had(error, message, monkeypatch):
    def model_info(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(ModelError, match=message) as caught:
        models.load_config("nobody/nothing", random_weights=False)
    assert "--random_weights" in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[]", "names no .model_type"),
        ("{}", "names no .model_type"),
        ('{"model_type": "martian"}', "cannot be used .*martian"),
        ('{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}', "not a multiple"),
        ('{"model_type": "llama", "hidden_size": "x"}', "expected int, got str"),
        ('{"model_type": "t5"}', "no causal language model"),
    ],
)
def test_bad_configs(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        models.load(str(path), torch.float32, CPU, random_weights=True)
    assert "\n" not in str(caught.value)


def test_folder_without_weights(tmp_path):
    folder = copy_of_tiny_llama(tmp_path / "model", without=["*.safetensors"])
    with pytest.raises(ModelError, match="cannot be loaded .* add --random_weights"):
        models.load(str(folder), torch.float32, CPU, random_weights=False)


def test_damaged_weights(tmp_path):
    folder = copy_of_tiny_llama(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.load(str(folder), torch.float32, CPU, random_weights=False)


def test_missing_weights_are_not_made_up(tmp_path):
    folder = copy_of_tiny_llama(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks the weight model.norm.weight"):
        models.load(str(folder), torch.float32, CPU, random_weights=False)


def test_weights_of_another_shape_are_not_made_up(tmp_path):
    folder = copy_of_tiny_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": config["hidden_size"] // 2}))
    with pytest.raises(ModelError, match=r"the weight .* of .* has the shape \[.*\], its config asks for \["):
        models.load(str(folder), torch.float32, CPU, random_weights=False)


def test_folder_without_tokenizer(tmp_path):
    folder = copy_of_tiny_llama(tmp_path / "model", without=["tokenizer*"])
    with pytest.raises(ModelError, match="finds no tokenizer"):
        models.load(str(folder), torch.float32, CPU, random_weights=False)


def test_a_broken_tokenizer_is_told_from_none(tmp_path):
    folder = copy_of_tiny_llama(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(
        ModelError, match="tokenizer.json of .* cannot be used [(].*line 1 column 2.*[)]: restore it, or"
    ):
        models.load(str(folder), torch.float32, CPU, random_weights=False)


def test_a_tokenizer_class_that_starts_out_empty_is_none(tmp_path):
    """Cohere's makes a tokenizer without words where there is no file of one."""
    write_config(tmp_path / "config.json", model_type="cohere")
    assert models._load_tokenizer(str(tmp_path), True, {}) is None
    with pytest.raises(ModelError, match="finds no tokenizer"):
        models._load_tokenizer(str(tmp_path), False, {})


def test_weights_larger_than_the_memory_are_refused_before_they_are_built(monkeypatch):
    monkeypatch.setattr(placement, "free_memory", lambda device: 10 * 2**30)
    with pytest.raises(ModelError, match="out of memory: the weights take 15.0 GiB in bfloat16 and 10.0 GiB are free"):
        models.load("llama-3.1-8b", torch.bfloat16, CPU, random_weights=True)


@pytest.mark.parametrize(
    "changes, gib",
    [
        ({"model_type": "llama"}, 2 * 2 * 2 * 16 * 2.0),  # keys and values, layers, heads, width, bytes
        ({"model_type": "mistral", "sliding_window": 256}, 2 * 2 * 2 * 16 * 2 * 0.25),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, 2 * 1 * 2 * 16 * 2.0),
    ],
)
def test_keys_and_values_larger_than_the_memory_are_refused(changes, gib, tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "free_memory", lambda device: 10 * 2**30)
    config = models.load_config(write_config(tmp_path / "config.json", **changes), random_weights=True)
    with pytest.raises(ModelError, match=f"of {2**20} x 1024 tokens take {gib:.1f} GiB and 10.0 GiB are free on cpu"):
        models.check_cache_memory(config, torch.bfloat16, CPU, sequences=2**20, tokens=1024)
    models.check_cache_memory(config, torch.bfloat16, CPU, sequences=2, tokens=1024)


def test_failed_allocations_are_explained():
    with pytest.raises(ModelError, match="out of memory on cpu: take a smaller --batch_size"):
        with models.out_of_memory_is_explained(CPU):
            torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="something else"):
        with models.out_of_memory_is_explained(CPU):
            raise RuntimeError("something else")


def test_free_memory():
    free = placement.free_memory(CPU)
    assert free is None or 2**20 < free < 2**50


def test_first_sentence():
    try:
        try:
            raise ValueError("The root. And more.\nAnd a second line")
        except ValueError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        assert models.first_sentence(error) == "The root"
    assert models.first_sentence(KeyError()) == "KeyError"
    assert models.first_sentence(KeyError("wobble")) == "'wobble' is not known"


def test_a_config_with_an_unknown_activation(tmp_path):
    config = models.load_config(str(write_config(tmp_path / "config.json", hidden_act="wobble")), True)
    with pytest.raises(ModelError, match="'llama' makes no .* [(]'wobble' is not known[)]: correct it, or take one of"):
        models.count_parameters(config)
