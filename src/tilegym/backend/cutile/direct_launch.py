"""Launching a compiled kernel through the CUDA driver, without ``ct.launch``'s look at every argument.

``ct.launch`` finds out of each argument what it is, and takes the host longer the more of them there are, constants
included: a repeated call knows it all but for the addresses of its tensors. What a launch hands to the driver is taken
down once: it is captured into a CUDA graph that never runs, whose node holds the function, its block and the values of
all parameters, as the driver's public interface tells (``cuGraphKernelNodeGetParams``). Those that are the addresses of
tensors are replaced from then on.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.backend import allocation

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other streams and threads are left alone
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
# CUlaunchAttributeID
_COOPERATIVE, _CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION, _PREFERRED_CLUSTER_DIMENSION = 2, 4, 6, 11

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


class _NodeParams(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("dimensions", ctypes.c_uint * 6),  # of the grid, of a block
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),  # where function is null
        ("context", ctypes.c_void_p),
    ]


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("dimensions", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Launch(NamedTuple):
    """A launch whose tensors alone change."""

    submit: Callable[..., int]  # of the addresses; 0, or the driver's error, or -1 where another GPU is the current one
    tensors: tuple[int, ...]  # which arguments' addresses these are


class _Taken(NamedTuple):
    """What a launch hands to the driver."""

    function: int
    dimensions: tuple[int, ...]
    shared_bytes: int
    values: list[bytes]  # of the parameters


def prepare(index: int, grid: tuple[int, ...], kernel: ct.kernel, args: tuple, overlap: bool) -> Launch | None:
    """``ct.launch`` of ``kernel`` over ``grid`` with ``args`` on GPU ``index``, to be repeated with tensors like these.

    Such as have their shapes, strides and dtypes, and addresses that are multiples of 16 where these have such ones.
    With ``overlap`` by programmatic dependent launch. The kernel has been launched before. None if this launch cannot
    be repeated so: it has no tensors, or lists of some, or two at one address; or there is another current GPU.
    """
    driver = _driver()
    tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    if (
        driver is None
        or not tensors
        or 0 in addresses
        or len(set(addresses)) < len(addresses)
        or any(isinstance(arg, list | tuple) for arg in args)
        or index != _current_device()
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    taken = _take_down(driver, index, grid, kernel, args)
    if taken is None or any(len(value) > 8 for value in taken.values):  # an address may be part of a descriptor
        return None
    order = []  # of the parameters that are addresses
    for address in addresses:
        found = [i for i, value in enumerate(taken.values) if value == struct.pack("=Q", address)]
        if len(found) != 1:
            return None
        order += found
    return Launch(_repeat(driver, index, kernel, taken, order, overlap), tuple(tensors))


def _repeat(
    driver: ctypes.PyDLL, index: int, kernel: ct.kernel, taken: _Taken, order: list[int], overlap: bool
) -> Callable[..., int]:
    others = [i for i in range(len(taken.values)) if i not in order]
    # The addresses first, so that one call of struct writes them; each other value by itself, as long as eight bytes.
    sizes = [8] * len(order) + [-(-len(taken.values[i]) // 8) * 8 for i in others]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    memory = ctypes.create_string_buffer(sum(sizes))
    start = ctypes.addressof(memory)
    parameters = (ctypes.c_void_p * len(sizes))()
    for at, i in zip(offsets, [*order, *others], strict=True):
        ctypes.memmove(start + at, taken.values[i], len(taken.values[i]))
        parameters[i] = start + at
    config = _Config(taken.dimensions, taken.shared_bytes)
    if overlap:
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        config.attributes, config.attribute_count = ctypes.pointer(attribute), 1
    write = struct.Struct(f"={len(order)}Q").pack_into
    launch, function, configured = driver.cuLaunchKernelEx, ctypes.c_void_p(taken.function), ctypes.byref(config)
    lock = threading.Lock()
    one_gpu = allocation.one_gpu()

    def submit(*addresses: int) -> int:
        # Not waited for: whoever holds it may be this thread, in a call within which garbage is collected.
        if not lock.acquire(False):
            return _repeat(driver, index, kernel, taken, order, overlap)(*addresses)
        try:
            if not one_gpu and _current_device() != index:
                return -1
            write(memory, 0, *addresses)
            config.stream = _raw_stream(index)
            return launch(configured, function, parameters, None)
        finally:
            lock.release()

    submit.kernel = kernel  # which keeps the function loaded
    return submit


def _take_down(driver: Any, index: int, grid: tuple[int, ...], kernel: ct.kernel, args: tuple) -> _Taken | None:
    """What ``ct.launch`` hands to the driver, which runs nothing; None if it is more than one kernel's plain launch."""
    stream, graph, mode = _stream(driver, index), ctypes.c_void_p(), ctypes.c_uint(_RELAXED)
    # Nor may what this thread asks of the driver meanwhile break a capture of another one's.
    if stream is None or driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
        return None
    try:
        if driver.cuStreamBeginCapture_v2(stream, _RELAXED):
            return None
        launched = False
        try:
            ct.launch(stream.value, grid, kernel, args)
            launched = True
        except Exception:  # the call itself is served: its launches were made before, and will be made so again
            pass
        finally:
            ended = driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        try:
            return _only_kernel(driver, graph) if launched and ended else None
        finally:
            if graph:
                driver.cuGraphDestroy(graph)
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.lru_cache
def _stream(driver: Any, index: int) -> ctypes.c_void_p | None:
    """A stream of GPU ``index``, the current one, on which nothing ever runs. One call is recorded at a time."""
    stream = ctypes.c_void_p()
    return None if driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING) else stream


def _only_kernel(driver: ctypes.PyDLL, graph: ctypes.c_void_p) -> _Taken | None:
    nodes, count, kind = (ctypes.c_void_p * 2)(), ctypes.c_size_t(2), ctypes.c_uint()
    if driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count)) or count.value != 1:
        return None
    node, params = ctypes.c_void_p(nodes[0]), _NodeParams()
    if driver.cuGraphNodeGetType(node, ctypes.byref(kind)) or kind.value != _KERNEL_NODE:
        return None
    if driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)) or params.extra:
        return None
    for attribute in (_COOPERATIVE, _CLUSTER_DIMENSION, _PREFERRED_CLUSTER_DIMENSION):
        value = (ctypes.c_uint * 16)()
        if driver.cuGraphKernelNodeGetAttribute(node, attribute, value) == 0 and _is_asked_for(attribute, value):
            return None
    function = params.function or params.kernel
    size_of = driver.cuFuncGetParamInfo if params.function else driver.cuKernelGetParamInfo
    values: list[bytes] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while True:
        number = ctypes.c_size_t(len(values))
        error = size_of(ctypes.c_void_p(function), number, ctypes.byref(offset), ctypes.byref(size))
        if error:
            break
        values.append(ctypes.string_at(params.parameters[len(values)], size.value))
    if error != _INVALID_VALUE:  # which says that there are no more
        return None
    return _Taken(function, tuple(params.dimensions), params.shared_bytes, values)


def _is_asked_for(attribute: int, value: Sequence[int]) -> bool:
    """Whether a launch is not as one without this attribute."""
    return bool(value[0]) if attribute == _COOPERATIVE else any(extent > 1 for extent in value[:3])


@functools.cache
def _driver() -> Any:
    """The CUDA driver, or None if there is none that tells what is needed here (CUDA 12.4 and later do)."""
    try:
        # Holds the interpreter's lock meanwhile, as ct.launch does: to give it up and take it again takes longer.
        driver = ctypes.PyDLL("libcuda.so.1")
        for name in (
            "cuStreamCreate",
            "cuThreadExchangeStreamCaptureMode",
            "cuStreamBeginCapture_v2",
            "cuStreamEndCapture",
            "cuGraphGetNodes",
            "cuGraphNodeGetType",
            "cuGraphKernelNodeGetParams_v2",
            "cuGraphKernelNodeGetAttribute",
            "cuGraphDestroy",
            "cuFuncGetParamInfo",
            "cuKernelGetParamInfo",
            "cuLaunchKernelEx",
        ):
            getattr(driver, name)
        return driver
    except (OSError, AttributeError):
        return None
