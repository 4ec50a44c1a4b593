"""Cases for memory, shapes, reductions, matrix products, atomics and control flow."""

from functools import cache

import torch

from interpreter import functions as F
from interpreter import kernels as K
from interpreter.cases import FLOAT8
from interpreter.cases import SIZE
from interpreter.cases import Case
from interpreter.cases import edges
from interpreter.cases import matrix
from interpreter.cases import numbers
from interpreter.cases import short

INTEGERS = (torch.int32, torch.int64)
ARITHMETIC = (*F.FLOAT_DTYPES, torch.int8, torch.int32, torch.int64, torch.uint8)


def small_integers(dtype: torch.dtype, *shape: int, seed="s", low: int = -3, high: int = 4) -> torch.Tensor:
    """Whole numbers so small that sums of their products are exact in every dtype."""
    values = numbers(torch.float64, torch.Size(shape).numel(), seed, low=low, high=high).floor().reshape(shape)
    if dtype == torch.uint8:
        values = values.abs()
    return values.to(dtype)


@cache
def memory() -> list:
    cases = []
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn, torch.bool):
        modes = 5 if dtype.is_floating_point and dtype != torch.float8_e4m3fn else 1
        for mode in range(modes):

            def padded_args(dtype=dtype, mode=mode):
                return [matrix(dtype, 13, 21), torch.zeros(16, 32, dtype=dtype), mode, 8, 16]

            cases.append(Case(f"pad-{mode}-{short(dtype)}", K.copy_padded, (2, 2, 1), padded_args))
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):

        def transposed_args(dtype=dtype):
            return [matrix(dtype, 13, 21), torch.zeros(21, 13, dtype=dtype), 8, 16]

        cases.append(Case(f"transpose_load-{short(dtype)}", K.copy_transposed, (2, 2, 1), transposed_args))
        cases.append(Case(f"transpose_store-{short(dtype)}", K.store_column_major, (2, 2, 1), transposed_args))

    def gather_args():
        index = torch.tensor([5, 0, -1, 31, 32, 7, 3, 15, 1000, -(2**31), 2, 6, 4, 9, 12, 30], dtype=torch.int32)
        return [numbers(torch.float32, 32), index, torch.zeros(48), 16]

    def rows_args():
        return [
            matrix(torch.bfloat16, 9, 12),
            torch.tensor([8, 0, 9, 3], dtype=torch.int32),
            torch.zeros(4, 16, dtype=torch.bfloat16),
            4,
            16,
        ]

    def rows_at_args():
        index = torch.tensor([8, 0, 9, 3], dtype=torch.int32)
        return [matrix(torch.float32, 9, 12), index, torch.zeros(9, 12), 6, 4, 8]

    def strided_args():
        return [matrix(torch.float32, 26, 42)[::2, ::2], torch.zeros(16, 32), 0, 8, 16]

    cases.extend(
        (
            Case("gather_scatter", K.gather_scatter, (1,), gather_args),
            Case("gather_rows", K.gather_rows, (1,), rows_args),
            Case("rows_at", K.rows_at, (1,), rows_at_args),
            Case("rows_at", K.rows_at, (1,), rows_at_args),
            Case("non_contiguous", K.copy_padded, (2, 2, 1), strided_args),
            Case(
                "overlapping", K.overlapping_tiles, (1,), lambda: [numbers(torch.float32, 20), torch.zeros(10, 4), 4, 2]
            ),
            Case("gaps", K.overlapping_tiles, (1,), lambda: [numbers(torch.float32, 20), torch.zeros(4, 4), 4, 6]),
            Case("slice", K.sliced, (1,), lambda: [numbers(torch.float32, 40), torch.zeros(16), 5, 19, 8]),
            Case(
                "list",
                K.sum_of_list,
                (3,),
                lambda: [[numbers(torch.float32, n, n) for n in (20, 24, 17)], torch.zeros(24), 8],
            ),
            Case("raw_memory", K.raw_offsets, (1,), lambda: [numbers(torch.float32, 16), torch.zeros(16), 16]),
            Case(
                "scalars", K.scalars, (4,), lambda: [numbers(torch.float32, 4), torch.zeros(4), 3, 0.1, True, 2**40], 1
            ),
        )
    )
    return cases


@cache
def shapes() -> list:
    cases = []
    for dtype in (torch.bool, *F.INTEGER_DTYPES, *F.FLOAT_DTYPES, *FLOAT8):

        def shape_args(dtype=dtype):
            return [matrix(dtype, 4, 8), torch.zeros(16, 8, dtype=dtype), 4, 8]

        cases.append(Case(f"shapes-{short(dtype)}", K.shapes, (1,), shape_args))
    for source, target in (
        (torch.float32, torch.int32),
        (torch.float32, torch.uint32),
        (torch.uint64, torch.float64),
        (torch.bfloat16, torch.float16),
        (torch.int16, torch.bfloat16),
        (torch.float8_e5m2, torch.float8_e4m3fn),
    ):

        def bits_args(source=source, target=target):
            x = numbers(source)
            return [x, torch.zeros(SIZE, dtype=target), torch.zeros(SIZE * x.itemsize, dtype=torch.uint8), SIZE]

        def unpack_args(target=target):
            return [numbers(torch.uint8), torch.zeros(SIZE // target.itemsize, dtype=target), SIZE]

        cases.append(Case(f"bits-{short(source)}-{short(target)}", K.bit_patterns, (1,), bits_args))
        cases.append(Case(f"unpack-{short(target)}", K.unpack, (1,), unpack_args))
    for dtype in (torch.float16, torch.float32, torch.int32, torch.uint16, torch.uint64):

        def select_args(dtype=dtype):
            return [numbers(dtype, seed="x"), numbers(dtype, seed="y"), torch.zeros(SIZE, dtype=dtype), SIZE]

        cases.append(Case(f"select-{short(dtype)}", K.select, (1,), select_args))
    return cases


@cache
def reductions() -> list:
    cases = []
    for dtype in ARITHMETIC:
        for axis in (0, 1):
            size = (16, 8)[axis]

            def exact_args(dtype=dtype, axis=axis, size=size):
                return [small_integers(dtype, 8, 16), torch.zeros(8, size, dtype=dtype), axis, 8, 16]

            cases.append(Case(f"reduce-{axis}-{short(dtype)}", K.reductions, (1,), exact_args))

        def arg_args(dtype=dtype):
            return [small_integers(dtype, 8, 8), torch.zeros(4, 8, dtype=torch.int32), 1, 8, 8]

        def scan_args(dtype=dtype):
            return [small_integers(dtype, 8, 4, low=-1, high=3), torch.zeros(32, 4, dtype=dtype), 0, 8, 4]

        cases.append(Case(f"arg_reduce-{short(dtype)}", K.arg_reductions, (1,), arg_args))
        cases.append(Case(f"scan-{short(dtype)}", K.scans, (1,), scan_args))
    for dtype in F.FLOAT_DTYPES:

        def rounded_args(dtype=dtype):
            return [matrix(dtype, 8, 16, low=0.5, high=1.5), torch.zeros(8, 8, dtype=dtype), 1, 8, 16]

        def nan_args(dtype=dtype):
            return [edges(dtype).reshape(8, 16), torch.zeros(4, 8, dtype=dtype), 8, 16]

        rows = tuple((name, ulps) for name, ulps in (("sum", 4), ("prod", 16), ("max", 0), ("min", 0), ("custom", 0)))
        cases.append(Case(f"reduce_rounded-{short(dtype)}", K.reductions, (1,), rounded_args, rows=rows))
        cases.append(Case(f"reduce_nan-{short(dtype)}", K.nan_reductions, (1,), nan_args))
    return cases


@cache
def products() -> list:
    cases = []
    for source, target in (
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int8, torch.int32),
        (torch.uint8, torch.int32),
        *((dtype, torch.float32) for dtype in FLOAT8),
    ):

        def exact_args(source=source, target=target):
            return [
                small_integers(source, 32, 64, seed="x"),
                small_integers(source, 64, 32, seed="y"),
                small_integers(target, 32, 32, seed="z"),
                32,
                32,
                64,
            ]

        cases.append(Case(f"mma-{short(source)}-{short(target)}", K.multiply, (1,), exact_args))
        if target != torch.int32:

            def rounded_args(source=source, target=target):
                # Positive, so that a sum's error is relative to the sum.
                return [
                    matrix(source, 32, 64, "x", low=0.1, high=1.0),
                    matrix(source, 64, 32, "y", low=0.1, high=1.0),
                    torch.zeros(32, 32, dtype=target),
                    32,
                    32,
                    64,
                ]

            name = f"mma_rounded-{short(source)}-{short(target)}"
            # Tensor cores add float8 products with 14 bits or so, and truncate sums of float16 products.
            ulps = 2.0**12 if source in FLOAT8 else 64.0 if source != torch.float16 or target != torch.float16 else 8.0
            cases.append(Case(name, K.multiply, (1,), rounded_args, ulps))

    def tf32_args():
        return [
            matrix(torch.float32, 32, 64, "x", low=0.1),
            matrix(torch.float32, 64, 32, "y", low=0.1),
            torch.zeros(32, 32),
            32,
            32,
            64,
        ]

    def batched_args(dtype):
        return lambda: [
            small_integers(dtype, 2, 16, 32, seed="x"),
            small_integers(dtype, 2, 32, 16, seed="y"),
            torch.zeros(2, 16, 16, dtype=dtype if dtype != torch.bfloat16 else torch.float32),
            2,
            16,
            16,
            32,
        ]

    cases.append(Case("mma-tfloat32", K.multiply_tf32, (1,), tf32_args, 64.0))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        cases.append(Case(f"matmul_batched-{short(dtype)}", K.multiply_batched, (1,), batched_args(dtype)))
    return cases


@cache
def scaled_products() -> list:
    """Block-scaled products, which need Blackwell."""
    cases = []
    for dtype in FLOAT8:

        def scaled_args(dtype=dtype):
            scales = torch.tensor([0.5, 1.0, 2.0, 4.0]).to(torch.float8_e8m0fnu)
            return [
                small_integers(dtype, 32, 64, seed="x"),
                scales[small_integers(torch.int64, 32, 2, low=0)],
                small_integers(dtype, 64, 32, seed="y"),
                scales[small_integers(torch.int64, 2, 32, low=0)],
                torch.zeros(32, 32),
                32,
                32,
                64,
                2,
            ]

        cases.append(Case(f"mma_scaled-{short(dtype)}", K.multiply_scaled, (1,), scaled_args))
    return cases


@cache
def atomics() -> list:
    cases = []
    for dtype in (torch.int32, torch.uint32, torch.int64, torch.uint64):

        def arithmetic_args(dtype=dtype):
            info = torch.iinfo(dtype)
            make = lambda value: torch.full((8,), value, dtype=torch.int64).to(dtype)  # noqa: E731
            high = torch.full((8,), info.min, dtype=torch.int64).to(dtype)
            low = torch.full((8,), min(info.max, 2**63 - 1), dtype=torch.int64).to(dtype)
            return [make(0), low, high, numbers(dtype), 32]

        def bits_args(dtype=dtype):
            return [*(numbers(dtype, 8, seed) for seed in "abc"), numbers(dtype), 32]

        cases.append(Case(f"atomic_arithmetic-{short(dtype)}", K.atomic_arithmetic, (4,), arithmetic_args))
        cases.append(Case(f"atomic_bits-{short(dtype)}", K.atomic_bits, (4,), bits_args))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):

        def float_args(dtype=dtype):
            return [torch.zeros(8, dtype=dtype), small_integers(dtype, SIZE), 32]

        def view_args(dtype=dtype):
            return [torch.zeros(32, dtype=dtype), small_integers(dtype, SIZE), 32]

        cases.append(Case(f"atomic_add-{short(dtype)}", K.atomic_float_add, (4,), float_args))
        cases.append(Case(f"atomic_view-{short(dtype)}", K.atomic_view, (4,), view_args))
    for dtype in INTEGERS:

        def swap_args(dtype=dtype):
            return [small_integers(dtype, 32, low=2, high=5), torch.zeros(2, 16, dtype=dtype), 16]

        cases.append(Case(f"atomic_swap-{short(dtype)}", K.atomic_swap, (1,), swap_args))
    return cases


@cache
def control_flow() -> list:
    def make_args():
        return [numbers(torch.float32, 32), torch.zeros(32), 12, 8]

    def jumps_args():
        return [matrix(torch.float32, 4, 6, low=-4, high=4), torch.zeros(4, dtype=torch.int32), 6]

    return [
        Case("control_flow", K.control_flow, (4,), make_args, 1),
        Case("nested_jumps", K.nested_jumps, (4,), jumps_args),
    ]
