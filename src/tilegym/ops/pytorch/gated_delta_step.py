"""``gated_delta_step`` in plain PyTorch: convolution, gates, delta rule and gated norm, one after the other."""

import torch
import torch.nn.functional as F

from tilegym.backend import register_impl
from tilegym.ops.pytorch.causal_conv1d import causal_conv1d_update
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import check_same_dtype
from tilegym.ops.pytorch.gated_delta_rule import recurrent_gated_delta_rule
from tilegym.ops.pytorch.rms_norm_gated import rms_norm_gated

OP = "gated_delta_step"


def check_delta_step(qkv, z, b, a, conv_state, state, conv_weight, conv_bias, a_log, dt_bias, norm_weight) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if state.dim() != 4 or conv_weight.dim() != 2:
        raise ValueError(
            f"{OP}: state must be [B, Hv, Dk, Dv] and conv_weight [C, K]; they are {tuple(state.shape)}, "
            f"{tuple(conv_weight.shape)}"
        )
    (batch, heads, key_dim, value_dim), (channels, taps) = state.shape, conv_weight.shape
    of_keys = channels - heads * value_dim
    key_heads = of_keys // (2 * key_dim) if key_dim else 0
    if key_heads < 1 or of_keys != 2 * key_heads * key_dim or heads % key_heads:
        raise ValueError(
            f"{OP}: the {channels} channels of conv_weight must be 2 * Hk * {key_dim} + {heads} * {value_dim}, with Hk "
            f"a divisor of {heads}"
        )
    expected = {
        "qkv": (qkv, (batch, 1, channels)),
        "z": (z, (batch, 1, heads * value_dim)),
        "b": (b, (batch, 1, heads)),
        "a": (a, (batch, 1, heads)),
        "a_log": (a_log, (heads,)),
        "dt_bias": (dt_bias, (heads,)),
        "norm_weight": (norm_weight, (value_dim,)),
    }
    if conv_bias is not None:
        expected["conv_bias"] = conv_bias, (channels,)
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{OP}: {name} must be {list(shape)}, it is {list(tensor.shape)}")
    if conv_state.dim() != 3 or conv_state.shape[:2] != (batch, channels) or conv_state.shape[2] < taps - 1:
        raise ValueError(
            f"{OP}: conv_state must be [{batch}, {channels}, {taps - 1} or more], it is {list(conv_state.shape)}"
        )
    if not qkv.is_floating_point() or not qkv.dtype is z.dtype is b.dtype is a.dtype:
        raise TypeError(f"{OP}: qkv is {qkv.dtype}, z {z.dtype}, b {b.dtype}, a {a.dtype}")
    check_same_dtype(OP, conv_weight=conv_weight, conv_bias=conv_bias)
    check_floating(
        OP, conv_state=conv_state, state=state, conv_weight=conv_weight, a_log=a_log, dt_bias=dt_bias,
        norm_weight=norm_weight,
    )  # fmt: skip


@register_impl(OP, "pytorch")
def gated_delta_step(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    settled: bool = False,
) -> torch.Tensor:
    check_delta_step(qkv, z, b, a, conv_state, state, conv_weight, conv_bias, a_log, dt_bias, norm_weight)
    _, heads, key_dim, value_dim = state.shape
    mixed = causal_conv1d_update(qkv.mT, conv_state, conv_weight, conv_bias, "silu").mT  # [B, 1, C]
    value_width = heads * value_dim
    key_width = (mixed.shape[2] - value_width) // 2
    q, k, v = mixed.split([key_width, key_width, value_width], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, dim)) for t, dim in ((q, key_dim), (k, key_dim), (v, value_dim)))
    compute = torch.promote_types(a.dtype, torch.float32)
    g = -a_log.to(compute).exp() * F.softplus(a.to(compute) + dt_bias)
    out, new = recurrent_gated_delta_rule(q, k, v, g, b.sigmoid(), state, True, True)
    state.copy_(new)
    return rms_norm_gated(out, z.view_as(out), norm_weight, eps).flatten(2)
