"""Runs cuTile kernels on CPU tensors, to test, debug and teach them without a GPU. See docs/interpreter.md."""

from .compile import compile_kernel
from .errors import DivisibilityError
from .errors import KernelAssertionError
from .errors import KernelError
from .errors import OutOfBoundsError
from .errors import UndeterminedValueError
from .errors import UnsupportedCuTileError
from .errors import WriteConflictError
from .install import install
from .install import is_installed
from .install import is_requested
from .install import uninstall
from .launch import launch
from .sanitizer import sanitize
from .signature import kernel_signature

__all__ = [
    "DivisibilityError",
    "KernelAssertionError",
    "KernelError",
    "OutOfBoundsError",
    "UndeterminedValueError",
    "UnsupportedCuTileError",
    "WriteConflictError",
    "compile_kernel",
    "install",
    "is_installed",
    "kernel_signature",
    "launch",
    "sanitize",
    "uninstall",
]

if is_requested():
    install()
