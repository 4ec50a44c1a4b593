"""Tutorial 2: reductions, padding that matters, and why fusing pays: softmax over the rows of a matrix.

Run it with ``python examples/tutorials/02_softmax.py``, with or without a GPU.
"""

import math

import cuda.tile as ct
import lesson
import torch

from tilegym import interpreter
from tilegym.backend.cutile.launch import launch


# One block, one row. TILE is the row's length rounded up to a power of two, so the whole row is one tile: it is read
# once, stays on the chip through max, exp and sum, and is written once.
@ct.kernel
def softmax_kernel(x, out, TILE: ct.Constant[int]):
    row = ct.bid(0)
    # What lies beyond the row must not change the result: exp(-inf) is 0, and -inf is no maximum.
    tile = ct.load(x, (row, 0), (1, TILE), padding_mode=ct.PaddingMode.NEG_INF)
    tile = tile.astype(ct.float32)  # fp16 and bf16 are for storage; exponentials and sums want fp32
    # Subtracting the maximum keeps exp from overflowing, and cancels in the quotient. keepdims: shape (1, 1), which
    # broadcasts against (1, TILE).
    power = ct.exp(tile - ct.max(tile, axis=1, keepdims=True))
    result = power / ct.sum(power, axis=1, keepdims=True)
    ct.store(out, (row, 0), result.astype(out.dtype))  # a store never narrows by itself: say so


# The same with a mistake that is easy to make: no padding_mode.
@ct.kernel
def careless_softmax_kernel(x, out, TILE: ct.Constant[int]):
    row = ct.bid(0)
    tile = ct.load(x, (row, 0), (1, TILE)).astype(ct.float32)
    power = ct.exp(tile - ct.max(tile, axis=1, keepdims=True))
    ct.store(out, (row, 0), (power / ct.sum(power, axis=1, keepdims=True)).astype(out.dtype))


# Rows too long for one tile: two passes over tiles of the row. The first keeps, for each of TILE lanes, the sum of
# exponentials relative to the largest value so far. When that value grows, sums so far shrink by exp(old - new). This
# "online" softmax comes back in tutorial 5, where it makes attention possible.
@ct.kernel
def long_softmax_kernel(x, out, TILE: ct.Constant[int]):
    row = ct.bid(0)
    top = ct.full((1, 1), -math.inf, ct.float32)
    sums = ct.zeros((1, TILE), ct.float32)
    for j in range(ct.cdiv(x.shape[1], TILE)):  # an ordinary loop; its bound may be known only at run time
        tile = ct.load(x, (row, j), (1, TILE), padding_mode=ct.PaddingMode.NEG_INF).astype(ct.float32)
        new_top = ct.maximum(top, ct.max(tile, axis=1, keepdims=True))
        sums = sums * ct.exp(top - new_top) + ct.exp(tile - new_top)
        top = new_top
    total = ct.sum(sums, axis=1, keepdims=True)
    for j in range(ct.cdiv(x.shape[1], TILE)):
        tile = ct.load(x, (row, j), (1, TILE), padding_mode=ct.PaddingMode.NEG_INF).astype(ct.float32)
        ct.store(out, (row, j), (ct.exp(tile - top) / total).astype(out.dtype))


def softmax(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tile = 1 << (x.shape[1] - 1).bit_length()  # the next power of two
    launch(x, (x.shape[0],), softmax_kernel, (x, out, tile))
    return out


def long_softmax(x: torch.Tensor, tile: int) -> torch.Tensor:
    out = torch.empty_like(x)
    launch(x, (x.shape[0],), long_softmax_kernel, (x, out, tile))
    return out


def unfused_softmax(x: torch.Tensor) -> torch.Tensor:
    """One torch operation after the other: each reads its input from memory and writes its result back."""
    power = torch.exp(x - x.amax(dim=1, keepdim=True))
    return power / power.sum(dim=1, keepdim=True)


def main() -> None:
    lesson.title("Softmax: reductions and padding")

    lesson.step(
        "One block, one row",
        "37 rows of 781 columns, in tiles of (1, 1024): 243 elements of every tile are padding.",
    )
    x = lesson.randn(37, 781)
    lesson.check("fp32", softmax(x), torch.softmax(x, 1), torch.softmax(x.double(), 1))
    half = (10 * x).to(torch.bfloat16)
    lesson.check("bf16", softmax(half), torch.softmax(half, 1), torch.softmax(half.double(), 1))
    huge = x * 10000
    lesson.check("values whose exp overflows", softmax(huge), torch.softmax(huge, 1), torch.softmax(huge.double(), 1))

    lesson.step(
        "Padding that nobody chose",
        """
        Without a padding_mode the padding of a load is undetermined: zeros today, leftovers tomorrow. With zeros each
        of the 243 adds exp(0 - max) to its row's sum, so the result is wrong, quietly. The interpreter's sanitizer
        puts different garbage into the padding, and reports that it reaches the output:
        """,
    )
    small = x[:1].cpu()
    try:
        interpreter.launch((1,), careless_softmax_kernel, (small, torch.empty_like(small), 1024), sanitize=True)
    except interpreter.UndeterminedValueError as error:
        print(f"UndeterminedValueError: {error}")
    else:
        raise AssertionError("the careless kernel was not noticed")

    lesson.step(
        "Rows longer than a tile",
        """
        A row of 100,000 does not fit into the registers of one block. So it is walked along in tiles, twice: once for
        the maximum and the sum together, once for the result.
        """,
    )
    wide = lesson.randn(3, 100_000 if lesson.ON_GPU else 5000)
    lesson.check("long rows", long_softmax(wide, 1024), torch.softmax(wide, 1), torch.softmax(wide.double(), 1))

    m, n = (16384, 4096) if lesson.ON_GPU else (32, 512)
    x = lesson.randn(m, n)
    lesson.step(
        "Why one kernel",
        f"""
        Softmax is limited by memory. For {m} x {n} in fp32, one kernel reads and writes {2 * x.nbytes:,} bytes. Five
        torch operations (max, subtract, exp, sum, divide) move {8 * x.nbytes:,}: the matrix goes to memory and comes
        back in between. Rates below count the bytes of the fused kernel, for all alike:
        """,
    )
    lesson.measure("GB/s", 2 * x.nbytes, torch_unfused=lambda: unfused_softmax(x), torch=lambda: torch.softmax(x, 1),
            one_tile_a_row=lambda: softmax(x), two_passes=lambda: long_softmax(x, 1024))  # fmt: skip
    lesson.end("Next: 03_rms_norm.py, with a backward pass.")


if __name__ == "__main__":
    main()
