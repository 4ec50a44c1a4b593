"""Every op of TileGym, declared once: signature, defaults, contract.

Shapes: B batch, S (Sq, Skv) tokens, H (Hq, Hkv) heads, D head dimension, M rows, N and K columns. Statistics, softmax
and accumulation are in fp32 whatever the inputs' dtype (fp64 inputs: in fp64). Each op takes ``backend=`` for one call.
An op computes in the dtypes that it is given, also within ``torch.autocast``. (Gradients by the pytorch backend
do, unless the backward pass runs within it, which PyTorch advises against.)
Errors: ValueError where shapes or options do not fit, TypeError where dtypes do not; a case that a backend
does not support falls back to ``pytorch`` (see :mod:`tilegym.backend`).
"""

import torch

from tilegym.backend import dispatch

Tensor = torch.Tensor


@dispatch("rms_norm")
def rms_norm(
    input: Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: Tensor | None,
    eps: float,
    bias: Tensor | None = None,
    mode: str | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> Tensor:
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    ``y = x * rsqrt(mean(x^2) + eps) * (offset + weight) + bias``, statistics in fp32.

    Args:
        input: [..., N], fp32, fp16 or bf16, any strides.
        normalized_shape: N or (N,).
        weight: [N], or None for ones.
        eps: added to the mean square.
        bias: [N] or None.
        mode: how the cuTile kernel walks over a row: "static_persistent", "multi_wave_reload", "multi_wave_cached",
            or None to let it pick. It changes speed, not the result.
        offset: added to the weight (Gemma: 1.0).
        casting: "llama" rounds the normalised value to the input's dtype before the weight is applied,
            "gemma" applies the weight in fp32 and rounds once.

    Returns:
        [..., N] in the input's dtype. Differentiable in input, weight and bias.
    """


@dispatch("fused_add_rms_norm")
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, casting: str = "llama"
) -> tuple[Tensor, Tensor]:
    """The residual addition of a decoder layer and the :func:`rms_norm` behind it.

    ``total = x + residual``, rounded to the dtype; ``y = rms_norm(total)``, as two separate ops give them.

    Args:
        x, residual: [..., N], the same shape and dtype (fp32, fp16 or bf16), any strides.
        weight: [N], or None for ones.
        eps: added to the mean square.
        offset: added to the weight (Gemma: 1.0).
        casting: "llama" or "gemma", as in :func:`rms_norm`.

    Returns:
        (y, total), in the shape and dtype of x. Differentiable in x, residual and weight, through both.
    """


@dispatch("layer_norm")
def layer_norm(
    input: Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation (Ba, Kiros and Hinton 2016, arXiv:1607.06450).

    ``y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias``, with the mean and the biased variance over the
    dimensions of ``normalized_shape``, in fp32, rounded once.

    Args:
        input: [..., *normalized_shape], fp32, fp16 or bf16, any strides.
        normalized_shape: the last dimensions of input, one or several.
        weight, bias: of normalized_shape, or None.
        eps: added to the variance.

    Returns:
        input's shape and dtype. Differentiable in input, weight and bias.
    """


@dispatch("silu_and_mul")
def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(x[..., :H]) * x[..., H:]``: the gate of a SwiGLU MLP on one packed tensor (arXiv:2002.05202).

    Args:
        input: [..., 2H], fp32, fp16 or bf16.
        out: [..., H] of the input's dtype, written and returned if given; not differentiable then.

    Returns:
        [..., H] in the input's dtype. Differentiable in input.
    """


@dispatch("swiglu")
def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b`` elementwise, with silu(a) = a * sigmoid(a) (arXiv:2002.05202).

    As the Hugging Face MLP computes it, silu(a) is rounded to the dtype before the product.

    Args:
        a, b: the same shape and dtype (fp32, fp16 or bf16).

    Returns:
        a's shape and dtype. Differentiable in both.
    """


@dispatch("geglu")
def geglu(a: Tensor, b: Tensor, approximate: str = "tanh") -> Tensor:
    """``gelu(a) * b`` elementwise (arXiv:2002.05202), gelu(a) = a * Phi(a) or its tanh form (arXiv:1606.08415).

    As the Hugging Face MLP computes it, gelu(a) is rounded to the dtype before the product.

    Args:
        a, b: the same shape and dtype (fp32, fp16 or bf16).
        approximate: "tanh": ``a * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3))) / 2`` (Gemma); "none": the normal
            distribution function itself.

    Returns:
        a's shape and dtype. Differentiable in both.
    """


@dispatch("gelu")
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """``x * Phi(x)`` elementwise, with Phi the normal distribution function, or its tanh form (arXiv:1606.08415).

    Args:
        x: any shape, fp32, fp16 or bf16.
        approximate: "none" or "tanh", as in :func:`geglu`; the default is torch's.

    Returns:
        x's shape and dtype. Differentiable.
    """


@dispatch("relu")
def relu(x: Tensor) -> Tensor:
    """``max(x, 0)`` elementwise; NaN stays NaN.

    Args:
        x: any shape, fp32, fp16 or bf16.

    Returns:
        x's shape and dtype. Differentiable, with gradient 0 at 0.
    """


@dispatch("dropout")
def dropout(x: Tensor, seed: int, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes each element with probability ``p`` and divides the others by ``1 - p`` (arXiv:1207.0580).

    What is zeroed depends on the seed and the element's index in row-major order alone (Philox 4x32-10, Salmon et al.
    2011): the same for every backend, device, dtype and layout, and in the backward pass, which saves no mask. Give
    every call of a training step a seed of its own.

    Args:
        x: any shape, fp32, fp16 or bf16; up to 2^34 elements.
        seed: 64 bits.
        p: the probability, 0 to 1.
        training: False: x itself is returned.
        inplace: write the result into x and return x.

    Returns:
        x's shape and dtype. Differentiable.
    """


@dispatch("apply_rope_base")
def apply_rope_base(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    partial_rotary_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding, half-split (GPT-NeoX, Llama) form (Su et al. 2021, arXiv:2104.09864).

    With R = D * partial_rotary_factor, x1 = x[..., :R/2], x2 = x[..., R/2:R]:
    ``y = [x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., R:]]``.

    Args:
        q: [B, Hq, S, D] (unsqueeze_dim 1) or [B, S, Hq, D] (unsqueeze_dim 2); fp32, fp16 or bf16; any strides.
        k: like q, with Hkv heads.
        cos, sin: [B or 1, S, R] (both halves equal, as transformers makes them) or [B or 1, S, R/2];
            with ``position_ids`` also [max positions, R or R/2], looked up by it.
        position_ids: [B or 1, S] integers, or None where cos and sin are per token already.
        unsqueeze_dim: which dimension of q and k holds the heads.
        partial_rotary_factor: the share of D that is rotated.

    Returns:
        (q, k) rotated, new tensors (but see ``tilegym.set_gradients_in_place``). Differentiable in q and k.
    """


@dispatch("softmax")
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """``exp(x - max) / sum(exp(x - max))`` along ``dim``, in fp32; rows of any length.

    A row of all -inf gives NaN, as in PyTorch.

    Args:
        x: any shape, fp32, fp16 or bf16.
        dim: the dimension that sums to one.

    Returns:
        x's shape and dtype. Differentiable. The same bits in every run, unless other work keeps the blocks of a long
        row apart for a millisecond: another one then computes their sums, which may be rounded otherwise.
    """


@dispatch("matmul")
def matmul(
    a: Tensor,
    b: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    static_persistent: bool | None = None,
    use_tma: bool | None = None,
) -> Tensor:
    """``op(a) @ op(b)`` with op the transpose where asked; accumulates in fp32 (fp32 inputs: tf32 if torch allows it).

    Args:
        a: [M, K], or [K, M] with trans_a; fp32, fp16, bf16 or fp8 (e4m3fn, e5m2).
        b: [K, N], or [N, K] with trans_b; a's dtype.
        static_persistent: True: one block per multiprocessor walks over the output tiles; None picks.
        use_tma: whether tiles are loaded by the tensor memory accelerator (Hopper and later); None picks.

    Returns:
        [M, N] in a's dtype (fp8: fp16). Differentiable in a and b (not fp8).
    """


@dispatch("bmm")
def bmm(
    a: Tensor,
    b: Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    static_persistent: bool | None = None,
) -> Tensor:
    """``op(a[i]) @ op(b[i])`` for every i of a batch, as :func:`matmul` computes it.

    Args:
        a: [B, M, K], or [B, K, M] with transpose_a; fp32, fp16, bf16 or fp8 (e4m3fn, e5m2), any strides.
        b: [B, K, N], or [B, N, K] with transpose_b; a's dtype.
        transpose_a, transpose_b: whether op transposes the last two dimensions.
        static_persistent: True: one block per multiprocessor walks over the output tiles; None picks.

    Returns:
        [B, M, N] in a's dtype (fp8: fp16). Differentiable in a and b (not fp8).
    """


@dispatch("linear")
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    settled: bool = False,
) -> Tensor:
    """``x @ weight.T + bias``: a GEMV kernel for few rows (decoding), a GEMM for many, behind one name.

    Args:
        x: [..., K], fp32, fp16 or bf16.
        weight: [N, K], x's dtype.
        bias: [N] or None, x's dtype.
        out_dtype: the result's, which all is computed in; None for x's. torch.float32 as of a router's logits: a
            single row is not rounded then, where copies of x and weight in that dtype are made for more rows.
        settled: whether weight was written before the launches in front of this one began, as a model's weights were
            before a step: in a CUDA graph it is read then, for a single row, before these launches end.

    Returns:
        [..., N] in out_dtype. Differentiable in x, weight and bias.
    """


@dispatch("fmha")
def fmha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None = None,
    is_causal: bool = True,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    attention_mask: Tensor | None = None,
    kv_len: Tensor | None = None,
) -> Tensor:
    """Attention with online softmax (Dao et al. 2022, arXiv:2205.14135): ``softmax(mask(scaling * q k^T)) v``.

    Query i of a row stands at key position ``p = L - Sq + i``, with L the row's ``kv_len`` (default Skv): the causal
    diagonal is aligned bottom-right. It sees key j where j < L, j <= p if causal, and p - j < window_size.

    Args:
        q: [B, Hq, Sq, D], fp32, fp16 or bf16, any strides.
        k: [B, Hkv, Skv, D]; Hq is a multiple of Hkv (grouped queries).
        v: [B, Hkv, Skv, Dv].
        scaling: factor on the scores, default 1/sqrt(D).
        window_size: W keys including the query's own, as Hugging Face counts them; None for all.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``, after scaling (Gemma 2).
        sinks: [Hq], a logit for each head that joins the softmax's denominator only (gpt-oss).
        attention_mask: broadcastable to [B, Hq, Sq, Skv]: boolean (True: attend) or additive in a float dtype;
            on top of is_causal and window_size.
        kv_len: [B] int32 on q's device, the number of keys that are valid in each row (a static cache is longer).

    Returns:
        [B, Hq, Sq, Dv] in q's dtype; a query that sees no key gives zeros. Differentiable in q, k, v and sinks; a
        gradient for attention_mask is PyTorch's. From 1024 queries on the gradient of q may be summed by atomics, in
        another order each time: not with ``torch.use_deterministic_algorithms(True)``.
    """


@dispatch("fmha_decode")
def fmha_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float | None = None,
    kv_len_per_split: int | None = None,
    kv_len: Tensor | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Attention of one new token over its cache, the keys split among blocks and merged (flash-decoding, Dao 2023).

    Args:
        q: [B, Hq, 1, D], fp32, fp16 or bf16.
        k, v: [B, Hkv, Skv, D] and [B, Hkv, Skv, Dv], any strides.
        sm_scale: factor on the scores, default 1/sqrt(D).
        kv_len_per_split: how many keys one block takes; None picks from shape and GPU.
        kv_len: [B] int32 on q's device, the number of valid keys in each row; None for Skv. It is read on the device:
            a captured graph replays with the lengths of the moment.
        window_size, soft_cap, sinks, attention_mask: as in :func:`fmha`, the query standing at ``kv_len - 1``.

    Returns:
        [B, Hq, 1, Dv] in q's dtype. Not differentiable.
    """


@dispatch("splitk_reduce")
def splitk_reduce(partial: Tensor, lse: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """Merges attention over splits of the keys: ``sum_s exp(lse_s - lse) partial_s``, ``lse = log sum_s exp(lse_s)``.

    Args:
        partial: [B, Hq, splits, Dv] fp32, each split's normalised output.
        lse: [B, Hq, splits] fp32, the natural log of each split's sum of exponentials; -inf for one that saw no key.
        dtype: of the result.
        sinks: [Hq], a logit for each head added to the denominator.

    Returns:
        [B, Hq, 1, Dv]; zeros where every split is -inf.
    """


@dispatch("cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy over the last dimension, in fp32, for rows of any length; it never waits for the GPU.

    ``(1 - s) * (lse - x[target]) + s * (lse - mean(x)) + z_loss * lse^2`` with ``lse = log(sum(exp(x)))``.

    Args:
        logits: [..., V], fp32, fp16 or bf16, any strides.
        target: [...] of classes in [0, V) or ignore_index, int64 or int32. Any other value is an error in torch; the
            cuTile kernels, which cannot raise, give that row NaN.
        ignore_index: rows with this target count for nothing, in the gradient neither.
        label_smoothing: s, how much of each target is spread over all classes (Szegedy et al. 2016, arXiv:1512.00567).
        softcap: x is ``softcap * tanh(logits / softcap)`` (Gemma 2), or the logits themselves if None.
        z_loss: weight of the penalty on lse (PaLM, arXiv:2204.02311).
        reduction: "mean" over the rows that are not ignored (NaN if all are), "sum" or "none".

    Returns:
        A scalar, or [...] for "none", in fp32. Differentiable in logits.
    """


@dispatch("fused_linear_cross_entropy")
def fused_linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    chunk_size: int = 4096,
    reduction: str = "mean",
) -> Tensor:
    """``cross_entropy(hidden_states @ weight.T + bias, target)`` without ever holding all of the logits.

    Logits exist for a chunk of rows at a time. Where weight needs a gradient they are in the memory of that, and the
    call takes, beside the gradients, the memory of 2^24 logits, or of 1024 for every row if that is more; if no
    more than H / 2 rows make more than 2^24 logits, of at most 2304 for every row. In fp16 the gradient of weight is
    held in fp32 until the backward pass. The call never waits for the GPU.

    Args:
        hidden_states: [..., H], fp32, fp16 or bf16.
        weight: [V, H], the output layer's, in the dtype of hidden_states.
        target: [...] of classes in [0, V) or ignore_index, int64 or int32, as in :func:`cross_entropy`.
        bias: [V] or None, in the dtype of hidden_states.
        ignore_index: rows with this target count for nothing, in the gradients neither.
        chunk_size: the most rows whose logits exist at a time; fewer do where that takes no longer. If weight needs a
            gradient they are in its memory: as many as fit, H and in fp16 2 * H, if 4096 or more are asked for. Then
            logits of rows beyond the first chunk are computed twice. More than 4096 are taken at their word: what does
            not fit, the logits of chunk_size - H rows, takes memory of its own, and of up to chunk_size rows none is
            computed twice.
        reduction: "mean" over the rows that are not ignored (NaN if all are), "sum" or "none". With "none" the backward
            pass computes the logits again.

    Returns:
        A scalar, or [...] for "none", in fp32. Differentiable in hidden_states, weight and bias.
    """
