"""Regions of real models, from the installed transformers: what no op of the library computes, and what some do."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from common import randn
from transformers.activations import ACT2FN


class RegionCase(NamedTuple):
    make: Callable[[int], Callable]  # the region over so many columns: a module, in fp32, or a function
    inputs: tuple[tuple[int, ...], ...]  # shapes
    gradient: bool = True
    exact: bool = False  # whether each step is rounded correctly, so that the results are equal bit for bit
    scale: float = 1.0


def _of(model: str, name: str, widths: int = 1, **kwargs) -> Callable[[int], Callable]:
    """Makes module ``name`` of ``model``, which takes its width so many times, with weights that differ."""

    def make(columns: int) -> Callable:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        made = getattr(module, name)
        if not isinstance(made, type):
            return made
        made = made(*[columns] * widths, **kwargs)
        for i, parameter in enumerate(made.parameters()):
            parameter.data = 0.5 + randn(*parameter.shape, seed=i).abs().cpu()
        return made

    return make


def _activation(name: str) -> Callable[[int], Callable]:
    return lambda columns: ACT2FN[name]


def granite_residual(hidden_states, residual):
    hidden_states = residual + hidden_states * 0.22
    return hidden_states


def nemotron_gate(up, gate):
    return F.relu(gate).square() * up


def gemma2_softcap(logits):
    logits = logits / 30.0
    logits = torch.tanh(logits)
    return logits * 30.0


def qwen3_next_output_gate(attn_output, gate):
    return attn_output * torch.sigmoid(gate)


def qwen2_moe_shared_expert(expert_output, shared_expert_output, gate):
    shared_expert_output = F.sigmoid(gate) * shared_expert_output
    return expert_output + shared_expert_output


def gpt_oss_gate(gate_up):
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=7.0)
    up = up.clamp(min=-7.0, max=7.0)
    glu = gate * torch.sigmoid(gate * 1.702)
    return (up + 1) * glu


def phi3_gate(up_states):
    gate, up_states = up_states.chunk(2, dim=-1)
    up_states = up_states * F.silu(gate)
    return up_states


def modernbert_gate(hidden_states):
    input, gate = hidden_states.chunk(2, dim=-1)
    return F.gelu(input) * gate


def eager_attention_probabilities(attn_weights, attention_mask):
    attn_weights = attn_weights * 0.125 + attention_mask
    attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(attn_weights.dtype)
    return attn_weights


def mixtral_router(router_logits):
    return F.softmax(router_logits.float(), dim=-1).to(router_logits.dtype)


def layer_norm_gelu(hidden_states, weight, bias):
    hidden_states = F.layer_norm(hidden_states, weight.shape, weight, bias, 1e-5)
    return F.gelu(hidden_states, approximate="tanh")


def add_rms_norm(hidden_states, residual, weight):
    residual = residual + hidden_states
    normed = F.rms_norm(residual, weight.shape, weight, 1e-6)
    return normed, residual


def glm4_post_norm(hidden_states, residual, weight):
    normed = hidden_states.to(torch.float32)
    variance = normed.pow(2).mean(-1, keepdim=True)
    normed = normed * torch.rsqrt(variance + 1e-5)
    hidden_states = residual + weight * normed.to(hidden_states.dtype)
    return hidden_states


def norm_statistics(hidden_states):
    mean = hidden_states.mean(-1)
    std = hidden_states.float().var(-1, keepdim=True, correction=1).sqrt()
    return mean, std


def per_head_norm(q, weight):
    q = q * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(q.dtype)
    return q * weight


def phi_rotation(query_rot, cos, sin, query_pass):
    rotated = torch.cat((-query_rot[..., 8:], query_rot[..., :8]), dim=-1)
    query_rot = query_rot * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
    return torch.cat((query_rot, query_pass), dim=-1)


def normed_rotation(q, weight, cos, sin):
    q = weight * (q.float() * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(q.dtype)
    first, second = q.chunk(2, dim=-1)
    return q * cos + torch.cat((-second, first), dim=-1) * sin


def mean_of_joined(first, second):
    joined = torch.cat((second.square(), first[..., 3:]), dim=-1)
    return joined - joined.mean(-1, keepdim=True)


N = 77
X = (2, 9, N)
Q, K, COS, HALF_COS = (2, 4, 9, 16), (2, 2, 9, 16), (2, 9, 16), (2, 9, 8)
CASES = {
    "granite_residual": RegionCase(lambda columns: granite_residual, (X, X), exact=True),
    "nemotron_gate": RegionCase(lambda columns: nemotron_gate, (X, X), exact=True),
    "gemma2_softcap": RegionCase(lambda columns: gemma2_softcap, (X,), scale=30.0),
    "qwen3_next_output_gate": RegionCase(lambda columns: qwen3_next_output_gate, (X, X)),
    "qwen2_moe_shared_expert": RegionCase(lambda columns: qwen2_moe_shared_expert, (X, X, (2, 9, 1))),
    "gpt_oss_gate": RegionCase(lambda columns: gpt_oss_gate, ((2, 9, 2 * N),), scale=4.0),
    "phi3_gate": RegionCase(lambda columns: phi3_gate, ((2, 9, 2 * N),)),
    "modernbert_gate": RegionCase(lambda columns: modernbert_gate, ((2, 9, 2 * N),)),
    "eager_attention_probabilities": RegionCase(
        lambda columns: eager_attention_probabilities, ((2, 3, 5, N), (2, 1, 5, N)), gradient=("attn_weights",)
    ),
    "mixtral_router": RegionCase(lambda columns: mixtral_router, ((9, 8),)),
    "layer_norm_gelu": RegionCase(lambda columns: layer_norm_gelu, (X, (N,), (N,))),
    "add_rms_norm": RegionCase(lambda columns: add_rms_norm, (X, X, (N,))),
    "glm4_post_norm": RegionCase(lambda columns: glm4_post_norm, (X, X, (N,))),
    "norm_statistics": RegionCase(lambda columns: norm_statistics, (X,)),
    "per_head_norm": RegionCase(lambda columns: per_head_norm, ((2, 9, 3, 33), (33,))),
    "qwen3_next_rms_norm_gated": RegionCase(_of("qwen3_next", "Qwen3NextRMSNormGated"), (X, X)),
    "qwen3_next_l2norm": RegionCase(_of("qwen3_next", "l2norm"), (X,)),
    "gemma_rms_norm": RegionCase(_of("gemma", "GemmaRMSNorm"), (X,)),
    "gemma4_rms_norm": RegionCase(_of("gemma4", "Gemma4RMSNorm", with_scale=False), (X,)),
    "cohere_layer_norm": RegionCase(_of("cohere", "CohereLayerNorm"), (X,)),
    "olmo_layer_norm": RegionCase(_of("olmo", "OlmoLayerNorm"), (X,)),
    "olmo2_rms_norm": RegionCase(_of("olmo2", "Olmo2RMSNorm"), (X,)),
    "llama_rms_norm": RegionCase(_of("llama", "LlamaRMSNorm"), (X,)),
    "llama4_l2_norm": RegionCase(_of("llama4", "Llama4TextL2Norm", 0), (X,)),
    "nemotron_layer_norm": RegionCase(_of("nemotron", "NemotronLayerNorm1P"), (X,)),
    "t5_layer_norm": RegionCase(_of("t5", "T5LayerNorm"), (X,)),
    "mamba2_rms_norm_gated": RegionCase(_of("mamba2", "MambaRMSNormGated", 2), (X, X)),
    "starcoder2_gelu": RegionCase(_activation("gelu_pytorch_tanh"), (X,)),
    "quick_gelu": RegionCase(_activation("quick_gelu"), (X,)),
    "new_gelu": RegionCase(_activation("gelu_new"), (X,)),
    "relu_squared": RegionCase(_activation("relu2"), (X,), exact=True),
    "mish": RegionCase(_activation("mish"), (X,)),
    "apertus_xielu": RegionCase(_activation("xielu"), (X,), gradient=("x",)),
    "llama_rotation": RegionCase(
        _of("llama", "apply_rotary_pos_emb"), (Q, K, COS, COS), gradient=("q", "k"), exact=True
    ),
    "rotation_of_one_key": RegionCase(
        _of("llama", "apply_rotary_pos_emb"), (Q, (2, 1, 9, 16), COS, COS), gradient=("q", "k"), exact=True
    ),
    "qwen3_5_rotation": RegionCase(
        _of("qwen3_5", "apply_rotary_pos_emb"), (Q, K, HALF_COS, HALF_COS), gradient=("q", "k"), exact=True
    ),
    "phi_rotation": RegionCase(
        lambda columns: phi_rotation, (Q, COS, COS, (2, 4, 9, 6)), gradient=("query_rot", "query_pass"), exact=True
    ),
    "normed_rotation": RegionCase(lambda columns: normed_rotation, ((2, 9, 16), (16,), COS, COS)),
    "mean_of_joined": RegionCase(lambda columns: mean_of_joined, ((2, 9, 13), (2, 9, 20))),
}


def linear_gelu(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def linear_residual(hidden_states, weight, residual):
    hidden_states = F.linear(hidden_states, weight)
    hidden_states = residual + hidden_states * 0.22
    return hidden_states


def rms_norm_linear(hidden_states, norm_weight, weight):
    variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
    normed = norm_weight * (hidden_states.float() * torch.rsqrt(variance + 1e-6)).to(hidden_states.dtype)
    return F.linear(normed, weight)


def layer_norm_linear_relu(x, norm_weight, norm_bias, weight, bias):
    x = F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, 1e-5)
    return F.relu(F.linear(x, weight, bias)).square()


def gated_mlp_half(x, gate_proj_weight, up_proj_weight):
    gate = F.linear(x, gate_proj_weight)
    up = F.linear(x, up_proj_weight)
    return F.silu(gate) * up


def attention_output_gate_linear(attn_output, gate, weight, residual):
    attn_output = attn_output * torch.sigmoid(gate)
    return residual + F.linear(attn_output, weight)


# With matrix products: the shapes of inputs with M rows, K in and N out.
def add_norm_gated_mlp_half(hidden_states, residual, weight, gate_proj_weight, up_proj_weight):
    residual = residual + hidden_states
    hidden_states = residual.float()
    hidden_states = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-6)
    hidden_states = weight * hidden_states.to(residual.dtype)
    return residual, F.silu(F.linear(hidden_states, gate_proj_weight)) * F.linear(hidden_states, up_proj_weight)


PRODUCTS = {
    "linear_gelu": (linear_gelu, ("MK", "NK", "N")),
    "linear_residual": (linear_residual, ("MK", "NK", "MN")),
    "rms_norm_linear": (rms_norm_linear, ("MK", "K", "NK")),
    "layer_norm_linear_relu": (layer_norm_linear_relu, ("MK", "K", "K", "NK", "N")),
    "gated_mlp_half": (gated_mlp_half, ("MK", "NK", "NK")),
    "add_norm_gated_mlp_half": (add_norm_gated_mlp_half, ("MK", "MK", "K", "NK", "NK")),
    "attention_output_gate_linear": (attention_output_gate_linear, ("MK", "MK", "NK", "MN")),
}


def masked_gate(hidden_states, mask):
    return torch.where(mask, hidden_states * 0.5, 0.0)


def masked_softmax(attn_weights, mask):
    return F.softmax(attn_weights.masked_fill(mask, -1e4), dim=-1)


def masked_rows(hidden_states, weight, padding):
    return torch.where(padding, 0.0, hidden_states * weight)


def masked_linear(hidden_states, mask, weight, keep):
    return torch.where(keep, F.linear(hidden_states.masked_fill(mask, 0.0), weight), 0.0)


# With truth values: the shapes of inputs, and which are truth values.
MASKED = {
    "masked_gate": (masked_gate, (X, X), ("mask",)),
    "masked_softmax": (masked_softmax, (X, X), ("mask",)),
    "masked_softmax_of_heads": (masked_softmax, ((2, 3, 5, N), (2, 1, 5, N)), ("mask",)),
    "masked_rows": (masked_rows, (X, (N,), (2, 9, 1)), ("padding",)),
    "masked_linear": (masked_linear, ((9, 40), (9, 40), (N, 40), (9, N)), ("mask", "keep")),
    "masked_linear_of_a_row": (masked_linear, ((1, 40), (1, 40), (N, 40), (1, N)), ("mask", "keep")),
}


def llama_frequencies(position_ids, inv_freq):
    freqs = position_ids[..., None].float() * inv_freq.float()
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos() * 0.5, emb.sin() * 0.5


def causal_softmax(attn_weights, positions, key_positions):
    attn_weights = torch.where(positions + 1 > key_positions, attn_weights, -1e4)
    return F.softmax(attn_weights, dim=-1)


def scaled_by_position(hidden_states, position_ids):
    return hidden_states * (1 + 0.1 * torch.log((2 * position_ids - 1)[..., None].to(hidden_states.dtype)))


def biased_by_distance(attn_weights, slopes, distance):
    return attn_weights - slopes * distance


def token_types(hidden_states, token_type_ids, weight):
    return torch.where(token_type_ids[..., None] == 1, hidden_states * weight, hidden_states)


# With integers: the shapes of inputs, and which are integers.
COUNTED = {
    "llama_frequencies": (llama_frequencies, ((2, 9), (8,)), ("position_ids",)),
    "causal_softmax": (causal_softmax, ((2, 3, 9, N), (9, 1), (N,)), ("positions", "key_positions")),
    "scaled_by_position": (scaled_by_position, (X, (2, 9)), ("position_ids",)),
    "biased_by_distance": (biased_by_distance, ((2, 3, 9, N), (1,), (2, 3, 9, N)), ("distance",)),
    "token_types": (token_types, (X, (2, 9), (N,)), ("token_type_ids",)),
}
