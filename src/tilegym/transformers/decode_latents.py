"""The attention of a DeepSeek layer's decoding step: eight launches, nine where queries are of a low rank."""

from typing import Any

from torch import Tensor
from torch import nn

from tilegym.ops import linear_add
from tilegym.ops import rms_norm_linear
from tilegym.ops import rope_and_cache
from tilegym.ops.mla_interface import latent_attention
from tilegym.transformers.attention import CausalMask
from tilegym.transformers.decode_cache import DecodeCache
from tilegym.transformers.deepseek2.attention import expands_by_its_weight
from tilegym.transformers.layers import arguments_of_norm


def misfit_of_latents(attention: nn.Module) -> str:
    """Why the parts of a latent attention are not those that the step takes over; empty if they are."""
    first = attention.q_proj if attention.q_lora_rank is None else attention.q_a_proj
    if not expands_by_its_weight(attention.kv_b_proj):
        return "its kv_b_proj is more than a weight"
    if (first.bias is None) != (attention.kv_a_proj_with_mqa.bias is None):
        return "one of the projections behind its first norm has a bias"
    return ""


def attend_latents(
    layer: nn.Module, hidden: Tensor, mask: CausalMask, cache: DecodeCache, embeddings: Any, backend: str | None
) -> Tensor:
    """``hidden`` and the layer's attention to the latents that the cache holds, of the new token too."""
    attention = layer.self_attn
    kept, low = cache.layers[attention.layer_idx], attention.q_lora_rank is not None
    first = attention.q_a_proj if low else attention.q_proj
    both = first, attention.kv_a_proj_with_mqa
    biases = None if first.bias is None else [p.bias for p in both]
    norm, eps, *form = arguments_of_norm(layer.input_layernorm)
    q, compressed = rms_norm_linear(hidden, norm, eps, [p.weight for p in both], biases, *form, backend=backend)
    if low:
        second = attention.q_b_proj
        biases = None if second.bias is None else [second.bias]
        norm, eps, *form = arguments_of_norm(attention.q_a_layernorm)
        (q,) = rms_norm_linear(q, norm, eps, [second.weight], biases, *form, backend=backend)
    q = q.view(1, 1, -1, attention.qk_head_dim).transpose(1, 2)  # [1, H, 1, D + Dr]
    q, qpe = q.split((attention.qk_nope_head_dim, attention.qk_rope_head_dim), -1)
    latents, kpe = compressed[:, None].split((attention.kv_lora_rank, attention.qk_rope_head_dim), -1)
    latents = attention.kv_a_layernorm(latents)
    if isinstance(embeddings, Tensor):  # V2's complex numbers
        cos, sin, one_half, pairs = embeddings.real, embeddings.imag, True, "kept"
    else:
        cos, sin, one_half = *embeddings, False
        pairs = "to halves" if attention.config.rope_interleave else ""
    # The cache holds latents as keys and rotated keys as values.
    into = kept.values, kept.keys, cache.length.to(qpe.device)
    qpe = rope_and_cache(qpe, kpe, latents, cos, sin, *into, one_half, pairs, backend=backend)
    out = latent_attention(
        q, qpe, kept.keys, kept.values, attention.kv_b_proj.weight, attention.scaling, True, mask.keys, mask.kv_len,
        backend=backend,
    )  # fmt: skip
    project = attention.o_proj
    return linear_add(out.view(1, 1, -1), project.weight, hidden, project.bias, backend=backend)
