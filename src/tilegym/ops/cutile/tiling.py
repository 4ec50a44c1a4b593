"""What the launch functions of row-wise and elementwise ops share when they choose tiles and hints."""

import functools
from typing import Any

import cuda.tile as ct
import torch

Int = ct.Constant[int]
Bool = ct.Constant[bool]
Float = ct.Constant[float]
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
INT32_MAX = 2**31 - 1


def span(tile, SIZE: Int):
    """In a kernel: the indices of the elements of tile number ``tile`` along one dimension, [SIZE]."""
    # Row-wise and elementwise kernels address memory with gather and scatter: on sm_90 these become predicated
    # 16-byte accesses issued back to back, where a bounds-checked ct.load branches around each one, or, with the
    # tensor memory accelerator, spends registers and barriers on a pipeline that a single pass cannot fill. Their
    # offsets are computed in 64 bits, and what lies out of bounds is 0.
    return tile * SIZE + ct.arange(SIZE, dtype=ct.int32)


def at(x, rows, cols):
    """In a kernel: what indexes these rows and columns of ``x``, which is [M, N], or [B, S, N] with M = B * S."""
    return (rows, cols) if x.ndim == 2 else (rows // x.shape[1], rows % x.shape[1], cols)


def row_count(x):
    """In a kernel: M of ``x``, [M, N] or [B, S, N]."""
    return x.shape[0] if x.ndim == 2 else x.shape[0] * x.shape[1]


def begin(OVERLAP: Bool):
    """In a kernel, first of all: lets the next launch begin, and waits for what the one before has written."""
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
        ct.grid_dependency_control_wait()


def begin_alone(OVERLAP: Bool):
    """In a kernel, first of all: waits for what the launch before has written, and only then lets the next one begin.

    For the small launches of a layer with experts. Where they let the next begin at once, so does that, and the kernels
    that wait take the place of one that runs: on an H200 a step of gpt-oss-20b takes 2.50 ms so, of DeepSeek-V2-Lite
    2.18; 2.30 and 2.11 with this in rms_norm and the sum of the experts. In the routing it changes nothing, and in the
    merge of an attention's splits, which has much to read behind it, it costs 0.1 ms.
    """
    if OVERLAP:
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()


def let_next_begin(OVERLAP: Bool):
    """In a kernel whose launch waits for the one before, first of all: lets the next launch begin."""
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def hinted(kernel: ct.kernel, **hints: Any) -> ct.kernel:
    """``kernel`` with compiler hints, built once: ``replace_hints`` costs as much as a hundred launches."""
    return kernel.replace_hints(**hints)


@functools.cache
def sm_count(device_index: int) -> int:
    """The number of multiprocessors of a CUDA device; 1 for the CPU (index -1), so that few rows make blocks loop."""
    return 1 if device_index < 0 else torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def overlaps(device_index: int) -> bool:
    """Whether a launch on a CUDA device (-1: the CPU) may begin before its predecessor ends: see ``launch``."""
    return device_index >= 0 and torch.cuda.get_device_capability(device_index) >= (9, 0)


# Up to this many elements (a few microseconds of an H200's time) what a launch costs is the host's work.
SMALL = 2**20


def is_small(x: torch.Tensor) -> bool:
    """Whether kernels take ``x``, [M, N] or [B, S, N], as it is: small, where the time of a view would show."""
    return x.numel() <= SMALL and 2 <= x.dim() <= 3 and x.is_contiguous()


def small_or_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as it is if it is small, [M, N] or [B, S, N], else :func:`rows_of` it."""
    return x if is_small(x) else rows_of(x)


def size_of(x: torch.Tensor) -> tuple[int, int]:
    """The numbers M of rows and N of columns of [M, N] or [B, S, N]."""
    shape = x.shape
    return (shape[0] if len(shape) == 2 else shape[0] * shape[1]), shape[-1]


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` as [M, N] over its last dimension: a view where strides allow and fit the kernels' 32 bits, else a copy."""
    if x.dim() == 2 and x.stride(0) <= INT32_MAX:
        return x
    x = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(x.shape[:-1].numel(), 0)
    return x if x.stride(0) <= INT32_MAX else x.contiguous()


LINE = 16  # bytes: where the tensor memory accelerator finds a row


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Matrices ``x`` [..., M, N] with unit stride in the last dimension, or a copy whose rows begin where they can be
    loaded at once: without, a product of 4096x3420 and 3420x1280 in bf16 takes an H200 1018 us."""
    size = x.element_size()
    if x.data_ptr() % LINE == 0 and all(stride * size % LINE == 0 for stride in x.stride()[:-1]):
        return x
    step = LINE // size
    columns = x.shape[-1]
    held = x.new_empty(*x.shape[:-1], -(-columns // step) * step)[..., :columns]
    return held.copy_(x)
