"""Small kernels that cover the language, each with arguments, to be run wherever a kernel can run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import cuda.tile as ct
import numpy as np
import torch

from interpreter import functions as F
from interpreter import kernels as K

SIZE = 128
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Case:
    """A launch. ``make_args`` makes fresh CPU arguments; the kernel writes its results into them."""

    name: str
    kernel: ct.kernel
    grid: tuple
    make_args: Callable[[], list]
    ulps: float = 0.0  # how far results may differ where a platform rounds in its own way
    rows: tuple = ()  # of the last array: (name, ulps) each

    def __str__(self) -> str:
        return self.name


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def generator(*seed: Any) -> np.random.Generator:
    return np.random.default_rng([ord(letter) for letter in "".join(map(str, seed))])


def numbers(dtype: torch.dtype, size: int = SIZE, seed: Any = 0, low: float = -8.0, high: float = 8.0) -> torch.Tensor:
    """Random numbers of any dtype; integers over their whole range."""
    rng = generator(dtype, size, seed)
    if dtype == torch.bool:
        return torch.from_numpy(rng.random(size) < 0.5)
    if dtype in F.INTEGER_DTYPES:
        info = np.iinfo(short(dtype))
        return torch.from_numpy(rng.integers(info.min, info.max, size, dtype=short(dtype), endpoint=True))
    return torch.from_numpy(rng.uniform(low, high, size)).to(dtype)


def matrix(dtype: torch.dtype, rows: int, columns: int, seed="m", **bounds) -> torch.Tensor:
    return numbers(dtype, rows * columns, seed, **bounds).reshape(rows, columns)


def edges(dtype: torch.dtype, seed: Any = 0) -> torch.Tensor:
    """Random numbers with the special ones of the dtype among them."""
    values = numbers(dtype, seed=seed)
    if dtype in F.INTEGER_DTYPES:
        info = np.iinfo(short(dtype))
        special = torch.tensor([info.min, info.max, 0, 1, info.max - 1, info.min + 1, 2, 7], dtype=dtype)
    else:
        info = torch.finfo(dtype)
        tiny = info.smallest_normal
        special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, info.min, tiny, -tiny, tiny / 4, 0.5, 1.5]
        special = torch.tensor(special, dtype=torch.float64).to(dtype)
    mixed = values.view(torch.uint8).clone().view(dtype)
    order = torch.from_numpy(generator("edges", dtype, seed).permutation(SIZE)[: len(special)])
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[mixed.element_size()]
    mixed.view(raw)[order] = special.view(raw)
    return mixed


def _rows(functions: tuple) -> tuple:
    return tuple((function.name, function.ulps) for function in functions)


@cache
def elementwise() -> list:
    """Every element-wise function, one launch for a table and dtype."""
    cases = []
    for dtype in F.FLOAT_DTYPES:
        unary = tuple(function for function in F.FLOAT_UNARY if function.takes(dtype))
        exact = tuple(function for function in unary if function.ulps == 0)

        def unary_args(dtype=dtype, count=len(unary)):
            return [numbers(dtype, seed="u", low=0.01), torch.zeros(count, SIZE, dtype=dtype), SIZE]

        def edge_args(dtype=dtype, count=len(exact)):
            return [edges(dtype), torch.zeros(count, SIZE, dtype=dtype), SIZE]

        cases.append(Case(f"unary-{short(dtype)}", F.unary_kernel(unary), (1,), unary_args, rows=_rows(unary)))
        cases.append(Case(f"unary_edges-{short(dtype)}", F.unary_kernel(exact), (1,), edge_args, rows=_rows(exact)))
        binary = tuple(function for function in F.FLOAT_BINARY if function.takes(dtype))
        for name, make in (("binary", numbers), ("binary_edges", edges)):
            chosen = binary if name == "binary" else tuple(f for f in binary if f.ulps == 0 and f.name != "floordiv")

            def binary_args(dtype=dtype, make=make, count=len(chosen)):
                return [make(dtype, seed="x"), make(dtype, seed="y"), torch.zeros(count, SIZE, dtype=dtype), SIZE]

            cases.append(Case(f"{name}-{short(dtype)}", F.binary_kernel(chosen), (1,), binary_args, rows=_rows(chosen)))
        cases.append(_comparison_case(dtype))
    for dtype in F.INTEGER_DTYPES:
        cases.extend(_integer_cases(dtype))
        cases.append(_comparison_case(dtype))
    return cases


def _comparison_case(dtype: torch.dtype) -> Case:
    def make_args():
        return [edges(dtype, "x"), edges(dtype, "y"), torch.zeros(len(F.COMPARISONS), SIZE, dtype=torch.uint8), SIZE]

    return Case(f"compare-{short(dtype)}", F.binary_kernel(F.COMPARISONS), (1,), make_args, rows=_rows(F.COMPARISONS))


def nonzero(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.where(x.numpy() == 0, np.array(3, x.numpy().dtype), x.numpy()))


def _integer_cases(dtype: torch.dtype) -> list:
    bits = dtype.itemsize * 8
    binary = tuple(f for f in F.INTEGER_BINARY if dtype.is_signed or f.name != "floordiv")  # does not compile
    unary = tuple(f for f in F.INTEGER_UNARY if dtype.is_signed or f.name == "bitwise_not")

    def unary_args():
        return [edges(dtype), torch.zeros(len(unary), SIZE, dtype=dtype), SIZE]

    def binary_args():
        # INT_MIN / -1 is undefined.
        divisor = nonzero(edges(dtype, "y"))
        divisor = torch.from_numpy(np.where(divisor.numpy() == -1, np.array(5, divisor.numpy().dtype), divisor.numpy()))
        return [edges(dtype, "x"), divisor, torch.zeros(len(binary), SIZE, dtype=dtype), SIZE]

    def shift_args():
        count = torch.from_numpy(generator("shift").integers(0, bits, SIZE).astype(short(dtype)))
        return [edges(dtype, "x"), count, torch.zeros(len(F.SHIFTS), SIZE, dtype=dtype), SIZE]

    return [
        Case(f"unary-{short(dtype)}", F.unary_kernel(unary), (1,), unary_args, rows=_rows(unary)),
        Case(f"binary-{short(dtype)}", F.binary_kernel(binary), (1,), binary_args, rows=_rows(binary)),
        Case(f"shift-{short(dtype)}", F.binary_kernel(F.SHIFTS), (1,), shift_args, rows=_rows(F.SHIFTS)),
    ]


@cache
def conversions() -> list:
    """From every dtype to every other, one launch a source."""
    sources = (torch.bool, *F.INTEGER_DTYPES, *F.FLOAT_DTYPES, *FLOAT8)
    cases = []
    for source in sources:
        floats = source in F.FLOAT_DTYPES or source in FLOAT8
        targets = tuple(t for t in (*F.INTEGER_DTYPES, *F.FLOAT_DTYPES, *FLOAT8) if t != source)

        def make_args(source=source, targets=targets, floats=floats):
            if floats:  # within every target's range: what lies beyond is not defined for integers
                values = numbers(torch.float64, seed="c", low=0.0, high=120.0).to(source)
            else:
                values = numbers(source, seed="c")
            return [values, tuple(torch.zeros(SIZE, dtype=target) for target in targets), SIZE]

        cases.append(Case(f"convert-{short(source)}", K.convert, (1,), make_args))
    for target in (torch.float16, torch.bfloat16, *FLOAT8):

        def edge_args(target=target):
            values = torch.cat((edges(torch.float32), numbers(torch.float32, seed="wide", low=-600.0, high=600.0)))
            return [values, (torch.zeros(2 * SIZE, dtype=target),), 2 * SIZE]

        cases.append(Case(f"convert_edges-float32-{short(target)}", K.convert, (1,), edge_args))

    def tf32_args():
        return [edges(torch.float32), torch.zeros(SIZE), SIZE]

    cases.append(Case("convert-float32-tfloat32", K.round_to_tf32, (1,), tf32_args))
    cases.append(Case("convert_modes", K.round_modes, (1,), _modes_args))
    return cases


def _modes_args() -> list:
    wide = numbers(torch.float64, seed="modes")
    return [wide, torch.zeros(3, SIZE), torch.zeros(SIZE, dtype=torch.float16), torch.zeros(SIZE), SIZE]
