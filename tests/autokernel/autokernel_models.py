"""Small models with parts that no op of the library covers, for the loop to find."""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers import LlamaForCausalLM


def _llama(layers: int = 1) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


class GatedNorm(nn.Module):
    """A norm whose input gates itself: ``w * x * rsqrt(mean(x^2) + eps) * sigmoid(gate * x)``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))
        self.gate = nn.Parameter(torch.randn(size))
        self.eps = 1e-5

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        x = hidden_states.float()
        gate = torch.sigmoid(self.gate.float() * x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * gate).to(dtype)


def gated_norm() -> LlamaForCausalLM:
    """A Llama whose last norm is a :class:`GatedNorm`."""
    model = _llama()
    model.model.norm = GatedNorm(32)
    return model


class ScaledMLP(nn.Module):
    """An MLP with a residual of its own, scaled."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.scale = 0.22

    def forward(self, hidden_states):
        out = self.mlp(hidden_states)
        return hidden_states * 0.5 + out * self.scale


def scaled_residual() -> LlamaForCausalLM:
    """A Llama whose MLPs have a scaled residual."""
    model = _llama()
    for layer in model.model.layers:
        layer.mlp = ScaledMLP(layer.mlp)
    return model


class Bump(nn.Module):
    """An activation that nobody has a kernel for: ``x * sigmoid(x) ** 2 + 0.1 * tanh(x)``."""

    def forward(self, x):
        return x * torch.sigmoid(x).square() + 0.1 * torch.tanh(x)


def unusual_activation() -> LlamaForCausalLM:
    """A Llama with :class:`Bump` as its activation."""
    model = _llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = Bump()
    return model
