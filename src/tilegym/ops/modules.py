"""Modules and functions with the interfaces of Hugging Face models, computed by the ops."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.ops.ops import apply_rope_base
from tilegym.ops.ops import rms_norm
from tilegym.ops.ops import swiglu


class RMSNorm(nn.Module):
    """``LlamaRMSNorm``: weight of ones, applied to the normalised value in the input's dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape, eps = self.weight.shape, self.variance_epsilon
        if hidden_states.dtype == self.weight.dtype:
            return rms_norm(hidden_states, shape, self.weight, eps)
        # A norm kept in fp32 in a bf16 model: the product is in the wider dtype.
        return self.weight * rms_norm(hidden_states, shape, None, eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class GemmaRMSNorm(nn.Module):
    """``Gemma3RMSNorm``: weight of zeros, 1 + weight applied in fp32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps, offset=1.0, casting="gemma")

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class SwiGLUMLP(nn.Module):
    """``LlamaMLP``: ``down_proj(silu(gate_proj(x)) * up_proj(x))``.

    Args:
        config: has hidden_size, intermediate_size, hidden_act ("silu") and, for biases, mlp_bias.

    Raises:
        ValueError: the config asks for another activation.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(f"SwiGLUMLP: hidden_act is {config.hidden_act!r}, it must be 'silu'")
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs hooks of its own, in the forward or in the backward pass."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, rotary: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    return apply_rope_base(q, k, cos, sin, None, unsqueeze_dim, rotary / q.shape[-1], backend=backend)


def _split_pairs(x: Tensor, rotary: int) -> Tensor:
    """[x0, x1, x2, x3, ..., rest] as [x0, x2, ..., x1, x3, ..., rest]."""
    pairs = x[..., :rotary].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, x[..., rotary:]), -1) if rotary < x.shape[-1] else pairs


def _join_pairs(x: Tensor, rotary: int) -> Tensor:
    """The inverse of :func:`_split_pairs`."""
    pairs = x[..., :rotary].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, x[..., rotary:]), -1) if rotary < x.shape[-1] else pairs


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """As Llama's: rotates the first ``cos.shape[-1]`` dimensions of each head, split into halves."""
    return _rotate(q, k, cos, sin, unsqueeze_dim, cos.shape[-1], backend)


def apply_rotary_pos_emb_of_pairs(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """As GLM's: rotates neighbouring dimensions with each other; cos and sin hold two equal halves."""
    rotary = cos.shape[-1]
    q, k = _rotate(_split_pairs(q, rotary), _split_pairs(k, rotary), cos, sin, unsqueeze_dim, rotary, backend)
    return _join_pairs(q, rotary), _join_pairs(k, rotary)


def apply_rotary_pos_emb_interleave(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """As DeepSeek-V3's: rotates neighbouring dimensions with each other and leaves them split into halves."""
    rotary = cos.shape[-1]
    return _rotate(_split_pairs(q, rotary), _split_pairs(k, rotary), cos, sin, unsqueeze_dim, rotary, backend)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """As DeepSeek-V2's: neighbouring dimensions are complex numbers, multiplied by ``freqs_cis`` [B or 1, S, D / 2]."""
    rotary = 2 * freqs_cis.shape[-1]
    cos, sin = freqs_cis.real, freqs_cis.imag
    q, k = _rotate(_split_pairs(xq, rotary), _split_pairs(xk, rotary), cos, sin, 1, rotary, backend)
    return _join_pairs(q, rotary), _join_pairs(k, rotary)


_RMS_NORMS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), RMSNorm),
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), GemmaRMSNorm),
}
_ROPES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"), apply_rotary_pos_emb),
    **dict.fromkeys(("glm", "glm4"), apply_rotary_pos_emb_of_pairs),
    "deepseek_v2": apply_rotary_emb,
    "deepseek_v3": apply_rotary_pos_emb_interleave,
}


def _of(table: dict[str, Any], getter: str, model: str) -> Any:
    if model not in table:
        raise ValueError(f"{getter}: model is {model!r}, supported are {', '.join(sorted(table))}")
    return table[model]


def get_rms_norm_module(model: str = "llama") -> type[nn.Module]:
    """The module class of ``model``'s RMS norms, with Hugging Face's constructor, parameter names and values.

    Raises:
        ValueError: no such model; the message lists those that there are.
    """
    return _of(_RMS_NORMS, "get_rms_norm_module", model)


def get_swiglu() -> Callable[[Tensor, Tensor], Tensor]:
    """The function ``swiglu(a, b)``."""
    return swiglu


def get_swiglu_module() -> type[nn.Module]:
    """The class of an MLP with gate_proj, up_proj and down_proj, built from a Hugging Face config."""
    return SwiGLUMLP


def get_apply_rope_func(model: str = "llama") -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that stands in for ``model``'s ``apply_rotary_pos_emb`` (DeepSeek-V2: ``apply_rotary_emb``).

    Models that rotate neighbouring dimensions are served by the same kernel, around which the dimensions are permuted.

    Raises:
        ValueError: no such model; the message lists those that there are.
    """
    return _of(_ROPES, "get_apply_rope_func", model)
