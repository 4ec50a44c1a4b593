"""Tiny random models of every family, and how close to each other two ways of running them must be."""

import contextlib
import inspect
from collections.abc import Iterator

import pytest
import torch
import transformers
from common import HAS_GPU
from common import device
from common import some

from tilegym.backend import observe_calls
from tilegym.transformers import monkey_patch

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
_ONE_SLIDES = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
_EXPERTS = dict(num_experts_per_tok=2, intermediate_size=48)
# What shows a mistake in what the family alone has: see each one's module in transformers.
_MODELS = {
    "llama": ("Llama", dict(mlp_bias=True)),
    "mistral": ("Mistral", dict(sliding_window=WINDOW)),
    "qwen2": ("Qwen2", _SLIDING),
    "qwen3": ("Qwen3", dict(head_dim=32, **_SLIDING)),
    "qwen3_moe": (
        "Qwen3Moe",
        # The first layer has an MLP, the second experts.
        dict(
            head_dim=32,
            num_experts=5,
            moe_intermediate_size=48,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
            norm_topk_prob=True,
            **_SLIDING,
        ),
    ),  # fmt: skip
    "gemma3": (
        "Gemma3",
        dict(
            head_dim=32,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=4.0,
            **_ONE_SLIDES,
        ),
    ),  # fmt: skip
    "phi3": (
        "Phi3",
        dict(
            hidden_size=96,
            head_dim=24,
            sliding_window=WINDOW,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75),
        ),
    ),  # fmt: skip
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "olmo3": ("Olmo3", _ONE_SLIDES),
    "olmoe": ("Olmoe", dict(num_experts=6, clip_qkv=1.5, **_EXPERTS)),
    "gpt_oss": (
        "GptOss",
        dict(
            head_dim=32,
            num_local_experts=4,
            swiglu_limit=1.5,
            **_EXPERTS,
            **_ONE_SLIDES,
            rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
        ),
    ),  # fmt: skip
    "mixtral": ("Mixtral", dict(num_local_experts=4, sliding_window=WINDOW, **_EXPERTS)),
    "glm4": ("Glm4", dict(head_dim=32)),
    "granite": (
        "Granite",
        dict(embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=2.0),
    ),
}
FAMILIES = list(_MODELS)
families = pytest.mark.parametrize("family", FAMILIES)
few_families = pytest.mark.parametrize("family", some(FAMILIES, "gemma3", "qwen3_moe"))
# The cuTile kernels themselves run here on a GPU; without one, test_in_interpreter.py runs them.
backends = pytest.mark.parametrize(
    "backend",
    ["pytorch", pytest.param("cutile", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")])],
)


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options) -> torch.nn.Module:
    """A model in eval mode; the same seed gives the same weights."""
    prefix, own = _MODELS[family]
    model_class = getattr(transformers, prefix + "ForCausalLM")
    attention = options.pop("attn_implementation", None)
    config = model_class.config_class(**{**_COMMON, **own, **options}, attn_implementation=attention)
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(device(), dtype)


def default_attention(family: str) -> str:
    """What transformers chooses for the family."""
    return "eager" if family == "gpt_oss" else "sdpa"


def computes(family: str) -> set[str]:
    """The flags of ``apply_tilegym_kernel_to_<family>``."""
    function = getattr(monkey_patch, f"apply_tilegym_kernel_to_{family}")
    return set(inspect.signature(function).parameters) - {"model", "use_cutile"}


def ops_by_compute(family: str) -> dict[str, set[str]]:
    """The ops that a forward of several tokens dispatches for each compute."""
    packed = family in ("phi3", "glm4")
    ops = {
        "rope": {"apply_rope_base"},
        "rms_norm": {"rms_norm"},
        "swiglu": {"silu_and_mul" if packed else "swiglu"},
        "geglu": {"geglu"},
        "moe": {"linear", "moe_topk_routing", "fused_moe"},
        "linear": {"linear"},
        "attn": {"fmha"},
    }
    return {compute: ops[compute] for compute in computes(family) if compute in ops}


def ops_of(family: str) -> set[str]:
    """What they dispatch together, but for the linears."""
    return set().union(*(ops for compute, ops in ops_by_compute(family).items() if compute != "linear"))


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
