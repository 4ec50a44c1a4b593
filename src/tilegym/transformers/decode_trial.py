"""Whether a layer's fused decoding step is what the layer computes: both are run, on random hidden states."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch import nn

from tilegym.backend import is_backend_available
from tilegym.transformers.attention import CausalMask
from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.decode_cache import RECURRENT
from tilegym.transformers.decode_cache import DecodeCache
from tilegym.transformers.decode_layer import is_gated
from tilegym.transformers.decode_layer import is_linear
from tilegym.transformers.decode_layer import most_sequences
from tilegym.transformers.rotary_rows import rotary_of

TRIES = 4
BEHIND = 5  # more than a convolution of linear attention looks back
PROMPTS = 512, 509  # tokens: a multiple of 16, and of nothing, which the compiler makes use of


def kind_of(layer: nn.Module) -> tuple:
    """What one trial holds for: some layers of a model may have experts, a window, or linear attention."""
    attention = _attention_of(layer)
    types = getattr(getattr(attention, "config", None), "layer_types", None)
    return type(layer), type(getattr(layer, "mlp", None)), types and types[attention.layer_idx]


def _attention_of(layer: nn.Module) -> nn.Module:
    return layer.linear_attn if is_linear(layer) else layer.self_attn


@torch.no_grad()
def computes_the_same(layer: nn.Module, rotary: nn.Module, forward: Callable) -> bool:
    """Whether a step by ``forward`` is what the layer computes: tried on its weights, behind steps of the layer's own.

    For a rounding a router may choose another expert, so that some tokens are tried; another formula would show in all.
    On a GPU the kernels of all this, and of a prompt, are compiled first, side by side.
    """
    modes = [(module, module.training) for module in layer.modules()]
    try:
        layer.eval()
        tries = range(1 if is_gated(layer) else TRIES)
        counts = {1, min(3, most_sequences(layer))}

        def run() -> None:
            for length in PROMPTS:
                trial = _Trial(layer, rotary, 1, 0, length)
                trial.run(type(layer).forward, trial.new_cache(), slice(0, length))
            for count in counts:
                _same_behind(0, count, layer, rotary, forward)

        if is_backend_available("cutile"):
            from tilegym.backend.cutile.compile_ahead import compile_ahead

            compile_ahead(run, layer.post_attention_layernorm.weight.device)
        return all(any(_same_behind(seed, count, layer, rotary, forward) for seed in tries) for count in counts)
    finally:
        for module, training in modes:
            module.training = training


def _same_behind(seed: int, sequences: int, layer: nn.Module, rotary: nn.Module, forward: Callable) -> bool:
    trial, results = _Trial(layer, rotary, sequences, seed, BEHIND + 1), []
    for step in (type(layer).forward, forward):
        cache = trial.new_cache()
        for token in range(BEHIND):
            trial.run(type(layer).forward, cache, slice(token, token + 1))
        results.append(trial.run(step, cache, slice(BEHIND, BEHIND + 1)))
    expected, got = results
    # Sums in another order: a few roundings of the dtype apart, relative to the largest element.
    return bool((got - expected).abs().max() <= 8 * torch.finfo(got.dtype).eps * expected.abs().max())


class _Trial:
    """Random hidden states of some sequences for a layer, and what it needs besides to run on them."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, sequences: int, seed: int, length: int) -> None:
        weight = layer.post_attention_layernorm.weight
        numbers = torch.randn(sequences, length, weight.shape[0], generator=torch.Generator().manual_seed(seed))
        where = next(rotary.buffers(), weight).device  # layers may be on several
        self.layer, self.hidden = layer, numbers.to(weight.device, weight.dtype)
        self.linear_attention = is_linear(layer)
        index = _attention_of(layer).layer_idx
        self.window = getattr(_attention_of(layer), "sliding_window", None)
        self.kinds = (*([""] * index), RECURRENT if self.linear_attention else "", "")
        by_type = "layer_type" in inspect.signature(type(rotary).forward).parameters  # as Gemma's
        types = (layer.self_attn.config.layer_types[index],) if by_type else ()
        positions = torch.arange(length, device=where) + torch.arange(sequences, device=where)[:, None]
        found = rotary_of(rotary, self.hidden.to(where), positions, types)
        alone = isinstance(found, Tensor)  # complex numbers, as DeepSeek-V2's
        self.embeddings = found.to(weight.device) if alone else tuple(t.to(weight.device) for t in found)

    def new_cache(self) -> DecodeCache:
        sequences, length, _ = self.hidden.shape
        return DecodeCache(len(self.kinds), max(16, length), self.hidden.device, self.kinds, sequences)

    def run(self, forward: Callable, cache: DecodeCache, tokens: slice) -> Tensor:
        count, sequences = tokens.stop - tokens.start, len(self.hidden)
        cache.set_length(tokens.start)
        cache.positions_of(cache.layers[0], count)
        filled = None  # as of a prompt
        if count == 1:
            filled = torch.full((sequences,), tokens.stop, dtype=torch.int32, device=self.hidden.device)
        mask = None
        if not self.linear_attention:
            window = self.window if self.window and self.window < cache.capacity else None  # as transformers' mask
            mask = CausalMask((sequences, 1, count, cache.capacity), None, filled, window)
        alone = isinstance(self.embeddings, Tensor)  # complex numbers, as DeepSeek-V2's
        return forward(
            self.layer,
            self.hidden[:, tokens],
            attention_mask=mask,
            use_cache=True,
            position_embeddings=self.embeddings[:, tokens] if alone else tuple(t[:, tokens] for t in self.embeddings),
            **{CACHE: cache},
        )
