"""What calls have in common that are replays of one CUDA graph, and what a graph needs to know of their results."""

import copy
import inspect
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import torch
from torch import Tensor
from torch import nn
from transformers.cache_utils import Cache
from transformers.cache_utils import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.utils import ModelOutput
from transformers.utils.import_utils import is_tracing

from tilegym.backend import recording
from tilegym.transformers.graph_capture import PLAIN
from tilegym.transformers.graph_capture import all_modules_are_hooked
from tilegym.transformers.graph_capture import distance
from tilegym.transformers.graph_capture import settings_of

DEVICES = ("cuda",)
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)  # of caches
_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of floats; other dtypes 2e-2


class Unsuitable(Exception):
    """A call or a result of a kind that no graph can stand in for."""


def may_replay(first: Tensor, inputs: dict[str, Any]) -> bool:
    """Whether nothing speaks against a graph but the model, gradients and autocast; ``first``: one of the inputs."""
    return (
        first.device.type in DEVICES
        and all(v.device == first.device if isinstance(v, Tensor) else isinstance(v, PLAIN) for v in inputs.values())
        and not is_tracing(first)
        and not recording.is_replaced()
        and not all_modules_are_hooked()
    )


class Form(NamedTuple):
    """What calls have in common that are replays of one graph."""

    stream: int
    full: bool  # whether no mask has padding in it
    switches: tuple
    inputs: tuple


def form_of(model: nn.Module, inputs: dict[str, Any], device: torch.device) -> Form:
    """Waits for the device where there is a mask, to look at it."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    switches = settings_of(model.config)
    switches += [torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.fp32_precision]
    masks = [v for n, v in inputs.items() if n.endswith("attention_mask") and isinstance(v, Tensor) and v.dim() == 2]
    described = {
        n: (v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else (type(v), v)
        for n, v in inputs.items()
    }
    full = all(bool(mask.all()) for mask in masks)
    return Form(stream, full, tuple(switches), tuple(sorted(described.items(), key=lambda item: item[0])))


def with_mask(forward: Callable, inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs``; of a decoder without a cache and without a mask with one that says that nothing is padding: without
    one, transformers writes a mask out while a graph is captured, lest sequences be packed."""
    given = {name for name, value in inputs.items() if value is not None}
    ids = inputs.get("input_ids")
    if ids is None or inputs.get("use_cache") is not False or given & {"attention_mask", "position_ids"}:
        return inputs
    known = inspect.signature(forward).parameters
    return inputs | {"attention_mask": torch.ones_like(ids)} if "attention_mask" in known else inputs


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether one may be what a graph gives, and the other what the code gives that it was captured of."""
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    return distance(a, b) <= _CLOSE.get(b.dtype, 2e-2)


def leaves_of(value: Any) -> list[Tensor]:
    """The tensors in it, each once; raises :class:`Unsuitable` as :func:`mapped`."""
    leaves: list[Tensor] = []
    mapped(value, lambda t: leaves.append(t) or t)
    return leaves


def mapped(value: Any, function: Callable[[Tensor], Tensor], done: dict[int, Tensor] | None = None) -> Any:
    """``value`` with ``function`` of each tensor in it, once where a tensor comes twice.

    Raises:
        Unsuitable: there are other things in it than tensors, numbers, tuples, and transformers' outputs and growing
            caches.
    """
    done = {} if done is None else done
    if isinstance(value, Tensor):
        if id(value) not in done:
            done[id(value)] = function(value)
        return done[id(value)]
    if type(value) is DynamicCache and all(type(layer) in _LAYERS for layer in value.layers):
        copied = copy.copy(value)
        copied.layers = [copy.copy(layer) for layer in value.layers]
        for layer in copied.layers:
            for name in ("keys", "values"):
                vars(layer)[name] = mapped(vars(layer)[name], function, done)
        return copied
    if isinstance(value, ModelOutput):
        return type(value)(**{name: mapped(item, function, done) for name, item in value.items()})
    if type(value) in (tuple, list):
        return type(value)(mapped(item, function, done) for item in value)
    if isinstance(value, PLAIN):
        return value
    remedy = ": give use_cache=False" if isinstance(value, Cache) else ""
    raise Unsuitable(f"it returns a {type(value).__name__}{remedy}")
