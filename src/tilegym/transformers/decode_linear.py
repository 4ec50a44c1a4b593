"""The linear attention of a Qwen3.5 layer's decoding step: between launches that read weights, one or two that keep
the states."""

from torch import Tensor
from torch import nn

from tilegym.ops import gated_delta_step
from tilegym.ops import linear_add
from tilegym.ops import rms_norm_linear
from tilegym.ops.modules import is_hooked
from tilegym.transformers.decode_cache import DecodeCache
from tilegym.transformers.forwards import has_its_class_forward
from tilegym.transformers.forwards import only_moves_inputs
from tilegym.transformers.layers import arguments_of_norm
from tilegym.transformers.qwen3_5.linear_attention import ACTIVATIONS

_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
LINEAR = ("linear_attn", *(f"linear_attn.{name}" for name in (*_PROJECTIONS, "norm", "out_proj")))
_TAPS = (2, 4)


def misfit_of_linear(attention: nn.Module) -> str:
    """Why the parts of a linear attention are not those that the step takes over; empty if they are."""
    conv = attention.conv1d
    own = has_its_class_forward(conv) and only_moves_inputs(conv)
    if type(conv) is not nn.Conv1d or not own or is_hooked(conv):
        return "its conv1d is more than a weight"
    if attention.activation not in ACTIVATIONS:
        return f"its activation is {attention.activation}, not silu"
    if any(getattr(attention, name).bias is not None for name in _PROJECTIONS):
        return "its projections have biases"
    dims = attention.head_k_dim, attention.head_v_dim
    if conv.kernel_size[0] not in _TAPS or any(d > 128 or d & (d - 1) for d in dims):
        return f"its heads are {dims[0]} and {dims[1]} wide, its convolution has {conv.kernel_size[0]} taps"
    return ""


def _states_of(layer: nn.Module, cache: DecodeCache) -> list[Tensor | None]:
    """The inputs of the convolution, and the state of the heads; None each before a prompt."""
    kept = cache.layers[layer.linear_attn.layer_idx]
    held = getattr(kept, "conv_states", None), getattr(kept, "recurrent_states", None)
    return [states.get(0) if isinstance(states, dict) else states for states in held]  # a tensor in older transformers


def has_states(layer: nn.Module, cache: DecodeCache) -> bool:
    """Whether the cache holds the states of a layer with linear attention."""
    return all(state is not None for state in _states_of(layer, cache))


def attend_linear(layer: nn.Module, hidden: Tensor, cache: DecodeCache, backend: str | None) -> Tensor:
    """``hidden`` and the layer's linear attention, whose states the cache keeps."""
    attention = layer.linear_attn
    conv_state, state = _states_of(layer, cache)
    weight, eps, *form = arguments_of_norm(layer.input_layernorm)
    weights = [getattr(attention, name).weight for name in _PROJECTIONS]
    qkv, z, b, a = rms_norm_linear(hidden, weight, eps, weights, None, *form, backend=backend)
    conv, norm = attention.conv1d, attention.norm
    # Between the steps are launches of PyTorch's, which nothing behind them overtakes.
    out = gated_delta_step(
        qkv, z, b, a, conv_state, state, conv.weight.squeeze(1), conv.bias,
        attention.A_log, attention.dt_bias, norm.weight, norm.variance_epsilon, True, backend=backend,
    )  # fmt: skip
    project = attention.out_proj
    return linear_add(out, project.weight, hidden, project.bias, backend=backend)
