"""The latent attention of DeepSeek-V2 and V3: a forward that attends to the latents, and the checks that it fits."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.backend.wrapped import is_quantised
from tilegym.ops import modules
from tilegym.ops.mla_interface import latent_attention
from tilegym.ops.modules import is_hooked
from tilegym.transformers.attention import NAMES
from tilegym.transformers.attention import CausalMask
from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.forwards import only_moves_inputs
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.forwards import with_globals

# The functions that rotate queries and keys: V2's is complex; V3's depends on the config.
COMPLEX, HALVES, PAIRS = ROTATIONS = "apply_rotary_emb", "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"


@reproducible
def rotation(name: str, backend: str | None) -> Callable:
    """Stands in for the function ``name`` of transformers' modules."""
    rotate = getattr(modules, name)

    def rotated(q: Tensor, k: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return rotate(q, k, *args, **kwargs, backend=backend)

    return rotated


def expands_by_its_weight(kv_b_proj: nn.Module) -> bool:
    """Whether the weight is all that the module does: no bias, adapter, quantisation, hook or weight elsewhere."""
    return (
        type(kv_b_proj) is nn.Linear
        and kv_b_proj.bias is None
        and not is_quantised(kv_b_proj.weight)
        and not is_hooked(kv_b_proj)
        and only_moves_inputs(kv_b_proj)
    )


def attention_forward(original: Callable, parts: dict[str, str | None]) -> Callable:
    """``original``, the forward of a DeepSeek attention, with the parts "rope" and "attn" on TileGym's ops."""
    names = inspect.unwrap(original).__globals__
    rotations = {name: names[name] for name in ROTATIONS if name in names}
    if "rope" in parts:
        rotations = {name: rotation(name, parts["rope"]) for name in rotations}
        original = with_globals(original, tuple(rotations.items()))
    return latent_attention_forward(original, rotations, parts["attn"]) if "attn" in parts else original


def latent_attention_forward(original: Callable, rotations: dict[str, Callable], backend: str | None) -> Callable:
    """Forward for a DeepSeek attention: latents and rotated keys go to the cache, and are attended to as they are.

    ``original`` serves the model when it is told to use another attention than TileGym's, calls that ask for the
    attention's weights, and layers whose kv_b_proj is more than its weight.
    """

    def rotate(self, q: Tensor, k: Tensor, embeddings: Any) -> tuple[Tensor, Tensor]:
        if isinstance(embeddings, Tensor):
            return rotations[COMPLEX](q, k, embeddings.to(q.device))
        return rotations[PAIRS if self.config.rope_interleave else HALVES](q, k, *embeddings)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | CausalMask | None = None,
        position_embeddings: Any = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        ours = self.config._attn_implementation in NAMES.values() and not kwargs.get("output_attentions")
        ours = ours and kwargs.get("write_index") is None  # continuous batching keeps keys and values, no latents
        if not ours or not expands_by_its_weight(self.kv_b_proj):
            return original(
                self,
                hidden_states,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        cache = kwargs.pop(CACHE, None)
        batch, length, _ = hidden_states.shape
        if self.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(batch, length, -1, self.qk_head_dim).transpose(1, 2)
        q, qpe = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        compressed = self.kv_a_proj_with_mqa(hidden_states)[:, None]  # one head
        latents, kpe = compressed.split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        latents = self.kv_a_layernorm(latents)
        qpe, kpe = rotate(self, qpe, kpe, position_embeddings)
        if cache is not None:
            latents, kpe = cache.update(latents, kpe, self.layer_idx)
        causal, kv_len = True, None
        if attention_mask is None:
            if 1 < length < latents.shape[2]:  # a prompt in an empty, longer static cache
                latents, kpe = latents[:, :, :length], kpe[:, :, :length]
        elif attention_mask.__class__ is CausalMask:
            attention_mask, kv_len = attention_mask.keys, attention_mask.kv_len
        else:
            causal = False  # the mask says it
        out = latent_attention(
            q,
            qpe,
            latents,
            kpe,
            self.kv_b_proj.weight,
            self.scaling,
            causal,
            attention_mask,
            kv_len,
            self.attention_dropout if self.training else 0.0,
            backend=backend,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    return forward


_SIZES = dict(
    hidden_size=24,
    num_attention_heads=2,
    num_key_value_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    max_position_embeddings=16,
    num_hidden_layers=1,
)
_LENGTH = 5


def _fill(layer: nn.Module) -> None:
    for i, parameter in enumerate(layer.parameters()):
        parameter.copy_(torch.sin(torch.arange(1.0, parameter.numel() + 1) * (i + 1)).view_as(parameter))


@torch.no_grad()
def computes_latent_attention(modeling: types.ModuleType, prefix: str, original: Callable) -> bool:
    """Whether ``original``, the forward of the attention in ``modeling``, computes what the one here computes.

    Tried on small layers, with and without a low rank of the queries, with every rotation that a config may choose.
    """
    config_class, cls = getattr(modeling, f"{prefix}Config"), getattr(modeling, f"{prefix}Attention")
    forward = attention_forward(original, {"attn": "pytorch"})
    interleaved = ({},) if hasattr(modeling, COMPLEX) else ({"rope_interleave": True}, {"rope_interleave": False})
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            hidden = torch.sin(torch.arange(2.0 * _LENGTH * _SIZES["hidden_size"])).view(2, _LENGTH, -1)
            mask = torch.full((_LENGTH, _LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
            for options in interleaved:
                for rank in (None, 12):
                    config = config_class(**_SIZES, q_lora_rank=rank, attn_implementation="eager", **options)
                    layer = cls(config, 0).float().eval()
                    _fill(layer)
                    embeddings = getattr(modeling, f"{prefix}RotaryEmbedding")(config)(
                        hidden, torch.arange(_LENGTH)[None]
                    )
                    arguments = dict(attention_mask=mask, position_embeddings=embeddings)
                    arguments[CACHE] = None
                    expected = original(layer, hidden, **arguments)[0]
                    config._attn_implementation = NAMES[None]
                    got = forward(layer, hidden, **arguments)[0]
                    if not torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
                        return False
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # it is no such layer
        return False
    return True


@torch.no_grad()
def computes_rotation(function: Callable, name: str) -> bool:
    """Whether ``function`` of transformers rotates as TileGym's function ``name`` does."""
    q, k = (torch.sin(torch.arange(heads * 24.0, device="cpu")).view(1, heads, 3, 8) for heads in (2, 1))
    angle = torch.cos(torch.arange(12.0, device="cpu")).view(1, 3, 4)
    if name == COMPLEX:
        embeddings = (torch.polar(torch.full_like(angle, 1.5), angle),)
    else:
        embeddings = tuple(torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    try:
        got = function(q, k, *embeddings)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    expected = getattr(modules, name)(q, k, *embeddings, backend="pytorch")
    return all(torch.allclose(g, e, rtol=1e-5, atol=1e-5) for g, e in zip(got, expected, strict=True))
