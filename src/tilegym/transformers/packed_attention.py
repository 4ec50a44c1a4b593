"""Attention of images, or windows of them, that lie one behind the other: each sees itself alone.

The parts for images of Qwen2-VL, GLM-4V and their like compute so. transformers gives them at once to an attention with
"flash" in its name, and to any other one by one: hundreds of calls a layer.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch import nn

from tilegym.backend import PREFER_CUTILE
from tilegym.backend import get_current_backend
from tilegym.ops import fmha_varlen
from tilegym.ops.attn_interface import as_autocast_wants


def attends_packed(model: nn.Module) -> bool:
    """Whether modules that share the config of ``model`` are told where sequences begin, and give them at once to flash
    attention alone."""
    own = {type(module) for module in model.modules() if getattr(module, "config", None) is model.config}
    return any(map(_takes_packed, own))


def _takes_packed(module_class: type) -> bool:
    forward = inspect.unwrap(module_class.forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "is_flash_attention_requested" in names and "cu_seqlens" in inspect.signature(forward).parameters


def by_kernel(backend: str | None) -> bool:
    """Whether attention that is told ``backend`` takes several sequences at once."""
    return backend == PREFER_CUTILE or get_current_backend() == "cutile"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alone: Callable[..., tuple[Tensor, Tensor | None]],
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
    is_causal: bool | None,
    backend: str | None,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of N sequences, [1, H, T, D] each of query, key and value, from ``cu_seq_lens`` [N + 1] on.

    The kernel takes them at once; what it does not do (gradients, dropout) takes them one by one, through ``alone``.

    Returns [1, T, H, D] and None.
    """
    if cu_seq_lens_q.shape[0] == 2:
        return alone(query, key, value)[0], None
    wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if dropout or wants_gradient or not by_kernel(backend):
        lengths = [(starts[1:] - starts[:-1]).tolist() for starts in (cu_seq_lens_q, cu_seq_lens_k)]
        parts = query.split(lengths[0], 2), key.split(lengths[1], 2), value.split(lengths[1], 2)
        return torch.cat([alone(*each)[0] for each in zip(*parts, strict=True)], 1), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    packed = (t[0].transpose(0, 1) for t in as_autocast_wants(query, key, value))
    lengths = max_length_q, max_length_k
    out = fmha_varlen(
        *packed, cu_seq_lens_q, cu_seq_lens_k, *lengths, scaling, causal, None, softcap, s_aux, backend=backend
    )
    return out[None], None
