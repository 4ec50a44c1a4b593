"""Attention as transformers' models spell it out, on plain tensors: what the ops of single families are held to."""

import types

import torch
from common import device


def additive_mask(queries: int, keys: int, window: int | None = None, start: int | None = None) -> torch.Tensor:
    """[1, 1, Sq, Skv], as transformers' masking_utils make it for eager attention, the first query at ``start``."""
    start = keys - queries if start is None else start
    position = torch.arange(queries, device=device())[:, None] + start
    key = torch.arange(keys, device=device())
    visible = key <= position
    if window is not None:
        visible = visible & (key > position - window)
    return torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]


def _module(q: torch.Tensor, k: torch.Tensor, training: bool = False, **attributes) -> types.SimpleNamespace:
    return types.SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=training, **attributes)


def gpt_oss(q, k, v, sinks, scaling, mask, dropout=0.0) -> torch.Tensor:
    """[B, Hq, Sq, D] for q [B, Hq, Sq, D] and k and v [B, Hkv, Skv, D]; in training if there is dropout."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    return eager_attention_forward(_module(q, k, dropout > 0, sinks=sinks), q, k, v, mask, scaling, dropout)[
        0
    ].transpose(1, 2)


def gemma(q, k, v, scaling, soft_cap, mask, family="gemma2", dropout=0.0) -> torch.Tensor:
    """The same for Gemma 2 or, with ``family="gemma3"``, Gemma 3."""
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gemma3 import modeling_gemma3

    modeling = {"gemma2": modeling_gemma2, "gemma3": modeling_gemma3}[family]
    module = _module(q, k, dropout > 0, head_dim=q.shape[3])
    return modeling.eager_attention_forward(module, q, k, v, mask, dropout, scaling, soft_cap)[0].transpose(1, 2)
