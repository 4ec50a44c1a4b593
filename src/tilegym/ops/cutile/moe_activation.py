"""The activations of experts, ``act(gate) * up``, within kernels: their values and their gradients."""

import cuda.tile as ct

from tilegym.ops.cutile.geglu import _gate
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.moe_experts import ACTIVATIONS

SILU, GELU, GELU_TANH, RELU, RELU2, GPT_OSS = range(len(ACTIVATIONS))


def clamped(gate, up, limit):
    """gate from above and up from both sides; NaN stays NaN."""
    up = ct.maximum(ct.minimum(up, limit, propagate_nan=True), -limit, propagate_nan=True)
    return ct.minimum(gate, limit, propagate_nan=True), up


def activated(gate, up, alpha, limit, dtype, KIND: Int, GATED: Bool, LIMITED: Bool):
    """The activation of fp32 ``gate`` and ``up`` (anything unless GATED), exact enough for results in ``dtype``."""
    if LIMITED:
        gate, up = clamped(gate, up, limit)
    if KIND == SILU:
        value = over_one_plus_exp(gate, gate, dtype)
    elif KIND == GPT_OSS:
        value = over_one_plus_exp(gate, gate * alpha, dtype)
        up = up + 1.0
    elif KIND == GELU or KIND == GELU_TANH:
        p, _ = _gate(gate, dtype, KIND == GELU_TANH)
        value = gate * p
    else:
        # A comparison with NaN is false; ct.maximum would turn NaN into 0.
        value = ct.where(gate <= 0.0, 0.0, gate)
        if KIND == RELU2:
            value = value * value
    return value * up if GATED else value


def activated_with_gradient(gate, up, grad, alpha, limit, dtype, KIND: Int, GATED: Bool, LIMITED: Bool):
    """The activation, and the gradients of gate and up for the upstream gradient ``grad``; all in fp32."""
    inside_gate, inside_up = gate, up
    if LIMITED:
        gate, up = clamped(gate, up, limit)
    if KIND == SILU or KIND == GPT_OSS:
        factor = alpha if KIND == GPT_OSS else 1.0
        sigmoid = over_one_plus_exp(1.0, gate * factor, dtype)
        value = gate * sigmoid
        slope = sigmoid + value * factor * (1.0 - sigmoid)
        if KIND == GPT_OSS:
            up = up + 1.0
    elif KIND == GELU or KIND == GELU_TANH:
        p, dp = _gate(gate, dtype, KIND == GELU_TANH)
        value = gate * p
        slope = p + gate * dp
    else:
        value = ct.where(gate <= 0.0, 0.0, gate)
        slope = ct.where(gate <= 0.0, 0.0, 1.0)
        if KIND == RELU2:
            slope = 2.0 * value
            value = value * value
    if not GATED:
        dgate, dup, result = grad * slope, grad, value
    else:
        dgate, dup, result = grad * up * slope, grad * value, value * up
    if LIMITED:
        dgate = ct.where(inside_gate > limit, 0.0, dgate)
        dup = ct.where((inside_up > limit) | (inside_up < -limit), 0.0, dup)
    return result, dgate, dup


@ct.kernel
def moe_activation_kernel(
    gate,  # [R, I]
    up,  # [R, I]; gate again without a gate
    h,  # [R, I]
    alpha,
    limit,
    TILE_N: Int,
    KIND: Int,
    GATED: Bool,
    LIMITED: Bool,
):
    tiles = ct.cdiv(h.shape[1], TILE_N)
    at = (ct.bid(0) // tiles, span(ct.bid(0) % tiles, TILE_N))
    g, u = ct.gather(gate, at).astype(ct.float32), ct.gather(up, at).astype(ct.float32)
    ct.scatter(h, at, activated(g, u, alpha, limit, h.dtype, KIND, GATED, LIMITED).astype(h.dtype))


def half_of(words, which: Int, dtype):
    """In a kernel: of numbers in 16 bits, two in each of ``words``, the first (0) or the second ones (1), in fp32."""
    bits = words >> 16 if which else words & 0xFFFF
    return ct.bitcast(bits.astype(ct.uint16), dtype).astype(ct.float32)


@ct.kernel
def moe_interleaved_activation_kernel(
    g,  # [R, I] of uint32: a gate and an up in each, in 16 bits
    b_gate,  # [E, I] if BIAS, else 0
    b_up,
    expert_of,  # [blocks]
    h,  # [R, I]
    alpha,
    limit,
    BLOCK: Int,
    TILE_M: Int,
    TILE_N: Int,
    BIAS: Bool,
    KIND: Int,
    LIMITED: Bool,
    OVERLAP: Bool,
):
    """h = act(gate + b_gate, up + b_up), where a block of BLOCK rows has an expert."""
    begin(OVERLAP)
    tiles = ct.cdiv(h.shape[1], TILE_N)
    m, n = ct.bid(0) // tiles, ct.bid(0) % tiles
    expert = ct.load(expert_of, (m * TILE_M // BLOCK,), (1,)).item()
    if expert >= 0:
        words = ct.load(g, (m, n), (TILE_M, TILE_N))
        gate, up = half_of(words, 0, h.dtype), half_of(words, 1, h.dtype)
        if BIAS:
            at = (expert, span(n, TILE_N))
            gate = gate + ct.gather(b_gate, at).astype(ct.float32)[None, :]
            up = up + ct.gather(b_up, at).astype(ct.float32)[None, :]
        ct.store(h, (m, n), activated(gate, up, alpha, limit, h.dtype, KIND, True, LIMITED).astype(h.dtype))


@ct.kernel
def moe_activation_backward_kernel(
    dh,  # [R, I]: the gradient of h, not yet times the routing weight
    gate,  # [R, I]
    up,  # [R, I]; gate again without a gate
    sorted_ids,  # [R]: the pair of each row, P where there is none
    weights,  # [P]: the routing weights
    dgate,  # [R, I]
    dup,  # [R, I]; dgate again without a gate
    h,  # [R, I]: h times the routing weight
    dweights,  # [P]
    row_weights,  # [R]: the routing weight of each row
    alpha,
    limit,
    TILE_N: Int,
    KIND: Int,
    GATED: Bool,
    LIMITED: Bool,
):
    """One block a row. What it writes is 0 for a row without a pair, whose dh and weight are."""
    row = ct.bid(0)
    pair = ct.load(sorted_ids, (row,), (1,))
    real = pair < weights.shape[0]
    weight = ct.gather(weights, pair).astype(ct.float32)
    dot = ct.zeros((TILE_N,), dtype=ct.float32)
    for n in range(ct.cdiv(h.shape[1], TILE_N)):
        at = (row, span(n, TILE_N))
        g, u = ct.gather(gate, at).astype(ct.float32), ct.gather(up, at).astype(ct.float32)
        grad = ct.gather(dh, at).astype(ct.float32)
        value, dg, du = activated_with_gradient(g, u, grad * weight, alpha, limit, h.dtype, KIND, GATED, LIMITED)
        dot = dot + value * grad
        ct.scatter(h, at, ct.where(real, value * weight, 0.0).astype(h.dtype))
        ct.scatter(dgate, at, ct.where(real, dg, 0.0).astype(dgate.dtype))
        if GATED:
            ct.scatter(dup, at, ct.where(real, du, 0.0).astype(dup.dtype))
    ct.scatter(dweights, pair, ct.sum(dot).astype(dweights.dtype))
    ct.scatter(row_weights, row, weight.item())
