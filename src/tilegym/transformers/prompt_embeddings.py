"""The text's part of prompts with more than text, as CUDA graphs: what reads the embeddings of words and images.

The parts for images and sounds stay what they are, as does what puts their tokens among the words: the host looks at
sizes there. What comes behind them is most of what is launched, and the same for all prompts of a length.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import nn
from transformers.utils import ModelOutput

from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.decode_cache import DecodeCache
from tilegym.transformers.graph_capture import PLAIN
from tilegym.transformers.prompt_graph import Given
from tilegym.transformers.prompt_graph import Prompt
from tilegym.transformers.prompt_graph import PromptGraphs
from tilegym.transformers.several_gpus import OtherGPUs

_RESULT = "last_hidden_state"
# What Qwen3-VL and its like add at the places of images behind the first layers (DeepStack, arXiv 2406.04334), and the
# method of theirs that adds it, with the host looking at where those are.
_PLACES, _DEEPSTACK, _ADDS = "visual_pos_masks", "deepstack_visual_embeds", "_deepstack_process"
_SEEN_TO = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", CACHE, _PLACES, _DEEPSTACK}


class EmbeddingGraphs(PromptGraphs):
    """As PromptGraphs, of the model's decoder, over embeddings: hidden states [B, S, H] are what they give."""

    def __init__(self, model: nn.Module, cache: DecodeCache, others: OtherGPUs | None = None) -> None:
        super().__init__(model, cache, others)
        part = model.get_decoder() if hasattr(model, "get_decoder") else None
        self.suited = self.suited and part not in (None, model) and part is not getattr(model, "base_model", None)
        self._forward: Callable[..., Any] | None = None  # the decoder's own, while a prompt is read
        self._options: dict[str, Any] = {}
        self._returned: dict[tuple, type[ModelOutput] | None] = {}  # by kind of call; None: more than hidden states

    @contextlib.contextmanager
    def replaying(self, model: nn.Module, mask: Tensor | None) -> Iterator[None]:
        """Within it the decoder's forward, where it is called with the session's cache, is replayed where it can be.

        Args:
            mask: [B, S] of prompts that are padded, else None.
        """
        if not self.suited:
            yield
            return
        part = model.get_decoder()
        before = part.forward

        def forward(*args, **kwargs):
            # The model's forward may run in another thread too, over another cache.
            if args or kwargs.get(CACHE) is not self.cache:
                return before(*args, **kwargs)
            return self._read(model, before, kwargs, mask)

        with _set(part, "forward", forward):
            yield

    def _read(self, model: nn.Module, before: Callable[..., Any], kwargs: dict[str, Any], mask: Tensor | None) -> Any:
        given, options = _given(kwargs, mask), {n: v for n, v in kwargs.items() if n not in _SEEN_TO}
        if given is not None and given.deepstack and not hasattr(model.get_decoder(), _ADDS):
            given = None
        if given is None or not all(isinstance(v, PLAIN) for v in options.values()):
            return before(**kwargs)
        outputs: Any = None

        def prefill() -> Tensor:
            nonlocal outputs
            outputs = before(**kwargs)
            self._returned[kind] = type(outputs) if _is_known(outputs, self.cache) else None
            return outputs[0]

        kind = (
            tuple(sorted(options.items())),
            None if given.positions is None else given.positions.shape[:-2],
            tuple((n, m.dtype, m.shape[0], m.shape[3]) for n, m in given.masks.items()),
            len(given.deepstack),
        )
        if self._returned.get(kind, ModelOutput) is None:
            return before(**kwargs)
        self._forward, self._options = before, options
        try:
            hidden = self.results_of(model, given, kind, prefill)
        finally:
            self._forward = None
        return self._returned[kind](**{_RESULT: hidden, CACHE: self.cache}) if outputs is None else outputs

    def call(self, model: nn.Module, prompt: Prompt) -> Tensor:
        mask = prompt.masks or prompt.mask
        if list(prompt.masks) == [""]:
            mask = prompt.masks[""]
        call = functools.partial(
            self._forward,
            inputs_embeds=prompt.tokens,
            attention_mask=mask,
            position_ids=prompt.positions,
            **{CACHE: self.cache},
            **self._options,
        )
        if not prompt.deepstack:
            return call()[0]
        part = model.get_decoder()
        before = getattr(part, _ADDS)

        def add(hidden, places, added):  # others' calls, from another thread, say places
            return hidden + added if places is None else before(hidden, places, added)

        with _set(part, _ADDS, add):
            return call(**{_DEEPSTACK: prompt.deepstack})[0]

    def of_prompt(self, results: Tensor, length: int) -> Tensor:
        return results[:, :length]


@contextlib.contextmanager
def _set(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Within it ``module`` has an attribute of its own."""
    own = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(module, name)
        else:
            setattr(module, name, own)


def _given(kwargs: dict[str, Any], mask: Tensor | None) -> Given | None:
    """What a decoder is called with for a prompt whose ``mask`` says what is padding; None if it is of another kind."""
    tokens, positions, masks = (kwargs.get(name) for name in ("inputs_embeds", "position_ids", "attention_mask"))
    if tokens is None or kwargs.get("input_ids") is not None:
        return None
    deepstack = _everywhere(kwargs.get(_DEEPSTACK), kwargs.get(_PLACES), tokens)
    if masks is None or (type(masks) is Tensor and masks.dim() == 2):
        return Given(tokens, mask, positions, {}, deepstack)  # the decoder makes masks of its own
    masks = masks if isinstance(masks, dict) else {"": masks}
    if any(type(m) is not Tensor or m.dim() != 4 or m.shape[2] != tokens.shape[1] for m in masks.values()):
        return None
    return Given(tokens, None, positions, masks, deepstack)


def _everywhere(deepstack: list[Tensor] | None, places: Tensor | None, tokens: Tensor) -> tuple[Tensor, ...]:
    """What is added at ``places`` [B, S], as [B, S, H] with zeros elsewhere."""
    zeros = torch.zeros_like(tokens)
    return tuple(zeros.masked_scatter(places[..., None], added.to(zeros)) for added in deepstack or ())


def _is_known(outputs: Any, cache: DecodeCache) -> bool:
    return isinstance(outputs, ModelOutput) and all(
        name == _RESULT or value is None or value is cache for name, value in outputs.items()
    )
