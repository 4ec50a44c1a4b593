"""What a kernel can do wrong, each error naming kernel, source line, block, array and index."""

from __future__ import annotations


class KernelError(RuntimeError):
    """An error inside a running kernel.

    Attributes:
        kernel: name of the kernel.
        location: ``file:line`` of the statement, or ``None``.
        block: the block's ``(x, y, z)``; the first to run, when every block does the same. ``None`` without blocks.
        array: name of the kernel parameter concerned, or ``None``.
        index: element index into that array, or ``None``.
    """

    def __init__(self, problem: str, *, kernel=None, location=None, block=None, array=None, index=None):
        self.problem = problem
        self.kernel = kernel
        self.location = location
        self.block = block
        self.array = array
        self.index = index
        super().__init__(problem)

    def __str__(self) -> str:
        where = []
        if self.kernel is not None:
            where.append(f"kernel {self.kernel}")
        if self.location is not None:
            where.append(f"at {self.location}")
        if self.block is not None:
            where.append(f"block {self.block}")
        if self.array is not None:
            where.append(f"array {self.array!r}")
        if self.index is not None:
            where.append(f"index {self.index}")
        return f"{self.problem} ({', '.join(where)})" if where else self.problem


class OutOfBoundsError(KernelError, IndexError):
    """An access outside an array that cuTile does not pad or drop."""


class UndeterminedValueError(KernelError):
    """A stored value, or the control flow, depends on padding that the hardware leaves undetermined."""


class DivisibilityError(KernelError):
    """A value does not have the divisibility or the bound that the kernel claims for it."""


class WriteConflictError(KernelError):
    """Two blocks (or two lanes of one scatter) write one address without an atomic operation."""


class KernelAssertionError(KernelError, AssertionError):
    """A ``ct.assert_`` of the kernel failed."""


class UnsupportedCuTileError(ImportError):
    """The installed cuda.tile is not a version that the interpreter knows."""
