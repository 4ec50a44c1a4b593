"""CUDA graphs of what a model launches, and what tells whether it would launch the same again."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from tilegym.backend import get_current_backend
from tilegym.backend.wrapped import PLAIN_TENSORS
from tilegym.backend.wrapped import addresses_of
from tilegym.errors import FallbackWarning
from tilegym.transformers.several_gpus import MovedOnce
from tilegym.transformers.several_gpus import OtherGPUs
from tilegym.transformers.several_gpus import capture_stream

PLAIN = (bool, int, float, str, type(None))


class _NumbersAreFilledIn(TorchFunctionMode):
    """Within it a number gets to a GPU as the argument of a kernel that fills, not as a copy, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, Tensor] = {}  # of the CPU, made within it

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and isinstance(args[0] if args else None, (bool, int, float)):
            dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
            made = torch.full((), args[0], **(kwargs | {"dtype": dtype}))
            if made.device.type == "cpu":
                self.numbers[id(made)] = made
            return made
        if function is Tensor.to and id(args[0]) in self.numbers and len(args) == 2 and not kwargs:
            if isinstance(args[1], (str, torch.device)) and torch.device(args[1]).type != "cpu":
                return torch.full((), args[0].item(), dtype=args[0].dtype, device=args[1])
        if function in (torch.where, Tensor.where) and len(args) == 3:
            like = next((t for t in args if isinstance(t, Tensor) and t.is_floating_point()), None)
            if like is not None:
                filled = [like.new_full((), x) if isinstance(x, (int, float)) else x for x in args]
                return function(*filled, **kwargs)
        return function(*args, **kwargs)


def _end_for_generator(device: torch.device) -> None:
    """A capture that fails leaves the random generator in its midst, and it would refuse every number from then on."""
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(generator.clone_state())


_one_at_a_time = threading.RLock()  # of all threads


def capture(
    run: Callable[[], Any],
    state: list[Tensor],
    device: torch.device,
    pool: Any = None,
    others: OtherGPUs | None = None,
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures what ``run`` launches, after two runs on a stream of their own.

    Args:
        run: works on buffers that stay where they are, and never waits for the device.
        state: what it changes and depends on; has its values again when this returns.
        device: a GPU.
        pool: of torch.cuda.graph_pool_handle, memory to share with graphs whose results are not wanted any more when
            this one is replayed; None for memory of its own.
        others: GPUs on which ``run`` launches besides.

    Returns:
        (the graph, what ``run`` returned: every replay overwrites it).

    Raises:
        Exception: whatever ``run`` does that a graph cannot hold.
    """
    values = [t.clone() for t in state]

    def restore() -> None:
        for tensor, value in zip(state, values, strict=True):
            tensor.copy_(value)

    others = others or OtherGPUs(())
    graph, result = _captured([lambda _: run()], restore, device, pool, others)[0]
    return others.graph(graph), result


def capture_in_turn(
    runs: list[Callable[[Any], Any]], device: torch.device, pool: Any
) -> list[tuple[torch.cuda.CUDAGraph, Any]]:
    """Of each of ``runs``, which is given what the one before has returned (None), what :func:`capture` returns.

    They share ``pool``, and are to be replayed in this order.
    """
    return _captured(runs, lambda: None, device, pool, OtherGPUs(()))


def _captured(
    runs: list[Callable[[Any], Any]], restore: Callable[[], None], device: torch.device, pool: Any, others: OtherGPUs
) -> list[tuple[torch.cuda.CUDAGraph, Any]]:
    with contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device):  # which need not be current
        return _capture(runs, restore, device, pool, others)


def _capture(
    runs: list[Callable[[Any], Any]], restore: Callable[[], None], device: torch.device, pool: Any, others: OtherGPUs
) -> list[tuple[torch.cuda.CUDAGraph, Any]]:
    stream = torch.cuda.Stream(device)
    captured: list[tuple[torch.cuda.CUDAGraph, Any]] = []
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles and tunes kernels, and lets libraries make their workspaces
                functools.reduce(lambda result, run: run(result), runs, None)
                restore()
        stream.synchronize()
        # Not by torch.cuda.graph, whose stream is of the GPU that was current when the process first used it.
        stream = capture_stream(torch.cuda.current_device())
        moves = MovedOnce() if others else contextlib.nullcontext()
        with _one_at_a_time, others.on_streams(), torch.cuda.stream(stream), moves, _NumbersAreFilledIn():
            torch.cuda.empty_cache()
            result = None
            for run in runs:
                graph = torch.cuda.CUDAGraph()
                # What other threads do meanwhile (loaders that pin memory, say) is not its business, nor forbidden.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    with others.forked(stream):
                        result = run(result)
                except BaseException:  # Ctrl-C too: the stream would capture for ever
                    with contextlib.suppress(RuntimeError):  # of a capture that has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
                captured.append((graph, result))
    except BaseException:
        # The first error is the one to tell. No device can be waited for while another thread captures on it.
        with contextlib.suppress(RuntimeError), _one_at_a_time:
            torch.cuda.synchronize()
        if device.type == "cuda":
            _end_for_generator(device)
        raise
    finally:
        restore()
    return captured


def warn(model: nn.Module, does: str, error: Exception) -> None:
    """Says that ``model`` does something without a CUDA graph, and why."""
    why = str(error).strip().partition("\n")[0]
    warnings.warn(f"{type(model).__name__} {does} without a CUDA graph: {why}", FallbackWarning, stacklevel=3)


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| of two tensors of floats; numbers that are none, or infinite, count as such numbers do in both."""
    a, b = (torch.nan_to_num(t.float(), nan=1.0, posinf=2.0, neginf=-2.0) for t in (a, b))
    off = (a - b).norm()
    return (off / b.norm()).item() if off else 0.0


def is_hooked(model: nn.Module) -> bool:
    """Whether a module has hooks, which a replay would not call.

    Those by which transformers records do not count, nor the one before a first call.
    """
    hooks = (h for m in model.modules() for table in (m._forward_hooks, m._forward_pre_hooks) for h in table.values())
    own = (hook for hook in hooks if not is_first_call(hook))
    return any(not (getattr(hook, "__module__", "") or "").startswith("transformers.") for hook in own)


def is_first_call(hook: Any) -> bool:
    """Whether a hook is that of :mod:`.first_call`."""
    return getattr(hook, "__module__", None) == "tilegym.transformers.first_call"


def all_modules_are_hooked() -> bool:
    """Whether there are hooks on every module of the process."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


BY_LENGTH = "its rotary embedding changes with the length of the sequence"


def rotates_by_length(model: nn.Module) -> bool:
    """Whether a rotary embedding looks at the positions on the host (transformers' dynamic_rope_update)."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", ())
        kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            return True
    return False


def settings_of(config: PreTrainedConfig) -> list[tuple]:
    """What a model's config says in plain values, those within it too: forward passes may read it."""
    settings = []
    for item in vars(config).items():
        if isinstance(item[1], PLAIN):
            settings.append(item)
        elif isinstance(item[1], PreTrainedConfig):
            settings += settings_of(item[1])
    return settings


class Fingerprint:
    """Everything that a graph captured of ``model`` takes for granted: which code runs on which memory."""

    def __init__(self, model: nn.Module) -> None:
        # What the model itself holds is asked for anew: its patched forward would keep it alive for ever.
        self._inner = [vars(module) for module in model.modules() if module is not model]
        self._taken = self._look(model)

    def holds(self, model: nn.Module) -> bool:
        """Whether it is so still; of a model with 400 modules this takes 0.2 ms."""
        return self._look(model) == self._taken

    def _look(self, model: nn.Module) -> list[Any]:
        owns = [vars(model), *self._inner]
        look: list[Any] = [get_current_backend(), model.config._attn_implementation]
        look += [id(module) for module in chain.from_iterable([own["_modules"].values() for own in owns])]
        look += [
            (id(own.get("forward")), own["training"], *own["_forward_hooks"], *own["_forward_pre_hooks"])
            for own in owns
        ]
        for kind in ("_parameters", "_buffers"):
            tensors = chain.from_iterable([own[kind].values() for own in owns])
            look += [
                tensor.data_ptr() if type(tensor) in PLAIN_TENSORS else addresses_of(tensor)
                for tensor in tensors
                if tensor is not None
            ]
        look += [_adapters_of(own) for own in owns if "merged_adapters" in own or "_active_adapter" in own]
        return look


def _adapters_of(own: dict[str, Any]) -> str:
    """The switches and factors of a module of peft's: which of its adapters compute, and which are in its weight."""
    plain = {n: v for n, v in own.items() if isinstance(v, (bool, int, float, str, list, dict)) and n[0] != "_"}
    return repr((own.get("_active_adapter"), own.get("_disable_adapters"), plain))
