"""The first call of a patched model compiles its kernels side by side, and so does its first one for a training step.

A hook before the model's forward runs it once without launching a kernel, with gradients also its backward pass, to see
what the call is about to launch (:mod:`tilegym.backend.cutile.compile_ahead`). That run leaves nothing behind: it takes
copies of the inputs, gives back the state of the random numbers and of buffers, and accumulates no gradients.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map
from transformers.utils.import_utils import is_tracing

from tilegym.backend import is_backend_available
from tilegym.backend import recording
from tilegym.backend.wrapped import unreadable
from tilegym.transformers.graph_capture import PLAIN
from tilegym.transformers.graph_capture import all_modules_are_hooked
from tilegym.transformers.graph_capture import is_first_call
from tilegym.transformers.graph_capture import is_hooked
from tilegym.transformers.patching import PatchSet

DEVICES = ("cuda",)
CACHES = "past_key_values", "cache_params"  # arguments, which a run would fill
# Of each model whether calls with gradients, and without, have been seen.
_seen: "weakref.WeakKeyDictionary[nn.Module, set[bool]]" = weakref.WeakKeyDictionary()


def put(patches: PatchSet, model: nn.Module) -> None:
    """Lets the first calls of ``model`` compile ahead, where kernels are compiled at all: on a GPU."""
    if not (is_backend_available("cutile") and any(torch.get_device_module(d).is_available() for d in DEVICES)):
        return
    if not any(map(is_first_call, model._forward_pre_hooks.values())):
        model.register_forward_pre_hook(before_forward, with_kwargs=True)
        patches.on_revert(functools.partial(take_out, model))


def take_out(model: nn.Module) -> None:
    for key in [key for key, hook in model._forward_pre_hooks.items() if is_first_call(hook)]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)


def before_forward(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """The hook."""
    if torch.compiler.is_compiling():
        return
    gradients, seen = torch.is_grad_enabled(), _seen.setdefault(model, set())
    cached = any(kwargs.get(name) is not None for name in CACHES)
    if gradients in seen or cached or getattr(model, "_is_replica", False):
        return
    device = _device_of(args, kwargs)
    if device is None:
        return
    seen.add(gradients)
    if not recording.is_replaced() and _is_alone(model, device):  # else the model that this is a part of does it
        from tilegym.backend.cutile.compile_ahead import compile_ahead

        compile_ahead(functools.partial(_run, model, args, kwargs, device), device)


def _device_of(args: tuple, kwargs: dict[str, Any]) -> torch.device | None:
    """The GPU of a call's tensors; None of one that takes anything else than these and plain options."""
    values = tree_leaves((args, kwargs))
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or tensors[0].device.type not in DEVICES or unreadable(values) is not None or is_tracing(tensors[0]):
        return None
    plain = all(isinstance(value, PLAIN + (Tensor, torch.dtype)) for value in values)
    return tensors[0].device if plain else None


def _is_alone(model: nn.Module, device: torch.device) -> bool:
    """Whether nobody watches a run of ``model`` but who called it, nor shares its weights with other processes."""
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if captured or _get_current_dispatch_mode() is not None:
        return False
    spread = any(type(module).__module__.startswith("torch.distributed.") for module in model.modules())
    hooked = spread or all_modules_are_hooked() or is_hooked(model)
    return not hooked and unreadable(model.parameters()) is None


def _run(model: nn.Module, args: tuple, kwargs: dict[str, Any], device: torch.device) -> None:
    """A call, and its backward pass if it has one."""
    args, kwargs = tree_map(_copy, (args, kwargs))
    with unchanged(model, device), torch.autograd.set_multithreading_enabled(False):  # backward on this thread
        outputs = model.forward(*args, **kwargs)
        loss = getattr(outputs, "loss", None)
        ends = [t for t in ((loss,) if isinstance(loss, Tensor) else tree_leaves(outputs)) if _takes_gradient(t)]
        starts = [t for t in (*model.parameters(), *tree_leaves((args, kwargs))) if _takes_gradient(t)]
        if ends and starts:
            torch.autograd.grad(ends, starts, [torch.zeros_like(t) for t in ends], allow_unused=True)


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _takes_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@contextlib.contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Gives back what a run may change: the generators' states, and buffers, as those of a batch norm."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
