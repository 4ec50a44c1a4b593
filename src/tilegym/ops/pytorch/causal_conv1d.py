"""The causal convolution of linear attention in PyTorch, as the Hugging Face models compute it."""

import torch
import torch.nn.functional as F

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import check_same_dtype

ACTIVATIONS = (None, "silu", "swish")


def check_conv(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if x.dim() != 3:
        raise ValueError(f"{op}: hidden_states must be [B, C, T], it has shape {tuple(x.shape)}")
    check_floating(op, hidden_states=x)
    channels = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(f"{op}: weight must be [{channels}, K], it has shape {tuple(weight.shape)}")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != channels):
        raise ValueError(f"{op}: bias must be [{channels}], it has shape {tuple(bias.shape)}")
    check_floating(op, weight=weight)
    check_same_dtype(op, weight=weight, bias=bias)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}, it must be one of {ACTIVATIONS}")


def check_seq_idx(x: torch.Tensor, seq_idx: torch.Tensor) -> None:
    if seq_idx.shape != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"causal_conv1d_fn: seq_idx must be {(x.shape[0], x.shape[2])}, its shape is {tuple(seq_idx.shape)}"
        )


def check_state(x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises ValueError for a state that does not fit."""
    of_x, of_state = x.shape, conv_state.shape
    if len(of_state) != 3 or of_state[0] != of_x[0] or of_state[1] != of_x[1] or of_state[2] < weight.shape[1] - 1:
        raise ValueError(
            f"causal_conv1d_update: conv_state must be [{of_x[0]}, {of_x[1]}, {weight.shape[1] - 1} or more], "
            f"its shape is {tuple(of_state)}"
        )


def _nothing(x, weight, bias):
    """The result for no tokens or no channels, with its gradients: F.conv1d refuses those."""
    out = x * weight[:, :1]
    return (out if bias is None else out + bias[:, None]).to(x.dtype)


@register_impl("causal_conv1d_fn", "pytorch")
def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    check_conv("causal_conv1d_fn", hidden_states, weight, bias, activation)
    if hidden_states.numel() == 0:
        return _nothing(hidden_states, weight, bias)
    _, channels, tokens = hidden_states.shape
    taps = weight.shape[1]
    x = hidden_states.to(weight.dtype)
    if seq_idx is None:
        out = F.conv1d(x, weight.unsqueeze(1), bias, padding=taps - 1, groups=channels)[:, :, :tokens]
    else:
        check_seq_idx(hidden_states, seq_idx)
        out = x * weight[:, -1:]
        for back in range(1, min(taps, tokens)):
            same = (seq_idx[:, back:] == seq_idx[:, :-back]).unsqueeze(1)
            earlier = x[:, :, :-back].masked_fill(~same, 0) * weight[:, -1 - back].unsqueeze(1)
            out = out + F.pad(earlier, (back, 0))
        out = out if bias is None else out + bias.unsqueeze(1)
    return (out if activation is None else F.silu(out)).to(hidden_states.dtype)


@register_impl("causal_conv1d_update", "pytorch")
def causal_conv1d_update(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    check_conv("causal_conv1d_update", hidden_states, weight, bias, activation)
    check_state(hidden_states, conv_state, weight)
    if hidden_states.numel() == 0:
        return _nothing(hidden_states, weight, bias)
    _, channels, tokens = hidden_states.shape
    inputs = torch.cat([conv_state, hidden_states], dim=-1).to(weight.dtype)
    conv_state.copy_(inputs[:, :, inputs.shape[2] - conv_state.shape[2] :])
    out = F.conv1d(inputs, weight.unsqueeze(1), bias, groups=channels)[:, :, -tokens:]
    return (out if activation is None else F.silu(out)).to(hidden_states.dtype)
