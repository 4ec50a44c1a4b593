"""``gated_delta_step`` in cuTile: a launch in place of a convolution, the gates, the delta rule and the gated norm.

A block has a key head and the value heads that share it, whose states it holds in registers whole, since the norm is
over all columns. States and weights are on their way before the launch in front has ended. For many states see
gated_delta_heads.py.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.gated_delta_heads import gates
from tilegym.ops.cutile.gated_delta_heads import launch_heads
from tilegym.ops.cutile.gated_delta_rule import read_and_write
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import wants_gradient
from tilegym.ops.pytorch.gated_delta_step import check_delta_step

MAX_DIM = 128
TAPS = (2, 4)
AHEAD = 2  # states that registers have room for beside each other


def former_inputs(conv_state, conv_weight, conv_bias, batch, channels, taps, BIAS: Bool):
    """In a kernel: of ``channels``, with the taps along another dimension, what the convolution needs of memory."""
    bias = ct.gather(conv_bias, channels).astype(ct.float32) if BIAS else 0.0
    return ct.gather(conv_state, (batch, channels, taps + 1)), ct.gather(conv_weight, (channels, taps)), bias


def convolved(qkv, conv_state, former, batch, channels, taps, AXIS: Int, LAST: Int):
    """In a kernel: the convolution of the new inputs with SiLU, rounded, in fp32; the taps are along AXIS, and 1 wide
    there. Their inputs move on in ``conv_state``."""
    held, weight, bias = former
    new = ct.gather(qkv, (batch, 0, channels + 0 * taps))
    inputs = ct.where(taps == LAST, new.astype(held.dtype), held)
    ct.scatter(conv_state, (batch, channels, taps), inputs)
    x = ct.sum(inputs.astype(ct.float32) * weight.astype(ct.float32), axis=AXIS, keepdims=True) + bias
    return over_one_plus_exp(x, x, qkv.dtype).astype(qkv.dtype).astype(ct.float32)


@ct.kernel
def delta_step_kernel(
    qkv,  # [B, 1, C], C = 2 * Hk * DK + Hv * DV
    z,  # [B, 1, Hv * DV]
    b,  # [B, 1, Hv]
    a,
    conv_state,  # [B, C, K]
    state,  # [B, Hv, DK, DV]
    conv_weight,  # [C, K]
    conv_bias,  # [C] if BIAS, else 0
    a_log,  # [Hv]
    dt_bias,
    norm_weight,  # [DV]
    out,  # [B, 1, Hv * DV]
    scale,
    eps,
    KEY_HEADS: Int,
    GROUP: Int,
    DK: Int,
    DV: Int,
    K: Int,
    BIAS: Bool,
    SETTLED: Bool,
    OVERLAP: Bool,
):
    let_next_begin(OVERLAP)
    if OVERLAP and not SETTLED:
        ct.grid_dependency_control_wait()
    batch, key_head = ct.bid(0) // KEY_HEADS, ct.bid(0) % KEY_HEADS
    rows, cols, taps = span(0, DK)[:, None], span(0, DV)[None, :], span(0, K)
    across, down = taps[None, :], taps[:, None]
    q_channels = key_head * DK + rows
    k_channels = KEY_HEADS * DK + q_channels
    states, formers = (), ()
    for j in ct.static_iter(range(GROUP)):
        head = key_head * GROUP + j
        channels = 2 * KEY_HEADS * DK + head * DV + cols
        formers = (*formers, former_inputs(conv_state, conv_weight, conv_bias, batch, channels, down, BIAS))
        if j < AHEAD:
            states = (*states, ct.gather(state, (batch, head, rows, cols)))
    of_q = former_inputs(conv_state, conv_weight, conv_bias, batch, q_channels, across, BIAS)
    of_k = former_inputs(conv_state, conv_weight, conv_bias, batch, k_channels, across, BIAS)
    weight = ct.gather(norm_weight, cols).astype(ct.float32)
    if OVERLAP and SETTLED:
        ct.grid_dependency_control_wait()

    q = convolved(qkv, conv_state, of_q, batch, q_channels, across, 1, K - 1)
    k = convolved(qkv, conv_state, of_k, batch, k_channels, across, 1, K - 1)
    for j in ct.static_iter(range(GROUP)):
        head = key_head * GROUP + j
        channels = 2 * KEY_HEADS * DK + head * DV + cols
        v = convolved(qkv, conv_state, formers[j], batch, channels, down, 0, K - 1)
        if j < AHEAD:
            held = states[j]
        else:
            held = ct.gather(state, (batch, head, rows, cols))
        decay, rate = gates(a, b, a_log, dt_bias, batch, head)
        read, new = read_and_write(held.astype(ct.float32), q, k, v, decay, rate, scale, True)
        ct.scatter(state, (batch, head, rows, cols), new.astype(state.dtype))
        read = read.astype(out.dtype).astype(ct.float32)
        normed = (read * rstd_of(read * read, eps, DV)).astype(out.dtype).astype(ct.float32)
        normed = (normed * weight).astype(out.dtype).astype(ct.float32)
        at = (batch, 0, head * DV + cols)
        gate = ct.gather(z, at).astype(ct.float32)
        ct.scatter(out, at, (normed * over_one_plus_exp(gate, gate, out.dtype)).astype(out.dtype))


@functools.lru_cache(maxsize=64)
def kernel_for(key_dim: int, value_dim: int) -> ct.kernel:
    """The kernel with as many warps as the state of a head needs registers of."""
    return hinted(delta_step_kernel, num_worker_warps=8 if key_dim * value_dim > 8192 else 4)


def wants_heads(batch: int, key_heads: int, heads: int, device_index: int) -> bool:
    """Whether two launches, of which one has a block for each head's state, are faster than one with a block for each
    key head: where a block would have several states, or some multiprocessors two blocks.

    On an H200 64 sequences of 16 key heads and 32 states of 128 x 128 take 83 us so and 143 in one launch, 12 of them
    22 and 33, 2 11.3 and 14.5; of 16 states 64 47 and 81, 12 14.9 and 19.4, but 6 12.1 and 10.3, 1 7.5 and 6.9.
    """
    return heads > key_heads or batch * key_heads > sm_count(device_index)


def fits(conv_state: torch.Tensor, state: torch.Tensor, conv_weight: torch.Tensor) -> str:
    """Why the kernel does not take these sizes; empty if it does."""
    (key_dim, value_dim), taps = state.shape[2:], conv_weight.shape[1]
    if any(dim > MAX_DIM or dim < 8 or dim & (dim - 1) for dim in (key_dim, value_dim)):
        return f"head dimensions are {key_dim} and {value_dim}, it takes powers of two from 8 to {MAX_DIM}"
    if taps not in TAPS or conv_state.shape[2] != taps:
        return f"it takes 2 or 4 taps, and as many former inputs, not {taps} and {conv_state.shape[2]}"
    return ""


@compilable(fake=lambda qkv, z, *_: z.new_empty(z.shape), mutates=("conv_state", "state"))
def delta_step_forward(
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
    settled: bool,
) -> torch.Tensor:
    batch, heads, key_dim, value_dim = state.shape
    channels, taps = conv_weight.shape
    key_heads, overlap = (channels - heads * value_dim) // (2 * key_dim), overlaps(z.get_device())
    if wants_heads(batch, key_heads, heads, z.get_device()):
        fixed = (conv_weight, conv_bias, a_log, dt_bias, norm_weight, eps)
        return launch_heads(qkv, z, b, a, conv_state, state, *fixed)
    out = z.new_empty(z.shape)
    bias = 0 if conv_bias is None else conv_bias
    arrays = (qkv, z, b, a, conv_state, state, conv_weight, bias, a_log, dt_bias, norm_weight, out)
    sizes = (key_heads, heads // key_heads, key_dim, value_dim, taps)
    args = (*arrays, key_dim**-0.5, eps, *sizes, conv_bias is not None, settled, overlap)
    launch(out, (batch * key_heads,), kernel_for(key_dim, value_dim), args, overlap)
    return out


@register_impl("gated_delta_step", "cutile")
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
    tensors = (qkv, z, b, a, conv_state, state, conv_weight, conv_bias, a_log, dt_bias, norm_weight)
    check_delta_step(*tensors)
    if wants_gradient(*tensors):
        raise UnsupportedError("it has no backward kernel")
    if any(t is not None and t.dtype not in FLOATS for t in tensors):
        raise UnsupportedError("a dtype is not fp32, fp16 or bf16")
    if why := fits(conv_state, state, conv_weight):
        raise UnsupportedError(why)
    return delta_step_forward(*tensors, eps, settled)
