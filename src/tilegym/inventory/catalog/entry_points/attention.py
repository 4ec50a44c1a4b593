"""Entry points of Solutions: attention, prefill and decode."""

import torch

from tilegym.ops import attention_sink as attention_sink_op
from tilegym.ops import attention_sink_decode as attention_sink_decode_op
from tilegym.ops import fmha
from tilegym.ops import fmha_decode
from tilegym.ops import fmha_paged_decode
from tilegym.ops import fmha_varlen
from tilegym.ops import gemma_attention as gemma_attention_op
from tilegym.ops import gemma_attention_decode as gemma_attention_decode_op
from tilegym.ops import mla as mla_op
from tilegym.ops import mla_decoding as mla_decoding_op
from tilegym.ops import mla_decoding_split_kv as mla_decoding_split_kv_op
from tilegym.ops import splitk_reduce as splitk_reduce_op


def attention(q, k, v, scaling, is_causal):
    return fmha(q, k, v, scaling, is_causal, backend="cutile")


def attention_window(q, k, v, scaling, window):
    return fmha(q, k, v, scaling, window_size=window, backend="cutile")


def attention_masked(q, k, v, scaling, mask):
    return fmha(q, k, v, scaling, is_causal=False, attention_mask=mask, backend="cutile")


def attention_sinks(q, k, v, scaling, sinks):
    return fmha(q, k, v, scaling, sinks=sinks, backend="cutile")


def attention_decode(q, k, v, scaling, kv_len):
    return fmha_decode(q, k, v, scaling, kv_len=kv_len, backend="cutile")


def attention_packed(q, k, v, cu_seqlens, scaling):
    return fmha_varlen(q, k, v, cu_seqlens, cu_seqlens, scaling=scaling, backend="cutile")


def attention_paged_decode(q, k, v, k_pages, v_pages, block_table, cu_seqlens_k, scaling):
    return fmha_paged_decode(q, k, v, k_pages, v_pages, block_table, cu_seqlens_k, scaling, backend="cutile")


def splitk_reduce(partial, lse):
    return splitk_reduce_op(partial, lse, torch.float32, backend="cutile")


def gemma_attention(q, k, v, scaling, soft_cap, window):
    return gemma_attention_op(q, k, v, scaling, window, soft_cap, backend="cutile")


def gemma_attention_decode(q, k, v, scaling, soft_cap, kv_len):
    return gemma_attention_decode_op(q, k, v, scaling, soft_cap=soft_cap, kv_len=kv_len, backend="cutile")


def attention_sink(query, key, value, sinks, scaling):
    return attention_sink_op(query, key, value, sinks, scaling, backend="cutile")


def attention_sink_decode(query, key, value, sinks, scaling):
    return attention_sink_decode_op(query, key, value, sinks, scaling, backend="cutile")


def mla(q, k, v, qpe, kpe, scaling, is_causal):
    return mla_op(q, k, v, qpe, kpe, is_causal, scaling, backend="cutile")


def mla_decoding(q, qpe, kv, kpe, scaling):
    return mla_decoding_op(q, qpe, kv, kpe, scaling, backend="cutile")


def mla_decoding_split_kv(q, qpe, kv, kpe, scaling, kv_len):
    return mla_decoding_split_kv_op(q, qpe, kv, kpe, scaling, kv_len=kv_len, backend="cutile")
