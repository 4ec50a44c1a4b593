"""The attention of transformers' continuous batching: what its attention functions are given, by TileGym's kernels.

A batch is one row of tokens, those of all its requests one behind the other, without a mask. Keys and values lie in
transformers' cache, in pages, which its ``update`` writes and reads. In transformers 5.24 the layers call it, and an
attention function gets all keys and values; before, that gets the cache and calls it, from 5.19 on as the layers do.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.ops import fmha_paged_decode
from tilegym.ops import fmha_varlen
from tilegym.ops.attn_interface import as_autocast_wants

BY_LAYERS, BY_ATTENTION = "by layers", "by attention"


@functools.cache
def who_updates_the_cache() -> str | None:
    """BY_LAYERS or BY_ATTENTION; None for a transformers whose continuous batching is another one.

    Those of 5.19 to 5.23 are BY_LAYERS: attention functions call it there, but as the layers do, under their own names.
    """
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
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | dict[str, int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | dict[str, int] | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of a batch: query [1, Hq, Tq, D]; key and value [1, Hkv, Tk, D], or [1, Hkv, Tq, D], of the new tokens
    alone, with ``cache`` or ``block_table``.

    A batch of single tokens may have a block table, [N, M] with the layer's pages ``k_cache`` and ``v_cache``, or with
    ``cache`` one for each group of layers. ``max_length_q`` and ``max_length_k`` are what older transformers call
    ``max_seqlen_q`` and ``max_seqlen_k``.

    Returns [1, Tq, Hq, D] and no attention weights.
    """
    longest_q, longest_k = max_length_q, max_length_k
    if cache is not None and who_updates_the_cache() == BY_LAYERS:
        given = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, "block_table": block_table}
        given |= {"read_index": read_index, "write_index": write_index}
        key, value = cache.update(key, value, module.layer_idx, given)
        cu_seq_lens_k, longest_k, block_table = given["cu_seq_lens_k"], given["max_length_k"], given["block_table"]
        k_cache, v_cache = given.get("k_cache"), given.get("v_cache")
    elif cache is not None:
        layer = module.layer_idx
        if hasattr(cache, "sliding_windows"):  # 5.18's has none
            window = cache.sliding_windows[layer]
            sliding_window = None if window == 1 else window
        longest_q, longest_k = max_seqlen_q, max_seqlen_k
        if isinstance(cu_seq_lens_k, dict):
            kind = "full_attention" if sliding_window is None else "sliding_attention"
            cu_seq_lens_k, longest_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
        if block_table is not None:
            group, k_cache, v_cache = _pages(cache, layer)
            block_table = block_table[group]
        else:
            key, value = cache.update(
                key_states=key, value_states=value, layer_idx=layer, read_index=read_index, write_index=write_index
            )
            key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]  # from [Tk, Hkv, D]
    query, key, value = as_autocast_wants(*(x[0].transpose(0, 1) for x in (query, key, value)))
    options = (scaling, sliding_window, softcap, s_aux)
    if block_table is not None:
        out = _decode(query, key, value, k_cache, v_cache, block_table, cu_seq_lens_k, options, backend)
    else:
        scaling, *others = options
        longest = (longest_q, longest_k)
        out = fmha_varlen(
            query, key, value, cu_seq_lens_q, cu_seq_lens_k, *longest, scaling, True, *others, backend=backend
        )
    return out[None].contiguous(), None


def _pages(cache: Any, layer: int) -> tuple[int, Tensor, Tensor]:
    """A layer's group, and its pages of keys and of values, [P, S, Hkv, D]."""
    if hasattr(cache, "get_cache_for_block_table"):
        return cache.get_cache_for_block_table(layer)
    group, place = cache.layer_index_to_group_indices[layer]
    of_layer = cache.key_cache[place], cache.value_cache[place]
    return group, *(x.view(-1, cache.block_size, *x.shape[1:]) for x in of_layer)


# As the update of the cache is: compiled code would make two tensors of the pages, which may lie in one.
@torch.compiler.disable
def _decode(query, key, value, k_cache, v_cache, block_table, cu_seq_lens_k, options, backend) -> Tensor:
    return fmha_paged_decode(query, key, value, k_cache, v_cache, block_table, cu_seq_lens_k, *options, backend=backend)
