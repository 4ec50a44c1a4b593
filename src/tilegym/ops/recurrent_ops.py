"""The ops of linear attention, declared: the gated delta rule and the short convolution before it.

Shapes: B batch, T tokens, Hk and Hv key and value heads, Dk and Dv their dimensions, C channels, K taps. Parameters are
those of the functions in transformers' Qwen3-Next and Qwen3.5 models. Errors as in :mod:`tilegym.ops.ops`.
"""

import torch

from tilegym.backend import dispatch

Tensor = torch.Tensor


@dispatch("recurrent_gated_delta_rule")
def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention by the gated delta rule, token by token: for decoding (Yang et al. 2024, arXiv:2412.06464).

    Each value head has a state S, [Dk, Dv], in fp32. A token decays it, corrects what it holds for the token's key
    towards the token's value, and reads it: ``S = exp(g) * S``, ``S = S + k (beta * (v - S^T k))^T``,
    ``out = S^T q / sqrt(Dk)``. Hv / Hk consecutive value heads share a query and a key head.

    Args:
        query, key: [B, T, Hk, Dk], fp32, fp16 or bf16, any strides.
        value: [B, T, Hv, Dv].
        g: [B, T, Hv], the logarithm of the decay, at most 0; -inf sets the state to zero.
        beta: [B, T, Hv], how much of the state's error is corrected, in [0, 1] as a rule.
        initial_state: [B, Hv, Dk, Dv], zeros if None; it is not changed.
        output_final_state: whether to return the state behind the last token.
        use_qk_l2norm_in_kernel: multiply query and key by ``rsqrt(sum(x^2) + 1e-6)`` first, in fp32.
        cu_seqlens: [N + 1] int32 or int64, from 0 on, never falling, at most T, for N sequences packed one behind the
            other in a batch of one: sequence n is the tokens from cu_seqlens[n] to cu_seqlens[n + 1], and has the state
            n of N. The pytorch backend serves it, and reads it on the host: torch.compile has to break its graph there,
            and no CUDA graph captures it.

    Returns:
        (out [B, T, Hv, Dv] in the dtype of query, zeros behind the last sequence; the final state [B, Hv, Dk, Dv] in
        fp32 or None). Differentiable in query, key, value, g, beta and initial_state: the cuTile kernels of a call that
        wants gradients, and how exact they are, are those of :func:`chunk_gated_delta_rule`.

    Raises:
        ValueError: shapes do not fit, or cu_seqlens starts elsewhere, falls, or goes beyond T.
        TypeError: query, key or value is not floating point, or cu_seqlens is neither int32 nor int64.
    """


@dispatch("chunk_gated_delta_rule")
def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`recurrent_gated_delta_rule` in chunks of tokens, by matrix products: for prompts and for training.

    The updates of a chunk are condensed into one by the inverse of a triangular matrix (the WY representation; Yang
    et al. 2024, arXiv:2406.06484). Decays enter as exp(g_i + ... + g_j), never as a quotient that could overflow.
    NaN and infinities, but for g of -inf, reach all tokens of their chunk, also earlier ones.

    Args:
        chunk_size: tokens a chunk. It changes speed, not the result; the cuTile kernels use 64 always.
        query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as in
            :func:`recurrent_gated_delta_rule`.

    Returns:
        As :func:`recurrent_gated_delta_rule`. For inputs in fp16 or bf16 the cuTile kernels multiply in tf32 what is
        not in that dtype, so that the final state, in fp32, is good to about a thousandth of its norm.
        Differentiable in query, key, value, g, beta and initial_state; the gradients are the same in every run.

    Raises:
        ValueError, TypeError: as :func:`recurrent_gated_delta_rule`; chunk_size is less than 1.
    """


@dispatch("causal_conv1d_fn")
def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """A short convolution over time, a filter of its own for every channel, with its activation.

    ``out[b, c, t] = act(bias[c] + sum_i weight[c, i] * x[b, c, t - K + 1 + i])``, with zeros before the first token.

    Args:
        hidden_states: [B, C, T], fp32, fp16 or bf16, any strides; the transpose of a contiguous [B, T, C] is fast.
        weight: [C, K]; the cuTile kernels take K from 2 to 4.
        bias: [C] in weight's dtype, or None.
        activation: "silu" (or "swish", the same), or None.
        seq_idx: [B, T] integers, which sequence a token of a packed batch belongs to: those of others count as zeros.
            The pytorch backend serves it.

    Returns:
        [B, C, T] in the dtype of hidden_states. Differentiable in hidden_states, weight and bias.

    Raises:
        ValueError: shapes do not fit, or another activation.
        TypeError: a tensor is not floating point, or weight and bias differ in dtype.
    """


@dispatch("causal_conv1d_update")
def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """:func:`causal_conv1d_fn` for the next tokens of a sequence, whose last inputs are in ``conv_state``.

    Args:
        hidden_states: [B, C, T], the new tokens, usually one.
        conv_state: [B, C, L] with L at least K - 1, in any floating-point dtype; the inputs before the new tokens.
            Changed in place: afterwards it holds the last L inputs.
        weight, bias, activation: as in :func:`causal_conv1d_fn`.

    Returns:
        [B, C, T] in the dtype of hidden_states. Differentiable, by the pytorch backend.
    """


@dispatch("gated_delta_step")
def gated_delta_step(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    settled: bool = False,
) -> Tensor:
    """The linear attention of Qwen3-Next and Qwen3.5 for one new token, between its projections and the one behind it.

    :func:`causal_conv1d_update` with SiLU of qkv, of which the channels are Hk queries, Hk keys and Hv values;
    :func:`recurrent_gated_delta_rule` with ``beta = sigmoid(b)``, ``g = -exp(a_log) * softplus(a + dt_bias)`` and
    normalised queries and keys; :func:`rms_norm_gated` of each head with z. Rounded where these round.

    Args:
        qkv: [B, 1, C] with C = 2 * Hk * Dk + Hv * Dv, fp32, fp16 or bf16; Hk divides Hv.
        z: [B, 1, Hv * Dv], the gates of the norm, qkv's dtype.
        b, a: [B, 1, Hv], qkv's dtype.
        conv_state: [B, C, L] with L at least K - 1: the inputs of the convolution before this one. Changed in place.
        state: [B, Hv, Dk, Dv], in fp32 as a rule. Changed in place.
        conv_weight: [C, K].
        conv_bias: [C] in conv_weight's dtype, or None.
        a_log, dt_bias: [Hv], any floating-point dtype.
        norm_weight: [Dv].
        eps: of the norm.
        settled: whether conv_state and state were written before the launches in front of this one began, as in a
            model's step, which visits a layer once: on a GPU they are read then before these launches end. Else a
            launch that still writes there would be overtaken.

    Returns:
        [B, 1, Hv * Dv] in qkv's dtype. Not differentiable. One launch, if Dk and Dv are powers of two from 8 to 128, K
        is 2 or 4, and L is K; other sizes are served by the pytorch backend.

    Raises:
        ValueError: shapes do not fit together.
        TypeError: qkv, z, b and a differ in dtype, or conv_weight and conv_bias do.
    """
