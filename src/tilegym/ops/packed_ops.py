"""The declarations of attention over packed sequences and pages, as :mod:`tilegym.ops.ops` has those of the others."""

from torch import Tensor

from tilegym.backend import dispatch


@dispatch("fmha_varlen")
def fmha_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scaling: float | None = None,
    is_causal: bool = True,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`tilegym.ops.fmha` of N sequences that lie one behind the other, each with lengths of its own.

    Sequence n has the queries ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1]`` and sees the keys ``cu_seqlens_k[n]`` to
    ``cu_seqlens_k[n + 1]``, its last query standing at its last key: prompts, chunks of prompts and single tokens to
    decode may come together. A sequence may be empty.

    Args:
        q: [Tq, Hq, D], fp32, fp16 or bf16, any strides.
        k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv]; Hq is a multiple of Hkv (grouped queries).
        cu_seqlens_q, cu_seqlens_k: [N + 1] int32 or int64 on q's device, from 0 on, never falling, at most Tq and Tk.
            They are read on the device: a captured graph replays with those of the moment.
        max_seqlen_q, max_seqlen_k: no sequence has more queries or keys; None: unknown. With ``max_seqlen_q=1`` blocks
            share the keys evenly, whatever the lengths.
        scaling, is_causal, window_size, soft_cap, sinks: as in :func:`tilegym.ops.fmha`.

    Returns:
        [Tq, Hq, Dv] in q's dtype; zeros for a query that sees no key and for those behind the last sequence.
        Not differentiable in the cuTile kernels; PyTorch serves calls that want gradients.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """


@dispatch("fmha_paged_decode")
def fmha_paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    scaling: float | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`tilegym.ops.fmha_decode` of N sequences whose keys and values lie in pages; it writes the new ones there.

    Sequence n has ``cu_seqlens_k[n + 1] - cu_seqlens_k[n]`` keys, the new token's among them. Key j is row ``j % S`` of
    page ``block_table[n, j // S]``. One without keys, as those are that fill up a captured graph, writes nothing.

    Args:
        q: [N, Hq, D], fp32, fp16 or bf16; k: [N, Hkv, D]; v: [N, Hkv, Dv]: those of the new tokens, any strides.
        k_pages: [P, S, Hkv, D]; v_pages: [P, S, Hkv, Dv]; written in place at the last key of each sequence. They may
            be views of one tensor in which their pages take turns.
        block_table: [N, M] int32 or int64 on q's device; what stands behind a sequence's last page is not looked at.
            A page that is written to holds no other keys of this call: not another sequence's, nor earlier ones.
        cu_seqlens_k: [N + 1] int32 or int64, never falling, no sequence longer than M pages. As the table, it is read
            on the device: a captured graph replays with those of the moment.
        scaling, window_size, soft_cap, sinks: as in :func:`tilegym.ops.fmha`, the query standing at the last key.

    Returns:
        [N, Hq, Dv] in q's dtype; zeros for sequences without keys. Not differentiable in the cuTile kernels.

    Raises:
        ValueError: shapes or options do not fit.
        TypeError: dtypes do not fit.
    """
