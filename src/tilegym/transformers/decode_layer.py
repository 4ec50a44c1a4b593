"""A decoder layer's decoding step in few launches, for layers in the layout of Llama's, six or seven, of Gemma 3's and
GLM-4's, which have norms behind attention and MLP, of OLMo's, which have no others, of Qwen3.5's, whose attention is
gated or linear, and of DeepSeek's; where its MLP are experts, those of the attention, a norm, the router and the
experts, who add the residual.

The parts of a layer are patched one by one elsewhere; with a token at a time what is left is launches, each over one
vector, or the rows of a few. Here norms of one row run in the launch that reads the weights behind them, activation and
residual in the one before.
Anything else than one new token of each of a few sequences, on a :class:`DecodeCache`, runs the layer as it was.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import torch
from torch import Tensor
from torch import nn

from tilegym.backend.wrapped import is_wrapped
from tilegym.ops import fmha_decode
from tilegym.ops import geglu
from tilegym.ops import linear
from tilegym.ops import linear_add
from tilegym.ops import rms_norm_add
from tilegym.ops import rms_norm_linear
from tilegym.ops import rms_norm_swiglu
from tilegym.ops import rope_and_cache
from tilegym.ops import rope_fmha_decode
from tilegym.ops import sigmoid_mul
from tilegym.ops import swiglu
from tilegym.ops.moe_interface import FORMULA
from tilegym.ops.moe_interface import experts_forward
from tilegym.transformers import layers
from tilegym.transformers.attention import CausalMask
from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.decode_cache import DecodeCache
from tilegym.transformers.decode_latents import attend_latents
from tilegym.transformers.decode_latents import misfit_of_latents
from tilegym.transformers.decode_linear import LINEAR
from tilegym.transformers.decode_linear import attend_linear
from tilegym.transformers.decode_linear import has_states
from tilegym.transformers.decode_linear import misfit_of_linear
from tilegym.transformers.experts import NAMES as EXPERTS
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import has_its_class_forward
from tilegym.transformers.forwards import is_bound
from tilegym.transformers.forwards import only_moves_inputs
from tilegym.transformers.forwards import place_of_forward
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.quantised_weights import add_product
from tilegym.transformers.quantised_weights import is_served

# The parts that the step takes over; those after the first one, or the first two, own the parameters.
_ATTENTION = ("self_attn", "self_attn.o_proj")
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_JOINT = ("self_attn.qkv_proj",)  # Phi-3's
_NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # of each head, where there are
# Of DeepSeek's latent attention, whose queries may have a low rank.
_LATENTS = (
    *_ATTENTION, "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj",
)  # fmt: skip
_LOW_RANK = ("self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")
_FULL_RANK = ("self_attn.q_proj",)
_MLP = ("mlp", "mlp.down_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_JOINT_GATE_UP = ("mlp.gate_up_proj",)
_INTO_MLP = ("gate_proj", "up_proj", "gate_up_proj")
_DROPOUTS = ("resid_attn_dropout", "resid_mlp_dropout")
_NO_NORMS = None, None, 0.0, 0.0, "llama"
MOST_SEQUENCES = 16  # whose rows the kernels of rms_norm_linear and its siblings take at once


def is_gated(layer: nn.Module) -> bool:
    """Whether behind the attention stands Llama's MLP, and no experts or whatever else there is."""
    return hasattr(layer.mlp, "gate_proj") or hasattr(layer.mlp, "gate_up_proj")


class _Norms(NamedTuple):
    """What a layer calls its norms in front of attention and MLP, and those behind them; empty where there is none."""

    first: str
    second: str
    behind_attention: str = ""
    behind_mlp: str = ""


_NORMS_OF_LLAMA = _Norms("input_layernorm", "post_attention_layernorm")
_NORMS_BY_NAME = {  # of one that only such a layer has
    "pre_feedforward_layernorm": _Norms(  # Gemma's
        "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
    ),
    "post_self_attn_layernorm": _Norms(  # GLM-4's
        "input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"
    ),
    "post_feedforward_layernorm": _Norms("", "", "post_attention_layernorm", "post_feedforward_layernorm"),  # OLMo's
}


def _norms_around(layer: nn.Module) -> _Norms:
    return next((norms for name, norms in _NORMS_BY_NAME.items() if hasattr(layer, name)), _NORMS_OF_LLAMA)


def _arguments_of(layer: nn.Module, name: str) -> tuple[Tensor | None, float, float, str]:
    """Weight, eps, offset and casting of a layer's norm; without a name of none."""
    return layers.arguments_of_norm(getattr(layer, name)) if name else (None, 0.0, 0.0, "llama")


def is_linear(layer: nn.Module) -> bool:
    return hasattr(layer, "linear_attn")


def _has_latents(layer: nn.Module) -> bool:
    return hasattr(layer, "self_attn") and hasattr(layer.self_attn, "kv_a_proj_with_mqa")


def _is_patched(part: nn.Module | None) -> bool:
    return part is not None and is_bound(vars(part).get(place_of_forward(part))) and only_moves_inputs(part)


def most_sequences(layer: nn.Module) -> int:
    """Of how many sequences at most the fused step takes a token each."""
    return 1 if is_linear(layer) or _has_latents(layer) else MOST_SEQUENCES


def _activation_of(mlp: nn.Module) -> str:
    """Of a gated MLP that is patched; empty if it has another patch than those here."""
    make, args = function_of_forward(mlp).recipe
    return args[2] if make is layers.gated_mlp_forward else ""


def _are_parts_known(layer: nn.Module) -> bool:
    """Whether its MLP is a router, experts, and shared ones or not, that nothing but the model puts together."""
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    children = {name for name, _ in mlp.named_children()}
    if children - {"shared_experts"} not in ({"gate", "experts"}, {"router", "experts"}):
        return False
    chosen = getattr(getattr(mlp.experts, "config", None), "_experts_implementation", None)
    own = [mlp, mlp.experts]
    if not all(map(has_its_class_forward, own)) or chosen not in EXPERTS.values():
        return False
    if mlp.training or FORMULA not in vars(mlp.experts):
        return False  # in training some add noise
    if "shared_experts" in children:
        shared = mlp.shared_experts
        taken_over = [norm, shared, *(getattr(shared, f"{name}_proj", None) for name in ("gate", "up", "down"))]
        if not all(_is_patched(part) for part in taken_over) or not _activation_of(shared):
            return False
        if shared.gate_proj.bias is not None or shared.up_proj.bias is not None:
            return False
        own += taken_over
    return not any(part._forward_hooks or part._forward_pre_hooks for part in own)


def _names_of(layer: nn.Module) -> tuple[str, ...]:
    if is_linear(layer):
        attention = LINEAR
    elif _has_latents(layer):
        low = getattr(layer.self_attn, "q_lora_rank", None) is not None
        attention = (*_LATENTS, *(_LOW_RANK if low else _FULL_RANK))
    else:
        projections = _JOINT if hasattr(layer.self_attn, "qkv_proj") else _LINEARS
        attention = (*_ATTENTION, *projections, *(_NORMS if hasattr(layer.self_attn, "q_norm") else ()))
    norms = _norms_around(layer)
    behind = norms.behind_attention, norms.behind_mlp
    if not is_gated(layer):
        return tuple(filter(None, (norms.first, *attention, *behind)))
    gate_up = _JOINT_GATE_UP if hasattr(layer.mlp, "gate_up_proj") else _GATE_UP
    return tuple(filter(None, (norms.first, *attention, *behind, *_MLP, norms.second, *gate_up)))


def misfit(layer: nn.Module) -> str:
    """Why the layer's parts are not those that the fused step takes over; empty if they are."""
    try:
        names = _names_of(layer)
        parts = [layer.get_submodule(name) for name in names]
    except AttributeError as error:
        return str(error)
    for name, part in zip(names, parts, strict=True):
        if not _is_patched(part) or part._forward_hooks or part._forward_pre_hooks:
            return f"its {name} is not patched" if not _is_patched(part) else f"its {name} has hooks"
    owners = [part for name, part in zip(names, parts, strict=True) if name != "linear_attn"]
    called = [part for part in owners if is_served(part)]
    if called and (is_linear(layer) or _has_latents(layer)):
        return "its attention is of another kind, and weights are quantised"
    parameters = [p for part in owners if part not in called for p in part.parameters(recurse=False)]
    if len({p.dtype for p in parameters}) > 1:
        return "its parameters are of several dtypes"
    if any(map(is_wrapped, parameters)):
        return "its parameters are quantised, or spread over several processes"
    mlp = layer.mlp
    if is_gated(layer):
        if any(part.bias is not None for name in _INTO_MLP if (part := getattr(mlp, name, None)) is not None):
            return "its MLP has biases"
        if not _activation_of(mlp):
            return "its MLP has another patch"
    elif _norms_around(layer).behind_mlp:
        return "it has a norm behind its experts"
    if any(part.training and part.p for name in _DROPOUTS if (part := getattr(layer, name, None)) is not None):
        return "it drops out what its parts give"
    if is_linear(layer):
        return misfit_of_linear(layer.linear_attn)
    if _has_latents(layer):
        return misfit_of_latents(layer.self_attn)
    return _misfit_of_attention(layer.self_attn)


def _misfit_of_attention(attention: nn.Module) -> str:
    if not getattr(attention, "is_causal", True):
        return "its attention is not causal"
    if hasattr(attention, "qkv_proj"):
        return "its projections have biases" if attention.qkv_proj.bias is not None else ""
    if len({p.bias is None for p in (attention.q_proj, attention.k_proj, attention.v_proj)}) > 1:
        return "some of q, k and v have biases"
    return ""


def _norms_of(attention: nn.Module) -> tuple[Tensor, Tensor, float, float, str] | None:
    """The weights of the norms of q's and k's heads, and what else :func:`rope_and_cache` needs to know of them."""
    norms = [layers.arguments_of_norm(norm) for norm in (attention.q_norm, attention.k_norm)]
    if any(weight.shape != (attention.head_dim,) for weight, *_ in norms) or norms[0][1:] != norms[1][1:]:
        return None
    return norms[0][0], norms[1][0], *norms[0][1:]


def _projected(layer: nn.Module, hidden: Tensor, backend: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v [B, 1, H, D] of the layer's norm, and the gate of Qwen3.5's attention, as q is."""
    attention, biases, first = layer.self_attn, None, _norms_around(layer).first
    joint = getattr(attention, "qkv_proj", None)
    parts = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")] if joint is None else [joint]
    if joint is not None:
        width = attention.o_proj.weight.shape[1]
        rest = (joint.weight.shape[0] - width) // 2
        sizes = width, rest, rest
    if any(map(is_served, parts)):
        normed = getattr(layer, first)(hidden) if first else hidden
        q, k, v = [p(normed) for p in parts] if joint is None else joint(normed).split(sizes, -1)
    else:
        weights = [p.weight for p in parts] if joint is None else list(joint.weight.split(sizes))
        biases = None if parts[0].bias is None else [p.bias for p in parts]
        norm, eps, *form = _arguments_of(layer, first)
        q, k, v = rms_norm_linear(hidden, norm, eps, weights, biases, *form, backend=backend)
    dim, gate = attention.head_dim, None
    if q.shape[-1] == 2 * attention.o_proj.weight.shape[1]:
        q, gate = q.view(len(q), 1, -1, 2 * dim).chunk(2, -1)
    return *(t.view(len(t), 1, -1, dim) if t.dim() == 3 else t for t in (q, k, v)), gate


def attend(
    layer: nn.Module,
    hidden: Tensor,
    mask: CausalMask,
    cache: DecodeCache,
    embeddings: Any,
    backend: str | None,
    pairs: str,
) -> Tensor:
    """``hidden`` and the layer's attention to what the cache holds, of the new token too; ``pairs`` as in
    :func:`rope_and_cache`."""
    attention, sinks = layer.self_attn, getattr(layer.self_attn, "sinks", None)
    kept, (cos, sin) = cache.layers[attention.layer_idx], embeddings
    q, k, v, gate = _projected(layer, hidden, backend)
    norms = _norms_of(attention) if hasattr(attention, "q_norm") else _NO_NORMS
    if norms is None:  # of another kind each, or of all heads together, as OLMo's
        both = (q, attention.q_norm), (k, attention.k_norm)
        q, k = (norm(t.view(len(t), 1, -1, norm.weight.shape[0])).view(t.shape) for t, norm in both)
        norms = _NO_NORMS
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, 1, D]
    into = q, k, v, cos, sin, kept.keys, kept.values, cache.length.to(q.device)
    one_half = sinks is not None and 2 * cos.shape[-1] == attention.head_dim  # as gpt-oss's
    if mask.keys is None:
        # Between the steps are launches of PyTorch's, which nothing behind them overtakes.
        out = rope_fmha_decode(
            *into, attention.scaling, True, mask.kv_len, *norms, one_half, pairs, mask.window, sinks, backend=backend
        )
    else:
        q = rope_and_cache(*into, one_half, pairs, *norms, backend=backend)
        out = fmha_decode(
            q, kept.keys, kept.values, attention.scaling, None, mask.kv_len, mask.window, None, sinks, mask.keys,
            backend=backend,
        )  # fmt: skip
    if gate is not None:
        out = sigmoid_mul(out.view(gate.shape), gate, backend=backend)
    out = out.view(len(out), 1, -1)
    return _into(layer, hidden, out, attention.o_proj, _norms_around(layer).behind_attention, backend)


def _into(
    layer: nn.Module, residual: Tensor, x: Tensor, project: nn.Module, behind: str, backend: str | None
) -> Tensor:
    """``residual`` and what ``project`` makes of x, by the layer's norm ``behind`` or, as in Granite, by its factor."""
    quantised, scale = is_served(project), getattr(layer, "residual_multiplier", 1.0)
    if not behind:
        if quantised:  # called, or by its kernel: there is no weight to read
            return add_product(project, x, residual, backend) if scale == 1.0 else residual + project(x) * scale
        return linear_add(x, project.weight, residual, project.bias, scale, backend=backend)
    weight, eps, *form = _arguments_of(layer, behind)
    out = project(x) if quantised else linear(x, project.weight, project.bias, None, True, backend=backend)
    return rms_norm_add(out, weight, eps, residual, *form, backend=backend)


def feed_forward(layer: nn.Module, hidden: Tensor, backend: str | None) -> Tensor:
    """``hidden`` and the layer's MLP, or experts, behind its norm."""
    mlp, norms = layer.mlp, _norms_around(layer)
    if is_gated(layer):
        return _gated(layer, mlp, hidden, norms.behind_mlp, backend)
    norm = getattr(layer, norms.second)
    if len(hidden) > 1 or not _are_parts_known(layer):
        out = mlp(norm(hidden))
        return hidden + (out[0] if isinstance(out, tuple) else out)  # some return what the router found, too
    normed = norm(hidden).view(1, -1)
    _, weights, ids = (mlp.gate if hasattr(mlp, "gate") else mlp.router)(normed)
    if hasattr(mlp, "shared_experts"):
        hidden = _gated(layer, mlp.shared_experts, hidden, "", backend)
    out = experts_forward(mlp.experts, normed, ids, weights, shared_output=hidden.view(1, -1), backend=backend)
    return out.view_as(hidden)


def _gated(layer: nn.Module, mlp: nn.Module, hidden: Tensor, behind: str, backend: str | None) -> Tensor:
    joint = getattr(mlp, "gate_up_proj", None)
    parts = [mlp.gate_proj, mlp.up_proj] if joint is None else [joint]
    second, activation = _norms_around(layer).second, _activation_of(mlp)
    if any(map(is_served, parts)):
        normed = getattr(layer, second)(hidden) if second else hidden
        gate, up = [part(normed) for part in parts] if joint is None else joint(normed).chunk(2, -1)
        form = () if activation == "silu" else ("tanh" if activation == "gelu_tanh" else "none",)
        inner = (geglu if form else swiglu)(gate, up, *form, backend=backend)
    else:
        gate, up = [part.weight for part in parts] if joint is None else joint.weight.chunk(2)
        weight, eps, *form = _arguments_of(layer, second)
        inner = rms_norm_swiglu(hidden, weight, eps, gate, up, *form, activation, backend=backend)
    return _into(layer, hidden, inner, mlp.down_proj, behind, backend)


@reproducible
def decode_forward(backend: str | None, pairs: str = "") -> Callable:
    """Forward for a decoder layer whose parts are patched, as :func:`misfit` has checked; ``pairs``: what its rotation
    turns by an angle, as in :func:`rope_and_cache`, where it is no latent attention's."""

    def step(layer: nn.Module, hidden: Tensor, mask: CausalMask | None, cache: DecodeCache, embeddings: Any) -> Tensor:
        if is_linear(layer):
            hidden = attend_linear(layer, hidden, cache, backend)
        elif _has_latents(layer):
            hidden = attend_latents(layer, hidden, mask, cache, embeddings, backend)
        else:
            hidden = attend(layer, hidden, mask, cache, embeddings, backend, pairs)
        return feed_forward(layer, hidden, backend)

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        cache, mask = kwargs.get(CACHE), kwargs.get("attention_mask")
        if (
            cache.__class__ is DecodeCache
            and cache.started
            and not args
            and hidden_states.shape[1] == 1
            and len(hidden_states) <= most_sequences(self)
            and not torch.is_grad_enabled()
            and not misfit(self)
            and (mask is None and has_states(self, cache) if is_linear(self) else mask.__class__ is CausalMask)
        ):
            return step(self, hidden_states, mask, cache, kwargs.get("position_embeddings"))
        return type(self).forward(self, hidden_states, *args, **kwargs)

    return forward
