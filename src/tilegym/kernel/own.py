"""TileGym's own kernels, registered under their names for every device and mode.

Each layer class is stateless, as ``kernels`` wants it: its forward runs on the layer that it replaces and reads that
layer's parameters. Submodules are called, never read, so that hooks, biases, quantised linears and LoRA keep working.
Before a layer or function is replaced, what it computes is compared with the kernel's formula on a few numbers.
"""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.kernel import registry
from tilegym.kernel.modes import Mode
from tilegym.kernel.sources import InProcess
from tilegym.ops import apply_rope_base
from tilegym.ops import fmha
from tilegym.ops import fmha_decode
from tilegym.ops import geglu
from tilegym.ops import rms_norm
from tilegym.ops import silu_and_mul
from tilegym.ops import swiglu
from tilegym.ops.attn_interface import as_autocast_wants
from tilegym.transformers.layers import computes_rope

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


def _eps(layer: nn.Module, x: Tensor) -> float:
    for name in _EPS_NAMES:
        eps = getattr(layer, name, None)
        if eps is not None:
            return eps
    return torch.finfo(x.dtype).eps  # as torch.nn.RMSNorm does for eps=None


class TileGymRMSNorm(nn.Module):
    """``weight * (x * rsqrt(mean(x^2) + eps)).to(x.dtype)``: Llama's norm and torch's; x: [..., N].

    For layers with ``weight`` [N] or None and ``variance_epsilon``, ``eps`` or ``epsilon``.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, eps, shape = self.weight, _eps(self, hidden_states), hidden_states.shape[-1:]
        if weight is None or weight.dtype is hidden_states.dtype:
            return rms_norm(hidden_states, shape, weight, eps)
        # A norm kept in fp32 in a bf16 model: the product is in the wider dtype.
        return weight * rms_norm(hidden_states, shape, None, eps)


class TileGymGemmaRMSNorm(nn.Module):
    """``(x * rsqrt(mean(x^2) + eps) * (1 + weight)).to(x.dtype)``: Gemma's norm; x: [..., N], weight: [N]."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape = hidden_states.shape[-1:]
        return rms_norm(
            hidden_states, shape, self.weight, _eps(self, hidden_states), None, None, offset=1.0, casting="gemma"
        )


class TileGymSwiGLU(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``: the MLP of Llama, Mistral and Qwen; x: [..., H]."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class TileGymGEGLU(nn.Module):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))`` with the tanh form of gelu: Gemma's MLP; x: [..., H]."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class TileGymExactGEGLU(nn.Module):
    """:class:`TileGymGEGLU` with gelu by the normal distribution function itself."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), "none"))


class TileGymSiluAndMul(nn.Module):
    """``silu(x[..., :H]) * x[..., H:]``: an activation layer on a packed projection; x: [..., 2H]."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return silu_and_mul(x)


def tilegym_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Stands in for transformers' ``apply_rotary_pos_emb``: half-split rotation of q and k, see ``apply_rope_base``."""
    return apply_rope_base(q, k, cos, sin, None, unsqueeze_dim)


def tilegym_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Stands in for transformers' ``eager_attention_forward``: every restriction is in the mask, as there.

    Args:
        query: [B, Hq, Sq, D].
        key, value: [B, Hkv, Skv, D].
        attention_mask: broadcastable to [B, Hq, Sq, Skv], additive, or None.

    Returns:
        ([B, Sq, Hq, D], None): the kernel never has the attention weights; with dropout in training, PyTorch computes.
    """
    if dropout and module.training:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = scores if attention_mask is None else scores + attention_mask
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        weights = nn.functional.dropout(weights, p=dropout)
        return (weights @ value).transpose(1, 2).contiguous(), weights
    query, key, value = as_autocast_wants(query, key, value)
    if query.shape[2] == 1 and not (query.requires_grad or key.requires_grad or value.requires_grad):
        out = fmha_decode(query, key, value, scaling, attention_mask=attention_mask)
    else:
        out = fmha(query, key, value, scaling, is_causal=False, attention_mask=attention_mask)
    return out.transpose(1, 2).contiguous(), None


tilegym_rope.can_torch_compile = True
tilegym_attention.can_torch_compile = True


def _numbers(*shape: int) -> Tensor:
    """Unround numbers between -2 and 2, the same in every call, on the CPU whatever the default device is."""
    return 2 * torch.sin(torch.arange(1.0, torch.Size(shape).numel() + 1, device="cpu", dtype=torch.float32)).view(
        shape
    )


def _stand_in(layer: nn.Module, members: dict[str, Any]) -> nn.Module:
    """``layer`` with some parameters and submodules replaced; nothing of it is copied."""
    double = copy.copy(layer)
    vars(double).update(
        {
            group: {k: v for k, v in vars(layer)[group].items() if k not in members}
            for group in ("_parameters", "_modules")
        }
    )
    vars(double).update(members)
    return double


def _differs(layer: nn.Module, x: Tensor, formula: str, expected: Tensor) -> str | None:
    """Why ``layer``'s own forward does not give ``expected`` for ``x``, or None if it does."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got = type(layer).forward(layer, x)
        same = got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
    except Exception as error:  # what it does with a stand-in's members is its own business
        return f"it could not be checked to compute {formula}: {type(error).__name__}: {error}"
    return None if same else f"it does not compute {formula}"


def _suits_rms_norm(layer: nn.Module, offset: float, formula: str) -> str | None:
    weight = getattr(layer, "weight", None)
    if not hasattr(layer, "weight") or (offset and weight is None):
        return "it has no attribute 'weight'"
    if not any(hasattr(layer, name) for name in _EPS_NAMES):
        return f"it has none of the attributes {', '.join(_EPS_NAMES)}"
    n = layer.normalized_shape[-1] if weight is None and hasattr(layer, "normalized_shape") else 64
    if weight is not None:
        if weight.dim() != 1:
            return f"its weight has {weight.dim()} dimensions, the kernel normalises one"
        n = weight.shape[0]
    # Rows of very different sizes, so that eps matters.
    x = _numbers(2, n) * torch.tensor([[1.0], [1e-3]], device="cpu", dtype=torch.float32)
    stand_in, expected = layer, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _eps(layer, x))
    if weight is not None:
        scale = _numbers(n)
        stand_in, expected = _stand_in(layer, {"weight": scale}), expected * (offset + scale)
    return _differs(stand_in, x, formula, expected)


def _suits_gated_mlp(layer: nn.Module, activation: Callable[[Tensor], Tensor], formula: str) -> str | None:
    members = {"gate_proj": lambda x: 2 * x, "up_proj": lambda x: x - 1, "down_proj": lambda x: 3 * x}
    missing = [name for name in members if not hasattr(layer, name)]
    if missing:
        return f"it has no attribute {missing[0]!r}"
    x = _numbers(4, 16)
    return _differs(_stand_in(layer, members), x, formula, 3 * (activation(2 * x) * (x - 1)))


def _suits_silu_and_mul(layer: nn.Module) -> str | None:
    x = _numbers(4, 16)
    return _differs(layer, x, "silu(x[..., :H]) * x[..., H:]", nn.functional.silu(x[:, :8]) * x[:, 8:])


def _suits_rope(function: Callable) -> str | None:
    return None if computes_rope(function) else "it does not rotate half-split pairs of q and k"


@torch.autocast("cpu", enabled=False)
def _suits_attention(function: Callable) -> str | None:
    q, k, v = _numbers(1, 4, 3, 8), _numbers(1, 2, 5, 8) / 2, _numbers(1, 2, 5, 8) / 3
    mask = torch.zeros_like(_numbers(1, 1, 3, 5)).masked_fill(_numbers(1, 1, 3, 5) > 1, float("-inf"))
    module = types.SimpleNamespace(num_key_value_groups=2, training=False)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    formula = "softmax(scaling * q k^T + attention_mask) v"
    try:
        with torch.no_grad():
            got = function(module, q, k, v, mask, scaling=0.3, dropout=0.0)[0]
        same = got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-5, atol=1e-5)
    except Exception as error:
        return f"it could not be checked to compute {formula}: {type(error).__name__}: {error}"
    return None if same else f"it does not compute {formula}"


_NORM = "weight * x * rsqrt(mean(x^2) + eps)"
_MLP = "down_proj({}(gate_proj(x)) * up_proj(x))"
_gelu_tanh = functools.partial(nn.functional.gelu, approximate="tanh")

LAYERS: dict[type[nn.Module], Callable[[nn.Module], str | None]] = {
    TileGymRMSNorm: functools.partial(_suits_rms_norm, offset=0.0, formula=_NORM),
    TileGymGemmaRMSNorm: functools.partial(
        _suits_rms_norm, offset=1.0, formula=_NORM.replace("weight", "(1 + weight)")
    ),
    TileGymSwiGLU: functools.partial(_suits_gated_mlp, activation=nn.functional.silu, formula=_MLP.format("silu")),
    TileGymGEGLU: functools.partial(_suits_gated_mlp, activation=_gelu_tanh, formula=_MLP.format("gelu_tanh")),
    TileGymExactGEGLU: functools.partial(_suits_gated_mlp, activation=nn.functional.gelu, formula=_MLP.format("gelu")),
    TileGymSiluAndMul: _suits_silu_and_mul,
}
FUNCTIONS = {"TileGymRoPE": (tilegym_rope, _suits_rope), "TileGymAttention": (tilegym_attention, _suits_attention)}


def register() -> None:
    """Registers all of them."""
    registry.add(
        *(
            registry.LayerKernel(cls.__name__, InProcess(cls), None, Mode.FALLBACK, suits)
            for cls, suits in LAYERS.items()
        ),
        own=True,
    )
    for name, (function, suits) in FUNCTIONS.items():
        registry.add_named_function(name, function, suits)
