"""The forwards and functions that are put in place of transformers', and the checks that they fit.

A forward that replaces another must compute the same thing: each ``computes_*`` runs what is there on a few numbers and
compares it with the formula, so that a class whose math differs (a Gemma norm, an interleaved rotation), now or in a
later version of transformers, is refused instead of silently changed. Submodules are called, their weights never read:
hooks, biases, quantised linears and LoRA keep working.
"""

import types
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch import nn

from tilegym.ops import apply_rope_base
from tilegym.ops import linear
from tilegym.ops import rms_norm
from tilegym.ops import swiglu
from tilegym.transformers.forwards import reproducible


@reproducible
def rms_norm_forward(backend: str | None) -> Callable:
    """Forward for a module with ``weight`` and ``variance_epsilon``, rounding as Llama does."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype is weight.dtype:
            return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon, backend=backend)
        # A norm kept in fp32 in a bf16 model: the product is in the wider dtype.
        return weight * rms_norm(hidden_states, weight.shape, None, self.variance_epsilon, backend=backend)

    return forward


@reproducible
def swiglu_forward(backend: str | None) -> Callable:
    """Forward for a module with ``gate_proj``, ``up_proj`` and ``down_proj`` whose activation is SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), backend=backend))

    return forward


@reproducible
def swiglu_forward_if_silu(original: Callable, backend: str | None) -> Callable:
    """:func:`swiglu_forward` for a whole class; instances with another activation keep what they compute."""
    from transformers.activations import ACT2FN

    patched = swiglu_forward(backend)
    known = {type(ACT2FN["silu"]): True}

    def forward(self, x: Tensor) -> Tensor:
        activation = type(self.act_fn)
        if activation not in known:
            known[activation] = is_silu(self.act_fn)
        return patched(self, x) if known[activation] else original(self, x)

    return forward


@reproducible
def linear_forward(backend: str | None) -> Callable:
    """Forward for an ``nn.Linear``. Autocast casts the arguments of PyTorch's function only."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return nn.functional.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias, backend=backend)

    return forward


@reproducible
def rope_function(backend: str | None) -> Callable:
    """Stands in for ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1):
        return apply_rope_base(q, k, cos, sin, None, unsqueeze_dim, backend=backend)

    return apply_rotary_pos_emb


@reproducible
def attention_choice(original: Callable, name: str) -> Callable:
    """Stands in for ``get_correct_attn_implementation``: ``name`` becomes what a model gets unless it asks otherwise.

    A config that has been used once says "sdpa", as does one that was never asked about: while a model is being made,
    both mean transformers' default. Later calls, and any other name, are obeyed. The models that got ``name`` this way
    are in ``made`` of the function.
    """
    made: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def get_correct_attn_implementation(self, requested_attention=None, is_init_check=False, *args, **kwargs):
        if is_init_check and requested_attention in (None, "sdpa"):
            made.add(self)
            requested_attention = name
        return original(self, requested_attention, is_init_check, *args, **kwargs)

    get_correct_attn_implementation.made = made
    return get_correct_attn_implementation


def restore_attention(choice: Callable, name: str) -> None:
    """Gives transformers' default back to the models that got ``name`` by :func:`attention_choice`."""
    while choice.made:
        model = choice.made.pop()
        if model.config._attn_implementation == name:
            model.set_attn_implementation("sdpa")


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unround numbers between -2 and 2, the same in every call, on the CPU whatever the default device is."""
    count = torch.Size(shape).numel()
    return (2 * torch.sin(torch.arange(1.0, count + 1, device="cpu", dtype=torch.float32))).to(dtype).view(shape)


def _agrees(run: Callable[[], object], *expected: Tensor) -> bool:
    """Whether ``run()`` returns what is expected, exactly; a callable that needs other arguments does not agree."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got = run()
    except Exception:  # whatever it does with the stand-in that it is called with, it is not the formula
        return False
    got = got if isinstance(got, tuple) else (got,)
    return len(got) == len(expected) and all(
        isinstance(g, Tensor) and g.dtype is e.dtype and torch.allclose(g, e, rtol=1e-6, atol=1e-6)
        for g, e in zip(got, expected, strict=True)
    )


def computes_rms_norm(forward: Callable) -> bool:
    """Whether ``forward`` is ``weight * (x * rsqrt(mean(x^2) + eps)).to(dtype)``; in bf16, where rounding shows."""
    x, weight = _numbers(4, 64, dtype=torch.bfloat16), _numbers(64, dtype=torch.bfloat16)
    module = types.SimpleNamespace(weight=weight, variance_epsilon=0.5)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 0.5)
    return _agrees(lambda: forward(module, x), weight * normed.to(x.dtype))


def computes_gated_mlp(forward: Callable) -> bool:
    """Whether ``forward`` is ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
    module = types.SimpleNamespace(
        gate_proj=lambda x: 2 * x, up_proj=lambda x: x - 1, act_fn=nn.functional.silu, down_proj=lambda x: 3 * x
    )
    x = _numbers(4, 8)
    return _agrees(lambda: forward(module, x), 3 * (nn.functional.silu(2 * x) * (x - 1)))


def is_silu(activation: Callable) -> bool:
    """Whether ``activation`` is ``x * sigmoid(x)``."""
    x = 4 * _numbers(64)
    return _agrees(lambda: activation(x), x * torch.sigmoid(x))


def computes_rope(function: Callable) -> bool:
    """Whether ``function(q, k, cos, sin)`` rotates half-split pairs of q and k, [B, H, S, D]."""
    q, k = _numbers(1, 2, 3, 8), _numbers(1, 1, 3, 8)
    angle = _numbers(1, 3, 4)
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat((x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin()), -1)

    return _agrees(lambda: function(q, k, cos, sin), rotate(q), rotate(k))
