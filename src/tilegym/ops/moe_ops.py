"""Mixture-of-experts ops, declared once: grouped products, routing, and the experts themselves.

Shapes: T tokens, H hidden size, E experts, k experts a token (top-k), I the experts' intermediate size. What else holds
for every op stands in :mod:`tilegym.ops.ops`.
"""

import torch

from tilegym.backend import dispatch

Tensor = torch.Tensor


@dispatch("group_gemm")
def group_gemm(group_A: list[Tensor], group_B: list[Tensor], transpose_b: bool = False) -> list[Tensor]:
    """A list of independent matrix products, ``C[i] = A[i] @ B[i]``, or ``A[i] @ B[i].T``, small ones in one launch.

    Args:
        group_A: [M_i, K_i] each, one dtype: fp32, fp16 or bf16. M_i may be 0. Or all of them as one tensor [G, M, K].
        group_B: [K_i, N_i] each, or [N_i, K_i] with ``transpose_b``, in the same dtype; or one tensor.
        transpose_b: whether the second operands are transposed.

    Returns:
        [M_i, N_i] each, which may be slices of one tensor where the operands are. Differentiable in every operand.

    Raises:
        ValueError: the lists differ in length, or a pair's shapes do not fit.
        TypeError: more than one dtype.
    """


@dispatch("ragged_group_gemm")
def ragged_group_gemm(
    a: Tensor, b: Tensor, offsets: Tensor, transpose_b: bool = True, bias: Tensor | None = None
) -> Tensor:
    """Consecutive rows of one matrix, each group of them times a matrix of its own.

    ``C[offsets[e]:offsets[e+1]] = A[offsets[e]:offsets[e+1]] @ op(B[e]) + bias[e]``. Rows outside every group are 0.

    Args:
        a: [T, K], fp32, fp16 or bf16.
        b: [E, N, K], or [E, K, N] without ``transpose_b``, in a's dtype.
        offsets: [E + 1], int32 or int64, not descending, from 0 or more to at most T. The cuTile kernels
            read it on the device, the pytorch backend on the host.
        transpose_b: whether ``b`` holds the matrices transposed, as linear layers do.
        bias: [E, N] or None.

    Returns:
        [T, N] in a's dtype. Differentiable in a, b and bias.

    Raises:
        ValueError: shapes do not fit.
        TypeError: a, b and bias differ in dtype, or offsets are neither int32 nor int64.
    """


@dispatch("moe_align_block_size")
def moe_align_block_size(topk_ids: Tensor, block_size: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts (token, expert) pairs by expert, and fills each expert's share up to a multiple of ``block_size``.

    Blocks of ``block_size`` rows then belong to one expert each. Pairs of one expert keep their order. Nothing is read
    on the host, so the lengths of the results are upper bounds that follow from the arguments' shapes alone.

    Args:
        topk_ids: [T, k], int32 or int64: the experts of each token. Ids outside [0, num_experts) are left out.
        block_size: rows a block, a power of two.
        num_experts: E.

    Returns:
        ``sorted_token_ids`` [L], int32: the pair (its index in the flat topk_ids) in each row, ``T * k`` in rows that
        only fill; ``expert_ids`` [L / block_size], int32: the expert of each block, -1 behind the last;
        ``num_tokens_post_padded`` [1], int32: how many rows there are. ``L`` is
        ``block_size * min(T * k, T * k // block_size + E)``, the number of rows at most.

    Raises:
        ValueError: topk_ids is not [T, k], or block_size is not a power of two.
        TypeError: topk_ids are not integers.
    """


@dispatch("moe_topk_routing")
def moe_topk_routing(
    router_logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scaling_factor: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, as the routers of Hugging Face's models choose them.

    - ``scoring="softmax"``: softmax over the experts in fp32, then the k largest (Mixtral, Qwen3-MoE, OLMoE; with
      groups, whose score is their largest, DeepSeek-V2).
    - ``scoring="topk_softmax"``: the k largest logits, then softmax over these (gpt-oss).
    - ``scoring="sigmoid"``: sigmoid; the k largest of score + correction_bias, of groups whose score is the sum of
      their two largest; the weights are the scores without the bias (DeepSeek-V3, arXiv:2412.19437).

    Args:
        router_logits: [T, E], fp32, fp16 or bf16. Of equal scores the lower expert wins.
        top_k: experts a token.
        scoring: as above.
        renormalize: divide the weights by their sum ("sigmoid": plus 1e-20).
        correction_bias: [E], added to the scores for the choice only ("sigmoid").
        num_groups, topk_groups: experts come from the ``topk_groups`` best of ``num_groups`` equal groups only.
        scaling_factor: the weights are multiplied by it at last.
        out_dtype: of the weights; None: fp32, with "topk_softmax" that of the logits.

    Returns:
        ``topk_weights`` [T, k] in out_dtype and ``topk_ids`` [T, k], int64, by descending score. The weights are
        differentiable in router_logits.

    Raises:
        ValueError: unknown scoring, or sizes that do not fit.
        TypeError: router_logits, correction_bias or out_dtype are not floating point.
    """


@dispatch("fused_moe")
def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w1_up: Tensor | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    shared_output: Tensor | None = None,
) -> Tensor:
    """The experts of a mixture: each token through its k experts' MLPs, and the weighted sum of the results.

    ``out[t] = sum_j topk_weights[t, j] * (act(x W_gate + b_gate, x W_up + b_up) W2 + b2)`` with x = hidden_states[t]
    and the matrices of expert ``topk_ids[t, j]``. The sum is in fp32 and in the order of j: results are the same bit
    for bit in every run. Nothing is read on the host, but by the pytorch backend, which asks once how many tokens each
    expert has, unless a CUDA graph is captured: then it copies the matrices of each token's experts.

    Activations of ``gate, up``: "silu", "gelu", "gelu_tanh", "relu", "relu2" are ``act(gate) * up``; with ``limit``
    gate is clamped from above and up from both sides first. "gpt_oss" is ``(up + 1) * gate * sigmoid(alpha * gate)``,
    clamped in the same way. Experts without a gate (w1 as wide as w2) compute ``act(x W1 + b1)``.

    Args:
        hidden_states: [T, H], fp32, fp16 or bf16.
        w1: [E, 2I, H]: gate above up; alternating rows with ``interleaved``; the gate alone, [E, I, H], if ``w1_up`` is
            given; [E, I, H] for experts without a gate. In hidden_states' dtype.
        w2: [E, H, I].
        topk_weights: [T, k], any floating dtype.
        topk_ids: [T, k], int32 or int64; ids outside [0, E) add nothing.
        activation: as above.
        w1_up: [E, I, H] or None.
        b1: [E, 2I] (or [E, I] without a gate), ordered as w1's rows, or None; not with w1_up.
        b2: [E, H] or None.
        interleaved: rows of w1 and b1 alternate between gate and up (gpt-oss).
        transposed: the weights are stored as [E, H, 2I] and [E, I, H] (gpt-oss).
        alpha: factor in the sigmoid of "gpt_oss".
        limit: bound of the clamps, or None.
        shared_output: [T, H], added to the sum, such as the shared experts' output.

    Returns:
        [T, H] in hidden_states' dtype. Differentiable in hidden_states, w1, w2, topk_weights, b1, b2, w1_up and
        shared_output.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """
