"""Normalisations and gates beside those of :mod:`tilegym.ops.ops`, declared. Shapes, dtypes and errors as there."""

import torch

from tilegym.backend import dispatch

Tensor = torch.Tensor


@dispatch("rms_norm_gated")
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    activation: str = "silu",
    casting: str = "llama",
) -> Tensor:
    """RMS normalisation with a gate, as behind the linear attention and the state space layers of hybrid models.

    With ``norm(u) = u * rsqrt(mean(u^2) + eps) * weight`` and act the activation: ``norm(x) * act(gate)`` (Qwen3-Next,
    Qwen3.5, Kimi-Linear), or, with norm_before_gate False, ``norm(x * act(gate))`` (Mamba 2, arXiv:2405.21060).

    Args:
        x, gate: [..., N], the same shape; fp32, fp16 or bf16, of dtypes of their own, any strides.
        weight: [N], or None for ones.
        eps: added to the mean square.
        norm_before_gate: which of the two comes first.
        group_size: the mean is over groups of so many neighbours (Mamba 2), a divisor of N; None for N.
        activation: "silu" or "sigmoid" (Kimi-Linear).
        casting: "llama" rounds the normalised value to x's dtype before the weight is applied, and the product before
            the gate, as Qwen3-Next and Mamba 2; "gemma" computes all in fp32 and rounds once, as Kimi-Linear.

    Returns:
        [..., N] in x's dtype. Differentiable in x, gate and weight.
    """


@dispatch("sigmoid_mul")
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``: the gate behind the attention of Qwen3-Next, and of its shared expert.

    As in the models, sigmoid(gate) is rounded to the dtype before the product.

    Args:
        x: [..., N], fp32, fp16 or bf16.
        gate: [..., N], or [..., 1] for one gate a row; x's dtype.

    Returns:
        x's shape and dtype. Differentiable in both.
    """


@dispatch("dual_rms_norm")
def dual_rms_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """:func:`~tilegym.ops.rms_norm` of the heads of q and of k (Qwen3, Gemma 3), in one launch.

    Args:
        q: [..., Hq, D], fp32, fp16 or bf16; slices of one projection's output are read where they are.
        k: [..., Hk, D], q's dtype; the dimensions before Hk may differ from q's.
        q_weight, k_weight: [D], or None for ones.
        eps, offset, casting: as of :func:`~tilegym.ops.rms_norm`, for both.

    Returns:
        (q, k) normalised, contiguous. Differentiable in q, k and the weights.
    """


@dispatch("group_norm")
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalisation over groups of channels and all positions (Wu and He 2018, arXiv:1803.08494).

    ``y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias``, mean and biased variance over a sample's C / num_groups
    neighbouring channels and all positions, in fp32, rounded once.

    Args:
        input: [B, C, ...], fp32, fp16 or bf16, any strides.
        num_groups: a divisor of C.
        weight, bias: [C], or None for ones and zeros.
        eps: added to the variance.

    Returns:
        input's shape and dtype, contiguous. Differentiable in input, weight and bias. The same bits in every run,
        unless other work keeps the blocks of a large group apart for a millisecond: another one then computes their
        sums, which may be rounded otherwise.
    """
