"""The parts of a TuningKey: fingerprints of kernel and search space, dtypes and shape bucket of the arguments."""

import ast
import dataclasses
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import cuda.tile as ct
import torch

_PLAIN = (bool, int, float, str, bytes, type(None))


def bucket(size: int) -> int:
    """The power of two nearest to ``size`` by ratio, 0 for 0.

    Sizes of one bucket share a tuning result. The borders (23, 46, 91, 182, 363, 725, 1449, ...) lie between
    the sizes that are common, so that 512 and 513 tokens, or 100 and 101, are one bucket. Across a border
    :func:`near` sizes share it.
    """
    if size < 2:
        return size
    power = 1 << (size.bit_length() - 1)
    return power if size * size < 2 * power * power else 2 * power


class Call(NamedTuple):
    """A call apart from its sizes, and its sizes: calls with equal ``form`` differ in sizes only."""

    form: str
    sizes: tuple[int, ...]

    @staticmethod
    def of_key(key: tuple) -> "Call":
        """The call that a key of the caller's stands for: the ints in it, but for bools, are its sizes."""
        sizes: list[int] = []

        def form(value: Any) -> str:
            if isinstance(value, tuple):
                return f"({','.join(map(form, value))})"
            if isinstance(value, int) and not isinstance(value, bool):
                sizes.append(value)
                return "#"
            return str(value)

        return Call(form(key), tuple(sizes))

    @staticmethod
    def of_arguments(kernel: ct.kernel, args: Sequence[Any]) -> "Call":
        """The launch of ``kernel`` with ``args``."""
        sizes: list[int] = []

        def form(size: int) -> str:
            sizes.append(size)
            return "#"

        return Call(describe(kernel, args, form), tuple(sizes))


def near(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Whether calls of these sizes, one by one, are so alike that the fastest configuration of one serves the other.

    They are at most an eighth apart, or one, but for 1 and 2: a second row, head or sequence is twice the work.
    """
    if len(sizes) != len(others):
        return False
    for size, other in zip(sizes, others, strict=True):
        small, large = (size, other) if size < other else (other, size)
        if large != small and (small < 2 or large - small > max(1, small // 8)):
            return False
    return True


def describe(kernel: ct.kernel, args: Sequence[Any], size: Callable[[int], Any] = bucket) -> str:
    """Dtypes and bucketed sizes of a launch's arguments, as in ``x=bfloat16[8192,4096] n=4096 TILE=128``.

    What is compiled in (``ct.Constant``) counts exactly, any other int by its bucket, a float not at all. ``size``
    writes a size in another way.
    """
    # Imported here: it takes a while, and a process that has nothing to tune does not need it.
    from tilegym.interpreter import _cutile

    names, annotations = parameter_names(kernel), _cutile.parameter_annotations(kernel)
    if len(args) != len(names):
        raise TypeError(f"kernel {kernel_name(kernel)} takes {', '.join(names)}; args_fn gives {len(args)} arguments")
    return " ".join(
        f"{name}={_describe(arg, getattr(annotation, 'constant', False), size)}"
        for name, annotation, arg in zip(names, annotations, args, strict=True)
    )


def _describe(arg: Any, constant: bool, size: Callable[[int], Any]) -> str:
    if isinstance(arg, torch.Tensor):
        sizes = ",".join(str(size(n)) for n in arg.shape)
        return f"{str(arg.dtype).removeprefix('torch.')}[{sizes}]{_stride_order(arg)}"
    if isinstance(arg, tuple):
        return f"({','.join(_describe(item, constant, size) for item in arg)})"
    if isinstance(arg, list):
        return f"{size(len(arg))}*{_describe(arg[0], constant, size) if arg else ''}"
    if dataclasses.is_dataclass(arg):
        values = (_describe(getattr(arg, field.name), constant, size) for field in dataclasses.fields(arg))
        return f"{type(arg).__name__}({','.join(values)})"
    if constant or isinstance(arg, bool) or not isinstance(arg, int | float):
        return str(arg)
    return "float" if isinstance(arg, float) else str(size(arg))


def _stride_order(tensor: torch.Tensor) -> str:
    """Empty where strides descend, as in a contiguous tensor; else the dimensions from outermost to innermost."""
    dims = [d for d in range(tensor.ndim) if tensor.shape[d] > 1]
    order = sorted(dims, key=lambda d: -tensor.stride(d))
    return "" if order == dims else "@" + ",".join(map(str, order))


@functools.cache
def parameter_names(kernel: ct.kernel) -> tuple[str, ...]:
    """The names of a kernel's parameters, in order."""
    return tuple(inspect.signature(kernel._pyfunc).parameters)


def kernel_name(kernel: ct.kernel) -> str:
    """Module and qualified name of a kernel's function."""
    function = kernel._pyfunc
    return f"{function.__module__}.{function.__qualname__}"


def kernel_fingerprint(kernel: ct.kernel) -> str:
    """A hash of the code that a kernel runs: its own, its helper functions', and the constants that they name.

    Comments, docstrings and layout do not count.
    """
    parts: list[str] = []
    _collect(kernel._pyfunc, parts, set())
    return _digest(*parts)


def space_fingerprint(configs: Sequence[str]) -> str:
    """A hash of the allowed configurations, written out; their order does not count, but which is first does."""
    return _digest(configs[0], *sorted(configs))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _collect(function: Callable, parts: list[str], seen: set[int]) -> None:
    function = inspect.unwrap(function)
    if id(function) in seen:
        return
    seen.add(id(function))
    parts.append(_normalized_source(function))
    used = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    for name, value in sorted({**used, **inspect.getclosurevars(function).nonlocals}.items()):
        if isinstance(value, types.FunctionType):
            if not value.__module__.startswith("cuda."):
                _collect(value, parts, seen)
        elif isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
            parts.append(f"{name}={value!r}")


def _names(code: types.CodeType) -> set[str]:
    """Those of globals and attributes in a function and in the functions inside it."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _normalized_source(function: types.FunctionType) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # no source file: the interpreter prompt, exec
        code = function.__code__
        return f"{code.co_code.hex()} {code.co_consts} {code.co_names}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
