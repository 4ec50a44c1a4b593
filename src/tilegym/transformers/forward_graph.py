"""Forward passes as CUDA graphs, of models that are run once: encoders, embedders, classifiers, of images and of sound.

BERT-large launches 270 kernels for what keeps an H200 busy for little more than a millisecond if the text is short; the
host takes ten times as long. The second call of one form (shapes, dtypes, options) is captured, and from the third on
such calls are replayed: inputs are copied to where the graph reads them, and results are copied from where it writes
them, so that a caller may keep them.

What could differ from a run of the model's code runs it: calls with gradients, in training, under autocast, with hooks
on any module, with inputs on other devices or of other kinds than tensors and plain options, and all that a graph
cannot hold, such as code that looks at what is on the device. A captured graph is compared with the run before it.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.backend.wrapped import is_spread
from tilegym.transformers import packed_sizes
from tilegym.transformers.attention import NAMES
from tilegym.transformers.attention import full_masks
from tilegym.transformers.attention import takes_packed
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import is_made_by
from tilegym.transformers.forwards import place_of_forward
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.graph_calls import Form
from tilegym.transformers.graph_calls import Unsuitable
from tilegym.transformers.graph_calls import form_of
from tilegym.transformers.graph_calls import is_close
from tilegym.transformers.graph_calls import leaves_of
from tilegym.transformers.graph_calls import mapped
from tilegym.transformers.graph_calls import may_replay
from tilegym.transformers.graph_calls import with_mask
from tilegym.transformers.graph_capture import BY_LENGTH
from tilegym.transformers.graph_capture import Fingerprint
from tilegym.transformers.graph_capture import capture
from tilegym.transformers.graph_capture import is_hooked
from tilegym.transformers.graph_capture import rotates_by_length
from tilegym.transformers.graph_capture import warn
from tilegym.transformers.packed_attention import attends_packed
from tilegym.transformers.patching import ALREADY_PATCHED
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

MOST_GRAPHS = 32  # of one model; calls of further forms run its code
MOST_MEMORY = 0.05  # of the device's, for inputs and results that graphs keep


class _Graph:
    """One captured form of a call."""

    def __init__(self, inputs: dict[str, Any], memory: int) -> None:
        with torch.inference_mode(False):
            self.inputs = {n: torch.empty_like(v) if isinstance(v, Tensor) else v for n, v in inputs.items()}
        self.memory = memory
        self.sizes: set[tuple] = set()  # of images, whose results were compared
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: Any = None

    def fill(self, inputs: dict[str, Any]) -> None:
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self.inputs[name].copy_(value)

    def replay(self, inputs: dict[str, Any]) -> Any:
        self.fill(inputs)
        self.graph.replay()
        return mapped(self.results, Tensor.clone)


class _Graphs:
    """What is kept for one model: its graphs by form of call, None for a form that was seen once.

    Graphs of one stream share their memory: the results of one are copied before the next is replayed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.fingerprint = Fingerprint(model)
        self.forms: dict[tuple, _Graph | None] = {}
        self.refused: set[tuple] = set()  # forms whose results cannot be kept
        self.pools: dict[int, Any] = {}
        self.sizes: packed_sizes.Sizes | None = None
        self.failed = False

    def pool(self, stream: int) -> Any:
        if stream not in self.pools:
            self.pools[stream] = torch.cuda.graph_pool_handle()
        return self.pools[stream]

    def room(self, device: torch.device) -> float:
        """How many bytes one more graph may keep; negative: none."""
        held = [graph.memory for graph in self.forms.values() if graph is not None]
        if self.failed or len(held) >= MOST_GRAPHS:
            return -1
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 34
        return MOST_MEMORY * total - sum(held)


_kept: "weakref.WeakKeyDictionary[nn.Module, _Graphs]" = weakref.WeakKeyDictionary()
_locks: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def put(patches: PatchSet, model: nn.Module, where: Entry) -> None:
    """Lets calls of ``model`` be replayed where they take no gradients."""
    current = vars(model).get(place_of_forward(model))
    forward = function_of_forward(model)
    if is_made_by(replaying, current):
        patches.skip(where, ALREADY_PATCHED)
        return
    masks = any(name.endswith("attention_mask") for name in inspect.signature(forward).parameters)
    if masks and model.config._attn_implementation not in NAMES.values():
        patches.skip(where, "its attention is not TileGym's")  # transformers' writes out masks while it is captured
    elif attends_packed(model) and not takes_packed(model):
        patches.skip(where, "what it launches depends on the sizes of the images")
    elif rotates_by_length(model):
        patches.skip(where, BY_LENGTH)
    elif patches.replace_forward(model, replaying(forward, attends_packed(model)), where):
        patches.on_revert(functools.partial(forget, model))


@reproducible
def replaying(forward: Callable, packed: bool) -> Callable:
    """``forward``, as a function of the module and its arguments, that replays graphs where it can.

    Args:
        packed: it takes images of any sizes, one behind the other (:mod:`.packed_sizes`).
    """
    names = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

    @functools.wraps(forward)
    def replayed_forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        if self.training:
            forget(self)  # a training step needs the memory
        if torch.is_grad_enabled() or self.training or len(args) > len(names) or getattr(self, "_is_replica", False):
            return forward(self, *args, **kwargs)
        named = dict(zip(names, args, strict=False))
        if named.keys() & kwargs.keys():
            return forward(self, *args, **kwargs)  # says what is wrong
        return _forward(self, forward, named | kwargs, packed)

    return replayed_forward


def forget(model: nn.Module) -> None:
    """Frees what was kept for ``model``."""
    _kept.pop(model, None)


def _forward(model: nn.Module, forward: Callable, inputs: dict[str, Any], packed: bool) -> Any:
    first = next((v for v in inputs.values() if isinstance(v, Tensor)), None)
    if first is None or not may_replay(first, inputs) or (packed and not takes_packed(model)):
        return forward(model, **inputs)
    device = first.device
    if torch.is_autocast_enabled(device.type):
        return forward(model, **inputs)
    with _locks.setdefault(model, threading.RLock()):
        kept = _kept.get(model)
        if kept is None or not kept.fingerprint.holds(model):
            _kept.pop(model, None)
            kept = None  # drops its memory first
            _kept[model] = kept = _Graphs(model)
        sizes, given = (), inputs
        if packed and kept.sizes is None:
            return forward(model, **inputs) if kept.failed else _first(model, forward, inputs, kept)
        if packed:
            sizes = kept.sizes.key(inputs)
            given = inputs | kept.sizes.of(sizes, inputs)
        form = form_of(model, given, device)
        graph = kept.forms.get(form)
        if graph is not None and (sizes in graph.sizes or len(graph.sizes) > 1):
            return graph.replay(given)
        results = forward(model, **inputs)
        if graph is not None:
            _compare(model, graph, given, results, kept)
            graph.sizes.add(sizes)
        elif form in kept.refused:
            return results
        elif form not in kept.forms:
            if len(kept.forms) < 4096:  # forms that vary from call to call must not fill the memory
                kept.forms[form] = None
        else:
            _capture(model, forward, given, results, kept, form)
            if kept.forms[form] is not None:
                kept.forms[form].sizes.add(sizes)
        return results


def _first(model: nn.Module, forward: Callable, inputs: dict[str, Any], kept: _Graphs) -> Any:
    """The results of the first call on packed images."""
    results, seen = packed_sizes.seen_in(model, forward, inputs)
    try:
        kept.sizes = packed_sizes.Sizes(seen, inputs)
    except ValueError as error:
        warn(model, "runs", error)
        kept.failed = True
    return results


def _compare(model: nn.Module, graph: _Graph, inputs: dict[str, Any], results: Any, kept: _Graphs) -> None:
    """Gives up all graphs of a model if one gives other results than the model's own code."""
    again = graph.replay(inputs)
    if not all(is_close(a, b) for a, b in zip(leaves_of(again), leaves_of(results), strict=True)):
        warn(model, "runs", Unsuitable("images of other sizes give others' results"))
        kept.failed = True
        kept.forms.clear()


def _capture(
    model: nn.Module, forward: Callable, inputs: dict[str, Any], results: Any, kept: _Graphs, form: Form
) -> None:
    """Keeps the graph of a call that has just returned ``results``, if there is room, or notes that it cannot be."""
    tensors = [v for v in inputs.values() if isinstance(v, Tensor)]
    device, room = tensors[0].device, kept.room(tensors[0].device)
    if room < 0:
        return
    if is_hooked(model) or any(p.device != device or is_spread(p) for p in model.parameters()):
        kept.failed = True
        return
    try:
        leaves = leaves_of(results)
    except Unsuitable as error:  # another form, without a cache, may be kept
        if not kept.refused:
            warn(model, "runs", error)
        kept.refused.add(form)
        return
    try:
        memory = sum(t.nbytes for t in tensors + leaves)
        if memory > room:
            return
        held = with_mask(forward, inputs)
        made = _Graph(held, memory)
        with torch.inference_mode(False), torch.no_grad(), full_masks(form.full):
            made.fill(held)
            pool = kept.pool(form.stream)
            made.graph, made.results = capture(lambda: forward(model, **made.inputs), [], device, pool)
        again = made.replay(inputs)
        if not all(is_close(a, b) for a, b in zip(leaves_of(again), leaves, strict=True)):
            raise Unsuitable("its results differ from run to run")
    except Exception as error:  # whatever a model does that a graph cannot hold
        warn(model, "runs", error)
        kept.failed = True
    else:
        kept.forms[form] = made
