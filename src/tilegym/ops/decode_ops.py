"""Ops of a decoding step, declared: the few rows that a linear layer multiplies, with what stands before and behind it,
and the choice of the next token.

A step of a dense decoder is its weights read once, and every further pass over a vector is a launch to wait for: here
the norm before a linear layer, and the activation or the residual behind it, run within the launch that reads the
weights. Results are rounded where the single ops round. In a CUDA graph weights are read before the launches in front
end, which are not to write them. Shapes, dtypes and errors as in :mod:`tilegym.ops.ops`.
"""

import torch

from tilegym.backend import dispatch

Tensor = torch.Tensor


@dispatch("rms_norm_linear")
def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weights: list[Tensor],
    biases: list[Tensor] | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> list[Tensor]:
    """:func:`rms_norm` of x, and :func:`linear` of the result by each of one to four weights: q, k and v.

    Args:
        x: [..., K], fp32, fp16 or bf16.
        norm_weight: [K], x's dtype; None where x is not normalised, as in OLMo 2.
        eps, offset, casting: as in :func:`rms_norm`.
        weights: each [N_i, K], x's dtype.
        biases: each [N_i], or None for all.

    Returns:
        A tensor [..., N_i] for each weight. Differentiable. One launch for a single row, for up to 16 one
        behind that of the norm; else as separate ops.
    """


@dispatch("rms_norm_swiglu")
def rms_norm_swiglu(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate_weight: Tensor,
    up_weight: Tensor,
    offset: float = 0.0,
    casting: str = "llama",
    activation: str = "silu",
) -> Tensor:
    """``silu(linear(y, gate_weight)) * linear(y, up_weight)`` of ``y = rms_norm(x)``: an MLP up to its down projection.

    Args:
        x: [..., K], fp32, fp16 or bf16.
        norm_weight: [K], x's dtype; None where x is not normalised.
        eps, offset, casting: as in :func:`rms_norm`.
        gate_weight, up_weight: [N, K], x's dtype.
        activation: "silu", as :func:`swiglu`; "gelu_tanh" or "gelu", as :func:`geglu` with "tanh" or "none".

    Returns:
        [..., N] in x's dtype. Differentiable. One launch for a single row, for up to 16 one behind that of the
        norm; else as separate ops.

    Raises:
        ValueError: activation is none of these, or as the separate ops.
    """


@dispatch("linear_add")
def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """``residual + scale * linear(x, weight, bias)``: the projection back into a decoder's residual stream.

    Args:
        x: [..., K], fp32, fp16 or bf16.
        weight: [N, K], x's dtype.
        residual: [..., N], x's dtype.
        bias: [N], x's dtype, or None.
        scale: what the projection is multiplied by, as in Granite; it is rounded before and after.

    Returns:
        [..., N] in x's dtype. Differentiable. One launch for up to 16 rows, two for several where K is long and
        N small; else as separate ops.
    """


@dispatch("rms_norm_add")
def rms_norm_add(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """``residual + rms_norm(x)``: the norms behind attention and MLP of Gemma 3, and the additions behind them.

    Args:
        x: [..., N], fp32, fp16 or bf16.
        weight: [N].
        eps, offset, casting: as in :func:`rms_norm`, whose result is rounded to x's dtype before the addition.
        residual: [..., N], x's dtype.

    Returns:
        [..., N] in x's dtype. Differentiable. One launch for up to 64 rows of up to 16384 columns without gradients;
        else as separate ops.

    Raises:
        ValueError: residual has another shape than x, weight is not [N], or casting is none of those allowed.
        TypeError: residual has another dtype than x, or x is not floating point.
    """


@dispatch("rope_and_cache")
def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    one_half: bool = False,
    pairs: str = "",
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """Rotates q and k of one token, as :func:`apply_rope_base`, and writes k and v into a cache, in place.

    With a norm of each head of q and k first, where it is given.

    Keys and values may be of several widths, as DeepSeek's rotated keys and the latents beside them.

    Args:
        q: [B, Hq, 1, D], fp32, fp16 or bf16, any strides.
        k, v: [B, Hkv, 1, D] and [B, Hkv, 1, Dv], q's dtype, any strides.
        cos, sin: [1 or B, 1, R], the two halves of R alike; the first R of D dimensions are rotated.
        keys, values: [B, Hkv, capacity, D] and [B, Hkv, capacity, Dv], the cache, q's dtype.
        position: [1] int32 or int64, on q's device: where in the cache; below capacity.
        one_half: cos and sin are one of the two halves, [1 or B, 1, R / 2], as gpt-oss's.
        pairs: what is rotated by an angle: "" an element of the first half of R and one of the second, as Llama; "kept"
            neighbours, as DeepSeek-V2's complex numbers; "to halves" neighbours too, but the first ones of them are the
            first half of what comes out, as of DeepSeek-V3's ``apply_rotary_pos_emb_interleave``.
        q_norm, k_norm: [D], q's dtype: the weights of :func:`rms_norm` over D, of what is not rotated too; both or
            neither.
        eps, offset, casting: of the norms, as in :func:`rms_norm`.

    Returns:
        The rotated q, [B, Hq, 1, D]. Not differentiable.

    Raises:
        ValueError: shapes do not fit together, one norm is given without the other, or pairs or casting is none of
            those allowed.
        TypeError: dtypes differ.
    """


@dispatch("rope_fmha_decode")
def rope_fmha_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    sm_scale: float | None = None,
    settled: bool = False,
    kv_len: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
    one_half: bool = False,
    pairs: str = "",
    window_size: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`rope_and_cache`, and :func:`fmha_decode` of the new token's queries over what the cache holds then; with
    the norms of each head of q and k first, where they are given.

    Args:
        q: [B, Hq, 1, D], not rotated yet; fp32, fp16 or bf16, any strides.
        k, v, cos, sin, keys, values: as in :func:`rope_and_cache`; Hq is a multiple of Hkv.
        position: [1] int32 or int64, on q's device: where in the cache; below capacity. All keys up to it are seen.
        sm_scale: what scores are multiplied by; None for ``D**-0.5``.
        settled: whether what the cache holds before ``position``, and ``position``, were written before the launches in
            front of this one began, as in a model's step, which visits a layer once: on a GPU they are read then before
            these launches end. Else a launch that still writes there would be overtaken.
        kv_len: [B] int32, ``position + 1``, where it is at hand: separate ops need it.
        q_norm, k_norm, eps, offset, casting, one_half, pairs: as in :func:`rope_and_cache`.
        window_size: how many keys are seen, the last ones, the new token's own included; None for all.
        sinks: [Hq], a score that each head's softmax counts besides those of the keys, as gpt-oss's; or None.

    Returns:
        [B, Hq, 1, D] in q's dtype. Not differentiable. One launch and a merge for fp16 and bf16, if D is 32, 64 or 128,
        pairs is not "to halves", cache or window have room for 2048 tokens at most, and B * Hkv times that in tiles of
        128 tokens is at most 264; else as separate ops.

    Raises:
        ValueError: shapes do not fit together, kv_len is no [B] int32, one norm is given without the other, window_size
            is less than 1, or casting or pairs is none of those allowed.
        TypeError: dtypes differ.
    """


@dispatch("argmax")
def argmax(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The index of each row's largest element, of equal ones the first; NaN counts as larger than all else.

    As ``torch.argmax(x, dim=-1)``; for few long rows, as the logits of a decoding step.

    Args:
        x: [..., V], fp32, fp16 or bf16, any strides; 0 < V < 2**31.
        out: [...] int64, contiguous, which gets the indices, as those of the tokens that the next step reads.

    Returns:
        [...] int64, ``out`` if it is given. Not differentiable.

    Raises:
        ValueError: x has no dimension, or V is 0; out has another shape, device or order of elements.
        TypeError: x is not floating point, or out is not int64.
    """
