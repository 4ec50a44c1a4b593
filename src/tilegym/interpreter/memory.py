"""Arrays as kernels see them: pointers into a flat storage, and strided views of it."""

from __future__ import annotations

import numpy as np
import torch

from .dtypes import FROM_TORCH
from .dtypes import carrier


class Memory:
    """The storage behind one array argument, as a flat tensor of carriers.

    ``shape``, ``strides`` and ``start`` (in elements) place the argument in it; they serve to name elements in errors.
    """

    __slots__ = ("flat", "name", "dtype", "shape", "strides", "start", "address", "packed")

    def __init__(self, array, name: str):
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array.detach()
        self.name = name
        self.dtype = FROM_TORCH[tensor.dtype]
        self.shape = tuple(tensor.shape)
        self.strides = tensor.stride()
        storage = tensor.untyped_storage()
        # An empty tensor's address is 0 whatever its offset, and its signature was made of that.
        self.start, self.address = (tensor.storage_offset(), storage.data_ptr()) if tensor.numel() else (0, 0)
        size = storage.nbytes() // tensor.element_size()
        if tensor.is_inference():  # which torch does not write outside of inference mode, as a GPU does
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (size,), (1,))
        else:
            flat = torch.as_strided(tensor, (size,), (1,), 0)
        self.packed = None
        if self.dtype.name == "float4_e2m1fn":  # one code an element while the kernel runs
            self.packed = flat.view(torch.uint8)
            flat = torch.stack((self.packed & 15, self.packed >> 4), -1).reshape(-1)
            self.shape = (*self.shape[:-1], self.shape[-1] * 2)
            self.strides = (*(stride * 2 for stride in self.strides[:-1]), 1)
            self.start *= 2
        elif flat.dtype != carrier(self.dtype):
            flat = flat.view(carrier(self.dtype))
        self.flat = flat

    def write_back(self) -> None:
        """Packs a 4-bit array again after the kernel."""
        if self.packed is not None:
            low, high = self.flat.reshape(-1, 2).unbind(1)
            self.packed.copy_(low | (high << 4))

    def flat_values(self) -> list:
        """The register values of an array parameter: base pointer, shape, strides."""
        return [Pointer(self, self.start), *self.shape, *self.strides]

    def extent(self) -> tuple:
        """First and last offset that an index into the array can have."""
        if 0 in self.shape:
            return 0, -1
        return self.start, self.start + sum(
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )

    def index_of(self, offset: int):
        """The array index that a flat offset stands for, beyond the array's shape too; None where there is none."""
        rest = offset - self.start
        index = [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]):
            stride = self.strides[axis]
            if stride > 0:
                index[axis], rest = divmod(rest, stride)
        return tuple(index) if rest == 0 else None


class Pointer:
    """A tile of pointers: element offsets into a memory, an int for a single one."""

    __slots__ = ("memory", "offset")

    def __init__(self, memory: Memory, offset):
        self.memory = memory
        self.offset = offset


class View:
    """A strided view of a memory: what an array is inside a kernel after slicing."""

    __slots__ = ("memory", "offset", "shape", "strides")

    def __init__(self, memory: Memory, offset: int, shape: tuple, strides: tuple):
        self.memory = memory
        self.offset = offset
        self.shape = shape
        self.strides = strides

    def permuted(self, order) -> View:
        if tuple(order) == tuple(range(len(self.shape))):
            return self
        shape, strides = (tuple(values[axis] for axis in order) for values in (self.shape, self.strides))
        return View(self.memory, self.offset, shape, strides)
