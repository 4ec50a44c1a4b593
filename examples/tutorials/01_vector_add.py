"""Tutorial 1: the shape of every tile kernel, on the smallest example, ``out = x + y``.

Run it with ``python examples/tutorials/01_vector_add.py``, with or without a GPU.
"""

import cuda.tile as ct
import lesson
import torch

from tilegym import interpreter
from tilegym.backend.cutile.launch import launch


# A kernel is the program of ONE BLOCK. A launch runs it for every block of a grid, in no particular order.
#
# - x, y, out are arrays in memory. The only things to do with them: load a tile, store a tile, ask for the shape.
# - A tile is a value: a small array of fixed shape, powers of two. Where it lives (registers, shared memory) and which
#   of the block's threads holds which element is the compiler's business. There is no threadIdx here, no barrier.
# - TILE is a ct.Constant: compiled in, because shapes of tiles have to be known to the compiler.
@ct.kernel
def add_kernel(x, y, out, TILE: ct.Constant[int]):
    i = ct.bid(0)  # which block am I?
    # "Cut x into tiles of TILE elements and give me tile number i." The index counts tiles, not elements.
    x_tile = ct.load(x, index=(i,), shape=(TILE,), padding_mode=ct.PaddingMode.ZERO)
    y_tile = ct.load(y, index=(i,), shape=(TILE,), padding_mode=ct.PaddingMode.ZERO)
    # The last tile may reach beyond the array. A load fills the rest as padding_mode says; a store drops it.
    ct.store(out, index=(i,), tile=x_tile + y_tile)


def add(x: torch.Tensor, y: torch.Tensor, tile: int = 1024) -> torch.Tensor:
    out = torch.empty_like(x)
    grid = (ct.cdiv(x.numel(), tile),)  # as many blocks as tiles, rounded up
    # On a GPU this is ct.launch(stream, grid, add_kernel, (x, y, out, tile)) on torch's current stream. For CPU tensors
    # it runs the very same kernel in TileGym's interpreter.
    launch(x, grid, add_kernel, (x, y, out, tile))
    return out


@ct.kernel
def where_am_i_kernel(out, TILE: ct.Constant[int]):
    ct.store(out, index=(ct.bid(0),), tile=ct.full((TILE,), ct.bid(0), dtype=ct.int32))


# The same addition with indices of single elements, for accesses that are no neat tiles. gather and scatter check the
# bounds themselves: what is out of bounds reads as padding_value (0) and is not written.
@ct.kernel
def add_gather_kernel(x, y, out, TILE: ct.Constant[int]):
    indices = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    ct.scatter(out, indices, ct.gather(x, indices) + ct.gather(y, indices))


def main() -> None:
    lesson.title("Vector addition: blocks, tiles, launch")

    lesson.step(
        "A grid of blocks",
        """
        10 elements in tiles of 4 take 3 blocks. Each block here writes its own number into its tile; the last tile
        hangs over the end, and what hangs over is not stored:
        """,
    )
    numbers = torch.full((10,), -1, dtype=torch.int32, device=lesson.DEVICE)
    launch(numbers, (3,), where_am_i_kernel, (numbers, 4))
    print(numbers.tolist())
    assert numbers.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]

    lesson.step(
        "The kernel against torch",
        """
        5000 elements in tiles of 1024: five blocks, the last of which has 120 elements too many. (Load -> compute ->
        store: every tile kernel is that, perhaps in a loop.)
        """,
    )
    x, y = lesson.randn(5000), lesson.randn(5000, seed=1)
    lesson.check("load and store, fp32", add(x, y), x + y, x.double() + y.double())
    half_x, half_y = x.half(), y.half()  # another dtype: the kernel is compiled once more, nothing is rewritten
    lesson.check("load and store, fp16", add(half_x, half_y), half_x + half_y, half_x.double() + half_y.double())
    out = torch.empty_like(x)
    launch(x, (5,), add_gather_kernel, (x, y, out, 1024))
    lesson.check("gather and scatter", out, x + y, x.double() + y.double())

    lesson.step(
        "What the interpreter finds",
        """
        Too small a grid leaves elements unwritten, and too large a one has blocks whose tile lies outside the array.
        The hardware says nothing. The interpreter's sanitizer does (on any machine: give it CPU tensors):
        """,
    )
    try:
        interpreter.launch((6,), add_kernel, (x.cpu(), y.cpu(), out.cpu(), 1024), sanitize=True)
    except interpreter.OutOfBoundsError as error:
        print(f"OutOfBoundsError: {error}")
    else:
        raise AssertionError("the sixth block was not noticed")

    lesson.step(
        "How fast?",
        """
        An addition does one operation for 12 bytes that it moves: memory is what limits it, so bytes per second are
        its measure, and the GPU's memory bandwidth is the ceiling. Time with GPU events, after a warm-up (the first
        launch compiles), with a cold cache, and next to a baseline in the same run:
        """,
    )
    n = 1 << 26 if lesson.ON_GPU else 1 << 12
    x, y = lesson.randn(n), lesson.randn(n, seed=1)
    lesson.measure(
        "GB/s", 3 * x.nbytes, torch=lambda: x + y, tile_1024=lambda: add(x, y), tile_4096=lambda: add(x, y, 4096)
    )
    lesson.end("Next: 02_softmax.py, where the elements of a tile have to talk to each other.")


if __name__ == "__main__":
    main()
