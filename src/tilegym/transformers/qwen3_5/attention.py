"""The gated attention of Qwen3.5 and Qwen3-Next, and their gated norm, on TileGym's ops; the checks that they fit."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tilegym.ops import rms_norm_gated
from tilegym.ops import sigmoid_mul
from tilegym.ops.modules import apply_rotary_pos_emb
from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.forwards import with_globals

ROPE = "apply_rotary_pos_emb"


@reproducible
def partial_rotation(backend: str | None) -> Callable:
    """Stands in for ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``, which rotates as cos is wide."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, backend=backend)

    return rotate


def attention_forward(original: Callable, parts: dict[str, str | None]) -> Callable:
    """``original``, the forward of a gated attention, with the parts "rope" and "sigmoid_mul" on TileGym's ops."""
    names = inspect.unwrap(original).__globals__
    rotate = partial_rotation(parts["rope"]) if "rope" in parts else names[ROPE]
    if "sigmoid_mul" in parts:
        return gated_attention_forward(rotate, names["eager_attention_forward"], parts["sigmoid_mul"])
    return with_globals(original, ((ROPE, rotate),))


def gated_attention_forward(rotate: Callable, eager: Callable, backend: str | None) -> Callable:
    """Forward for an attention whose q_proj gives each head's query and the gate of its output."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        cache = kwargs.pop(CACHE, None)
        shape = hidden_states.shape[:-1]
        q, gate = self.q_proj(hidden_states).view(*shape, -1, 2 * self.head_dim).chunk(2, -1)  # [B, S, H, D]
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(*shape, -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        out = sigmoid_mul(out, gate.to(out.dtype), backend=backend)
        return self.o_proj(out.flatten(2)), weights

    return forward


@reproducible
def gated_norm_forward(backend: str | None) -> Callable:
    """Forward for a norm with ``weight`` and ``variance_epsilon`` that is called with a gate."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return rms_norm_gated(hidden_states, gate, self.weight, self.variance_epsilon, backend=backend)

    return forward


def _numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.sin(torch.arange(1.0, torch.Size(shape).numel() + 1, device="cpu") * seed).view(shape)


def _close(expected: Tensor, run: Callable[[], Tensor], tolerance: float) -> bool:
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got = run()
    except Exception:  # whatever it does with the stand-in that it is called with, it is not the formula
        return False
    return got.dtype is expected.dtype and torch.allclose(got, expected, rtol=tolerance, atol=tolerance)


def computes_gated_norm(cls: type[nn.Module]) -> bool:
    """Whether an instance of ``cls`` computes ``weight * norm(x) * silu(gate)``; in bf16, where rounding shows."""
    x, gate = _numbers(5, 32).bfloat16(), 3 * _numbers(5, 32, seed=2).bfloat16()
    weight = _numbers(32, seed=3).bfloat16()
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.weight, module.variance_epsilon, module.activation = nn.Parameter(weight), 0.5, "silu"
    expected = rms_norm_gated(x, gate, weight, 0.5, backend="pytorch")
    return _close(expected, lambda: cls.forward(module, x, gate), 1e-6)


def computes_gated_attention(original: Callable) -> bool:
    """Whether ``original`` computes what :func:`gated_attention_forward` computes, on a stand-in for its module."""
    heads, dim, hidden = 2, 8, _numbers(1, 5, 12)
    q_weight, kv_weight = _numbers(12, heads * dim * 2, seed=2), _numbers(12, dim, seed=3)
    module = types.SimpleNamespace(
        config=types.SimpleNamespace(_attn_implementation="eager"),
        q_proj=lambda x: x @ q_weight,
        k_proj=lambda x: x @ kv_weight,
        v_proj=lambda x: x @ kv_weight + 1,
        o_proj=lambda x: 2 * x,
        q_norm=lambda x: 3 * x,
        k_norm=lambda x: x - 1,
        head_dim=dim,
        num_key_value_groups=heads,
        scaling=0.1,
        attention_dropout=0.5,
        training=False,
        layer_idx=0,
    )
    angle = _numbers(1, 5, 2, seed=4)
    tables = tuple(torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    mask = torch.full((5, 5), torch.finfo(torch.float32).min, device="cpu").triu(1)[None, None]
    arguments = dict(position_embeddings=tables, attention_mask=mask) | {CACHE: None}
    try:
        forward = attention_forward(original, {"sigmoid_mul": "pytorch"})
        expected = forward(module, hidden, **arguments)[0]
    except Exception:  # its module lacks what the forward needs
        return False
    return _close(expected, lambda: original(module, hidden, **arguments)[0], 1e-5)


def computes_partial_rotation(function: Callable) -> bool:
    """Whether ``function(q, k, cos, sin)`` rotates the first dimensions, as many as cos is wide, split into halves."""
    q, k, angle = _numbers(1, 2, 3, 8), _numbers(1, 1, 3, 8, seed=2), _numbers(1, 3, 2, seed=3)
    tables = tuple(torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    expected = torch.cat(apply_rotary_pos_emb(q, k, *tables, backend="pytorch"), 1)
    return _close(expected, lambda: torch.cat(function(q, k, *tables), 1), 1e-5)
