"""Small models of many families with random weights, of random sizes and options."""

import copy
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "transformers"))  # where tiny_models is

from tiny_models import _COMMON  # noqa: E402
from tiny_models import _MODELS  # noqa: E402

_ROUTED = dict(num_experts_per_tok=2, moe_intermediate_size=24)
_LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    topk_group=1,
    **_ROUTED,
)
_DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)
# By name: the prefix of the class, and what sizes and options it has besides the common ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = _MODELS | {
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", dict(sliding_window=6)),
    "deepseek_v2": ("DeepseekV2", dict(q_lora_rank=None, topk_method="greedy", n_group=1, **_LATENT)),
    "deepseek_v3": ("DeepseekV3", dict(q_lora_rank=24, n_group=2, **_LATENT)),
    "ernie4_5": ("Ernie4_5", dict(head_dim=16)),
    "exaone4": ("Exaone4", dict(sliding_window=6)),
    "gemma": ("Gemma", dict(head_dim=16)),
    "gemma2": ("Gemma2", dict(head_dim=16, sliding_window=6)),
    "glm": ("Glm", dict(head_dim=16)),
    "glm4_moe": (
        "Glm4Moe",
        dict(head_dim=16, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1)
        | _ROUTED,
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "granitemoe": ("GraniteMoe", dict(num_local_experts=4, num_experts_per_tok=2)),
    "helium": ("Helium", {}),
    "hunyuan": ("HunYuanDenseV1", dict(head_dim=16)),
    "lfm2": ("Lfm2", dict(layer_types=["conv", "full_attention"])),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {}),
    "phi": ("Phi", {}),
    "qwen2_moe": ("Qwen2Moe", dict(num_experts=4, shared_expert_intermediate_size=32, **_ROUTED)),
    "qwen3_next": (
        "Qwen3Next",
        dict(head_dim=16, num_experts=4, shared_expert_intermediate_size=32, **_ROUTED, **_DELTA),
    ),
    "seed_oss": ("SeedOss", dict(head_dim=16, attention_dropout=0.0, residual_dropout=0.0)),
    "smollm3": ("SmolLM3", {}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", dict(residual_dropout=0.0)),
}
_ALL_HEADS = ("deepseek_v2", "deepseek_v3", "gpt_neox", "nemotron", "olmoe", "phi")  # have keys for each of them
_OWN_ROPE = ("gemma3", "olmo3")  # by kinds of layers
_ROPES = [
    dict(rope_type="linear", rope_theta=1e4, factor=2.0),
    dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
    dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32),
    dict(
        rope_type="llama3",
        rope_theta=1e4,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
]


def drawn_options(rng: random.Random, family: str) -> dict[str, Any]:
    """Sizes and options for a configuration of the family."""
    own = FAMILIES[family][1]
    options = {**_COMMON, **own}
    if "hidden_size" not in own and rng.random() < 0.5:
        options["hidden_size"] = rng.choice([64, 128])
    if rng.random() < 0.3:
        heads = rng.choice([2, 4, 8])
        shared = heads if family in _ALL_HEADS else rng.choice([n for n in (1, 2, 4, 8) if heads % n == 0])
        options |= {"num_attention_heads": heads, "num_key_value_heads": shared}
        if "head_dim" not in own and options["hidden_size"] % (2 * heads):
            options["hidden_size"] = 16 * heads
    if family == "helium":
        options["head_dim"] = options["hidden_size"] // options["num_attention_heads"]
    if rng.random() < 0.4 and not {"layer_types", "max_window_layers"} & options.keys():
        options["num_hidden_layers"] = rng.choice([1, 3])
    options["intermediate_size"] = rng.choice([options["intermediate_size"], 128])
    options["tie_word_embeddings"] = rng.random() < 0.4
    if rng.random() < 0.3:
        options["attention_bias"] = True
    if rng.random() < 0.3 and "rope_parameters" not in own and family not in _OWN_ROPE:
        options["rope_parameters"] = rng.choice(_ROPES)
    return copy.deepcopy(options)  # configurations write to what they are given


def drawn_model(rng: random.Random, family: str, device: str) -> tuple[nn.Module, str]:
    """A model in eval mode, and what of its configuration is not common to all."""
    prefix, own = FAMILIES[family]
    model_class = getattr(transformers, prefix + "ForCausalLM")
    options, attention = drawn_options(rng, family), rng.choice([None, None, "eager", "sdpa"])
    if family == "gemma2":  # transformers 5.17's SDPA, the default there, leaves out the soft cap
        attention = "eager"
    torch.manual_seed(rng.getrandbits(40))
    try:
        model = model_class(model_class.config_class(**options, attn_implementation=attention)).eval()
    except (ArithmeticError, KeyError, TypeError, ValueError):  # not every family takes every rotation and attention
        options, attention = {n: value for n, value in options.items() if n != "rope_parameters"} | own, None
        model = model_class(model_class.config_class(**options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    special = {name: value for name, value in options.items() if _COMMON.get(name) != value}
    return model.to(device), f"{special}, {attention or 'default'} attention"


def drawn_places(rng: random.Random, model: nn.Module, devices: list[torch.device]) -> dict[str, torch.device]:
    """A device map: for each layer, and for each module beside the layers."""
    layers = model.config.num_hidden_layers
    tied, places = model.config.tie_word_embeddings, {}

    def place(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            at = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList) and len(child) == layers:
                places.update({f"{at}.{i}": rng.choice(devices) for i in range(layers)})
            elif any(isinstance(m, nn.ModuleList) and len(m) == layers for m in child.modules()):
                place(at, child)
            else:
                embeds = child is model.get_input_embeddings() or (tied and child is model.get_output_embeddings())
                places[at] = devices[0] if embeds else rng.choice(devices)

    place("", model)
    return places


def spread(model: nn.Module, places: dict[str, torch.device]) -> nn.Module:
    """``model`` under accelerate's hooks, as transformers loads one with ``device_map``."""
    import accelerate

    main = next(iter(places.values()))
    skipped = model._skip_keys_device_placement
    return accelerate.dispatch_model(model, places, main_device=main, skip_keys=skipped, force_hooks=True)


def has_experts(model: nn.Module) -> bool:
    """Whether rounding may decide which weights a token meets."""
    return any("expert" in name for name, _ in model.named_parameters())
