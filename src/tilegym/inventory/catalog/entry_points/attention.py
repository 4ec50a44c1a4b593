"""Entry points of Solutions: attention, prefill and decode."""

import torch

from tilegym.ops import fmha
from tilegym.ops import fmha_decode
from tilegym.ops import splitk_reduce as splitk_reduce_op


def attention(q, k, v, scaling, is_causal):
    return fmha(q, k, v, scaling, is_causal, backend="cutile")


def attention_window(q, k, v, scaling, window):
    return fmha(q, k, v, scaling, window_size=window, backend="cutile")


def attention_masked(q, k, v, scaling, mask):
    return fmha(q, k, v, scaling, is_causal=False, attention_mask=mask, backend="cutile")


def attention_soft_cap(q, k, v, scaling, soft_cap, window):
    return fmha(q, k, v, scaling, window_size=window, soft_cap=soft_cap, backend="cutile")


def attention_sinks(q, k, v, scaling, sinks):
    return fmha(q, k, v, scaling, sinks=sinks, backend="cutile")


def attention_decode(q, k, v, scaling, kv_len):
    return fmha_decode(q, k, v, scaling, kv_len=kv_len, backend="cutile")


def splitk_reduce(partial, lse):
    return splitk_reduce_op(partial, lse, torch.float32, backend="cutile")
