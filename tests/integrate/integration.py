"""Small models and folders of models for the tests of the pipeline."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from integrate_models import UnseenConfig

from tilegym.integrate.small_model import small_model

# A config file that is quick to build and to run, of a family that nobody has patched by hand.
STABLELM = {
    "model_type": "stablelm", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
    "partial_rotary_factor": 0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def stablelm(folder: Path) -> str:
    """The path of the config file, in ``folder``."""
    path = folder / "stablelm.json"
    path.write_text(json.dumps(STABLELM))
    return str(path)


def remote(folder: Path) -> str:
    """A model folder with code of its own, random weights."""
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("integrate_models.py"), folder / "modeling_unseen.py")
    config = UnseenConfig(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                          num_attention_heads=4).to_dict()  # fmt: skip
    config["auto_map"] = {
        "AutoConfig": "modeling_unseen.UnseenConfig",
        "AutoModelForCausalLM": "modeling_unseen.Unseen",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def small(family: str, dtype: torch.dtype = torch.float32):
    """A small model of a family, ready to generate."""
    from transformers import CONFIG_MAPPING
    from transformers import GenerationConfig

    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not have {family} yet")
    model = small_model(family).model.to(dtype).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model
