"""Decoding steps as CUDA graphs: ``generate`` replays one instead of launching hundreds of kernels for each token.

A decoding step of a model with 8B parameters keeps an H200 busy for 4 ms, and a host several times as long. Here the
step is captured once, over buffers that stay where they are (:class:`DecodeCache`, the token, its position, the mask),
and then replayed; and the host looks whether all sequences have ended one step late, so that the GPU never waits.

What ``generate`` offers beyond greedy search and sampling (beams, assistants, streamers, dictionaries as a result,
caches of the caller's) runs as transformers does it.
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import nn
from transformers.generation import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.stopping_criteria import MaxTimeCriteria
from transformers.generation.utils import GENERATION_MODES_MAPPING

from tilegym.backend.wrapped import is_spread
from tilegym.ops import argmax
from tilegym.transformers.attention import NAMES as ATTENTION
from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.decode_cache import RECURRENT
from tilegym.transformers.decode_cache import DecodeCache
from tilegym.transformers.graph_capture import Fingerprint
from tilegym.transformers.graph_capture import capture
from tilegym.transformers.graph_capture import settings_of
from tilegym.transformers.graph_capture import warn
from tilegym.transformers.prompt_embeddings import EmbeddingGraphs
from tilegym.transformers.prompt_graph import PromptGraphs
from tilegym.transformers.prompt_media import are_of_prompts
from tilegym.transformers.prompt_media import beyond_text
from tilegym.transformers.prompt_media import is_text
from tilegym.transformers.prompt_media import steps_agree
from tilegym.transformers.rotary_rows import RotaryRows
from tilegym.transformers.several_gpus import OtherGPUs
from tilegym.transformers.several_gpus import devices_of
from tilegym.transformers.several_gpus import misplaced
from tilegym.transformers.side_stream import Aside
from tilegym.transformers.side_stream import LateFlag

DEVICES = ("cuda",)
ROUND_CAPACITY = 256  # caches hold a multiple of as many tokens, so that similar lengths share a graph
# Up to so many tokens a cache serves shorter calls too, else those of half its size. Llama-3.1-8B decodes 576 tokens at
# 271.0 tokens/s on an H200 with a cache of 768, 270.4 with 1024, 264.8 with 2048, 264.4 with 4096.
SHARED_CAPACITY = 2048
_LAYERS = ("full_attention", "sliding_attention")
# Arguments of generate that only its own loops know, and arguments of forward that the session sees to.
_SPECIAL = {"custom_generate", "streamer", "tokenizer", "assistant_model", "synced_gpus", "past_key_values", CACHE}
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
_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)  # that keep nothing of what they see
_ARGUMENTS = {"attention_mask", CACHE, "use_cache", "position_ids", "logits_to_keep", "cache_position"}


class Session:
    """One model, batch size, capacity and kind of positions: the cache, and the step captured over it.

    The positions of some models (Qwen2-VL's: text, time, height, width) are ``planes`` of them.
    """

    def __init__(self, model: nn.Module, batch_size: int, capacity: int, planes: tuple[int, ...] = ()) -> None:
        device, config = model.device, model.config.get_text_config(decoder=True)
        self.key = batch_size, capacity
        self.planes = planes
        self.backend = next((b for b, name in ATTENTION.items() if name == model.config._attn_implementation), None)
        self.fingerprint, self.settings = Fingerprint(model), settings_of(model.config)
        kinds = tuple(getattr(config, "layer_types", None) or ())
        self.cache = DecodeCache(config.num_hidden_layers, capacity, device, kinds, batch_size, planes)
        self.tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.positions = self.cache.positions
        self.mask = torch.ones(batch_size, capacity, dtype=torch.int64, device=device)
        # generate gives positions to models that ask for them by name; others may hand them on and mean something else.
        self.positioned = "position_ids" in inspect.signature(type(model).forward).parameters
        self.sequences = torch.zeros(batch_size, capacity, dtype=torch.int64, device=device)
        alone = batch_size == 1 and self.positioned and not planes
        rotary = getattr(model.base_model, "rotary_emb", None) if alone else None
        self.others = OtherGPUs(devices_of(model)[1:]) if device.type == "cuda" else None
        self.rotary = RotaryRows(rotary, self.positions, self.cache.length, capacity, model.dtype)
        self.prompts = PromptGraphs(model, self.cache, self.others)
        self.embeddings = EmbeddingGraphs(model, self.cache, self.others)  # of prompts with more than text
        self.agreed: dict[frozenset[str], bool] = {}  # by what prompts had besides: whether steps can do without it
        self.stepped = False  # whether a step has succeeded
        self.graphs: dict[tuple[bool, bool], Any] = {}  # by whether there is padding, and whether tokens are chosen
        self.logits: dict[tuple[bool, bool], Tensor] = {}

    def fits(self, batch_size: int, capacity: int, planes: tuple[int, ...]) -> bool:
        """Whether it serves calls that need so much: a larger cache is not much slower, and new graphs take a while."""
        held = self.key[1]
        same = batch_size == self.key[0] and planes == self.planes
        return same and capacity <= held <= max(SHARED_CAPACITY, 2 * capacity)

    def start(self, prompt_mask: Tensor | None, positions: Tensor | None, prompt_length: int) -> None:
        """Takes over after a prefill of ``prompt_length`` tokens at ``positions`` [B or 1, S], of planes before it if
        there are; the mask is of those that are padded."""
        self.cache.set_length(prompt_length)
        if prompt_mask is not None:
            self.mask.fill_(1)
            self.mask[:, :prompt_length] = prompt_mask
        if positions is not None:
            self.positions.copy_(positions[..., -1:] + 1)
        elif prompt_mask is not None:
            self.positions.copy_(prompt_mask.sum(1, keepdim=True))
        else:
            self.positions.fill_(prompt_length)

    def step(self, model: nn.Module, padded: bool, choose: bool = False) -> Tensor:
        """The logits [B, V] behind ``self.tokens`` [B, 1]; they are overwritten by the next step.

        With ``choose`` those that they choose are in ``self.tokens`` then, and the next column of ``self.sequences``.
        """
        how = padded, choose
        if self.tokens.device.type == "cuda" and how not in self.graphs:
            self._capture(model, how)
        graph = self.graphs.get(how, _NO_GRAPH)
        if graph is _NO_GRAPH:
            logits = self.compute(model, *how)
        else:
            graph.replay()
            logits = self.logits[how]
        self.stepped = True
        return logits

    def compute(self, model: nn.Module, padded: bool, choose: bool = False) -> Tensor:
        """What :meth:`step` replays, by the model's code."""
        options = {"position_ids": self.positions} if self.positioned else {}
        with self.rotary:
            outputs = model(
                input_ids=self.tokens,
                attention_mask=self.mask if padded else None,
                use_cache=True,
                return_dict=True,
                **{CACHE: self.cache},
                **options,
            )
        logits = outputs.logits[:, -1].to(self.tokens.device)
        self.cache.advance()
        if choose:
            self.choose(logits)
        return logits

    def choose(self, logits: Tensor) -> None:
        """Takes the tokens of the largest ``logits`` [B, V] for the next step, and into the next column."""
        argmax(logits, self.tokens.view(-1), backend=self.backend)
        self.sequences.index_copy_(1, self.cache.length, self.tokens)

    def _capture(self, model: nn.Module, how: tuple[bool, bool]) -> None:
        state = [*self.cache.state(), self.tokens]
        try:
            run = functools.partial(self.compute, model, *how)
            graph, self.logits[how] = capture(run, state, self.tokens.device, None, self.others)
        except Exception as error:  # whatever a model does that a graph cannot hold
            self.graphs[how] = _NO_GRAPH
            warn(model, "decodes", error)
        else:
            self.graphs[how] = graph


_NO_GRAPH = object()
_sessions: "weakref.WeakKeyDictionary[nn.Module, Session]" = weakref.WeakKeyDictionary()
_refused: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # over several GPUs, and what a session counts is on one
_turns: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, list]]" = weakref.WeakKeyDictionary()


def _turns_of(model: nn.Module) -> tuple[Any, list]:
    """The lock that calls on ``model`` take turns by, and those that use or want its session within it."""
    return _turns.setdefault(model, (threading.RLock(), []))


@contextlib.contextmanager
def _turn(model: nn.Module) -> Iterator[bool]:
    """Waits for other threads' calls on ``model``; yields whether its session is free then, which it is not for a call
    from within another one, such as a stopping criterion's."""
    lock, calls = _turns_of(model)
    with lock:
        calls.append(None)
        try:
            yield len(calls) == 1
        finally:
            calls.pop()


def forget(model: nn.Module) -> None:
    """Frees what was kept for ``model``: its cache and its graphs."""
    _sessions.pop(model, None)
    _refused.discard(model)


def session_for(model: nn.Module, batch_size: int, length: int, planes: tuple[int, ...] = ()) -> Session | None:
    """The session that is kept for ``model`` if it fits, else a new one in its place; None if its steps cannot be
    captured."""
    capacity = -(-length // ROUND_CAPACITY) * ROUND_CAPACITY
    kept = _sessions.get(model)
    alike = kept is not None and kept.settings == settings_of(model.config) and kept.fingerprint.holds(model)
    if not alike or not kept.fits(batch_size, capacity, planes):
        _sessions.pop(model, None)
        kept = None  # drops its memory first
        if suits(model) or model in _refused:
            return None
        _sessions[model] = kept = Session(model, batch_size, capacity, planes)
    kept.cache.set_length(0)
    return kept


def suits(model: nn.Module) -> str:
    """Why the steps of ``model`` cannot be captured; empty if nothing is known to stand against it."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    others = sorted({kind for kind in kinds if kind not in (*_LAYERS, RECURRENT)})
    if not others and kinds and all(kind == RECURRENT for kind in kinds):
        return "it has no attention"
    if others:
        return f"it has layers of another kind than attention: {', '.join(others)}"
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if getattr(config, "use_bidirectional_attention", False):
        return "its tokens see those behind them"
    if not getattr(model, "_can_compile_fullgraph", False):
        return "its forward depends on values on the device"
    if any(parameter.is_meta for parameter in model.parameters()):  # as under accelerate's cpu_offload
        return "its weights are on the meta device"
    if any(is_spread(parameter) for parameter in model.parameters()):
        return "its weights are spread over several processes"
    return misplaced(model)


def generate(model: nn.Module, *args, **kwargs) -> Any:
    """Stands in for ``generate``; what is no plain greedy search or sampling goes through as it is."""
    configs = kwargs.get("generation_config"), model.generation_config
    special = _SPECIAL & {name for name, value in kwargs.items() if value is not None}
    for name in _MODES:
        values = kwargs.get(name), *(getattr(config, name, None) for config in configs)
        if any(value not in (None, 1) for value in values):
            special.add(name)
    if len(args) >= 2 or special:
        return type(model).generate(model, *args, **kwargs)
    # What precedes the loop takes its turn too: it works on the device, while another thread may be capturing.
    with _turns_of(model)[0]:
        return type(model).generate(model, *args, **(kwargs | {"custom_generate": sample}))


def _is_plain(model: nn.Module, generation_config, stopping_criteria, model_kwargs: dict[str, Any]) -> bool:
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    return (
        model.device.type in DEVICES
        and generation_config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and generation_config.use_cache
        and generation_config.cache_implementation is None
        and not generation_config.return_dict_in_generate
        and not getattr(generation_config, "prefill_chunk_size", None)
        and stopping_criteria.max_length is not None
        and are_of_prompts(model, beyond_text(model_kwargs, _ARGUMENTS))
        and (mask is None or mask.dim() == 2)
        and (positions is None or positions.dim() in (2, 3))
        and not torch.is_autocast_enabled(model.device.type)
        and model.config._attn_implementation in ATTENTION.values()
        and not _prepares_otherwise(model)
    )


def _prepares_otherwise(model: nn.Module) -> bool:
    """Whether others have put something into this model that changes its inputs, as peft does to add virtual tokens."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    return prepare is not None and getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation


def sample(
    model: nn.Module, input_ids: Tensor, logits_processor, stopping_criteria, generation_config, **model_kwargs
) -> Tensor:
    """The decoding loop of ``generate``: the session's, where it can be, else transformers' own; the same tokens."""
    call = model, input_ids, logits_processor, stopping_criteria, generation_config
    with contextlib.ExitStack() as stack:
        if _is_plain(model, generation_config, stopping_criteria, model_kwargs) and stack.enter_context(_turn(model)):
            if model.device.type == "cuda":  # it need not be the current one
                stack.enter_context(torch.cuda.device(model.device))
            # What is kept for the next call must not be tensors that only inference mode may write to.
            with torch.inference_mode(False), torch.no_grad():
                positions = model_kwargs.get("position_ids")
                planes = () if positions is None else positions.shape[:-2]
                session = session_for(model, input_ids.shape[0], stopping_criteria.max_length, planes)
                try:
                    tokens = None if session is None else _sample_by_session(session, *call, **model_kwargs)
                except Exception as error:
                    if session.stepped or not session.others:
                        raise
                    forget(model)
                    _refused.add(model)
                    warn(model, "decodes", error)
                    tokens = None
                if tokens is not None:
                    return tokens
        loop = getattr(type(model), GENERATION_MODES_MAPPING[generation_config.get_generation_mode()])
        return loop(*call, **model_kwargs)


def _sample_by_session(
    session: Session, model: nn.Module, input_ids: Tensor, logits_processor, stopping_criteria, generation_config,
    **model_kwargs,
) -> Tensor | None:  # fmt: skip
    """The prompts and what follows them; None if its steps cannot do without what the prompts are given besides."""
    max_length = stopping_criteria.max_length
    besides = beyond_text(model_kwargs, _ARGUMENTS)
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    batch_size, length = input_ids.shape
    padded = mask is not None and not bool(mask.all())
    mask = mask if padded else None
    if not steps_agree(session, besides, model, input_ids, mask, generation_config, model_kwargs):
        return None
    model_kwargs[CACHE] = session.cache

    def prefill() -> Tensor:
        return model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1].to(input_ids.device)

    if is_text(model_kwargs, besides):
        logits = session.prompts.run(model, input_ids, mask, positions, prefill)
    else:
        with session.embeddings.replaying(model, mask):
            logits = prefill()
    session.start(mask, positions, length)
    # Where nothing is done to the scores first, the choice is a part of the captured step.
    choose = not generation_config.do_sample and not logits_processor
    kept = choose and not all(type(criterion) in _CRITERIA for criterion in stopping_criteria)
    if choose:
        sequences = session.sequences[:, :max_length]
        sequences[:, :length] = input_ids
        session.choose(logits)
    else:
        sequences = torch.cat([input_ids, input_ids.new_zeros(batch_size, max_length - length)], dim=1)
    session.rotary.fill(length, max_length - 1)
    unfinished = torch.ones(batch_size, dtype=torch.bool, device=input_ids.device)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    all_ended = LateFlag(input_ids.device)
    ended_at: int | None = None
    aside = Aside(input_ids.device)
    while True:
        if choose:
            tokens = session.tokens.view(-1)
        else:
            scores = logits_processor(sequences[:, :length], logits.to(torch.float32, copy=True))
            if generation_config.do_sample:
                tokens = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
            else:
                tokens = argmax(scores, backend=session.backend)
        if has_eos and batch_size > 1:  # of one sequence nothing is kept behind its end
            tokens = torch.where(unfinished, tokens, generation_config._pad_token_tensor.to(tokens.device))
        if not choose or (has_eos and batch_size > 1):
            session.tokens.copy_(tokens.view(-1, 1))
            sequences[:, length] = tokens
        length += 1
        seen = sequences[:, :length]
        shown = torch.empty_like(seen) if kept else seen
        with aside.run():
            if kept:
                shown.copy_(seen)
            unfinished &= ~stopping_criteria(shown, None)  # as in transformers, where no scores are asked for
            if length < max_length:
                all_ended.post(~unfinished.any(), length)
        if length >= max_length:
            break
        with getattr(model, "_optimize_model_for_decode", contextlib.nullcontext)():
            logits = session.step(model, padded, choose)
        aside.join()
        ended_at = all_ended.read()
        if ended_at is not None:
            break
    aside.join()
    if ended_at is None:
        ended_at = all_ended.read(wait_for_last=True)
    return sequences[:, : ended_at or length].clone() if choose else sequences[:, : ended_at or length]


@contextlib.contextmanager
def eager_steps(*devices: str) -> Iterator[None]:
    """Runs the same loop on other devices too, without graphs; for tests."""
    global DEVICES
    former, DEVICES = DEVICES, (*DEVICES, *devices)
    try:
        yield
    finally:
        DEVICES = former
