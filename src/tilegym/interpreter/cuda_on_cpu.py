"""Lets code that asks torch for CUDA devices run on a machine without one: its tensors are CPU tensors.

``redirect()`` changes what torch does with a device: every torch function that is given a CUDA device gets the CPU
instead, and the parts of ``torch.cuda`` that programs ask about (availability, streams, events, properties) answer for
one imaginary GPU. ``Tensor.device`` stays truthful: it says cpu.
"""

from __future__ import annotations

import contextlib
import threading
import time
import types

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

CAPABILITY = (10, 0)  # of the imaginary GPU: what the interpreter's front end compiles for
_NUM_MULTIPROCESSORS = 4
_TOTAL_MEMORY = 8 * 2**30


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))


def _on_cpu(value):
    return torch.device("cpu") if _is_cuda(value) else value


def _named(device):
    """A device given by its number is a CUDA device."""
    return "cuda" if type(device) is int else device


_TO = (torch.Tensor.to, torch._C._nn._parse_to)  # the second is what a module's ``to`` asks


class _Redirection(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda or function is torch.Tensor.cpu:
            return args[0].clone()  # a copy, as between two devices
        if function in _TO:
            args = (*args[:1], *map(_named, args[1:])) if function is torch.Tensor.to else tuple(map(_named, args))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _named(kwargs["device"])}
        asks = any(map(_is_cuda, args[1:])) or _is_cuda(kwargs.get("device"))
        if asks:
            args = (*args[:1], *map(_on_cpu, args[1:]))
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
            if function is torch.Tensor.to:
                kwargs = {**kwargs, "copy": True}
        elif function is torch.Tensor.pin_memory:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return function(*args, **kwargs)


class _GeneratorType(type):
    """Of a stand-in for ``torch.Generator``, a type in C that asks no mode: its instances are the real ones."""

    def __call__(cls, device="cpu"):
        return cls.real(_on_cpu(device))

    def __instancecheck__(cls, value):
        return isinstance(value, cls.real)


class _Generator(metaclass=_GeneratorType):
    real = torch.Generator


class Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True


class Event:
    """An event that happens when it is recorded."""

    def __init__(self, *args, **kwargs):
        self._seconds = 0.0

    def record(self, stream=None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._seconds - self._seconds) * 1e3


class Device(contextlib.nullcontext):
    """``torch.cuda.device``: torch itself asks for instances of it, so it has to be a class."""


def _properties(device=None):
    major, minor = CAPABILITY
    return types.SimpleNamespace(
        name="tilegym interpreter",
        major=major,
        minor=minor,
        multi_processor_count=_NUM_MULTIPROCESSORS,
        total_memory=_TOTAL_MEMORY,
        L2_cache_size=2**20,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=2**16,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=227 * 2**10,
        shared_memory_per_multiprocessor=228 * 2**10,
    )


def _that_do_nothing(*names: str) -> dict:
    # A function for each: torch._dynamo has rules by function, and refuses one that stands under two names.
    return {name: lambda *args, **kwargs: None for name in names}


_stream = Stream()

_CUDA_ANSWERS = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: "tilegym interpreter",
    "get_device_properties": _properties,
    "current_stream": lambda device=None: _stream,
    "default_stream": lambda device=None: _stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "device": Device,
    "is_current_stream_capturing": lambda: False,
    "mem_get_info": lambda device=None: (_TOTAL_MEMORY, _TOTAL_MEMORY),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_summary": lambda device=None, abbreviated=False: "",
    "can_device_access_peer": lambda device, peer_device: False,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
    "seed": lambda: None,
    "initial_seed": lambda: torch.initial_seed(),
    "Stream": Stream,
    "ExternalStream": Stream,
    "Event": Event,
    **_that_do_nothing("init", "synchronize", "set_device", "set_stream", "empty_cache", "ipc_collect"),
    **_that_do_nothing("manual_seed", "manual_seed_all", "_sleep"),
    **_that_do_nothing(*(f"reset_{what}" for what in ("peak_memory_stats", "accumulated_memory_stats"))),
    **_that_do_nothing(*(f"reset_max_memory_{what}" for what in ("allocated", "cached"))),
}

_ACCELERATOR_ANSWERS = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: 0,
    "current_stream": lambda device=None: _stream,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    **_that_do_nothing("synchronize", "set_device_index", "set_stream", "empty_cache", "reset_peak_memory_stats"),
}

_load, _set_default_device = torch.load, torch.set_default_device

# What no mode sees: a type in C, a function in Python, and a device that is added to calls when the modes are through.
_TORCH_ANSWERS = {
    "Generator": _Generator,
    "load": lambda f, map_location=None, *args, **kwargs: _load(f, _on_cpu(map_location), *args, **kwargs),
    "set_default_device": lambda device: _set_default_device(_on_cpu(device)),
}

_start = threading.Thread.start


def _start_redirected(thread: threading.Thread) -> None:
    # A mode holds in the thread that entered it.
    run = thread.run

    def redirected():
        with _Redirection():
            run()

    thread.run = redirected
    _start(thread)


_ANSWERS = (
    (threading.Thread, {"start": _start_redirected}),
    (torch, _TORCH_ANSWERS),
    (torch.Tensor, _that_do_nothing("record_stream")),
    (torch.cuda, _CUDA_ANSWERS),
    (torch.accelerator, _ACCELERATOR_ANSWERS),
    (torch.cuda.nvtx, _that_do_nothing("range_push", "range_pop", "mark")),
)


@contextlib.contextmanager
def redirect():
    """Within the ``with`` block, tensors asked for on CUDA devices are CPU tensors.

    So it is in this thread, and in those that are started within the block.
    """
    # One that was set before, which torch would add to calls when the mode is through.
    if (device := getattr(_device, "CURRENT_DEVICE", None)) is not None and device.type == "cuda":
        _set_default_device("cpu")
    saved = []
    for owner, answers in _ANSWERS:
        for name, answer in answers.items():
            if hasattr(owner, name):
                saved.append((owner, name, getattr(owner, name)))
                setattr(owner, name, answer)
    try:
        with _Redirection():
            yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
