"""The attention of transformers' continuous batching: what its attention functions are given, by TileGym's kernels.

A batch is one row of tokens, those of all its requests one behind the other, without a mask. Keys and values lie in
transformers' cache, in pages, which its ``update`` writes and reads. In transformers 5.24 the layers call it, and an
attention function gets all keys and values; in 5.10 to 5.17 that gets the cache and calls it.
"""

import functools
import inspect
from typing import Any

from torch import Tensor
from torch import nn

from tilegym.errors import UnsupportedError
from tilegym.ops import fmha_varlen
from tilegym.ops.attn_interface import as_autocast_wants

BY_LAYERS, BY_ATTENTION = "by layers", "by attention"


@functools.cache
def who_updates_the_cache() -> str | None:
    """BY_LAYERS or BY_ATTENTION; None for a transformers whose continuous batching is another one."""
    try:
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
    except ImportError:
        return None
    parameters = inspect.signature(PagedAttentionCache.update).parameters
    if list(parameters)[1:] == ["key_states", "value_states", "layer_idx", "kwargs"]:
        return BY_LAYERS
    if list(parameters)[1:] == ["key_states", "value_states", "layer_idx", "read_index", "write_index"]:
        return BY_ATTENTION
    return None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    cache: Any,
    backend: str | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | dict[str, Tensor],
    read_index: list[Tensor],
    write_index: list[Tensor],
    block_table: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | dict[str, int] | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of a batch: query [1, Hq, Tq, D]; key and value [1, Hkv, Tk, D], or [1, Hkv, Tq, D] with ``cache``.

    ``max_length_q`` and ``max_length_k`` are what older transformers call ``max_seqlen_q`` and ``max_seqlen_k``.

    Returns [1, Tq, Hq, D] and no attention weights.

    Raises:
        UnsupportedError: for pages that the attention is to read by a block table.
    """
    if block_table is not None:
        raise UnsupportedError("TileGym's attention reads no block tables")
    if cache is None:
        key, value, longest_q, longest_k = key[0].transpose(0, 1), value[0].transpose(0, 1), max_length_q, max_length_k
    else:
        layer = module.layer_idx
        # Shared by layers of one kind; 1 is no window.
        window = cache.sliding_windows[layer]
        sliding_window = None if window == 1 else window
        if isinstance(cu_seq_lens_k, dict):
            kind = "full_attention" if sliding_window is None else "sliding_attention"
            cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
        # [Tk, Hkv, D]
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=layer, read_index=read_index, write_index=write_index
        )
        longest_q, longest_k = max_seqlen_q, max_seqlen_k
    query, key, value = as_autocast_wants(query[0].transpose(0, 1), key, value)
    out = fmha_varlen(
        query, key, value, cu_seq_lens_q, cu_seq_lens_k, longest_q, longest_k, scaling, True, sliding_window, softcap,
        s_aux, backend=backend,
    )  # fmt: skip
    return out[None].contiguous(), None
