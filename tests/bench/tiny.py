"""A model small enough to build in every test, and the batches to run it on."""

import torch
from transformers import AutoModelForCausalLM
from transformers import GenerationConfig
from transformers import LlamaConfig

from tilegym.bench.prompts import Batch

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=dtype).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model


def tiny_batches() -> list[Batch]:
    """Two batches; the first is padded on the left."""
    first = torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]])
    second = torch.tensor([[31, 32, 33]])
    return [Batch(first, (first != 0).long()), Batch(second, torch.ones_like(second))]
