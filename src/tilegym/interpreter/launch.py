"""Runs a kernel over its grid on CPU tensors."""

from __future__ import annotations

import contextlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from cuda import tile as ct
from cuda.tile.compilation import ConstantConstraint
from cuda.tile.compilation import ListConstraint
from cuda.tile.compilation import ScalarConstraint
from cuda.tile.compilation import TupleConstraint

from . import _cutile
from .control import BlockState
from .dtypes import is_whole
from .errors import KernelError
from .frontend import compiled
from .memory import Memory
from .program import describe
from .program import failing_location
from .sanitizer import Sanitizer
from .sanitizer import sanitizing
from .values import constant

ORDERS = ("sequential", "shuffled", "threads")
_MAX_BLOCKS = 2**24 - 1  # along each axis


def launch(grid, kernel, args, *, sanitize: bool | None = None, order: str = "sequential", seed: int = 0) -> None:
    """Runs ``kernel`` (made by ``@ct.kernel``, unmodified) over ``grid`` on CPU tensors, in place.

    Args:
        grid: one to three sizes, as ``ct.launch`` takes them.
        kernel: the kernel object.
        args: its positional arguments: CPU tensors, numpy arrays, numbers, tuples, lists of arrays.
        sanitize: whether to check for what the hardware leaves undefined; by default as ``sanitize()`` says.
        order: "sequential", "shuffled" (by ``seed``), or "threads" (blocks spread over torch's number of threads;
            one after the other when sanitized).
        seed: of the shuffled order.

    Raises:
        KernelError: for what goes wrong while a block runs, see ``tilegym.interpreter.errors``.
        TypeError, ValueError: for arguments that the launch or the kernel does not take.
        Whatever cuTile raises for a kernel that it rejects.
    """
    if not isinstance(kernel, ct.kernel):
        raise TypeError(f"expected a kernel made by @cuda.tile.kernel, got {type(kernel).__name__}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    sizes = _grid_sizes(grid)
    _check_on_cpu(args)
    sanitizer = Sanitizer() if (sanitizing() if sanitize is None else sanitize) else None
    num_threads = max(2, torch.get_num_threads())
    with _quiet_torch():
        found = compiled(kernel, args)  # makes the constants of the kernel, for later launches too
        program = found.program
        memories = []
        registers = [None] * program.num_registers
        _bind(registers, found, _cutile.parameter_names(kernel), args, memories)
        blocks = [(x, y, z) for z, y, x in itertools.product(*map(range, reversed(sizes)))]
        if order == "shuffled":
            random.Random(seed).shuffle(blocks)
        try:
            registers[0] = BlockState(None, sizes, sanitizer)
            with _errors_name(kernel, blocks[0] if blocks else None):  # every block would fail; name the first
                program.prologue.run(registers)
            if sanitizer is not None:
                for block in blocks:
                    with _errors_name(kernel, block):
                        sanitizer.run_block(program, registers, block, sizes)
            elif order == "threads":
                _run_on_threads(kernel, program, registers, blocks, sizes, num_threads)
            else:
                for block in blocks:
                    _run_block(kernel, program, registers, BlockState(block, sizes))
        finally:
            for memory in memories:
                memory.write_back()


@contextlib.contextmanager
def _quiet_torch():
    """Torch as kernels need it, in this thread: no gradients, none of the caller's modes (a default device, autocast),
    and one thread an operation, since handing out pieces of a tile costs more than computing it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_num_threads(num_threads)


def _grid_sizes(grid) -> tuple:
    """The three sizes of a grid, which is refused for what ``ct.launch`` refuses it for."""
    if not isinstance(grid, tuple):
        raise TypeError(f"a grid is a tuple of one to three sizes, got {grid!r}")
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"a grid has one to three sizes, got {grid}")
    if not all(isinstance(size, int) for size in grid):
        raise TypeError(f"grid sizes are ints, got {grid}: round them, as with ct.cdiv")
    if any(size < 0 for size in grid):
        raise ValueError(f"grid sizes cannot be negative, got {grid}")
    if any(size > _MAX_BLOCKS for size in grid):
        raise ValueError(f"a grid has at most {_MAX_BLOCKS} blocks an axis, got {grid}: launch it several times")
    return grid + (1,) * (3 - len(grid))


def _check_on_cpu(args) -> None:
    for arg in args:
        if isinstance(arg, (tuple, list)):
            _check_on_cpu(arg)
        elif isinstance(arg, torch.Tensor) and arg.device.type != "cpu":
            raise ValueError(f"the interpreter runs on CPU tensors, got one on {arg.device}")


def _run_block(kernel, program, registers, state) -> None:
    registers = registers.copy()
    registers[0] = state
    with _errors_name(kernel, state.index):
        program.body.run(registers)


def _run_on_threads(kernel, program, registers, blocks, grid, num_threads) -> None:
    def run(block):
        with _quiet_torch():
            _run_block(kernel, program, registers, BlockState(block, grid))

    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(run, blocks):
            pass


@contextlib.contextmanager
def _errors_name(kernel, block):
    """Errors that leave this context say where they happened."""
    try:
        yield
    except KernelError as error:
        error.kernel = _cutile.kernel_name(kernel)
        error.block = block
        raise
    except Exception as error:
        location = failing_location(error)
        raise KernelError(
            f"the interpreter failed: {type(error).__name__}: {error}",
            kernel=_cutile.kernel_name(kernel),
            location=None if location is None else describe(location),
            block=block,
        ) from error


def _bind(registers, found, names, args, memories) -> None:
    """Puts the arguments into the registers of the parameters."""
    values = []
    for name, arg, constraint in zip(names, args, found.signature.parameters, strict=True):
        _flatten(values, name, arg, constraint, memories)
    program = found.program
    for slot, value in zip(program.parameters, values, strict=True):
        registers[slot] = value


def _flatten(values, name, arg, constraint, memories) -> None:
    """Appends the register values of one argument, in the order of the program's parameters."""
    if isinstance(constraint, ConstantConstraint):
        return
    if isinstance(constraint, TupleConstraint):
        for position, (item, item_constraint) in enumerate(zip(arg, constraint.items, strict=True)):
            _flatten(values, f"{name}[{position}]", item, item_constraint, memories)
    elif isinstance(constraint, ScalarConstraint):
        whole = is_whole(constraint.dtype)
        values.append(arg if whole else constant(arg, (), constraint.dtype))
    elif isinstance(constraint, ListConstraint):
        arrays = [_memory(item, f"{name}[{position}]", memories) for position, item in enumerate(arg)]
        values.extend((arrays, len(arrays)))
    else:
        values.extend(_memory(arg, name, memories).flat_values())


def _memory(array: torch.Tensor | np.ndarray, name: str, memories: list) -> Memory:
    memory = Memory(array, name)
    if memory.packed is not None:
        memories.append(memory)
    return memory
