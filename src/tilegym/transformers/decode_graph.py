"""Decoding steps as CUDA graphs: ``generate`` replays one instead of launching hundreds of kernels for each token.

A decoding step of a model with 8B parameters keeps an H200 busy for 4 ms, and a host for 12 ms. Here the step is
captured once, over buffers that stay where they are (:class:`DecodeCache`, the token, its position, the mask), and
then replayed; and the host looks whether all sequences have ended one step late, so that the GPU never waits for it.

What ``generate`` offers beyond greedy search and sampling (beams, assistants, streamers, dictionaries as a result,
caches of the caller's) runs as transformers does it.
"""

import contextlib
import inspect
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import nn
from transformers.cache_utils import Cache
from transformers.cache_utils import LinearAttentionLayer
from transformers.cache_utils import StaticLayer
from transformers.generation import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

from tilegym.backend import get_current_backend
from tilegym.errors import FallbackWarning
from tilegym.transformers.attention import NAMES as ATTENTION
from tilegym.transformers.graph_capture import capture

DEVICES = ("cuda",)
ROUND_CAPACITY = 256  # caches hold a multiple of as many tokens, so that similar lengths share a graph
_LAYERS = ("full_attention", "sliding_attention")
_RECURRENT = "linear_attention"  # layers with states of fixed size, which they change in place
# Arguments of generate that only its own loops know, and arguments of forward that the session sees to.
_SPECIAL = {"custom_generate", "streamer", "tokenizer", "assistant_model", "synced_gpus", "past_key_values"}
# Settings that choose a loop with arguments of its own.
_MODES = (
    "assistant_early_exit",
    "constraints",
    "dola_layers",
    "force_words_ids",
    "num_beam_groups",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
)
_ARGUMENTS = {"attention_mask", "past_key_values", "use_cache", "position_ids", "logits_to_keep", "cache_position"}


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
        positions = self.cache.positions_of(self, key_states.shape[2])
        self.keys.index_copy_(2, positions, key_states)
        self.values.index_copy_(2, positions, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int | Tensor:
        return self.cache.length if self.cache.started else 0


class DecodeCache(Cache):
    """A cache of fixed size for the steps of one session.

    Attributes:
        capacity: how many tokens it has room for.
        length: [1] int64, how many it holds; of all layers alike, and on the device, where graphs can count.
        started: whether it holds any.
    """

    def __init__(self, num_layers: int, capacity: int, device: torch.device, kinds: tuple[str, ...] = ()) -> None:
        self.capacity = capacity
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        self.started = False
        self._positions: Tensor | None = None
        recurrent = [i < len(kinds) and kinds[i] == _RECURRENT for i in range(num_layers)]
        super().__init__(layers=[LinearAttentionLayer() if linear else _Layer(self) for linear in recurrent])
        self._recurrent = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
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
            for layer in self._recurrent:
                layer.reset()

    def advance(self) -> None:
        """Counts the token that every layer has put in."""
        self.length.add_(1)
        self._positions = None

    def state(self) -> list[Tensor]:
        """What a step changes besides the keys and values that it appends."""
        states = [self.length]
        for layer in self._recurrent:
            for held in (layer.conv_states, layer.recurrent_states):  # a dict; in older transformers a tensor
                states += [t for t in (held.values() if isinstance(held, dict) else (held,)) if t is not None]
        return states


class Session:
    """One model, batch size and capacity: the cache, and the step captured over it."""

    def __init__(self, model: nn.Module, batch_size: int, capacity: int) -> None:
        device, config = model.device, model.config.get_text_config(decoder=True)
        self.key = batch_size, capacity
        self.fingerprint = fingerprint(model)
        kinds = tuple(getattr(config, "layer_types", None) or ())
        self.cache = DecodeCache(config.num_hidden_layers, capacity, device, kinds)
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.mask = torch.ones(batch_size, capacity, dtype=torch.int64, device=device)
        # generate gives positions to models that ask for them by name; others may hand them on and mean something else.
        self.positioned = "position_ids" in inspect.signature(type(model).forward).parameters
        self.graphs: dict[bool, Any] = {}  # by whether there is padding
        self.logits: dict[bool, Tensor] = {}

    def start(self, prompt_mask: Tensor | None, positions: Tensor | None, prompt_length: int) -> bool:
        """Takes over after a prefill of ``prompt_length`` tokens at ``positions`` [B or 1, S]: is any padding?"""
        self.cache.set_length(prompt_length)
        padded = prompt_mask is not None and not bool(prompt_mask.all())
        if padded:
            self.mask.fill_(1)
            self.mask[:, :prompt_length] = prompt_mask
        if positions is not None:
            self.positions.copy_(positions[:, -1:] + 1)
        elif padded:
            self.positions.copy_(prompt_mask.sum(1, keepdim=True))
        else:
            self.positions.fill_(prompt_length)
        return padded

    def step(self, model: nn.Module, tokens: Tensor, padded: bool) -> Tensor:
        """The logits [B, V] behind ``tokens`` [B]; they are overwritten by the next step."""
        self.tokens.copy_(tokens.view(-1, 1))
        if self.tokens.device.type == "cuda" and padded not in self.graphs:
            self._capture(model, padded)
        graph = self.graphs.get(padded, _NO_GRAPH)
        if graph is _NO_GRAPH:
            return self._run(model, padded)
        graph.replay()
        return self.logits[padded]

    def _run(self, model: nn.Module, padded: bool) -> Tensor:
        options = {"position_ids": self.positions} if self.positioned else {}
        outputs = model(
            input_ids=self.tokens,
            attention_mask=self.mask if padded else None,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **options,
        )
        self.cache.advance()
        self.positions.add_(1)
        return outputs.logits[:, -1]

    def _capture(self, model: nn.Module, padded: bool) -> None:
        state = [*self.cache.state(), self.positions]
        try:
            graph, self.logits[padded] = capture(lambda: self._run(model, padded), state, self.tokens.device)
        except Exception as error:  # whatever a model does that a graph cannot hold
            self.graphs[padded] = _NO_GRAPH
            why = str(error).strip().partition("\n")[0]
            warnings.warn(f"{type(model).__name__} decodes without a CUDA graph: {why}", FallbackWarning, stacklevel=2)
        else:
            self.graphs[padded] = graph


_NO_GRAPH = object()
_sessions: "weakref.WeakKeyDictionary[nn.Module, Session]" = weakref.WeakKeyDictionary()


def forget(model: nn.Module) -> None:
    """Frees what was kept for ``model``: its cache and its graphs."""
    _sessions.pop(model, None)


def fingerprint(model: nn.Module) -> tuple:
    """Changes with everything that a captured graph has taken for granted: which code runs on which memory."""
    parts: list[Any] = [get_current_backend(), model.config._attn_implementation]
    seen: set[int] = set()
    left: list[nn.Module | None] = [model]
    while left:  # by model.modules() it takes half as long again, and the prompt waits
        module = left.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        own = vars(module)
        parts += (id(module), id(own.get("forward")), own["training"], len(own["_forward_hooks"]))
        parts.append(len(own["_forward_pre_hooks"]))
        parts.extend([t.data_ptr() for t in own["_parameters"].values() if t is not None])
        parts.extend([t.data_ptr() for t in own["_buffers"].values() if t is not None])
        left.extend(own["_modules"].values())
    return tuple(parts)


def session_for(model: nn.Module, batch_size: int, length: int) -> Session:
    """The session that is kept for ``model`` if it fits, else a new one in its place."""
    capacity = -(-length // ROUND_CAPACITY) * ROUND_CAPACITY
    kept = _sessions.get(model)
    if kept is None or kept.key != (batch_size, capacity) or kept.fingerprint != fingerprint(model):
        _sessions.pop(model, None)
        kept = None  # drops its memory first
        _sessions[model] = kept = Session(model, batch_size, capacity)
    kept.cache.set_length(0)
    return kept


def suits(model: nn.Module) -> str:
    """Why the steps of ``model`` cannot be captured; empty if nothing is known to stand against it."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    others = sorted({kind for kind in kinds if kind not in (*_LAYERS, _RECURRENT)})
    if not others and kinds and all(kind == _RECURRENT for kind in kinds):
        return "it has no attention"
    if others:
        return f"it has layers of another kind than attention: {', '.join(others)}"
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if not getattr(model, "_can_compile_fullgraph", False):
        return "its forward depends on values on the device"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "it is spread over several devices"
    return ""


def generate(model: nn.Module, *args, **kwargs) -> Any:
    """Stands in for ``generate``; what is no plain greedy search or sampling goes through as it is."""
    configs = kwargs.get("generation_config"), model.generation_config
    special = _SPECIAL & {name for name, value in kwargs.items() if value is not None}
    for name in _MODES:
        values = kwargs.get(name), *(getattr(config, name, None) for config in configs)
        if any(value not in (None, 1) for value in values):
            special.add(name)
    if len(args) < 2 and not special:
        kwargs["custom_generate"] = sample
    return type(model).generate(model, *args, **kwargs)


def _is_plain(model: nn.Module, generation_config, stopping_criteria, model_kwargs: dict[str, Any]) -> bool:
    tensors = (model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
    return (
        model.device.type in DEVICES
        and generation_config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and generation_config.use_cache
        and generation_config.cache_implementation is None
        and not generation_config.return_dict_in_generate
        and not getattr(generation_config, "prefill_chunk_size", None)
        and stopping_criteria.max_length is not None
        and not model_kwargs.keys() - _ARGUMENTS
        and all(t is None or t.dim() == 2 for t in tensors)
        and not torch.is_autocast_enabled(model.device.type)
        and model.config._attn_implementation in ATTENTION.values()
        and not suits(model)
    )


def sample(
    model: nn.Module, input_ids: Tensor, logits_processor, stopping_criteria, generation_config, **model_kwargs
) -> Tensor:
    """The decoding loop of ``generate``, by the session's steps: the same tokens."""
    if not _is_plain(model, generation_config, stopping_criteria, model_kwargs):
        loop = getattr(type(model), GENERATION_MODES_MAPPING[generation_config.get_generation_mode()])
        return loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
    max_length = stopping_criteria.max_length
    session = session_for(model, input_ids.shape[0], max_length)
    model_kwargs["past_key_values"] = session.cache
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    batch_size, length = input_ids.shape
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    logits = outputs.logits[:, -1]
    del outputs
    padded = session.start(mask, positions, length)
    sequences = torch.cat([input_ids, input_ids.new_zeros(batch_size, max_length - length)], dim=1)
    unfinished = torch.ones(batch_size, dtype=torch.bool, device=input_ids.device)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    all_ended = _LateFlag(input_ids.device)
    ended_at: int | None = None
    aside = _Aside(input_ids.device)
    while True:
        scores = logits_processor(sequences[:, :length], logits.to(torch.float32, copy=True))
        if generation_config.do_sample:
            tokens = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = argmax(scores)
        if has_eos:
            tokens = torch.where(unfinished, tokens, generation_config._pad_token_tensor.to(tokens.device))
        sequences[:, length] = tokens
        length += 1
        with aside.run():
            unfinished &= ~stopping_criteria(sequences[:, :length], scores)
            if length < max_length:
                all_ended.post(~unfinished.any(), length)
        if length >= max_length:
            break
        with getattr(model, "_optimize_model_for_decode", contextlib.nullcontext)():
            logits = session.step(model, tokens, padded)
        aside.join()
        ended_at = all_ended.read()
        if ended_at is not None:
            break
    aside.join()
    if ended_at is None:
        ended_at = all_ended.read(wait_for_last=True)
    return sequences[:, : ended_at or length]


def argmax(scores: Tensor) -> Tensor:
    """``scores.argmax(-1)``, [B], of [B, V]: of parts of each row first, so that few rows keep many blocks at work.

    With that and :class:`_Aside`, 43 us between the replays of Llama-3.1-8B on an H200 instead of 73.
    """
    rows, width = scores.shape
    parts = math.gcd(width, 256)
    if parts == 1 or rows > 64 or not scores.is_contiguous():
        return scores.argmax(-1)
    top, at = scores.view(rows, parts, width // parts).max(-1)
    part = top.argmax(-1, keepdim=True)
    return at.gather(1, part).add_(part, alpha=width // parts).squeeze(1)


class _Aside:
    """What the next token does not wait for: small launches on a stream of their own, beside the model's step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Within it launches go aside; they see what has been launched before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from here on sees what was launched aside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class _LateFlag:
    """A boolean of the device that the host reads one posting later, when it has long been copied."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._posts: list[tuple[Tensor, int, Any]] = []

    def post(self, flag: Tensor, length: int) -> None:
        copy = torch.empty((), dtype=torch.bool, pin_memory=self._pinned)
        copy.copy_(flag, non_blocking=True)
        event = None
        if self._pinned:
            event = torch.cuda.Event()
            event.record()
        self._posts.append((copy, length, event))

    def read(self, wait_for_last: bool = False) -> int | None:
        """The length at which the flag was first posted as true, as far as it is known; None if it was not."""
        while len(self._posts) > (0 if wait_for_last else 1):
            copy, length, event = self._posts.pop(0)
            if event is not None:
                event.synchronize()
            if bool(copy):
                return length
        return None


@contextlib.contextmanager
def eager_steps(*devices: str) -> Iterator[None]:
    """Runs the same loop on other devices too, without graphs; for tests."""
    global DEVICES
    former, DEVICES = DEVICES, (*DEVICES, *devices)
    try:
        yield
    finally:
        DEVICES = former
