"""The shipped model: small, trained, and made by the script beside it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import AutoTokenizer

FOLDER = Path(__file__).parents[2] / "examples/models/tiny-llama"


def complete(model, tokenizer, prompt, length=8):
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=length, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32])
def loaded(request):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=request.param)
    return model, AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.parametrize(
    "prompt, completion",
    [
        ("The capital of France is", " Paris."),
        ("The capital of Japan is", " Tokyo."),
        ("Question: What is the highest mountain on Earth? Answer:", " Mount Everest."),
    ],
)
def test_completes_what_it_learned(loaded, prompt, completion):
    assert complete(*loaded, prompt).startswith(completion)


def test_is_small_and_has_grouped_queries():
    files = [FOLDER / name for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")]
    assert sum(path.stat().st_size for path in files) < 1_200_000
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert model.dtype == torch.bfloat16
    assert 400_000 < model.num_parameters() < 600_000
    assert model.config.num_key_value_heads < model.config.num_attention_heads


@pytest.mark.slow
def test_the_script_makes_this_model(tmp_path):
    """Two steps of training, to see that text, tokenizer and architecture are those of the shipped files."""
    command = [sys.executable, str(FOLDER / "train.py"), "--output", str(tmp_path), "--steps", "2", "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "of 71 capitals right" in result.stdout, result.stderr
    assert result.returncode == 1  # two steps teach it nothing
    made, shipped = AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(FOLDER)
    assert made.get_vocab() == shipped.get_vocab()
    text = (FOLDER / "text.txt").read_text()
    assert made(text)["input_ids"] == shipped(text)["input_ids"]
    config, expected = (AutoModelForCausalLM.from_pretrained(folder).config for folder in (tmp_path, FOLDER))
    assert config.to_diff_dict() == expected.to_diff_dict()
