"""What the parts for images of Qwen2-VL and its like find on the host, found before a graph of them is replayed.

Where the images of a call begin, how long the longest is, which patches share a window: that follows from their sizes,
``grid_thw``, which the forward reads from the device. transformers computes it by functions that take it from the
options of the call instead if it is there, under names of its own (``cu_seqlens``, ``position_ids``); with all of it a
forward reads nothing. Which functions a forward calls, with what, is seen while it runs once.
"""

import contextvars
import inspect
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from torch import Tensor
from torch import nn
from transformers import PreTrainedConfig

from tilegym.transformers.forwards import reproducible
from tilegym.transformers.forwards import with_globals
from tilegym.transformers.graph_capture import PLAIN

_WHERE = ("transformers.vision_utils", "transformers.utils.generic")
_OPTIONS = "kwargs"  # the argument that is looked into
MOST_SIZES = 32  # whose values are kept
_seen: contextvars.ContextVar[list["_Seen"] | None] = contextvars.ContextVar("seen", default=None)


class _Seen(NamedTuple):
    """One call of such a function: its arguments by name, what it asked the options for, and its results."""

    function: Callable
    arguments: dict[str, Any]
    names: tuple[str, ...]
    results: tuple


class _Asked(dict):
    """Options that note what they are asked for."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.names: list[str] = []

    def pop(self, name, *default):
        self.names.append(name)
        return super().pop(name, *default)


@reproducible
def _watched(function: Callable) -> Callable:
    signature = inspect.signature(function)

    def watched(*args, **kwargs):
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        options = arguments.pop(_OPTIONS, None)
        seen = _seen.get()
        if seen is None or options is None:
            return function(*args, **kwargs)
        asked = _Asked(options)
        result = function(**arguments, **{_OPTIONS: asked})
        for name in asked.names:
            options.pop(name, None)
        seen.append(_Seen(function, arguments, tuple(asked.names), _as_tuple(result)))
        return result

    return watched


class Sizes:
    """What one model's forward finds on the host, by the inputs that it follows from."""

    def __init__(self, seen: list[_Seen], inputs: dict[str, Any]) -> None:
        """Raises ValueError if what was ``seen`` in a call with ``inputs`` cannot be had beforehand."""
        self._calls = [(call.function, call.names, _sources(call, seen[:i], inputs)) for i, call in enumerate(seen)]
        names = [name for call in seen for name in call.names]
        if not names or len(set(names)) < len(names) or any(len(c.names) != len(c.results) for c in seen):
            raise ValueError("what it finds on the host has no names")
        self._follows_from = {s[1] for *_, sources in self._calls for s in sources.values() if s[0] == "input"}
        self._kept: dict[tuple, dict[str, Any]] = {}

    def key(self, inputs: dict[str, Any]) -> tuple:
        """What the inputs hold that decide; it waits for the device."""
        return tuple((inputs[n].dtype, str(inputs[n].tolist())) for n in sorted(self._follows_from))

    def of(self, key: tuple, inputs: dict[str, Any]) -> dict[str, Any]:
        """The options for a forward that finds nothing itself, on its device."""
        if key not in self._kept:
            device, results = inputs[next(iter(self._follows_from))].device, []
            for function, _, sources in self._calls:
                arguments = {name: _value(source, results, inputs) for name, source in sources.items()}
                results.append(_as_tuple(function(**arguments)))
            named = zip([n for _, names, _ in self._calls for n in names], sum(results, ()), strict=True)
            found = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in named if v is not None}
            if len(self._kept) >= MOST_SIZES:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = found
        return self._kept[key]


def seen_in(model: nn.Module, forward: Callable, inputs: dict[str, Any]) -> tuple[Any, list[_Seen]]:
    """The results of ``forward`` for ``inputs``, and what it found on the host."""
    inner = inspect.unwrap(forward)
    names = inner.__code__.co_names if inspect.isfunction(inner) else ()
    found = {name: inner.__globals__.get(name) for name in names}
    mine = [(n, _watched(f)) for n, f in found.items() if getattr(f, "__module__", "") in _WHERE and _looks(f)]
    seen: list[_Seen] = []
    token = _seen.set(seen)
    try:
        watched = with_globals(forward, tuple(mine)) if mine else forward
        return watched(model, **inputs), seen
    finally:
        _seen.reset(token)


def _looks(function: Any) -> bool:
    return inspect.isfunction(function) and _OPTIONS in inspect.signature(function).parameters


def _as_tuple(result: Any) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def _sources(call: _Seen, before: list[_Seen], inputs: dict[str, Any]) -> dict[str, tuple]:
    """Where each argument of ``call`` is from: the name of an input, the place of an earlier result, or a constant."""
    sources: dict[str, tuple] = {}
    for name, value in call.arguments.items():
        if isinstance(value, Tensor):
            places = [("input", n) for n, v in inputs.items() if v is value]
            places += [("result", i, j) for i, c in enumerate(before) for j, r in enumerate(c.results) if r is value]
            if not places:
                raise ValueError(f"what it finds on the host follows from a tensor of its own ({name})")
            sources[name] = places[0]
        elif isinstance(value, (*PLAIN, PreTrainedConfig)):
            sources[name] = ("constant", value)
        else:
            raise ValueError(f"what it finds on the host follows from a {type(value).__name__} ({name})")
    return sources


def _value(source: tuple, results: list[tuple], inputs: dict[str, Any]) -> Any:
    kind, *place = source
    if kind == "input":
        return inputs[place[0]]
    return results[place[0]][place[1]] if kind == "result" else place[0]
