"""Prompts as CUDA graphs: the first token of ``generate`` does not wait for the host either.

What a prompt takes is captured over buffers with room for a little more (:func:`room_for`), so that prompts of similar
lengths share a graph. Behind the prompt's last token others fill the room: attention is causal, so that none of the
prompt sees them, and the keys that they leave in the cache lie behind its length until generated tokens replace them.
Layers of linear attention get them as padding before the prompt (:mod:`.prompt_states`).

The second prompt that fits a graph is captured, and from the third on they are replayed; not where the GPU takes longer
for it than its host. The logits of a graph, and the states of layers that have such, are compared with those of the
model's own prefill when it is captured, and of the first prompt that does not fill its room. Models with hooks, and in
training, have none.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.decode_cache import DecodeCache
from tilegym.transformers.graph_capture import all_modules_are_hooked
from tilegym.transformers.graph_capture import capture
from tilegym.transformers.graph_capture import distance
from tilegym.transformers.graph_capture import is_hooked
from tilegym.transformers.graph_capture import warn
from tilegym.transformers.prompt_states import linear_attentions
from tilegym.transformers.prompt_states import room_comes_first

MOST_TOKENS = 8192  # of all sequences together: what a graph computes with stays allocated
MOST_GRAPHS = 32  # of one session
BOUND_BY_HOST = 0.7  # the share of a prefill's time, from which on its host is what it waits for
# Of logits and states, by their norm; other dtypes 0.2: a token goes to other experts for a rounding.
_CLOSE = {torch.float32: 1e-2, torch.float64: 1e-2}


def room_for(length: int) -> int:
    """How many tokens a graph for a prompt of ``length`` has room for: an eighth more at most, or a multiple of 16."""
    step = max(16, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


class _Prompt:
    """One captured form: its buffers, [B, room] each, and the logits [B, V] that a replay overwrites."""

    def __init__(self, ids: Tensor, mask: Tensor | None, positions: Tensor, room: int) -> None:
        batch, device = ids.shape[0], ids.device
        self.ids = torch.zeros(batch, room, dtype=torch.int64, device=device)
        self.positions = torch.zeros(*positions.shape[:-2], batch, room, dtype=torch.int64, device=device)
        self.mask = None if mask is None else torch.ones(batch, room, dtype=mask.dtype, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self.checked = False  # whether the logits of a prompt that left room were compared
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def fill(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> None:
        length, room = ids.shape[1], self.ids.shape[1]
        # The prompt's own tokens once more: experts get them as evenly as those.
        self.ids.copy_(ids.repeat(1, -(-room // length))[:, :room])
        self.positions[..., :length] = positions
        self.positions[..., length:] = positions[..., -1:]  # no further, or tables of positions might end before them
        if mask is not None:
            self.mask[:, :length] = mask
            self.mask[:, length:] = 1
        self.last.fill_(length - 1)


class PromptGraphs:
    """The prompts of one session: a batch size and a cache."""

    def __init__(self, model: nn.Module, cache: DecodeCache) -> None:
        known = inspect.signature(type(model).forward).parameters
        config = model.config.get_text_config(decoder=True)
        self.cache = cache
        self.positioned = "position_ids" in known
        self.most = min(cache.capacity, getattr(config, "max_position_embeddings", None) or cache.capacity)
        self.linear = linear_attentions(model)
        # Hooks would see what fills the room, and not be called by replays; a session begins anew when they change.
        self.suited = "logits_to_keep" in known and len(self.linear) == len(cache.recurrent) and not is_hooked(model)
        self.forms: dict[tuple[bool, int], _Prompt] = {}  # by whether any is padded, and the room
        self.seen: set[tuple[bool, int]] = set()
        self.left: set[tuple[bool, int]] = set()  # what keeps the GPU busy
        self.pool: Any = None

    def run(
        self,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        prefill: Callable[[], Tensor],
    ) -> Tensor:
        """The logits [B, V] behind a prompt, whose keys, values and states the cache holds then.

        Args:
            ids: [B, S].
            mask: [B, S], 0 for padding; None without any.
            positions: [B or 1, S] of the caller's, or [planes, B or 1, S]; None for those that the mask gives.
            prefill: computes the same by the model's own code; its result is the device's to finish.
        """
        batch, length = ids.shape
        room = room_for(length)
        form = mask is not None, room
        if not self.suited or room > self.most or batch * room > MOST_TOKENS or form in self.left:
            return prefill()
        if model.training or all_modules_are_hooked():
            return prefill()
        kept = self.forms.get(form)
        if kept is None and (form not in self.seen or len(self.forms) >= MOST_GRAPHS):
            self.seen.add(form)
            return prefill()
        if positions is None:
            seen = torch.ones_like(ids[:1]) if mask is None else mask
            positions = (seen.cumsum(1) - 1).clamp(min=0)
        if kept is None:
            return self._capture(model, form, (ids, mask, positions), prefill)
        if kept.checked or length == room:
            kept.fill(ids, mask, positions)
            return self._replay(model, kept)
        try:
            return self._compared(model, kept, (ids, mask, positions), self._with_states(prefill()))
        except ValueError as error:
            return self._give_up(model, error, prefill)

    def _replay(self, model: nn.Module, prompt: _Prompt) -> Tensor:
        if prompt.graph is None:  # on a CPU
            return self._compute(model, prompt)
        prompt.graph.replay()
        self.cache.set_has_states(True)
        return prompt.logits

    def _compute(self, model: nn.Module, prompt: _Prompt) -> Tensor:
        options = {"position_ids": prompt.positions} if self.positioned else {}
        self.cache.set_has_states(False)
        with room_comes_first(self.linear, self.cache, prompt.last, prompt.ids.shape[1]):
            outputs = model(
                input_ids=prompt.ids,
                attention_mask=prompt.mask,
                use_cache=True,
                return_dict=True,
                logits_to_keep=prompt.last,
                **{CACHE: self.cache},
                **options,
            )
        return outputs.logits[:, -1]

    def _capture(self, model: nn.Module, form: tuple[bool, int], given: tuple, prefill: Callable[[], Tensor]) -> Tensor:
        """The logits of :meth:`run`, and a graph for the next prompts of this form."""
        ids, mask, positions = given
        on_gpu = ids.device.type == "cuda"
        start = time.perf_counter()
        logits = prefill()
        launched = time.perf_counter()
        if on_gpu:
            torch.cuda.synchronize(ids.device)
            if launched - start < BOUND_BY_HOST * (time.perf_counter() - start):
                self.left.add(form)
                return logits
        expected = self._with_states(logits)
        try:
            prompt = _Prompt(ids, mask, positions, form[1])
            if on_gpu:
                prompt.fill(*given)
                self.pool = self.pool or torch.cuda.graph_pool_handle()
                captured = capture(lambda: self._compute(model, prompt), [], ids.device, self.pool)
                prompt.graph, prompt.logits = captured
            self._check_that_room_leaves_no_trace(model, prompt, given)
            logits = self._compared(model, prompt, given, expected)
        except Exception as error:  # whatever a model does that a graph cannot hold
            return self._give_up(model, error, prefill)
        self.forms[form] = prompt
        return logits

    def _check_that_room_leaves_no_trace(self, model: nn.Module, prompt: _Prompt, given: tuple) -> None:
        """Runs a prompt of no tokens; states fade, so that it would not show behind every prompt.

        Raises:
            ValueError: the states behind it are not zero.
        """
        if self.cache.recurrent:
            prompt.fill(*given)
            prompt.last.fill_(-1)
            self._replay(model, prompt)
            if any(state.any() for state in self.cache.states()):
                raise ValueError("its states take in what fills the room")

    def _with_states(self, logits: Tensor) -> list[Tensor]:
        """What is compared behind a prompt; keys and values show in the logits."""
        return [logits, *(state.clone() for state in self.cache.states())]

    def _compared(self, model: nn.Module, prompt: _Prompt, given: tuple, expected: list[Tensor]) -> Tensor:
        """The logits of a graph.

        Raises:
            ValueError: they, or the states behind the prompt, are not those of ``expected``.
        """
        prompt.fill(*given)
        logits = self._replay(model, prompt)
        off = max(distance(a, b) for a, b in zip([logits, *self.cache.states()], expected, strict=True))
        if off > _CLOSE.get(logits.dtype, 0.2):
            raise ValueError(f"its results are another's, off by {off:.2g} of their size")
        prompt.checked = given[0].shape[1] < prompt.ids.shape[1]
        return logits

    def _give_up(self, model: nn.Module, error: Exception, prefill: Callable[[], Tensor]) -> Tensor:
        self.suited, self.pool = False, None
        self.forms.clear()
        self.cache.set_has_states(False)
        warn(model, "takes in prompts", error)
        return prefill()
