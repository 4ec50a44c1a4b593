"""A decoder layer's decoding step in few launches, for layers in the layout of Llama's, six or seven, and DeepSeek's;
where its MLP are experts, those of the attention, a norm, the router and the experts, who add the residual.

The parts of a layer are patched one by one elsewhere; with a token at a time what is left is launches, each over one
vector. Here norms run in the launch that reads the weights behind them, activation and residual in the one before.
Anything else than one new token of one sequence, on a :class:`DecodeCache`, runs the layer as it was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.ops import fmha_decode
from tilegym.ops import linear_add
from tilegym.ops import rms_norm_linear
from tilegym.ops import rms_norm_swiglu
from tilegym.ops import rope_and_cache
from tilegym.ops import rope_fmha_decode
from tilegym.ops.moe_interface import FORMULA
from tilegym.ops.moe_interface import experts_forward
from tilegym.transformers.attention import CausalMask
from tilegym.transformers.decode_graph import DecodeCache
from tilegym.transformers.decode_latents import attend_latents
from tilegym.transformers.decode_latents import misfit_of_latents
from tilegym.transformers.experts import NAMES as EXPERTS
from tilegym.transformers.forwards import reproducible

# The parts that the step takes over; those after the first one, or the first two, own the parameters.
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_ATTENTION = ("self_attn", "input_layernorm", *_LINEARS)
_NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # of each head, where there are
# Of DeepSeek's latent attention, whose queries may have a low rank.
_LATENTS = (
    "self_attn", "input_layernorm", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj",
    "self_attn.o_proj",
)  # fmt: skip
_LOW_RANK = ("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")
_FULL_RANK = ("self_attn.q_proj",)
_MLP = ("mlp", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TRIES = 4


def _is_gated(layer: nn.Module) -> bool:
    """Whether behind the attention stands Llama's MLP, and no experts or whatever else there is."""
    return hasattr(layer.mlp, "gate_proj")


def _has_latents(layer: nn.Module) -> bool:
    return hasattr(layer.self_attn, "kv_a_proj_with_mqa")


def _are_parts_known(layer: nn.Module) -> bool:
    """Whether its MLP is a router, experts, and shared ones or not, that nothing but the model puts together."""
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    children = {name for name, _ in mlp.named_children()}
    if children - {"shared_experts"} not in ({"gate", "experts"}, {"router", "experts"}):
        return False
    chosen = getattr(getattr(mlp.experts, "config", None), "_experts_implementation", None)
    own = [mlp, mlp.experts]
    if any("forward" in vars(part) for part in own) or chosen not in EXPERTS.values():
        return False
    if mlp.training or FORMULA not in vars(mlp.experts):
        return False  # in training some add noise
    if "shared_experts" in children:
        shared = mlp.shared_experts
        taken_over = [norm, shared, *(getattr(shared, f"{name}_proj", None) for name in ("gate", "up", "down"))]
        if any(part is None or "forward" not in vars(part) for part in taken_over):
            return False  # it is not patched
        if shared.gate_proj.bias is not None or shared.up_proj.bias is not None:
            return False
        own += taken_over
    return not any(part._forward_hooks or part._forward_pre_hooks for part in own)


def _names_of(layer: nn.Module) -> tuple[str, ...]:
    if _has_latents(layer):
        low = getattr(layer.self_attn, "q_lora_rank", None) is not None
        attention = (*_LATENTS, *(_LOW_RANK if low else _FULL_RANK))
    else:
        attention = (*_ATTENTION, *(_NORMS if hasattr(layer.self_attn, "q_norm") else ()))
    return (*attention, *(_MLP if _is_gated(layer) else ()))


def misfit(layer: nn.Module) -> str:
    """Why the layer's parts are not those that the fused step takes over; empty if they are."""
    try:
        names = _names_of(layer)
        parts = [layer.get_submodule(name) for name in names]
    except AttributeError as error:
        return str(error)
    for name, part in zip(names, parts, strict=True):
        if "forward" not in vars(part) or part._forward_hooks or part._forward_pre_hooks:
            return f"its {name} is not patched" if "forward" not in vars(part) else f"its {name} has hooks"
    attention, mlp = layer.self_attn, layer.mlp
    if len({p.dtype for part in parts for p in part.parameters(recurse=False)}) > 1:
        return "its parameters are of several dtypes"
    if _is_gated(layer) and (mlp.gate_proj.bias is not None or mlp.up_proj.bias is not None):
        return "its MLP has biases"
    if _has_latents(layer):
        return misfit_of_latents(attention)
    if len({p.bias is None for p in (attention.q_proj, attention.k_proj, attention.v_proj)}) > 1:
        return "some of q, k and v have biases"
    return ""


def _norms_of(attention: nn.Module) -> tuple[Tensor, Tensor, float] | tuple[()]:
    """The weights and the epsilon of the norms of q and k, where ``rope_fmha_decode`` takes them."""
    if not hasattr(attention, "q_norm"):
        return ()
    q_norm, k_norm = attention.q_norm, attention.k_norm
    same = q_norm.weight.shape == k_norm.weight.shape == (attention.head_dim,)
    if not same or q_norm.variance_epsilon != k_norm.variance_epsilon:
        return ()
    return q_norm.weight, k_norm.weight, q_norm.variance_epsilon


def attend(
    layer: nn.Module, hidden: Tensor, mask: CausalMask, cache: DecodeCache, embeddings: Any, backend: str | None
) -> Tensor:
    """``hidden`` and the layer's attention to what the cache holds, of the new token too."""
    attention, sinks = layer.self_attn, getattr(layer.self_attn, "sinks", None)
    norm, kept, (cos, sin) = layer.input_layernorm, cache.layers[attention.layer_idx], embeddings
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    biases = None if attention.q_proj.bias is None else [p.bias for p in projections]
    q, k, v = rms_norm_linear(
        hidden, norm.weight, norm.variance_epsilon, [p.weight for p in projections], biases, backend=backend
    )
    q, k, v = (t.view(1, 1, -1, attention.head_dim) for t in (q, k, v))
    plain = mask.window is None and mask.keys is None and sinks is None
    norms = _norms_of(attention) if plain else ()
    if hasattr(attention, "q_norm") and not norms:
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [1, H, 1, D]
    into = q, k, v, cos, sin, kept.keys, kept.values, cache.length
    if plain:
        # Between the steps are launches of PyTorch's, which nothing behind them overtakes.
        out = rope_fmha_decode(*into, attention.scaling, True, mask.kv_len, *norms, backend=backend)
    else:
        one_half = sinks is not None and 2 * cos.shape[-1] == attention.head_dim  # as gpt-oss's
        q = rope_and_cache(*into, one_half, backend=backend)
        out = fmha_decode(
            q, kept.keys, kept.values, attention.scaling, None, mask.kv_len, mask.window, None, sinks, mask.keys,
            backend=backend,
        )  # fmt: skip
    project = attention.o_proj
    return linear_add(out.view(1, 1, -1), project.weight, hidden, project.bias, backend=backend)


def feed_forward(layer: nn.Module, hidden: Tensor, backend: str | None) -> Tensor:
    """``hidden`` and the layer's MLP, or experts, behind its norm."""
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    if _is_gated(layer):
        return _gated(mlp, norm, hidden, backend)
    if not _are_parts_known(layer):
        out = mlp(norm(hidden))
        return hidden + (out[0] if isinstance(out, tuple) else out)  # some return what the router found, too
    normed = norm(hidden).view(1, -1)
    _, weights, ids = (mlp.gate if hasattr(mlp, "gate") else mlp.router)(normed)
    if hasattr(mlp, "shared_experts"):
        hidden = _gated(mlp.shared_experts, norm, hidden, backend)
    out = experts_forward(mlp.experts, normed, ids, weights, shared_output=hidden.view(1, -1), backend=backend)
    return out.view_as(hidden)


def _gated(mlp: nn.Module, norm: nn.Module, hidden: Tensor, backend: str | None) -> Tensor:
    inner = rms_norm_swiglu(
        hidden, norm.weight, norm.variance_epsilon, mlp.gate_proj.weight, mlp.up_proj.weight, backend=backend
    )
    return linear_add(inner, mlp.down_proj.weight, hidden, mlp.down_proj.bias, backend=backend)


@reproducible
def decode_forward(backend: str | None) -> Callable:
    """Forward for a decoder layer whose parts are patched, as :func:`misfit` has checked."""

    def step(layer: nn.Module, hidden: Tensor, mask: CausalMask, cache: DecodeCache, embeddings: Any) -> Tensor:
        attends = attend_latents if _has_latents(layer) else attend
        return feed_forward(layer, attends(layer, hidden, mask, cache, embeddings, backend), backend)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        **kwargs,
    ) -> Tensor:
        if (
            past_key_values.__class__ is DecodeCache
            and past_key_values.started
            and attention_mask.__class__ is CausalMask
            and hidden_states.numel() == hidden_states.shape[-1]
            and not torch.is_grad_enabled()
            and not misfit(self)
        ):
            return step(self, hidden_states, attention_mask, past_key_values, position_embeddings)
        return type(self).forward(
            self,
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )

    return forward


@torch.no_grad()
def computes_the_same(layer: nn.Module, rotary: nn.Module, forward: Callable) -> bool:
    """Whether a step by ``forward`` is what the layer computes: tried on its weights, behind a prompt of 9 tokens.

    For a rounding a router may choose another expert, so that some tokens are tried; another formula would show in all.
    """
    modes = [(module, module.training) for module in layer.modules()]
    try:
        layer.eval()
        return any(_same_behind(seed, layer, rotary, forward) for seed in range(1 if _is_gated(layer) else TRIES))
    finally:
        for module, training in modes:
            module.training = training


def _same_behind(seed: int, layer: nn.Module, rotary: nn.Module, forward: Callable) -> bool:
    weight = layer.input_layernorm.weight
    numbers = torch.randn(1, 10, weight.shape[0], generator=torch.Generator().manual_seed(seed))
    hidden = numbers.to(weight.device, weight.dtype)
    embeddings = rotary(hidden, torch.arange(10, device=weight.device)[None])
    alone = isinstance(embeddings, Tensor)  # complex numbers, as DeepSeek-V2's

    def run(forward: Callable, cache: DecodeCache, tokens: slice) -> Tensor:
        count = tokens.stop - tokens.start
        cache.set_length(tokens.start)
        cache.positions_of(cache.layers[0], count)
        filled = torch.full((1,), tokens.stop, dtype=torch.int32, device=weight.device)
        return forward(
            layer,
            hidden[:, tokens],
            attention_mask=CausalMask((1, 1, count, cache.capacity), None, filled, None),
            past_key_values=cache,
            use_cache=True,
            position_embeddings=embeddings[:, tokens] if alone else tuple(t[:, tokens] for t in embeddings),
        )

    results = []
    for step in (type(layer).forward, forward):
        cache = DecodeCache(layer.self_attn.layer_idx + 1, 16, weight.device)
        run(type(layer).forward, cache, slice(0, 9))
        results.append(run(step, cache, slice(9, 10)))
    expected, got = results
    # Sums in another order: a few roundings of the dtype apart, relative to the largest element.
    return bool((got - expected).abs().max() <= 8 * torch.finfo(weight.dtype).eps * expected.abs().max())
