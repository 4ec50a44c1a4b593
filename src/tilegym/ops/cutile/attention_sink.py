"""``attention_sink`` and ``attention_sink_decode`` by the kernels of ``fmha`` and ``fmha_decode``."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.cutile.attention import fmha
from tilegym.ops.cutile.flash_decode import fmha_decode
from tilegym.ops.pytorch.attention_sink import with_sinks
from tilegym.ops.pytorch.attention_sink import with_sinks_decode


@register_impl("attention_sink", "cutile")
def attention_sink(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    start_q: int | torch.Tensor | None = None,
) -> torch.Tensor:
    return with_sinks("attention_sink", fmha, query, key, value, sinks, sm_scale, sliding_window, start_q)


@register_impl("attention_sink_decode", "cutile")
def attention_sink_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    start_q: int | torch.Tensor | None = None,
    kv_len_per_split: int | None = None,
) -> torch.Tensor:
    options = (sinks, sm_scale, sliding_window, start_q, kv_len_per_split)
    return with_sinks_decode("attention_sink_decode", fmha, fmha_decode, query, key, value, *options)
