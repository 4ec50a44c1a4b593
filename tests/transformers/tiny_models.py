"""Tiny random models of every family, and how close to each other two ways of running them must be."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from common import HAS_GPU
from common import device
from transformers import LlamaConfig
from transformers import LlamaForCausalLM
from transformers import MistralConfig
from transformers import MistralForCausalLM
from transformers import Qwen2Config
from transformers import Qwen2ForCausalLM
from transformers import Qwen3Config
from transformers import Qwen3ForCausalLM

from tilegym.backend import observe_calls

VOCAB = 61
WINDOW = 6
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,  # ten times the usual: attention is not flat then, and a wrong mask shows
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_SLIDING = dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)  # the second layer slides
_MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, dict(mlp_bias=True)),
    "mistral": (MistralConfig, MistralForCausalLM, dict(sliding_window=WINDOW)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, _SLIDING),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=32, **_SLIDING)),
}
FAMILIES = list(_MODELS)
families = pytest.mark.parametrize("family", FAMILIES)
# The cuTile kernels themselves run here on a GPU; without one, test_in_interpreter.py runs them.
backends = pytest.mark.parametrize(
    "backend",
    ["pytorch", pytest.param("cutile", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")])],
)


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options) -> torch.nn.Module:
    """A model in eval mode; the same seed gives the same weights."""
    config_class, model_class, own = _MODELS[family]
    attention = options.pop("attn_implementation", "sdpa")
    config = config_class(**{**_COMMON, **own, **options}, attn_implementation=attention)
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(device(), dtype)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """[batch, length] random token ids, none of them the padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (batch, length), generator=generator).to(device())


def padded(lengths: list[int], side: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [len(lengths), max(lengths)], padded on ``side``."""
    width = max(lengths)
    ids, mask = tokens(len(lengths), width, seed), torch.ones(len(lengths), width, dtype=torch.long, device=device())
    for row, length in enumerate(lengths):
        pad = slice(0, width - length) if side == "left" else slice(length, width)
        ids[row, pad] = 0
        mask[row, pad] = 0
    return ids, mask


def assert_close(got: torch.Tensor, expected: torch.Tensor, backend: str = "pytorch") -> None:
    """Equal up to the rounding of a few dozen fp32 operations in a row (cuTile on a GPU: of tf32 products)."""
    eps = 2**-11 if backend == "cutile" and HAS_GPU else 2**-23
    tolerance = 64 * eps * expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@contextlib.contextmanager
def observed() -> Iterator[set[tuple[str, str]]]:
    """Collects (op, backend) of the ops that are dispatched within the block."""
    calls: set[tuple[str, str]] = set()

    def observer(op: str, backend: str) -> contextlib.AbstractContextManager:
        calls.add((op, backend))
        return contextlib.nullcontext()

    with observe_calls(observer):
        yield calls
