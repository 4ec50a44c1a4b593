"""The cache of a session of :mod:`.decode_graph`: of fixed size, and it counts on the device, where graphs can."""

import math
import weakref

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.cache_utils import LinearAttentionLayer
from transformers.cache_utils import StaticLayer

RECURRENT = "linear_attention"  # layers with states of fixed size, which they change in place


class _Layer(StaticLayer):
    """Keys and values [B, Hkv, capacity, D] of one layer; where they go is the same for all layers."""

    is_compileable = False  # so generate neither writes masks out nor calls torch.compile
    is_sliding = False  # a window is the mask's business

    def __init__(self, cache: "DecodeCache") -> None:
        super().__init__(cache.capacity)
        self.cache = weakref.proxy(cache)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        if self.cache.started:
            positions = self.cache.positions_of(self, count).to(key_states.device)
            self.keys.index_copy_(2, positions, key_states)
            self.values.index_copy_(2, positions, value_states)
        else:  # a prompt of many tokens, which a plain copy puts in faster
            self.keys[:, :, :count].copy_(key_states)
            self.values[:, :, :count].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int | Tensor:
        return self.cache.length if self.cache.started else 0


class DecodeCache(Cache):
    """A cache of fixed size for the steps of one session.

    Attributes:
        capacity: how many tokens it has room for.
        length: [1] int64, how many it holds; of all layers alike, and on the device, where graphs can count. Layers may
            be on others.
        positions: [B, 1] int64, of the sequences' next tokens, which :meth:`advance` counts up with it; of models that
            count in several ways, such as time, height and width, [planes, B, 1].
        started: whether it holds any.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        device: torch.device,
        kinds: tuple[str, ...] = (),
        batch_size: int = 1,
        planes: tuple[int, ...] = (),
    ) -> None:
        self.capacity = capacity
        shape = (*planes, batch_size, 1)
        self._counters = torch.zeros(1 + math.prod(shape), dtype=torch.int64, device=device)  # one launch counts all
        self.length, self.positions = self._counters[:1], self._counters[1:].view(shape)
        self.started = False
        self._positions: Tensor | None = None
        recurrent = [i < len(kinds) and kinds[i] == RECURRENT for i in range(num_layers)]
        super().__init__(layers=[LinearAttentionLayer() if linear else _Layer(self) for linear in recurrent])
        self.recurrent = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        self._first = next(layer for layer in self.layers if isinstance(layer, _Layer))

    def positions_of(self, layer: _Layer, count: int) -> Tensor:
        """Where a layer puts its next ``count`` tokens; found for all by the first one that asks in a step."""
        if layer is self._first or self._positions is None:
            self._positions = torch.arange(count, device=self.length.device) + self.length
        return self._positions

    def set_length(self, length: int) -> None:
        self.length.fill_(length)
        self._positions = None
        self.started = length > 0
        if not self.started:
            self.set_has_states(False)

    def set_has_states(self, whether: bool) -> None:
        """Whether the next tokens go on from the states of the recurrent layers, or replace them."""
        for layer in self.recurrent:
            held = layer.has_previous_state  # a dict; in older transformers a bool
            layer.has_previous_state = dict.fromkeys(held, whether) if isinstance(held, dict) else whether

    def advance(self) -> None:
        """Counts the token that every layer has put in."""
        self._counters.add_(1)
        self._positions = None

    def state(self) -> list[Tensor]:
        """What a step changes besides the keys and values that it appends."""
        return [self._counters, *self.states()]

    def states(self) -> list[Tensor]:
        """Those of the recurrent layers."""
        states: list[Tensor] = []
        for layer in self.recurrent:
            for held in (layer.conv_states, layer.recurrent_states):  # a dict; in older transformers a tensor
                states += [t for t in (held.values() if isinstance(held, dict) else (held,)) if t is not None]
        return states
