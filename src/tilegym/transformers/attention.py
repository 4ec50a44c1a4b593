"""TileGym's attention as an implementation that transformers can choose, with the masks that it needs.

Importing this module makes the names "tilegym" (the backend of the moment) and "tilegym_cutile" known to transformers'
attention interface, and both with "_flash" behind them for :mod:`.packed_attention`; nothing changes for a model until
its config names one of them. They stay known, since a copy of a patched model may outlive the patch.

Masks are never written out where a few numbers say the same: see :class:`CausalMask`. What it cannot express (packed
sequences, overlays, custom 4D masks) comes as a full boolean or additive mask, which says everything by itself.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers import AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function
from transformers.masking_utils import causal_mask_function
from transformers.masking_utils import sdpa_mask
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.utils.import_utils import is_tracing

from tilegym.backend import PREFER_CUTILE
from tilegym.errors import UnsupportedError
from tilegym.ops import fmha
from tilegym.ops import fmha_decode
from tilegym.ops.attn_interface import as_autocast_wants
from tilegym.ops.attn_interface import fmha_interface
from tilegym.transformers.packed_attention import attends_packed
from tilegym.transformers.packed_attention import by_kernel
from tilegym.transformers.packed_attention import packed_attention
from tilegym.transformers.paged_attention import BY_ATTENTION
from tilegym.transformers.paged_attention import paged_attention
from tilegym.transformers.paged_attention import who_updates_the_cache


class CausalMask(BlockMask):
    """A causal mask that is not written out: what the kernels need to know of it.

    It is a BlockMask because that is the one mask besides a 4D tensor that transformers hands on untouched.

    Attributes:
        keys: [B, 1, 1, Skv] boolean, the keys that are not padding; None if all are valid.
        kv_len: [B] int32, how many keys are filled (a static cache is longer); None for all. The last query stands at
            the last of them.
        window: how many keys a query sees, its own included; None for all before it.
    """

    def __init__(self, shape: tuple[int, ...], keys: Tensor | None, kv_len: Tensor | None, window: int | None) -> None:
        self._shape, self.keys, self.kv_len, self.window = shape, keys, kv_len, window

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        """As of the tensor that it stands for: some models take those of four dimensions as they are."""
        return len(self._shape)

    def to(self, device: Any, *args, **kwargs) -> "CausalMask":
        keys, kv_len = (None if t is None else t.to(device, *args, **kwargs) for t in (self.keys, self.kv_len))
        return CausalMask(self._shape, keys, kv_len, self.window)

    def contiguous(self) -> "CausalMask":
        return self

    def __getitem__(self, index: Any) -> Tensor:
        raise TypeError("the model reads its causal mask, which is not written out for TileGym's attention")

    def to_dense(self) -> Tensor:
        """The mask written out, [B or 1, 1, Sq, Skv] boolean; on the CPU if it consists of Python numbers only."""
        *_, q_len, skv = self._shape
        known = self.keys if self.keys is not None else self.kv_len
        device = "cpu" if known is None else known.device
        key = torch.arange(skv, device=device)
        last = skv if self.kv_len is None else self.kv_len.view(-1, 1, 1, 1)
        query = torch.arange(q_len, device=device).view(-1, 1) + (last - q_len)
        visible = key <= query
        if self.window is not None:
            visible = visible & (query - key < self.window)
        if self.keys is not None:
            visible = visible & self.keys
        return visible.view(-1, 1, q_len, skv)

    def __repr__(self) -> str:
        padded, filled = self.keys is not None, self.kv_len is not None
        return f"CausalMask(shape={self._shape}, padded={padded}, kv_len={filled}, window={self.window})"

    __str__ = __repr__


class WindowedCausal:
    """transformers' ``sliding_window_causal_mask_function(window)``, as something that says what its window is."""

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, batch_idx: Any, head_idx: Any, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx > q_idx - self.window)


_window_pattern = sliding_window_causal_mask_function(1)


def _window_of(mask_function: Callable) -> int | None:
    """The W of transformers' sliding-window causal mask function; None for any other function.

    torch.compile does not let one look into closures: to it only :class:`WindowedCausal` has a window.
    """
    if isinstance(mask_function, WindowedCausal):
        return mask_function.window
    if mask_function is causal_mask_function or torch.compiler.is_compiling():
        return None
    if getattr(mask_function, "__code__", None) is not _window_pattern.__code__:
        return None
    parts, pattern = (f.__closure__[0].cell_contents for f in (mask_function, _window_pattern))
    if len(parts) != 2 or parts[0].__code__ is not pattern[0].__code__ or parts[1] is not causal_mask_function:
        return None
    return parts[0].__closure__[0].cell_contents


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured, by Python and not while torch.compile looks at this."""
    return not torch.compiler.is_compiling() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_full = threading.local()


@contextlib.contextmanager
def full_masks(full: bool) -> Iterator[None]:
    """Within the block a graph that is captured may rely on it, if ``full``, that nothing is padding."""
    _full.value = full
    try:
        yield
    finally:
        _full.value = False


def _relies_on_full() -> bool:
    """Whether a graph is being captured of a call without padding."""
    return getattr(_full, "value", False) and _is_capturing()


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    allow_is_bidirectional_skip: bool = False,
    **kwargs,
) -> Tensor | CausalMask | None:
    """The mask function that transformers calls once per forward; see ``transformers.masking_utils.sdpa_mask``.

    Returns:
        None (causal, the last query at the last key, one query or as many as keys; or of an encoder, no padding), a
        :class:`CausalMask`, a boolean [B, 1, 1, Skv] (an encoder's padding), or a full boolean mask.
        On a GPU it waits for the device only before a prefill, to learn that nothing is padded.
    """
    tracing = is_tracing(attention_mask)  # what the device holds cannot be looked at
    # A CUDA graph being captured has to hold the very mask that was given to the steps before it.
    compiling = tracing and not _is_capturing()
    window = _window_of(mask_function)
    compact = mask_function is causal_mask_function or window is not None
    padding = attention_mask is None or attention_mask.ndim == 2
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip and padding and not use_vmap:
        return _padding_mask(attention_mask, kv_offset, kv_length, tracing)
    if isinstance(q_offset, Tensor) and q_offset.device.type == "cpu" and not compiling:
        q_offset = int(q_offset)
    # How many keys there are up to the last query; where a static cache keeps count on the device, that many more.
    filled = q_length - kv_offset
    static = isinstance(q_offset, Tensor)
    if not static:
        filled += q_offset
        # A caller that wants no shortcut is going to index the mask, unless a cache with spare room made it say so.
        compact = compact and (filled < kv_length or (filled == kv_length and allow_is_causal_skip))
    if not compact or use_vmap or (attention_mask is not None and attention_mask.ndim != 2):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
    if window is not None and window >= kv_length:
        window = None
    keys = None
    if attention_mask is not None:
        keys = attention_mask[:, kv_offset : kv_offset + kv_length]
        if tracing and _relies_on_full():
            keys = None
        elif not tracing and (q_length > 1 or keys.device.type == "cpu"):
            relevant = keys if static else keys[:, :filled]
            if relevant.shape[1] == (kv_length if static else filled) and bool(relevant.all()):
                keys = None
    if keys is not None:
        if keys.shape[1] < kv_length:
            keys = nn.functional.pad(keys, (0, kv_length - keys.shape[1]))
        keys = keys.to(torch.bool)[:, None, None, :]
    kv_len = None
    if static:
        # In one launch: it is a part of every decoding step.
        kv_len = torch.add(q_offset, filled, out=q_offset.new_empty(q_offset.shape, dtype=torch.int32))
        kv_len = kv_len.to(device).reshape(1).expand(batch_size).contiguous()
    elif filled < kv_length:
        kv_len = torch.full((batch_size,), filled, dtype=torch.int32, device=device)
    # Without a mask, a prefill with more keys than queries would mean to transformers that it starts at the first key.
    if keys is None and kv_len is None and window is None and q_length in (1, kv_length):
        return None
    return CausalMask((batch_size, 1, q_length, kv_length), keys, kv_len, window)


def _padding_mask(attention_mask: Tensor | None, start: int, length: int, tracing: bool) -> Tensor | None:
    """The mask of an encoder, whose queries see all keys but padding: [B, 1, 1, Skv] boolean; None for no padding."""
    if attention_mask is None or (tracing and _relies_on_full()):
        return None
    if not tracing and bool(attention_mask.all()):
        return None
    keys = attention_mask[:, start : start + length].to(torch.bool)
    return nn.functional.pad(keys, (0, length - keys.shape[1]))[:, None, None, :]


def _attention_forward(backend: str | None, packed: bool = False) -> Callable:
    def attention_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | CausalMask | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        cache: Any = None,
        output_attentions: bool = False,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as transformers calls it: query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D].

        Returns [B, Sq, Hq, D], and None or, where they are asked for, the attention weights [B, Hq, Sq, Skv]. Those go
        to PyTorch, as do dropout and a position bias. Dropout, soft cap and sinks may come together.

        In continuous batching the arguments are those of :func:`paged_attention`, and of images that lie one behind
        the other, with ``cu_seq_lens_q``, those of :func:`packed_attention`.

        Raises:
            UnsupportedError: for dropout, weights or a position bias in continuous batching.
        """
        if kwargs.get("write_index") is not None:
            if dropout or output_attentions or position_bias is not None:
                raise UnsupportedError("continuous batching has no dropout, attention weights or position bias")
            options = (scaling, sliding_window, softcap, s_aux, cache, backend)
            return paged_attention(module, query, key, value, *options, **kwargs)
        if packed and kwargs.get("cu_seq_lens_q") is not None:
            alone = functools.partial(
                attention_forward, module, attention_mask=None, scaling=scaling, dropout=dropout, softcap=softcap,
                s_aux=s_aux, is_causal=is_causal, output_attentions=output_attentions,
            )  # fmt: skip
            return packed_attention(
                module, query, key, value, alone, scaling, dropout, softcap, s_aux, is_causal, backend, **kwargs
            )
        if cache is not None:
            raise UnsupportedError("a paged cache outside of continuous batching")
        capped_or_sinks = softcap is not None or s_aux is not None
        if output_attentions:
            return _attention_with_weights(
                module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, s_aux, is_causal,
                position_bias,
            )  # fmt: skip
        if (dropout and not capped_or_sinks) or position_bias is not None:
            return _torch_attention(
                module, query, key, value, attention_mask,
                scaling=scaling, dropout=dropout, is_causal=is_causal, softcap=softcap, s_aux=s_aux,
                position_bias=position_bias, **kwargs,
            )  # fmt: skip
        query, key, value = as_autocast_wants(query, key, value)
        kv_len = window = None
        if attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if causal and 1 < query.shape[2] < key.shape[2]:
                # As in transformers' SDPA: a prefill into a longer, empty static cache.
                key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            if sliding_window is not None and sliding_window < key.shape[2]:
                window = sliding_window
        elif attention_mask.__class__ is CausalMask:
            causal, kv_len, window = True, attention_mask.kv_len, attention_mask.window
            attention_mask = attention_mask.keys
        else:
            causal = False
        if dropout:
            out = fmha_interface(
                query, key, value, scaling, causal, window, softcap, s_aux, attention_mask, kv_len, dropout
            )
        elif query.shape[2] == 1 and not query.requires_grad and not key.requires_grad:
            out = fmha_decode(
                query, key, value, scaling, None, kv_len, window, softcap, s_aux, attention_mask, backend=backend
            )
        else:
            out = fmha(
                query, key, value, scaling, causal, window, softcap, s_aux, attention_mask, kv_len, backend=backend
            )
        # Contiguous, as that of transformers' SDPA: some models take a view of it. Others would copy it in a reshape.
        return out.transpose(1, 2).contiguous(), None

    return attention_forward


def _attention_in_batching(backend: str | None) -> Callable:
    """The attention under a name for continuous batching, for which no masks are made: it can do nothing else."""
    attention_forward = _attention_forward(backend)

    def attention_in_batching(*args, **kwargs) -> tuple[Tensor, Tensor | None]:
        if kwargs.get("write_index") is None:
            raise UnsupportedError("the model is batching continuously: stop its manager first")
        return attention_forward(*args, **kwargs)

    return attention_in_batching


def _torch_attention(module, query, key, value, attention_mask, *, softcap, s_aux, **kwargs):
    """What the kernels do not do, by transformers' SDPA integration."""
    if softcap is not None or s_aux is not None:
        raise UnsupportedError("attention with a soft cap or sinks has no position bias")
    if isinstance(attention_mask, CausalMask):
        attention_mask = attention_mask.to_dense().to(query.device)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _attention_with_weights(
    module, query, key, value, mask, scaling, dropout, window, softcap, s_aux, is_causal, position_bias
) -> tuple[Tensor, Tensor]:
    """Attention in the steps of transformers' eager functions, which hold the weights."""
    query, key, value = as_autocast_wants(query, key, value)
    q_len = query.shape[2]
    if mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        if 1 < q_len < key.shape[2]:
            key, value = key[:, :, :q_len], value[:, :, :q_len]
        mask = CausalMask((1, 1, q_len, key.shape[2]), None, None, window)
    if isinstance(mask, CausalMask):
        mask = mask.to_dense().to(query.device)
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if s_aux is not None:  # one more key without a value
        scores = torch.cat([scores, s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, torch.float32).to(query.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    weights = nn.functional.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


NAMES = {None: "tilegym", PREFER_CUTILE: "tilegym_cutile"}  # by the backend
NAMES_OF_PACKED = {backend: f"{name}_flash" for backend, name in NAMES.items()}

for _names in (NAMES, NAMES_OF_PACKED):
    for _backend, _name in _names.items():
        AttentionInterface.register(_name, _attention_forward(_backend, packed=_names is NAMES_OF_PACKED))
        AttentionMaskInterface.register(_name, causal_mask)


def name_for(model: nn.Module, backend: str | None) -> str:
    """The name by which ``model`` shall choose its attention."""
    return (NAMES_OF_PACKED if attends_packed(model) else NAMES)[backend]


def takes_packed(model: nn.Module) -> bool:
    """Whether the attention of ``model`` takes sequences that lie one behind the other at once, by a kernel."""
    name = model.config._attn_implementation
    return name == NAMES_OF_PACKED[PREFER_CUTILE] or (name == NAMES_OF_PACKED[None] and by_kernel(None))


def name_in_batching(name: str) -> str | None:
    """What the attention ``name`` is called while transformers batches continuously; None if it cannot serve that."""
    updates = who_updates_the_cache()
    # For a name with the prefix transformers makes no masks: none is registered for it.
    return None if updates is None else f"paged|{name}" if updates == BY_ATTENTION else name


if who_updates_the_cache() == BY_ATTENTION:
    for _backend, _name in NAMES.items():
        AttentionInterface.register(name_in_batching(_name), _attention_in_batching(_backend))
