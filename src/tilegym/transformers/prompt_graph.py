"""Prompts as CUDA graphs: the first token of ``generate`` does not wait for the host either.

What a prompt takes is captured over buffers with room for a little more (:func:`room_for`), so that prompts of similar
lengths share a graph. Behind the prompt's last token others fill the room: attention is causal, so that none of the
prompt sees them, and the keys that they leave in the cache lie behind its length until generated tokens replace them.
Layers of linear attention get them as padding before the prompt (:mod:`.prompt_states`).

The second prompt that fits a graph is captured, and from the third on they are replayed; not where the GPU takes longer
for it than its host. The results of a graph, and the states of layers that have such, are compared with those of the
model's own prefill when it is captured, and of the first prompt that does not fill its room. Models with hooks, and in
training, have none. Of prompts with more than text the part of the model that reads it is captured
(:mod:`.prompt_embeddings`).
"""

import contextlib
import inspect
import time
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

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
from tilegym.transformers.several_gpus import IndicesFollow
from tilegym.transformers.several_gpus import OtherGPUs

MOST_TOKENS = 8192  # of all sequences together: what a graph computes with stays allocated
MOST_GRAPHS = 32  # of one session
BOUND_BY_HOST = 0.7  # the share of a prefill's time, from which on its host is what it waits for
# Of logits and states, by their norm; other dtypes 0.2: a token goes to other experts for a rounding.
_CLOSE = {torch.float32: 1e-2, torch.float64: 1e-2}


def room_for(length: int) -> int:
    """How many tokens a graph for a prompt of ``length`` has room for: an eighth more at most, or a multiple of 16."""
    step = max(16, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


class Given(NamedTuple):
    """What a prompt brings.

    Attributes:
        tokens: ids [B, S], or embeddings [B, S, H].
        mask: [B, S], 0 for padding; None without any.
        positions: [B or 1, S], or [planes, B or 1, S]; None where the model counts them.
        masks: by name those that are written out, [B or 1, 1, S, K].
        deepstack: [B, S, H] each, what is added to the hidden states behind the first layers.
    """

    tokens: Tensor
    mask: Tensor | None
    positions: Tensor | None
    masks: dict[str, Tensor] = {}
    deepstack: tuple[Tensor, ...] = ()


class Prompt:
    """One captured form: its buffers, for ``room`` tokens each, and the results that a replay overwrites."""

    def __init__(self, given: Given, room: int) -> None:
        (batch, _, *embedded), device = given.tokens.shape, given.tokens.device
        self.tokens = given.tokens.new_zeros(batch, room, *embedded)
        self.positions = self.mask = None
        if given.positions is not None:
            self.positions = torch.zeros(*given.positions.shape[:-2], batch, room, dtype=torch.int64, device=device)
        if given.mask is not None:
            self.mask = torch.ones(batch, room, dtype=given.mask.dtype, device=device)
        self.masks = {n: m.new_zeros(*m.shape[:2], room, m.shape[3]) for n, m in given.masks.items()}
        self.deepstack = tuple(torch.zeros_like(self.tokens) for _ in given.deepstack)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self.checked = False  # whether the results of a prompt that left room were compared
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: Tensor | None = None

    def fill(self, given: Given) -> None:
        length, room = given.tokens.shape[1], self.tokens.shape[1]
        # The prompt's own tokens once more: experts get them as evenly as those.
        places = torch.arange(room, device=self.last.device) % length
        for mine, its in zip((self.tokens, *self.deepstack), (given.tokens, *given.deepstack), strict=True):
            torch.index_select(its, 1, places, out=mine)
        if self.positions is not None:
            self.positions[..., :length] = given.positions
            # No further, or tables of positions might end before them.
            self.positions[..., length:] = given.positions[..., -1:]
        if self.mask is not None:
            self.mask[:, :length] = given.mask
            self.mask[:, length:] = 1
        for name, mask in self.masks.items():  # what is behind the last token sees what that sees
            mask[:, :, :length] = given.masks[name]
            mask[:, :, length:] = given.masks[name][:, :, -1:]
        self.last.fill_(length - 1)


class PromptGraphs:
    """The prompts of one session: a batch size and a cache."""

    def __init__(self, model: nn.Module, cache: DecodeCache, others: OtherGPUs | None = None) -> None:
        known = inspect.signature(type(model).forward).parameters
        config = model.config.get_text_config(decoder=True)
        self.cache, self.others = cache, others
        self.positioned = "position_ids" in known
        self.most = min(cache.capacity, getattr(config, "max_position_embeddings", None) or cache.capacity)
        self.linear = linear_attentions(model)
        # Hooks would see what fills the room, and not be called by replays; a session begins anew when they change.
        self.suited = "logits_to_keep" in known and len(self.linear) == len(cache.recurrent) and not is_hooked(model)
        self.forms: dict[tuple, Prompt] = {}  # by whether any is padded, the room, and what else tells them apart
        self.seen: set[tuple] = set()
        self.left: set[tuple] = set()  # what keeps the GPU busy
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
        if positions is None:
            seen = torch.ones_like(ids[:1]) if mask is None else mask
            positions = (seen.cumsum(1) - 1).clamp(min=0)
        return self.results_of(model, Given(ids, mask, positions), (), prefill)

    def results_of(self, model: nn.Module, given: Given, kind: tuple, prefill: Callable[[], Tensor]) -> Tensor:
        """What ``prefill`` computes for a prompt, of what is captured for others of its ``kind``."""
        batch, length = given.tokens.shape[:2]
        room = room_for(length)
        form = given.mask is not None, room, *kind
        if not self.suited or room > self.most or batch * room > MOST_TOKENS or form in self.left:
            return prefill()
        if model.training or all_modules_are_hooked():
            return prefill()
        kept = self.forms.get(form)
        if kept is None and (form not in self.seen or len(self.forms) >= MOST_GRAPHS):
            if len(self.seen) < 4096:  # kinds that vary from prompt to prompt must not fill the memory
                self.seen.add(form)
            return prefill()
        if kept is None:
            return self._capture(model, form, given, prefill)
        if kept.checked or length == room:
            kept.fill(given)
            return self._replay(model, kept, length)
        try:
            return self._compared(model, kept, given, self._with_states(prefill()))
        except ValueError as error:
            return self._give_up(model, error, prefill)

    def _replay(self, model: nn.Module, prompt: Prompt, length: int) -> Tensor:
        if prompt.graph is None:  # on a CPU
            return self.of_prompt(self._compute(model, prompt), length)
        prompt.graph.replay()
        self.cache.set_has_states(True)
        return self.of_prompt(prompt.results, length)

    def _compute(self, model: nn.Module, prompt: Prompt) -> Tensor:
        self.cache.set_has_states(False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(room_comes_first(self.linear, self.cache, prompt.last, prompt.tokens.shape[1]))
            if self.others:
                stack.enter_context(IndicesFollow())
            return self.call(model, prompt)

    def call(self, model: nn.Module, prompt: Prompt) -> Tensor:
        """What is captured: the logits of :meth:`run`."""
        options = {"position_ids": prompt.positions} if self.positioned else {}
        outputs = model(
            input_ids=prompt.tokens,
            attention_mask=prompt.mask,
            use_cache=True,
            return_dict=True,
            logits_to_keep=prompt.last,
            **{CACHE: self.cache},
            **options,
        )
        return outputs.logits[:, -1].to(prompt.tokens.device)

    def of_prompt(self, results: Tensor, length: int) -> Tensor:
        """What of the results of :meth:`call` is of a prompt of so many tokens."""
        return results

    def _capture(self, model: nn.Module, form: tuple, given: Given, prefill: Callable[[], Tensor]) -> Tensor:
        """The results of a prompt, and a graph for the next ones of this form."""
        device = given.tokens.device
        on_gpu = device.type == "cuda"
        if on_gpu:
            # Not the whole device: another thread may be capturing on it.
            torch.cuda.current_stream(device).synchronize()
        start = time.perf_counter()
        results = prefill()
        launched = time.perf_counter()
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()
            if launched - start < BOUND_BY_HOST * (time.perf_counter() - start):
                self.left.add(form)
                return results
        expected = self._with_states(results)
        eager = time.perf_counter() - start
        try:
            prompt = Prompt(given, form[1])
            if on_gpu:
                prompt.fill(given)
                self.pool = self.pool or torch.cuda.graph_pool_handle()
                captured = capture(lambda: self._compute(model, prompt), [], device, self.pool, self.others)
                prompt.graph, prompt.results = captured
            self._check_that_room_leaves_no_trace(model, prompt, given)
            results = self._compared(model, prompt, given, expected)
            if on_gpu and self._seconds(model, prompt, given) > eager:
                # The host waited: it looked at what a graph computes otherwise, as experts in fp32.
                self.left.add(form)
                return expected[0]
        except Exception as error:  # whatever a model does that a graph cannot hold
            return self._give_up(model, error, prefill)
        self.forms[form] = prompt
        return results

    def _seconds(self, model: nn.Module, prompt: Prompt, given: Given) -> float:
        """What a replay takes, for a prompt that the buffers hold."""
        stream = torch.cuda.current_stream(given.tokens.device)
        stream.synchronize()
        start = time.perf_counter()
        self._replay(model, prompt, given.tokens.shape[1])
        stream.synchronize()
        return time.perf_counter() - start

    def _check_that_room_leaves_no_trace(self, model: nn.Module, prompt: Prompt, given: Given) -> None:
        """Runs a prompt of no tokens; states fade, so that it would not show behind every prompt.

        Raises:
            ValueError: the states behind it are not zero.
        """
        if self.cache.recurrent:
            prompt.fill(given)
            prompt.last.fill_(-1)
            self._replay(model, prompt, 0)
            if any(state.any() for state in self.cache.states()):
                raise ValueError("its states take in what fills the room")

    def _with_states(self, results: Tensor) -> list[Tensor]:
        """What is compared behind a prompt; keys and values show in the results."""
        return [results, *(state.clone() for state in self.cache.states())]

    def _compared(self, model: nn.Module, prompt: Prompt, given: Given, expected: list[Tensor]) -> Tensor:
        """The results of a graph.

        Raises:
            ValueError: they, or the states behind the prompt, are not those of ``expected``.
        """
        length = given.tokens.shape[1]
        prompt.fill(given)
        results = self._replay(model, prompt, length)
        off = max(distance(a, b) for a, b in zip([results, *self.cache.states()], expected, strict=True))
        if off > _CLOSE.get(results.dtype, 0.2):
            raise ValueError(f"its results are another's, off by {off:.2g} of their size")
        prompt.checked = length < prompt.tokens.shape[1]
        return results

    def _give_up(self, model: nn.Module, error: Exception, prefill: Callable[[], Tensor]) -> Tensor:
        self.suited, self.pool = False, None
        self.forms.clear()
        self.cache.set_has_states(False)
        warn(model, "takes in prompts", error)
        return prefill()
